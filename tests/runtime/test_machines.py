"""The watcher of another machine: what of it counts as silence, and what it needs. Machines with a link between them
that is cut are in test_two_nodes.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import ray

from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.cluster.machines import OtherMachine
from piperlang.runtime.driver.training import Lost

LIMIT = 0.2
"""Less than any process takes to start, more than one takes to answer."""


def look(machine: OtherMachine, pid: int) -> str:
    """What is seen of a worker, or why it counts as lost."""
    deadline = time.monotonic() + 60
    while pid not in machine.seen:
        try:
            machine.look(0, LIMIT)
        except Lost as lost:
            return lost.why
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return machine.state(pid)


def test_a_watcher_that_starts_is_not_silent(cluster: Cluster) -> None:
    """On a slow machine it starts in more time than `--node-timeout`: the machine is not lost."""
    assert cluster.group is not None
    machine = OtherMachine(cluster.group, 0, "a machine")
    try:
        machine.watch(os.getpid())
        began = time.monotonic()
        assert look(machine, os.getpid()) in "RS"
        assert time.monotonic() - began > LIMIT
        watcher = ray.get(machine.watcher.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(watcher, signal.SIGSTOP)
        try:
            machine.seen.clear()
            assert look(machine, os.getpid()) == "its machine, a machine, has not answered for 0.2 s"
        finally:
            os.kill(watcher, signal.SIGCONT)
    finally:
        machine.close()


@pytest.mark.parametrize("module", ["torch", "ray"])
def test_a_watcher_is_small(module: str) -> None:
    code = f"import sys, piperlang.runtime.driver.watcher; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
