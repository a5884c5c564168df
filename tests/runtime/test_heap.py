"""Memory that CPU workers keep from step to step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from piperlang.runtime.hardware import heap
from tests.support import ROOT

STEPS = """
import resource, torch
from piperlang.runtime.hardware import heap
{before}
def step():
    return [torch.ones(1 << 20) for _ in range(8)]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
for _ in range(3):
    step()
first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
faults, held = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first, resident()
heap.keep(False)
print(faults // 5, held - resident())
"""
PAGES = 8 * (4 << 20) // 4096
"""Of what a step allocates."""


def step(before: str, **environment: str) -> tuple[int, int]:
    """Page faults of a step, and the MiB that went back to the system at the end."""
    clean = {name: value for name, value in os.environ.items() if name not in heap._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(before=before)],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    faults, back = map(int, done.stdout.split())
    return faults, back


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_a_step_frees_is_there_for_the_next() -> None:
    faults, back = step("heap.keep(True)")
    assert faults < PAGES / 20
    assert back >= 28


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_users_may_say_it_themselves() -> None:
    assert step("heap.keep(True)", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")[0] > PAGES / 2
