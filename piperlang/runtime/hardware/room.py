"""The free memory of a device, and the number of threads for an amount of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LITTLE = 10e9
"""Floating-point operations that one thread executes in about a second."""


@contextmanager
def threads_for(flops: float) -> Iterator[None]:
    """Uses one thread for little work: on a busy machine several threads wait for each other at every operator, 40
    times as long as the work takes (measured on two cores)."""
    before = torch.get_num_threads()
    if flops < LITTLE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62  # unknown on this system


def gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
