"""One set of workers for all tests that want some: starting eight of them takes longer than most of what they are used
for."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests of the front end run without torch and Ray
    from piperlang.runtime.driver.cluster import Cluster
    from tests.support.jobs import Lent

# A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two threads of an operator wait for each other far longer than the work takes while other tests use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOGETHER = {
    "test_matrix.py": "ray",
    **dict.fromkeys(
        (
            "test_graph.py",
            "test_known_faults.py",
            "test_plan.py",
            "test_plan_text.py",
            "test_resolved.py",
            "test_training.py",
        ),
        "models",
    ),
    "test_repl_completion.py": "repl",
    **{
        name: name
        for name in (
            "test_capture.py",
            "test_completion.py",
            "test_dropless.py",
            "test_fuzz.py",
            "test_golden.py",
            "test_habits.py",
            "test_mistake_examples.py",
            "test_mixing.py",
            "test_never_wrong.py",
            "test_optimizers.py",
            "test_package.py",
            "test_whole_sums.py",
        )
    },
}
"""Files whose tests share what takes long to make, traced models most of all, with the group of xdist that they form:
in every process of its own it would be made again."""

_shared: list[Cluster] = []


def _end() -> None:
    while _shared:
        _shared.pop().close()


def _workers(count: int) -> Cluster:
    if _shared and (_shared[0].dead(0) or len(_shared[0].workers) != count):
        _end()
    if not _shared:
        from piperlang.runtime.driver.cluster import Cluster

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
def lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """Commands in this process train on the eight workers that are there already."""
    return _lend(cluster, monkeypatch)


@pytest.fixture
def lent_worker(worker: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """The same with one, for jobs on one device."""
    return _lend(worker, monkeypatch)


def _lend(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    from tests.support.jobs import Lent

    lent = Lent(cluster)
    monkeypatch.setattr("piperlang.runtime.driver.job.Cluster", lent.asked)
    return lent


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
    return (os.cpu_count() or 1) * 3 // 2


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share eight workers run on one process: xdist keeps those of a group together, if the mark is there
    before it looks at the collected items. Those that break workers or start Ray themselves run on another: they wait
    most of the time, and more than two instances of Ray on two cores take longer than one after the other. Slow tests
    may take their time."""
    if item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.timeout(0))
    if not item.get_closest_marker("xdist_group"):
        group = _group_of_ray(item) or TOGETHER.get(item.path.name)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def _group_of_ray(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    if "alone" in fixtures or "worker" in fixtures:
        return "own ray"
    return "ray" if "cluster" in fixtures else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """xdist hands out groups in the order of the items (pyproject.toml asks for that): the long ones of Ray first, and
    at the end single tests, so that all processes end at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """Those that start Ray themselves come after those that share one worker, which they end."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return 3, False
    turn = {"ray": 0, "own ray": 1}.get(mark.args[0], 2)
    return turn, turn == 1 and "alone" in getattr(item, "fixturenames", ())
