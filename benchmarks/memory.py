"""The most memory that a process has had since one asked last: what torch has allocated on CUDA, the resident set on
CPU.

On CPU it counts from what the process had before there was a model, and large tensors must lie in mappings of their own
(`MAPPINGS`, before the process starts), or the C library would keep what is freed."""

from __future__ import annotations

from pathlib import Path

MAPPINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def resident(pid: int) -> int:
    return _line(pid, "VmRSS")


def highest(pid: int) -> int:
    return _line(pid, "VmHWM")


def forget(pid: int) -> None:
    """From now on `highest` begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _line(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ProcessLookupError(pid)
