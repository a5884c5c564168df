"""`piperc` on wrong input: a located diagnostic within two seconds and bounded memory, never a traceback.

Every case runs `piperc check FILE` in a process of its own (tests/support/served.py), which is watched from outside:
processor time and the highest resident size are measured, and a process that does not end is killed."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from piperlang.syntax.lines import MAX_STATEMENTS, MAX_TOKENS
from piperlang.syntax.parse import MAX_BYTES
from tests.support.served import Call, Server, limit

SECONDS, WORK = 4.0, 0.2
"""Of processor time: twice what is promised, on a machine that needs WORK for `_work`. Machines are slower by other
factors from one minute to the next, so what took longer is compared with the same work there and then."""
MEGABYTES = 500
PATIENCE = 40.0
"""The same for time on the clock: for what waits without working. Other work on the machine must not matter."""
MOST_TEXT = 100_000
"""Characters of diagnostics that anyone would want to see."""

Text = str | bytes | Callable[[], str | bytes]


measured = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    seconds: float
    megabytes: float
    hung: bool = False

    @property
    def codes(self) -> list[str]:
        return re.findall(r"^error\[(P\d{4})\]", self.err, re.MULTILINE)

    @property
    def places(self) -> list[tuple[str, int, int]]:
        found = re.findall(r"^ *--> (.*):(\d+):(\d+)$", self.err, re.MULTILINE)
        return [(file, int(line), int(column)) for file, line, column in found]


@cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def piperc(
    *arguments: str | bytes,
    cwd: Path,
    stdin: Path | None = None,
    env: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
) -> Outcome:
    """Run `python -m piperlang`, watch it, and kill it when it takes too long. With `env` it is a new Python, else a
    fork of one."""
    out, err = cwd / ".out", cwd / ".err"
    out.touch()
    err.touch()
    watched = _Watched(patience)
    if env is None:
        status, seconds = _server().run(
            Call(list(arguments), cwd, str(stdin or os.devnull), str(out), str(err)), watched.watch
        )
    else:
        with out.open("wb") as to_out, err.open("wb") as to_err, open(stdin or os.devnull, "rb") as given:
            child = subprocess.Popen(
                [sys.executable, "-m", "piperlang", *arguments],
                cwd=cwd,
                stdin=given,
                stdout=to_out,
                stderr=to_err,
                env={**os.environ, **env},
                preexec_fn=limit,
            )
            watched.watch(
                child.pid, lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            )
            _, status, used = os.wait4(child.pid, 0)
        child.returncode, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    code = os.waitstatus_to_exitcode(status)
    shown = [path.read_bytes().decode("utf-8", "backslashreplace") for path in (out, err)]
    return Outcome(
        code, shown[0], shown[1], seconds, watched.peak, watched.hung or code in (-signal.SIGKILL, -signal.SIGXCPU)
    )


@dataclass
class _Watched:
    patience: float
    peak: float = 0.0
    hung: bool = False

    def watch(self, pid: int, ended: Callable[[], bool]) -> None:
        started = time.monotonic()
        while not ended():
            self.peak = max(self.peak, _peak(pid))
            if time.monotonic() - started > self.patience and not self.hung:
                os.kill(pid, signal.SIGKILL)
                self.hung = True
            time.sleep(0.004)


def _peak(pid: int) -> float:
    """The highest resident size so far in megabytes. (ru_maxrss would count what this process had before the exec.)"""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def bounded(outcome: Outcome) -> Outcome:
    """What every run owes: an end, in time, within memory, and no traceback."""
    assert not outcome.hung, (
        f"stopped after {outcome.seconds:.1f} s with {outcome.megabytes:.0f} MB\n{outcome.err[-500:]}"
    )
    assert "Traceback" not in outcome.err, outcome.err[-1500:]
    assert outcome.code in (0, 1, 2), f"exit code {outcome.code}\n{outcome.err[-1500:]}"
    if outcome.seconds >= SECONDS:
        slower = max(1.0, _work() / WORK)
        assert outcome.seconds < SECONDS * slower, (
            f"took {outcome.seconds:.1f} s of processor time, on a machine that is {slower:.1f} times as slow as others"
        )
    assert outcome.megabytes < MEGABYTES, f"took {outcome.megabytes:.0f} MB"
    return outcome


def _work() -> float:
    """Seconds of processor time for something fixed, of the kind that a front end does."""
    started = time.process_time()
    known: dict[str, list[tuple[int, str]]] = {}
    for i in range(60_000):
        name = f"a{i % 977}"
        found = re.match(r"([a-z]+)(\d+)", name)
        assert found is not None
        known.setdefault(found[1], []).append((int(found[2]), name.upper()))
        if i % 1000 == 0:
            known["a"].sort()
    return time.process_time() - started


def refused(outcome: Outcome, *codes: str) -> Outcome:
    """Bounded, exit code 1, and every diagnostic has a code and a place; the first is one of `codes`."""
    bounded(outcome)
    assert outcome.code == 1, f"exit code {outcome.code}\n{outcome.out}\n{outcome.err[-1500:]}"
    assert outcome.codes, outcome.err[-1500:]
    assert len(outcome.places) == len(outcome.codes), f"a diagnostic without a place\n{outcome.err[-1500:]}"
    assert all(line >= 1 and column >= 1 for _, line, column in outcome.places)
    diagnostics = outcome.err[outcome.err.index("error[") :]
    assert len(diagnostics) < MOST_TEXT, f"{len(diagnostics):,} characters of diagnostics"
    assert not codes or outcome.codes[0] in codes, outcome.err[:1500]
    return outcome


def save(folder: Path, text: Text, name: str = "bad.piper") -> str:
    data = text() if callable(text) else text
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def check(folder: Path, text: Text) -> Outcome:
    return piperc("check", save(folder, text), cwd=folder)


Case = tuple[Text, tuple[str, ...]]


def _often(number: int) -> tuple[pytest.MarkDecorator, ...]:
    """Every case is a process: a third of each table in every run of the tests, the others with `-m slow`."""
    return () if number % 3 == 0 else (pytest.mark.slow,)


def cases(table: Mapping[str, Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("text", "codes"),
        [
            pytest.param(*case, id=name.replace(" ", "-"), marks=_often(i))
            for i, (name, case) in enumerate(table.items())
        ],
    )


def texts(table: Mapping[str, Text]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "text",
        [
            pytest.param(text, id=name.replace(" ", "-"), marks=_often(i))
            for i, (name, text) in enumerate(table.items())
        ],
    )


def lines(*parts: str) -> str:
    return "".join(f"{part}\n" for part in parts)


def doubled(first: str, step: str, times: int, name: str = "a") -> str:
    """`let a0 = first`, then a1 from a0 and so on; `step` speaks of the one before as `{0}`."""
    chain = [f"let {name}{i + 1} = {step.format(f'{name}{i}')}" for i in range(times)]
    return lines(f"let {name}0 = {first}", *chain)


def most(unit: str, head: str = "", tail: str = "", *, statements: int = 1, share: float = 0.9) -> Callable[[], str]:
    """`unit` as often as the limits admit; `{i}` in it counts, and `statements` is how many at top level it is."""

    def text() -> str:
        words = len(re.findall(r"\w+|[^\w ]", unit.replace("{i}", "1")))
        longest = len(unit.replace("{i}", "123456"))
        count = min(
            MAX_BYTES // longest, MAX_TOKENS // words, MAX_STATEMENTS // statements if statements else MAX_TOKENS
        )
        return head + "".join(unit.replace("{i}", str(i)) for i in range(int(count * share))) + tail

    return text


def both(first: Callable[[], str], second: Callable[[], str]) -> Callable[[], str]:
    return lambda: first() + second()


MB10 = 10_000_000
