"""Ctrl-C: one ends a command wherever it arrives, with a line that says how far the command came, and leaves nothing
half done.

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
    from typing import Any

INTERRUPTED = 130
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
_doing: Callable[[], str] | None = None
_done: Callable[[], str] | None = None


class Watch:
    """Handles SIGINT from the start of the process to its end."""

    def __init__(self) -> None:
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
        signal.signal(signal.SIGINT, self.handler)
        # Signals are written to a pipe when they come, and handled when the main thread runs Python.
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_deaf)
        _thread.start_new_thread(self._insist, (read,))  # threading would wait for it at the end

    def stop(self) -> None:
        """Give Ctrl-C back to Python, for commands that have their own use for it."""
        sys.unraisablehook = self.unraisable
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        again, self.again, self.answered = self.again, False, time.monotonic()
        if not again:
            self.count += 1
            if self.count == 1:
                self._notice()
        if self.ended is not None or (self._unwinding() and (again or self.count < INSISTING)):
            return
        if _imports(frame):
            if self.answered - self.first > IMPORT:
                self._exit()
            return
        self._raise()

    def check(self) -> None:
        postponed = signal.getsignal(signal.SIGINT) is not self.handler
        if self.first and self.ended is None and not postponed and not self._unwinding():
            self._raise()

    def _raise(self) -> None:
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

    def _notice(self) -> None:
        if not self.first:
            self.first = self.answered = time.monotonic()
            self.what = _doing() if _doing is not None else "starting"

    def _insist(self, signals: int) -> None:
        """A thread of its own: from the first interrupt on it delivers further ones, as long as they are needed."""
        main = threading.main_thread().ident
        assert main is not None
        # Where the handler is another one, it is postponed and comes again, or is somebody else's.
        while signal.SIGINT not in os.read(signals, 64) or signal.getsignal(signal.SIGINT) is not self.handler:
            pass
        self._notice()
        while True:
            time.sleep(AGAIN)
            now = time.monotonic()
            if self.ended is not None:
                if now - self.ended > EXIT:
                    os._exit(INTERRUPTED)
            elif signal.getsignal(signal.SIGINT) is not self.handler:  # postponed, or somebody else's
                self.answered = now
            elif now - self.answered > BUSY:
                self._exit()
            else:
                self.again = True
                with suppress(OSError):
                    signal.pthread_kill(main, signal.SIGINT)

    def _exit(self) -> None:
        """Without cleaning up. What a cluster leaves behind, its janitor removes."""
        self.say()
        os._exit(INTERRUPTED)

    def _unraisable(self, found: Any) -> None:
        if not (self.first and found.exc_type is KeyboardInterrupt):
            self.unraisable(found)

    def end(self, code: int) -> int:
        """The main thread is back. The exit code."""
        self.ended = time.monotonic()
        if not self.first:
            self.stop()
            return code
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further one would print a traceback of the exit
        self.say()
        return INTERRUPTED

    def say(self) -> None:
        if not self.said:
            self.said = True
            say(self.what)


def watched(run: Callable[[], int]) -> int:
    """Run a command, as the whole process: Ctrl-C ends it."""
    global _watch
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in a shell's background jobs
        return run()
    watch = _watch = Watch()
    try:
        watch.start()
        return watch.end(run())
    except KeyboardInterrupt:  # also one that the user's code raises
        watch.first = watch.first or time.monotonic()
        return watch.end(INTERRUPTED)


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


def say(what: str = "") -> None:
    """One line on standard error."""
    what = what or (_doing() if _doing is not None else "starting")
    came = _done() if _done is not None else ""
    parts = [f"while {what}"] if what else []
    text = " ".join(["interrupted", ", ".join([*parts, came] if came else parts)]).strip()
    with suppress(OSError, ValueError, AttributeError):  # closed
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
    """Postpone Ctrl-C to the end of a block: an interrupted import leaves a package half initialised, an interrupted
    fork a process without a mark. Only the main thread is ever interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
        if arrived:
            signal.raise_signal(signal.SIGINT)
