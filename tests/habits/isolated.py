"""A runner in a process of its own: a habit that kills the process, or leaves state in it, affects no other.

The processes are forked by a server that has run nothing but an import (tests/habits/warm.py), not by the process that
asks: that one may have threads of Ray's and of OpenMP's, which a fork does not copy.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.habits import HABITS
from tests.habits.habit import Habit
from tests.habits.plain import Reference, plain
from tests.habits.run import CRASH, PATIENCE, Outcome, Runner, clean

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.habits.warm"])


class Isolated:
    """A new process for every habit in threads; one for all habits on workers, since starting those takes long."""

    def __init__(self, executor: str = "threads") -> None:
        self.executor = executor
        self.process: Any = None
        self.pipe: Connection | None = None
        self.habit = ""

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
        self.pipe, other = _SERVER.Pipe()
        self.process = _SERVER.Process(target=_serve, args=(other, self.executor), daemon=False)
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


def _serve(pipe: Connection, executor: str) -> None:
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
