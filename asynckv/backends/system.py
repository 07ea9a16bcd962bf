"""What the system says about itself, read from /proc and /sys: the kernel, and why it may refuse a ring.

Nothing here raises for a file that is missing: every answer has a value for "not known".
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

__all__ = [
    "error_name",
    "io_uring_sysctl",
    "kernel_release",
    "kernel_version",
    "memlock_limit",
    "read_text",
    "ring_refusal",
    "seccomp_mode",
]

IO_URING_SYSCTL = "/proc/sys/kernel/io_uring_disabled"
SECCOMP_FILTER = 2  # proc(5): 0 off, 1 strict, 2 filter


def read_text(path: str) -> str:
    """Return the text of a small file of the kernel, stripped; empty when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def kernel_release() -> str:
    """Return the kernel's release as uname(2) has it."""
    return os.uname().release


def kernel_version() -> tuple[int, int]:
    """Return the kernel's major and minor number, (0, 0) when the release has another form."""
    match = re.match(r"(\d+)\.(\d+)", kernel_release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def io_uring_sysctl() -> int | None:
    """Return the sysctl kernel.io_uring_disabled (0 to 2); None before Linux 6.6, which has none."""
    text = read_text(IO_URING_SYSCTL)
    return int(text) if text.isdigit() else None


def seccomp_mode() -> int | None:
    """Return the seccomp mode of this process (2 is a filter); None when the kernel does not tell."""
    match = re.search(r"^Seccomp:\s*(\d+)", read_text("/proc/self/status"), re.MULTILINE)
    return int(match[1]) if match else None


def memlock_limit() -> int | None:
    """Return the bytes that this process may lock (RLIMIT_MEMLOCK); None for no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def error_name(error: OSError) -> str:
    """Return an error's symbol, such as ``EPERM``."""
    return errno.errorcode.get(error.errno or 0, "an unnamed error")


def ring_refusal(error: Exception) -> str:
    """Say exactly why there is no ring, from the error that ended the attempt.

    Source: io_uring_setup(2), Documentation/admin-guide/sysctl/kernel.rst (io_uring_disabled), seccomp(2).
    """
    if isinstance(error, ImportError):
        return (
            "the extension asynckv._uring is missing: linux/io_uring.h was not there when this was built, "
            f"or the build left it out ({error})"
        )
    if not isinstance(error, OSError) or not error.errno:
        return str(error) or type(error).__name__
    name = error_name(error)
    filtered = seccomp_mode() == SECCOMP_FILTER
    if error.errno == errno.EPERM:
        disabled = io_uring_sysctl()
        if disabled == 2:
            return f"{name}: the sysctl kernel.io_uring_disabled is 2"
        if disabled == 1 and os.geteuid() != 0:
            return (
                f"{name}: the sysctl kernel.io_uring_disabled is 1, "
                "and this process is not in the group of kernel.io_uring_group"
            )
        return f"{name}: {'a seccomp filter of this process or container' if filtered else 'the kernel'} forbids it"
    if error.errno == errno.ENOSYS:
        return f"{name}: {'a seccomp filter hides it, or ' if filtered else ''}the kernel was built without io_uring"
    if error.errno == errno.EACCES:
        return f"{name}: {'a seccomp filter' if filtered else 'a security module'} forbids it"
    if error.errno == errno.ENOMEM:
        limit = memlock_limit()
        room = "" if limit is None else f", the memlock limit is {limit >> 10} KiB"
        return f"{name}: no memory for the ring{room}"
    return f"{name}: {error.strerror or error}"
