"""Who may import whom: read from the sources, so that the direction of dependencies stays what it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asynckv

PACKAGE = Path(asynckv.__file__).parent
FOUNDATION = {"errors", "blocks", "config", "clock", "stats", "_version"}
# What a part may import of asynckv at run time; parts are modules or packages right below asynckv.
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "stats": set(),
    "_version": set(),
    "beside": set(),
    "checksum": set(),
    "blocks": {"_core", "errors"},
    "config": FOUNDATION,
    "backends": FOUNDATION | {"backends", "_core", "_uring"},
    "tiers": FOUNDATION | {"backends", "checksum", "tiers", "_record"},
    "blocking": {"buffers", "cache", "errors"},
    "commands": {"", "commands", "config", "errors", "_version"},
    "bench": {"", "_roofline", "_version", "backends", "bench", "commands", "config"},
    "cli": {"bench", "commands", "errors", "_version"},
    "__main__": {"cli"},
}
# The command line may also ask these what lies in a directory and what can be done there, without opening a store,
# and mend one.
LOOKING = {"tiers.inspect", "tiers.repair", "tiers.report", "backends.probes"}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def runtime_imports(path: Path) -> set[str]:
    """Return the modules that a file imports, except under ``if TYPE_CHECKING``."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                for each in node.orelse:
                    self.visit(each)
            else:
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = {alias.name for alias in node.names}
            modules = set()
            if node.module in ("asynckv", "asynckv.commands", "asynckv.tiers", "asynckv.backends"):
                folder = PACKAGE.parent / node.module.replace(".", "/")
                modules = {name for name in names if any((folder / (name + end)).exists() for end in (".py", ".pyx"))}
            found.update(f"{node.module}.{name}" for name in modules)
            if names - modules:
                found.add(node.module)

    Visitor().visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def ours(path: Path) -> set[str]:
    """Return the asynckv modules that a file imports, without the leading ``asynckv``."""
    return {
        name.removeprefix("asynckv").removeprefix(".")
        for name in runtime_imports(path)
        if name == "asynckv" or name.startswith("asynckv.")
    }


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_direction(path):
    part = part_of(path)
    modules = ours(path)
    parts = {name.partition(".")[0] for name in modules}
    if part in ("testing", "__init__"):
        return
    assert "testing" not in parts, "asynckv.testing is for tests"
    if part in ALLOWED:
        if part == "commands":
            modules -= LOOKING
            parts = {name.partition(".")[0] for name in modules}
        if path.name == "repair.py":
            parts.discard("_core")  # it opens a tier offline, with a table of its own
        assert parts <= ALLOWED[part], f"{part} imports {sorted(parts - ALLOWED[part])}"
    else:  # cache, scheduler and their rooms
        assert not parts & {"cli", "commands", "blocking", "__main__"}
    if part.startswith(("scheduler", "writer", "waiting")):
        assert {name for name in modules if name.startswith(("tiers", "backends"))} <= {"tiers", "tiers.base"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_are_imported_where_they_are_used(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            continue
        assert not names & {"uvloop", "ml_dtypes", "torch"}
        assert part_of(path) == "testing" or not names & {"pytest", "hypothesis"}


def test_nothing_uses_formats_that_run_code():
    for path in sources():
        modules = {name.partition(".")[0] for name in runtime_imports(path)}
        assert not modules & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path


def test_importing_leaves_the_users_loop_alone():
    code = (
        "import asyncio, sys, asynckv\n"
        "assert 'uvloop' not in sys.modules, 'uvloop'\n"
        "assert 'asynckv.testing' not in sys.modules, 'testing'\n"
        "assert 'ml_dtypes' not in sys.modules, 'ml_dtypes'\n"
        "assert 'asynckv.cli' not in sys.modules, 'cli'\n"
        "loop = asyncio.new_event_loop()\n"
        "assert type(loop).__module__.startswith('asyncio'), type(loop)\n"
        "loop.close()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, cwd=PACKAGE.parent)
