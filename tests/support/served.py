"""`piperc` in a process for every call, without the time that starting Python takes: a server that has imported the
front end, and done nothing else, forks them."""

from __future__ import annotations

import io
import os
import pickle
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.support import ROOT

LIMITS = ((resource.RLIMIT_CPU, 20), (resource.RLIMIT_AS, 3 << 30), (resource.RLIMIT_FSIZE, 200 << 20))
"""The machine is shared: what runs away is stopped long before it hurts."""


@dataclass(frozen=True)
class Call:
    arguments: list[str | bytes]
    folder: Path
    stdin: str
    stdout: str
    stderr: str


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.served"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )

    def run(self, call: Call, watch: Callable[[int, Callable[[], bool]], None]) -> tuple[int, float]:
        """Exit status as of `wait` and processor time. `watch` gets the process and a function that says whether it has
        ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(call, self.process.stdin)
        self.process.stdin.flush()
        pid: int = pickle.load(self.process.stdout)
        watch(pid, lambda: _ended(pid))
        found: tuple[int, float] = pickle.load(self.process.stdout)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def _ended(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while True:
        try:
            call: Call = pickle.load(requests)
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            os._exit(_call(call))
        pickle.dump(pid, answers)
        answers.flush()
        _, status, used = os.wait4(pid, 0)
        pickle.dump((status, used.ru_utime + used.ru_stime), answers)
        answers.flush()


def limit() -> None:
    for what, value in LIMITS:
        resource.setrlimit(what, (value, value))


def _call(call: Call) -> int:
    """What `python -m piperlang` does, on other streams."""
    limit()
    os.chdir(call.folder)
    for number, path, flags in (
        (0, call.stdin, os.O_RDONLY),
        (1, call.stdout, os.O_WRONLY),
        (2, call.stderr, os.O_WRONLY),
    ):
        os.dup2(os.open(path, flags), number)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        os.fdopen(2, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    sys.argv = ["piperc", *map(os.fsdecode, call.arguments)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 0
    try:
        runpy.run_module("piperlang", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    import piperlang.cli.main  # noqa: F401
    from piperlang.source import Source
    from piperlang.syntax.parse import parse

    parse(Source("warm.piper", "mesh gpu = pp: 2\n"))  # reads the grammar
    serve(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
