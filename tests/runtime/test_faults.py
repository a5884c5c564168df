"""A worker that dies, hangs or raises ends the job with one clear error, and nothing of the job is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from piperlang.capture.program import Program, capture
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.shapes import TRAIN
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import compiled, optimizer
from tests.support.processes import processes
from tests.support.sleepy import CASE, SCRIPT

pytestmark = pytest.mark.usefixtures("alone")


def gone(folder: Path, within: float) -> float:
    started = time.monotonic()
    while time.monotonic() - started < within:
        if not processes(folder) and not folder.exists():
            return time.monotonic() - started
        time.sleep(0.05)
    raise AssertionError(f"still there after {within} s: {processes(folder)}, {folder.exists()}")


@cache
def program() -> Program:
    return capture(CASE.model, CASE.loss, CASE.batch(8))


def job() -> Job:
    graph, captured = compiled(program(), SCRIPT)
    return Job(lower(graph), captured, Training(CASE.model, optimizer))


def struck(worker: int, number: int, delay: float, within: float) -> PiperError:
    """A step during which a worker is hit by a signal, and the error it ends in, which must come in time.

    On a quiet machine errors come in 0.5 s (killed) and 4 s (stopped); the limits here are for a busy one, `-m slow`
    has the promised ones."""
    running = job()
    folder = running.cluster.folder
    try:
        running.step(CASE.batch(8))
        hit: list[float] = []

        def strike() -> None:
            hit.append(time.monotonic())
            os.kill(running.cluster.pids[worker], number)

        if delay:
            threading.Timer(delay, strike).start()
        else:
            strike()
        with pytest.raises(PiperError) as found:
            running.step(CASE.batch(8))
        assert time.monotonic() - hit[0] < within
        gone(folder, 5.0)
        return found.value
    finally:
        running.close()


BUSY, PROMISED = 4.0, 1.0


@pytest.mark.parametrize(
    ("device", "delay", "within"),
    [
        (0, 0.1, BUSY),
        *(
            pytest.param(device, delay, PROMISED, marks=pytest.mark.slow)
            for device in (0, 1)
            for delay in (0.0, 0.1, 1.0, 1.7)
        ),
    ],
)
def test_a_worker_that_is_killed(device: int, delay: float, within: float) -> None:
    """Between steps, in the first forward (where worker 1 still waits), in the middle, and late."""
    (diagnostic,) = struck(device, signal.SIGKILL, delay, within).diagnostics
    assert diagnostic.code == "P0602"
    assert f"device {device} died" in diagnostic.message
    if delay:
        assert any("it was running" in note and f"stage={device}" in note for note in diagnostic.notes), (
            diagnostic.notes
        )
        assert any(f"device {1 - device} was running" in note for note in diagnostic.notes), diagnostic.notes


@pytest.mark.slow  # test_restart.py stops one every time
@pytest.mark.parametrize("within", [10.0, 5.0])
def test_a_worker_that_is_stopped(within: float) -> None:
    (diagnostic,) = struck(1, signal.SIGSTOP, 0.3, within).diagnostics
    assert diagnostic.code == "P0603"
    assert "device 1 does not answer" in diagnostic.message


@pytest.mark.slow  # test_cluster.py has the janitor every time
@pytest.mark.parametrize("within", [20.0, 10.0])
def test_a_driver_that_is_killed(within: float) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", "from tests.support.sleepy import main; main()"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    assert len(processes(folder)) > 2
    driver.kill()
    driver.wait()
    gone(folder, within)


@pytest.mark.slow
def test_a_worker_that_raises() -> None:
    """At once, though another stream of the same device, and the other device, wait for it."""
    running = job()
    folder = running.cluster.folder
    try:
        futures = running.begin(CASE.batch(8))
        running.finish(futures)
        feeds = {key: torch.zeros(3, 5) for key, _, _ in running.plan.devices[0].feeds}  # no shape that the layer takes
        others = {key: torch.zeros(2, 16) for key, _, _ in running.plan.devices[1].feeds}
        started = time.monotonic()
        with pytest.raises(PiperError) as found:
            running.finish(
                [running.cluster.call(0, "step", TRAIN, feeds), running.cluster.call(1, "step", TRAIN, others)]
            )
        assert time.monotonic() - started < BUSY
        (diagnostic,) = found.value.diagnostics
        assert diagnostic.code == "P0604"
        assert "device 0 failed" in diagnostic.message
        assert any("F of F[stage=0, mb=0]" in note for note in diagnostic.notes), diagnostic.notes
        gone(folder, 5.0)
    finally:
        running.close()
