"""Builds the Cython extensions; everything else is in pyproject.toml.

Switches, all environment variables:

ASYNCKV_DEBUG=1
    Bounds checks, assertions, line tracing (for coverage) and live-object counts.
ASYNCKV_SANITIZE=address,undefined
    Passed to ``-fsanitize=``; run Python with the matching runtime preloaded.
ASYNCKV_EXTENSIONS=_core,_record
    Build only these, while another one is being worked on.

``_uring`` and ``_roofline`` are optional: they are left out where ``<linux/io_uring.h>`` is missing or too old, or does
not compile, and the package works without them.

No ``-march=native``: what is built on one machine has to run on the next.
"""

import os
import tempfile
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Left out, with a warning, where their header does not compile.
OPTIONAL = {"_uring": "_uring_abi.h", "_roofline": "_uring_abi.h"}

ROOT = Path(__file__).resolve().parent
PACKAGE = "asynckv"

DEBUG = os.environ.get("ASYNCKV_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("ASYNCKV_SANITIZE", "")
ONLY = [name for name in os.environ.get("ASYNCKV_EXTENSIONS", "").split(",") if name]

DIRECTIVES = {
    "language_level": 3,
    "embedsignature": True,
    "boundscheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": DEBUG,
    "overflowcheck": False,
    "linetrace": DEBUG,
}

MACROS = [
    ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
    # The oldest C API we may be loaded with; numpy's own default moves up with each of its releases.
    ("NPY_TARGET_VERSION", "NPY_1_23_API_VERSION"),
    ("ASYNCKV_DEBUG", "1" if DEBUG else "0"),
]
if DEBUG:
    MACROS += [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]
else:
    MACROS += [("CYTHON_WITHOUT_ASSERTIONS", "1")]

COMPILE = ["-O1", "-g"] if DEBUG else ["-O2"]
LINK: list[str] = []
if SANITIZE:
    COMPILE += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
    LINK += [f"-fsanitize={SANITIZE}"]


class BuildExt(build_ext):
    """Leaves out what cannot be built here, and builds all again when the switches differ from the last build's.

    Time stamps alone would not see the latter.
    """

    def run(self) -> None:
        stamp = ROOT / "build" / "mode"
        mode = f"debug={DEBUG} sanitize={SANITIZE} numpy={numpy.__version__}\n"
        self.force = self.force or not stamp.exists() or stamp.read_text() != mode
        super().run()
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(mode)

    def build_extension(self, ext: Extension) -> None:
        header = OPTIONAL.get(ext.name.rpartition(".")[2])
        if header is not None and not self.compiles(header):
            self.warn(f"{ext.name} is left out: {header} does not compile on this system")
            return
        super().build_extension(ext)

    def compiles(self, header: str) -> bool:
        """Whether a header and what it includes are there and good enough."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "check.c")
            source.write_text(f'#include "{header}"\nint main(void) {{ return 0; }}\n')
            try:
                self.compiler.compile([str(source)], output_dir=folder, include_dirs=[PACKAGE])
            except CompileError:
                return False
        return True


def extension(source: Path) -> Extension:
    """Describe the extension of one ``.pyx``, which depends on its rooms (``_core_*.pxi``) and headers."""
    stem = source.stem
    rooms = [source.with_suffix(".pxd"), *source.parent.glob(f"{stem}_*.pxi"), *source.parent.glob("*.h")]
    return Extension(
        f"{PACKAGE}.{stem}",
        [str(source.relative_to(ROOT))],
        depends=[str(room.relative_to(ROOT)) for room in rooms if room.exists()],
        include_dirs=[numpy.get_include(), PACKAGE],
        define_macros=MACROS,
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
    )


def cythonized(found: list[Path]) -> list[Extension]:
    """Translate; ``optional`` is set on what comes back, because cythonize drops it."""
    extensions = cythonize(
        [extension(source) for source in found],
        compiler_directives=DIRECTIVES,
        build_dir="build/cython-debug" if DEBUG else "build/cython",
    )
    for each in extensions:
        each.optional = each.name.rpartition(".")[2] in OPTIONAL
    return extensions


sources = sorted(path for path in (ROOT / PACKAGE).glob("*.pyx") if not ONLY or path.stem in ONLY)
setup(ext_modules=cythonized(sources), cmdclass={"build_ext": BuildExt})
