"""Config: every option is checked on construction, and the error names it."""

from pathlib import Path

import numpy as np
import pytest

from asynckv.blocks import Namespace
from asynckv.clock import MonotonicClock
from asynckv.config import SIZE_FORMS, Config, default_segment, format_size, memory_limit, parse_size

GIB = 1 << 30


def make(**options) -> Config:
    return Config(directory="store", **options)


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (12345, 12345),
        (np.int64(4096), 4096),
        ("0B", 0),
        ("512KiB", 512 << 10),
        ("256 MiB", 256 << 20),
        (" 8GiB ", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("8GB", 8 * 10**9),
        ("3kB", 3000),
        ("3KB", 3000),
        ("0.5kB", 500),
    ],
)
def test_sizes(value, size):
    assert parse_size(value, "memory") == size


@pytest.mark.parametrize(
    "value",
    [
        "", "12", "GiB", "-1MiB", "8 gigs", "8gib", "8Gib", "1e9B", "1.5B", "0.3KiB", "1_000B", "٣KiB", "8GiB8",
        "9999999999TiB", -1, 1 << 63, 1.5, 1e9, True, None, b"8GiB", [],
    ],
)  # fmt: skip
def test_bad_sizes_name_the_parameter_and_the_forms(value):
    with pytest.raises(ValueError, match="memory=") as caught:
        parse_size(value, "memory")
    assert SIZE_FORMS in str(caught.value)
    assert "'512KiB'" in str(caught.value)


def test_format_size():
    assert format_size(17) == "17 B"
    assert format_size(3 << 29) == "1.5 GiB"
    assert format_size(5 << 40) == "5.0 TiB"


def test_defaults_are_the_contracts():
    config = make()
    assert (config.memory, config.disk) == (256 << 20, 4 << 30)
    assert (config.io_timeout, config.room_timeout, config.persist_after) == (5.0, 5.0, None)
    assert (config.policy, config.engine, config.direct, config.recover) == ("lru", "auto", "auto", "quiet")
    assert config.namespace is None
    assert config.segment == 128 << 20
    assert isinstance(config.clock, MonotonicClock)
    assert config.backend_factory is None
    assert len(config.random(16)) == 16


def test_values_are_normalised():
    config = make(memory="1MiB", disk="64MiB", io_timeout=2, persist_after=1, direct="on", segment="100KiB")
    assert (config.memory, config.disk, config.segment) == (1 << 20, 64 << 20, 100 << 10)
    assert (config.io_timeout, config.persist_after, config.direct) == (2.0, 1.0, True)
    assert make(direct="off").direct is False
    assert make(direct=True).direct is True
    assert make(segment=(64 << 10) + 1).segment == (64 << 10) + 4096


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("memory", 0, ValueError),
        ("memory", "lots", ValueError),
        ("disk", -1, ValueError),
        ("disk", "1KiB", ValueError),
        ("segment", 4096, ValueError),
        ("segment", "4GiB", ValueError),
        ("segment", -5, ValueError),
        ("namespace", "llama", TypeError),
        ("policy", "mru", ValueError),
        ("policy", None, TypeError),
        ("engine", "spdk", ValueError),
        ("engine", 3, TypeError),
        ("direct", "maybe", ValueError),
        ("direct", None, ValueError),
        ("direct", 1, ValueError),
        ("io_timeout", 0, ValueError),
        ("io_timeout", -1.0, ValueError),
        ("io_timeout", float("inf"), ValueError),
        ("io_timeout", "5", TypeError),
        ("io_timeout", True, TypeError),
        ("io_timeout", 10**400, ValueError),
        ("room_timeout", float("nan"), ValueError),
        ("room_timeout", -0.1, ValueError),
        ("persist_after", 0, ValueError),
        ("persist_after", "1s", TypeError),
        ("recover", "hard", ValueError),
        ("recover", None, TypeError),
        ("force", 1, TypeError),
    ],
)
def test_bad_options_are_refused_by_name(option, value, error):
    with pytest.raises(error, match=option):
        make(**{option: value})


def test_directory():
    assert Config.from_options(Path("a/b"), {}).directory == "a/b"
    assert Config.from_options(b"a", {}).directory == "a"
    for bad in (None, 3):
        with pytest.raises(TypeError, match="directory"):
            Config.from_options(bad, {})
    for bad in ("", "a\0b", "\ud800"):
        with pytest.raises(ValueError, match="directory"):
            Config.from_options(bad, {})


def test_policy_auto_is_lru():
    assert make().policy == make(policy="lru").policy == "lru"
    assert make(policy="fifo").policy == "fifo"


def test_no_waiting_for_room_is_allowed():
    assert make(room_timeout=0).room_timeout == 0.0


def test_unknown_options_are_type_errors():
    with pytest.raises(TypeError, match=r"'memroy'.*memory"):
        Config.from_options("d", {"memroy": 1})
    with pytest.raises(TypeError):
        make(memroy=1)
    assert Config.from_options("d", {"memory": 4096}).memory == 4096


def test_disk_zero_is_memory_only():
    assert make(disk=0).disk == 0


def test_disk_has_to_hold_four_segments():
    assert make(disk="256KiB").segment == 64 << 10
    with pytest.raises(ValueError, match=r"disk=.*below 4 segments"):
        make(disk=(256 << 10) - 1)
    with pytest.raises(ValueError, match="below 4 segments"):
        make(disk="8MiB", segment="4MiB")
    assert make(disk="16MiB", segment="4MiB").segment == 4 << 20


def test_default_segment_is_a_bounded_share_of_the_disk():
    assert default_segment(4 * GIB) == 128 << 20
    assert default_segment(64 * GIB) == 128 << 20
    assert default_segment(1 << 40) == 2 * GIB
    assert default_segment(1 << 50) <= 2 * GIB
    assert default_segment(64 << 20) == 4 << 20
    assert default_segment(1) == 64 << 10
    assert default_segment(99_999_999) % 4096 == 0


def test_engine_override(monkeypatch):
    monkeypatch.setenv("ASYNCKV_ENGINE", "threads")
    assert make(engine="io_uring").engine == "threads"
    monkeypatch.setenv("ASYNCKV_ENGINE", "")
    assert make(engine="io_uring").engine == "io_uring"
    monkeypatch.setenv("ASYNCKV_ENGINE", "floppy")
    with pytest.raises(ValueError, match="ASYNCKV_ENGINE"):
        make()


def test_seams():
    clock, factory = MonotonicClock(), object()
    config = make(_clock=clock, _backend_factory=factory, _random=lambda n: b"\7" * n)
    assert config.clock is clock
    assert config.backend_factory is factory
    assert config.random(3) == b"\7\7\7"


def test_namespace_digest():
    assert make().namespace_digest == Namespace().digest()
    assert make(namespace=Namespace("m")).namespace_digest == Namespace("m").digest()


def test_memory_above_the_machines_share_needs_force(monkeypatch):
    monkeypatch.setattr("asynckv.config.memory_limit", lambda: 1000)
    assert make(memory=800).memory == 800
    with pytest.raises(ValueError, match=r"memory=801 is above 80%.*force=True"):
        make(memory=801)
    assert make(memory=801, force=True).memory == 801


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limit_of_the_machine(tmp_path):
    write(tmp_path / "proc/meminfo", "MemFree: 1 kB\nMemTotal:       1024 kB\n")
    assert memory_limit(tmp_path) == 1 << 20


def test_limit_of_cgroup_version_2_counts_every_level(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/memory.max", "max\n")
    assert memory_limit(tmp_path) == 9999999 * 1024
    write(tmp_path / "sys/fs/cgroup/a/memory.max", "5000\n")
    assert memory_limit(tmp_path) == 5000
    write(tmp_path / "sys/fs/cgroup/a/b/memory.max", "4000\n")
    assert memory_limit(tmp_path) == 4000


def test_limit_of_cgroup_version_1(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\n")
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x/y\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_limit(tmp_path) == 9999999 * 1024
    write(tmp_path / "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "7000\n")
    assert memory_limit(tmp_path) == 7000


def test_limit_inside_a_container_whose_path_is_not_visible(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/docker/abc\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", "6000\n")
    write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\n")
    assert memory_limit(tmp_path) == 6000


def test_limit_with_nothing_to_read_is_the_machines(tmp_path):
    assert 0 < memory_limit(tmp_path) < 1 << 63
