"""Ctrl-C, SIGTERM and SIGHUP: one ends a command wherever it arrives, with a line that says how far the command came,
and leaves nothing half done. A job that trains is asked first (`asked_first`): it ends after its step.

Python raises KeyboardInterrupt between two instructions of the main thread. In a destructor, or in a function that C
calls back, the exception is printed and forgotten, or becomes another one. So a `Watch` notes that an interrupt came,
and delivers it again until the main thread has come back to the entry point.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # that of typing takes 10 ms, in which Ctrl-C is not handled
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130
SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""What ends a command, and what it then says."""
AGAIN = 0.1
"""Seconds after which an interrupt is delivered again."""
IMPORT = 2.0
"""Seconds that an import may take to end after an interrupt."""
BUSY = 10.0
"""Seconds that the main thread may run code that is not Python's before the process is ended from outside."""
EXIT = 30.0
"""Seconds that the process may take to exit, when the main thread has come to its end."""
INSISTING = 3
"""So many interrupts by the user stop cleaning up, too."""

_watch: Watch | None = None
_abandoned = False
_doing: Callable[[], str] | None = None
_done: Callable[[], str] | None = None


class Watch:
    """Handles these signals from the start of the process to its end."""

    def __init__(self, signals: list[int]) -> None:
        self.signals = signals
        self.by = signals[0]
        """The one that came first."""
        self.asks: Callable[[int], None] | None = None
        """What the first one does instead, where it is set."""
        self.asked = [False, False]
        """Whether it has been called, and whether `_insist` knows."""
        self.count = 0
        """Interrupts by the user."""
        self.what = ""
        """What the command did when the first one came."""
        self.raised: KeyboardInterrupt | None = None
        self.again = False
        """The next one is delivered by `_insist`."""
        self.first = 0.0
        """When the first one came."""
        self.answered = 0.0
        """When the main thread ran the handler last."""
        self.ended: float | None = None
        """When the main thread came back to the entry point."""
        self.said = False
        self.handler = self._handle  # one object, to be recognised
        self.unraisable = sys.unraisablehook

    def start(self) -> None:
        sys.unraisablehook = self._unraisable
        for number in self.signals:
            signal.signal(number, self.handler)
        # Signals are written to a pipe when they come, and handled when the main thread runs Python.
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_deaf)
        _thread.start_new_thread(self._insist, (read,))  # threading would wait for it at the end

    def stop(self) -> None:
        """Give signals back to Python, for commands that have their own use for them."""
        sys.unraisablehook = self.unraisable
        for number in self.signals:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.again, self.answered = self.again, False, time.monotonic()
        if not again:
            if self.asks is not None and not self.asked[0]:
                self.asked[0], self.by = True, number
                self.asks(number)
                return
            self.count += 1
            if self.count == 1:
                self._notice(number)
        if self.ended is not None or (self._unwinding() and (again or self.count < INSISTING)):
            return
        if _imports(frame):
            if self.answered - self.first > IMPORT:
                self._exit()
            return
        self._raise()

    def check(self) -> None:
        if self.first and self.ended is None and not self._postponed() and not self._unwinding():
            self._raise()

    def _raise(self) -> NoReturn:
        self.raised = KeyboardInterrupt()
        raise self.raised

    def _unwinding(self) -> bool:
        """Whether the code that was interrupted cleans up after an interrupt already."""
        problem, seen = sys.exception(), set[int]()
        while problem is not None and id(problem) not in seen:
            if problem is self.raised:
                return True
            seen.add(id(problem))
            problem = problem.__context__
        return False

    def _postponed(self) -> bool:
        """The handler is another one: `uninterrupted`, or somebody else's."""
        return signal.getsignal(self.by) is not self.handler

    def _notice(self, number: int) -> None:
        if not self.first:
            self.by = number
            self.first = self.answered = time.monotonic()
            self.what = _doing() if _doing is not None else "starting"

    def _insist(self, signals: int) -> None:
        """A thread of its own: from the first interrupt on it delivers further ones, as long as they are needed."""
        main = threading.main_thread().ident
        assert main is not None
        self._notice(self._first(signals))
        while True:
            time.sleep(AGAIN)
            now = time.monotonic()
            if self.ended is not None:
                if now - self.ended > EXIT:
                    os._exit(self.code)
            elif self._postponed():
                self.answered = now
            elif now - self.answered > BUSY:
                self._exit()
            else:
                self.again = True
                with suppress(OSError):
                    signal.pthread_kill(main, self.by)

    def _first(self, signals: int) -> int:
        """Waits for a signal that ends the command. Where the handler is another one, it is postponed and comes again,
        or is somebody else's."""
        while True:
            for number in os.read(signals, 64):
                if number not in self.signals or signal.getsignal(number) is not self.handler:
                    continue
                if self.asks is None or self.asked[1]:
                    return number
                self.asked[1] = True

    @property
    def code(self) -> int:
        return 128 + self.by

    def _exit(self) -> None:
        """Without cleaning up. What a cluster leaves behind, its janitor removes."""
        self.say()
        os._exit(self.code)

    def _unraisable(self, found: Any) -> None:
        if not (self.first and found.exc_type is KeyboardInterrupt):
            self.unraisable(found)

    def end(self, code: int) -> int:
        """The main thread is back. The exit code."""
        self.ended = time.monotonic()
        if not self.first:
            self.stop()
            return code
        for number in self.signals:  # a further one would print a traceback of the exit
            signal.signal(number, signal.SIG_IGN)
        self.say()
        return self.code

    def say(self) -> None:
        if not self.said:
            self.said = True
            say(self.what, SIGNALS[signal.Signals(self.by)])


def watched(run: Callable[[], int]) -> int:
    """Run a command, as the whole process: signals end it. Those that are ignored stay so: SIGINT in a shell's
    background jobs, SIGHUP after `nohup`."""
    global _watch
    usual = (signal.default_int_handler, signal.SIG_DFL)
    signals = [number for number in SIGNALS if signal.getsignal(number) in usual]
    if not signals:
        return run()
    watch = _watch = Watch([int(number) for number in signals])
    try:
        watch.start()
        return watch.end(run())
    except KeyboardInterrupt:  # also one that the user's code raises
        watch.first = watch.first or time.monotonic()
        return watch.end(watch.code)


@contextmanager
def asked_first(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Inside, the first signal does not end the command. It calls `say` with its name; the command then asks the
    function that is yielded whether to end. A second one ends it at once."""
    watch = _watch
    if watch is None:
        yield lambda: False
        return
    watch.asks = lambda number: say(signal.Signals(number).name)
    try:
        yield lambda: watch.asked[0]
    finally:
        watch.asks = None


def end() -> NoReturn:
    """The command ends, as it was asked to."""
    if _watch is not None:
        _watch._notice(_watch.by)
        _watch._raise()
    raise KeyboardInterrupt


def abandon() -> None:
    """A library waits for something that does not come, and cannot be ended: the process leaves without it."""
    global _abandoned
    _abandoned = True


def leave(code: int) -> None:
    """Ends the process here, if something is abandoned: Python would free what its threads still use."""
    if _abandoned:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def told_by(doing: Callable[[], str], done: Callable[[], str]) -> None:
    """Who knows what the command is doing, `tracing model.py`, and what it has done, `after 12 steps; runs/both-1`."""
    global _doing, _done
    _doing, _done = doing, done


def unwatched() -> None:
    """From here on Ctrl-C is Python's again."""
    if _watch is not None and signal.getsignal(signal.SIGINT) is _watch.handler:
        _watch.stop()


def checkpoint() -> None:
    """Between two parts of a command: an interrupt that could not be raised where it came is raised now."""
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.check()


def arrived() -> bool:
    """Whether the user has interrupted this command, whatever became of it."""
    return _watch is not None and _watch.first > 0


def say(what: str = "", how: str = "interrupted") -> None:
    """One line on standard error."""
    what = what or (_doing() if _doing is not None else "starting")
    came = _done() if _done is not None else ""
    parts = [f"while {what}"] if what else []
    text = " ".join([how, ", ".join([*parts, came] if came else parts)]).strip()
    write(text)


def write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # closed, or being written by the main thread
        # The terminal has written `^C` there.
        erase = "\r\x1b[2K" if sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") else ""
        print(f"{erase}{text}", file=sys.stderr, flush=True)


def _deaf() -> None:
    """A forked process does not write to the pipe of this one."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported. The C++ code of one, torch's for example, may take an exception for another
    one, or abort the process."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone signals to the end of a block: an interrupted import leaves a package half initialised, an interrupted
    fork a process without a mark. Only the main thread is ever interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    previous = {number: one for number, one in handlers.items() if callable(one) or number == signal.SIGINT}
    for number in previous:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for one in dict.fromkeys(arrived):
            signal.raise_signal(one)
