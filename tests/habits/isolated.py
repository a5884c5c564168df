"""A runner in a process of its own: a habit that kills the process, or leaves state in it, affects no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from piperlang.capture.program import capture
from tests.habits import HABITS
from tests.habits.habit import Habit, Layers, square, vectors
from tests.habits.plain import Reference, plain
from tests.habits.run import CRASH, PATIENCE, Outcome, Runner, clean

_FORK = multiprocessing.get_context("fork")


class Isolated:
    """A new process for every habit in threads; one for all habits on workers, since starting those takes long."""

    def __init__(self, executor: str = "threads") -> None:
        self.executor = executor
        self.process: Any = None
        self.pipe: Connection | None = None
        self.habit = ""
        _warm()

    def run(self, habit: Habit, schedule: str) -> Outcome:
        if self.process is None or (self.executor == "threads" and self.habit != habit.name):
            self._start()
        self.habit = habit.name
        assert self.pipe is not None
        try:
            self.pipe.send((habit.name, schedule))
            if self.pipe.poll(3 * PATIENCE):
                found: Outcome = self.pipe.recv()
                return found
            reason = "no answer"
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode or 0
            reason = (
                f"the process was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"the process ended with {code}"
            )
        self.close()
        return Outcome(CRASH, "", reason)

    def _start(self) -> None:
        self.close()
        self.pipe, other = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(other, self.pipe, self.executor), daemon=False)
        self.process.start()
        other.close()

    def close(self) -> None:
        """It ends by itself when its pipe is closed, and leaves no workers."""
        if self.process is None:
            return
        assert self.pipe is not None
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process = None


@cache
def _warm() -> None:
    """Tracing imports much when it is first used; then every process has it from the start.

    Not with CUDA builds of torch: autograd starts threads there, which a forked process would not have."""
    if torch.version.cuda is not None:
        return
    torch.set_num_threads(1)
    with clean(), contextlib.suppress(Exception):  # whatever is wrong with it shows again in the habits
        capture(Layers, square, vectors()).cut()


def _serve(pipe: Connection, parents: Connection, executor: str) -> None:
    parents.close()  # else we would never see it closed
    torch.set_num_threads(1)
    runner = Runner(executor)
    known: dict[str, Reference] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, schedule = pipe.recv()
            if name not in known:
                known.clear()
                with clean():
                    known[name] = plain(HABITS[name])
            pipe.send(runner.run(HABITS[name], schedule, known[name]))
    runner.close()
