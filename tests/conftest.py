"""One set of workers for all tests that want some: starting eight of them takes longer than most of what they are used
for."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests of the front end run without torch and Ray
    from piperlang.runtime.cluster import Cluster

# A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two threads of an operator wait for each other far longer than the work takes while other tests use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_shared: list[Cluster] = []


def _end() -> None:
    while _shared:
        _shared.pop().close()


def _workers(count: int) -> Cluster:
    if _shared and (_shared[0].dead(0) or len(_shared[0].workers) != count):
        _end()
    if not _shared:
        from piperlang.runtime.cluster import Cluster

        _shared.append(Cluster(count))
    return _shared[0]


@pytest.fixture
def cluster() -> Cluster:
    """Eight workers. A test that breaks them leaves none to the next."""
    return _workers(8)


@pytest.fixture
def worker() -> Cluster:
    """One worker, for tests that break it: eight others take a while to start."""
    return _workers(1)


@pytest.fixture
def alone() -> None:
    """For tests that start Ray themselves: it runs once in a process."""
    _end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    _end()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: more than there are cores, because much of what tests do is to wait for processes."""
    return max(2, (os.cpu_count() or 1) * 3 // 2)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share workers run on one process: xdist keeps those of a group together, if the mark is there before
    it looks at the collected items. Slow tests may take their time."""
    if item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.timeout(0))
    for fixture in {"cluster", "worker"} & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.xdist_group(fixture))
