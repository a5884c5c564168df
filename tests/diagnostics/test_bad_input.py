"""Wrong input of any kind: a located diagnostic within two seconds and bounded memory, never a traceback.

Every case runs `piperc check FILE` in a process of its own (tests/support/served.py), which is watched from outside:
processor time and the highest resident size are measured, and a process that does not end is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from piperlang.elaborate.declare import MAX_DEVICES
from piperlang.elaborate.interpret import MAX_CALLS, MAX_SPLIT
from piperlang.syntax.lines import MAX_STATEMENTS, MAX_TOKENS
from piperlang.syntax.parse import MAX_BYTES, MAX_LINE
from tests.support.served import Call, Server, limit

SECONDS = 4.0
"""Twice what is promised, because test machines are shared and slow; by hand, on a quiet machine, set it to 2."""
MEGABYTES = 500
PATIENCE = 40.0
"""The same for time on the clock: for what waits without working. Other work on the machine must not matter."""
MOST_TEXT = 100_000
"""Characters of diagnostics that anyone would want to see."""

Text = str | bytes | Callable[[], str | bytes]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

# ------------------------------------------------------------------------------------------------------------ harness


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
    return Server()


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _server().close()
    _server.cache_clear()


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
    assert outcome.seconds < SECONDS, f"took {outcome.seconds:.1f} s of processor time"
    assert outcome.megabytes < MEGABYTES, f"took {outcome.megabytes:.0f} MB"
    return outcome


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

# ----------------------------------------------------------------------------------------------------- files of no text


@cases(
    {
        "random bytes": (random.Random(1).randbytes(50_000), ("P0101",)),
        "elf": (b"\x7fELF\x02\x01\x01\x00" + bytes(8) + random.Random(2).randbytes(5_000), ("P0101", "P0109")),
        "nuls": (bytes(5_000), ("P0109",)),
        "ten megabytes of nuls": (lambda: bytes(MB10), ("P0101", "P0108", "P0109")),
        "nul in a name": (b"let a\0b = 1\n", ("P0109",)),
        "utf-16": ("let a = 1\n".encode("utf-16"), ("P0101",)),
        "utf-16 without mark": ("let a = 1\n".encode("utf-16-le"), ("P0109",)),
        "latin-1": ("let a = 1 # caf\u00e9\n".encode("latin-1"), ("P0101",)),
        "gzip": (b"\x1f\x8b\x08\x00" + random.Random(3).randbytes(2_000), ("P0101",)),
        "lone surrogate": (b'print "\xed\xa0\x80"\n', ("P0101",)),
        "overlong": (b"print \xc0\x80\n", ("P0101",)),
        "cut in a character": ("let a = 1 # \u20ac".encode()[:-1], ("P0101",)),
        "bad byte on the third line": (b"let a = 1\nlet b = 2\nlet c\xff = 3\n", ("P0101",)),
        "control characters": (bytes(range(1, 9)) + bytes(range(14, 32)), ("P0109",)),
        "escape sequences": (b"\x1b[2J\x1b]0;title\x07 let a = 1\n", ("P0109",)),
    }
)
def test_not_text(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


def test_not_text_is_located(tmp_path: Path) -> None:
    outcome = refused(check(tmp_path, b"let a = 1\nlet b = 2\nlet c\xff = 3\n"), "P0101")
    assert outcome.places == [("bad.piper", 3, 6)]


@texts(
    {
        "nothing": b"",
        "mark only": b"\xef\xbb\xbf",
        "line end": b"\n",
        "blank lines": b"\n  \n\t\n\n",
        "spaces": b"    ",
        "comment": b"# nothing here",
        "comments": b"   # one\n# two\n\t# three\n",
        "documentation": b'"""Only words."""\n',
        "mark before a statement": "\ufefflet a = 1\n".encode(),
        "no final newline": b"let a = 1",
        "no final newline in a block": b"for i in range(2):\n    print i",
        "windows line ends": b"for i in range(2):\r\n    print i\r\nlet a = 1\r\n",
        "old mac line ends": b"for i in range(2):\r    print i\rlet a = 1\r",
        "mixed line ends": b"let a = 1\r\nlet b = 2\rlet c = 3\n",
        "blank before the line end": b"let a = 1   \t \n",
        "comment under a block": b"for i in range(2):\n    print i\n  # between\n# below\n",
        "line end in brackets": b"let a = [\n1,\n\n  # why\n2\n]\n",
        "one space a block": b"if True:\n if True:\n  print 1\n",
    }
)
def test_fine(tmp_path: Path, text: Text) -> None:
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0, outcome.err


# ------------------------------------------------------------------------------------------------------------- too much


@cases(
    {
        "identifier": (lambda: "a" * MB10, ("P0108",)),
        "sum": (lambda: "let a = " + "1+" * (MB10 // 2) + "1\n", ("P0108",)),
        "list": (lambda: "let a = [" + "1," * (MB10 // 2) + "1]\n", ("P0108",)),
        "open list": (lambda: "let a = [" + "1," * (MB10 // 2), ("P0108",)),
        "open parentheses": (lambda: "(" * MB10, ("P0108",)),
        "string": (lambda: 'let a = "' + "x" * MB10 + '"\n', ("P0108",)),
        "open string": (lambda: 'let a = "' + "x" * MB10, ("P0108",)),
        "text": (lambda: '"""' + "x" * MB10 + '"""\n', ("P0108",)),
        "quotes": (lambda: '"' * MB10, ("P0108",)),
        "comment": (lambda: "#" * MB10, ("P0108",)),
        "spaces": (lambda: " " * MB10, ("P0108",)),
        "tabs": (lambda: "\t" * MB10, ("P0108",)),
        "digits": (lambda: "9" * MB10, ("P0108",)),
        "dots": (lambda: "." * MB10, ("P0108",)),
        "emoji": (lambda: "\U0001f600" * (MB10 // 4), ("P0108",)),
        "two bytes a character": (lambda: "\u00e9" * (MB10 // 2), ("P0108",)),
        "three bytes a character": (lambda: "\u20ac" * (MB10 // 3), ("P0108",)),
    }
)
def test_ten_megabyte_line(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@cases(
    {
        "lets": (lambda: lines(*(f"let x{i} = {i}" for i in range(MB10 // 20))), ("P0108",)),
        "blank lines": (lambda: "\n" * MB10, ("P0108",)),
        "comments": (lambda: "# x\n" * (MB10 // 4), ("P0108",)),
        "open brackets": (lambda: "(\n" * (MB10 // 2), ("P0108",)),
        "accents": (lambda: "# \u00e9\u00e9\u00e9\n" * (MB10 // 9), ("P0108",)),
    }
)
def test_ten_megabyte_file(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@cases(
    {
        "identifier": (lambda: "let " + "a" * 30_000 + " = 1\n", ("P0108",)),
        "comment": (lambda: "#" * 30_000 + "\n", ("P0108",)),
        "further down": (lambda: "let a = 1\n" * 2 + "x" * 30_000, ("P0108",)),
    }
)
def test_long_line(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


def test_long_line_is_located(tmp_path: Path) -> None:
    outcome = refused(check(tmp_path, lambda: "let a = 1\nlet b = 2\n" + "x" * 30_000), "P0108")
    assert outcome.places[0][1] == 3


@pytest.mark.slow
@texts(
    {
        "blank lines": most("\n", statements=0),
        "comments": most("# x\n", statements=0),
        "long comments": lambda: ("# " + "x" * (MAX_LINE - 10) + "\n") * (MAX_BYTES // MAX_LINE - 1),
        "lets": most("let x{i} = {i}\n"),
        "prints without a value": most("print\n"),
        "calls": most("f()\n"),
        "words": most("word\n"),
        "different words": most("word{i}\n"),
        "unknown names": most("print unknown{i}\n"),
        "many names and unknown names": both(most("let x{i} = {i}\n", share=0.45), most("print y{i}\n", share=0.45)),
        "unknown names in a function": both(
            most("let name{i} = {i}\n", share=0.45), most("    print nume{i}\n", "def f():\n", statements=0, share=0.4)
        ),
        "the same name": most("let x = 1\n"),
        "broken lets": most("let\n"),
        "broken in a block": most("    let\n", "for i in range(2):\n", statements=0),
        "bad characters": most("$\n"),
        "bad characters in a line": lambda: ("$ " * (MAX_LINE // 2 - 5) + "\n") * (MAX_TOKENS // MAX_LINE),
        "bad numbers": most("1x\n"),
        "bad strings": most("'\n"),
        "bad escapes": most("print '\\q'\n"),
        "bad sizes": most("let x = 99999999999TB\n"),
        "closing brackets": most(")\n"),
        "open brackets": most("(\n", statements=0),
        "open bracket before each statement": most("(\nlet x = 1\n", statements=2),
        "open brackets in a block": most("    (\n    let x = 1\n", "def f():\n", statements=0),
        "open brackets in blocks": most("if x:\n    (\nlet y = [\n", statements=3),
        "open bracket swallows all": most("x\n", "(\n", statements=0),
        "open bracket swallows statements": most("x = (y)\n", "(\n", statements=0),
        "one sum over lines": most("1+1+1+1+1+1+1+1+\n", "let a = (\n", "1)\n", statements=0),
        "one list over lines": most("1, 1, 1, 1, 1, 1, 1, 1,\n", "let a = [\n", "]\n", statements=0),
        "one list of selectors": most("[stage=0, mb=1:2],\n", "let a = [\n", "]\n", statements=0),
        "one call": most("a=1, b=2, c=3,\n", "f(\n", ")\n", statements=0),
        "one call of named arguments": most("a{i}=1,\n", "def f(x): x\nlet y = f(\n", ")\n", statements=0),
        "one call of arguments": most("1, 2, 3,\n", "def f(x): x\nlet y = f(\n", ")\n", statements=0),
        "one function of parameters": most("a{i}=1,\n", "def f(\n", "): 1\nprint f()\n", statements=0),
        "the same parameter": most("a,\n", "def f(\n", "): 1\n", statements=0),
        "one long function": most("    print 1\n", "def f():\n", statements=0),
        "one function of names": most("    let a{i} = {i}\n", "def f():\n", "f()\n", statements=0),
        "one function of unknown names": most("    print b{i}\n", "def f():\n", "f()\n", statements=0),
        "functions": most("def f{i}(x): x\n"),
        "functions that call": most("def f{i}(x): f{i}(x)\n", tail="f1(1)\n"),
        "comprehensions": most("[x{i} for x{i} in range({i})],\n", "let a = [\n", "]\n", statements=0),
        "selector keys": most("k{i}=1,\n", "place [\n", "] on gpu\n", statements=0),
        "the same key": most("k=1,\n", "print [\n", "]\n", statements=0),
        "passes": most("F,\n", "print [pass={\n", "F}]\n", statements=0),
        "unknown passes": most("G{i},\n", "print [pass={\n", "F}]\n", statements=0),
        "axes": lambda: "mesh g = " + ", ".join(f"a{i}: 1" for i in range(MAX_LINE // 12)) + "\nprint g.b1\n",
        "options": lambda: (
            "mesh g = a: 2\nreplicate [b=1] over g.a with "
            + ", ".join(f"grads{i}=1" for i in range(MAX_LINE // 20))
            + "\n"
        ),
        "tags": lambda: "tag " + ", ".join(f"a{i}={i}" for i in range(MAX_LINE // 20)) + " at m\n",
        "paths": lambda: "tag a=1 at " + ", ".join(f"m[{i}].x" for i in range(MAX_LINE // 20)) + "\n",
        "indented twice": most("if x:\n        print 1\n    print 2\n"),
        "bad dedents": lambda: "if x:\n" + "".join(f"{' ' * (9 - i % 7)}y\n" for i in range(MAX_TOKENS // 4)),
        "uneven indents": lambda: "".join(f"{' ' * (i % 30)}x\n" for i in range(min(MAX_TOKENS // 3, MAX_BYTES // 20))),
        "elses": most("else: x\n"),
        "texts": most('"""x"""\n'),
        "broken texts": lambda: ('\\"""' * 100 + "\n") * min(MAX_TOKENS // 210, MAX_BYTES // 410),
        "escaped quotes": lambda: ('"\\' * 400 + "\n") * (MAX_BYTES // 900),
        "one broken text": lambda: '"""' + ("\\" * 1_001 + "\n") * (MAX_BYTES // 1_010),
        "quotes": lambda: ("'" * (MAX_LINE - 1) + "\n") * (MAX_BYTES // MAX_LINE - 1),
        "digits": lambda: ("9" * (MAX_LINE - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "digits and underscores": lambda: ("9_" * (MAX_LINE // 2 - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "digits and dots": lambda: ("9." * (MAX_LINE // 2 - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "branches and names": both(most("let x{i} = 1\n", share=0.5), most("if True: print 1\n", share=0.4)),
        "branches of names": most("    if True: let x{i} = 1\n", "def f():\n", statements=0),
        "elifs and names": both(
            most("let x{i} = 1\n", share=0.5),
            most("elif x1 == {i}: print 1\n", "if False: print 1\n", statements=0, share=0.4),
        ),
        "loops and names": both(most("let x{i} = 1\n", share=0.5), most("for y in [1]: print y\n", share=0.4)),
        "misspelt long name": lambda: lines(
            "let " + "ab" * (MAX_LINE // 2 - 10) + " = 1", "print " + "ab" * (MAX_LINE // 2 - 11) + "cb"
        ),
        "misspelt long names": lambda: lines(
            *(f"let {'ab' * 300}{i} = 1" for i in range(300)), *(f"print {'ba' * 300}{i}" for i in range(100))
        ),
        "misspelt names": both(
            most("let abcdefgh{i} = 1\n", share=0.6), lambda: lines(*(f"print badcfehg{i}" for i in range(100)))
        ),
        "misspelt long keyword": lambda: "replicat" * (MAX_LINE // 8 - 10) + " x\n",
        "misspelt attribute": both(
            lambda: "mesh g = " + ", ".join(f"abcdef{i}: 1" for i in range(MAX_LINE // 15)) + "\n",
            most("print g.badcfe{i}\n"),
        ),
        "failing statements": most("let x{i} = 1 // 0\n"),
        "failing loops": most("for i in range(1000): let x = i // 1\n"),
    }
)
def test_as_much_as_the_limits_admit(tmp_path: Path, text: Text) -> None:
    """Just below the limits of size the answer may be anything, but it comes in time."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code in (0, 1)
    assert outcome.code == 0 or outcome.places
    assert len(outcome.codes) <= 20


# ------------------------------------------------------------------------------------------------------------ too deep


def nested(opening: str, middle: str, closing: str, depth: int = 10_000) -> Callable[[], str]:
    """Over as many lines as the longest line wants."""

    def text() -> str:
        per_line = 500
        left = "".join(opening + ("\n" if i % per_line == per_line - 1 else "") for i in range(depth))
        right = "".join(closing + ("\n" if i % per_line == per_line - 1 else "") for i in range(depth))
        return f"let a = {left}{middle}{right}\n"

    return text


@cases(
    {
        "parentheses": (nested("(", "1", ")"), ("P0107",)),
        "square brackets": (nested("[", "1", "]"), ("P0107",)),
        "braces": (nested("{", "1", "}"), ("P0107",)),
        "mixed brackets": (nested("([{", "1", "}])", 3_400), ("P0107",)),
        "open parentheses": (nested("(", "1", ""), ("P0107",)),
        "open square brackets": (nested("[", "1", ""), ("P0107",)),
        "open braces": (nested("{", "1", ""), ("P0107",)),
        "open mixed": (nested("([{", "", "", 3_400), ("P0107",)),
        "closing only": (lambda: "let a = 1" + (")" * 500 + "\n") * 20, ("P0105",)),
        "crossed": (nested("([", "1", ")]", 5_000), ("P0107", "P0105")),
        "crossed and shallow": ("let a = ([1)]\n", ("P0105",)),
        "calls": (nested("f(", "1", ")"), ("P0107",)),
        "selectors": (nested("[a=", "1", "]"), ("P0107",)),
        "sets in selectors": (nested("[a={", "1", "}]", 5_000), ("P0107",)),
        "comprehensions": (nested("[x for x in ", "[1]", "]"), ("P0107",)),
        "indices": (nested("a[", "0", "]"), ("P0107",)),
        "not": (lambda: "let a = (" + ("not " * 500 + "\n") * 10 + "True)\n", ("P0107",)),
        "minus": (lambda: "let a = (" + ("- " * 500 + "\n") * 10 + "1)\n", ("P0107",)),
        "minus without blanks": (lambda: "let a = " + "-" * 9_000 + "1\n", ("P0107",)),
        "not on one line": (lambda: "let a = " + "not " * 4_500 + "True\n", ("P0107",)),
        "attributes": (lambda: "let a = range" + ".b" * 5_000 + "\n", ("P0107",)),
        "attributes over lines": (lambda: "let a = (range" + (".b" * 500 + "\n") * 20 + ")\n", ("P0107",)),
        "index chain": (lambda: "let a = [1]" + "[0]" * 5_000 + "\n", ("P0107",)),
        "call chain": (lambda: "let a = range" + "()" * 5_000 + "\n", ("P0107",)),
        "pick chain": (lambda: "mesh g = p: 1\nlet a = g" + "[p=0]" * 3_000 + "\n", ("P0107",)),
        "conditional chain": (lambda: "let a = (" + "1 if True else\n" * 5_000 + "1)\n", ("P0107",)),
        "power chain": (lambda: "let a = " + "2**" * 5_000 + "2\n", ("P0107",)),
        "power over lines": (lambda: "let a = (" + ("2**" * 500 + "\n") * 10 + "2)\n", ("P0107",)),
        "path": (lambda: "tag a=1 at " + "m" + "[(" * 500 + "0" + ")]" * 500 + "\n", ("P0107",)),
        "repeats": (lambda: lines(*(" " * i + "repeat 1:" for i in range(190)), " " * 190 + "print 1"), ("P0107",)),
        "ifs": (lambda: lines(*(" " * i + "if True:" for i in range(190)), " " * 190 + "print 1"), ("P0107",)),
        "loops without end": (lambda: lines(*(" " * i + f"for x{i} in range(2):" for i in range(150))), ("P0107",)),
        "functions": (
            lambda: lines(*(" " * i + f"def f{i}():" for i in range(150)), " " * 150 + "print 1"),
            ("P0107", "P0111"),
        ),
        "a block a line and back": (
            lambda: lines(*(" " * i + "if True:" for i in [*range(100), *range(100, 0, -1)])),
            ("P0107",),
        ),
    }
)
def test_too_deep(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@texts(
    {
        "elifs": lambda: (
            "let a = 1\nif a == 0: print 0\n" + "".join(f"elif a == {i}: print {i}\n" for i in range(5_000))
        ),
        "elif blocks": lambda: (
            "let a = 1\nif a == 0:\n    print 0\n" + "".join(f"elif a == {i}:\n    print {i}\n" for i in range(5_000))
        ),
        "sum": lambda: "let a = " + "+".join(["1"] * 9_000) + "\n",
        "product": lambda: "let a = " + "*".join(["1"] * 9_000) + "\n",
        "and": lambda: "let a = " + " and ".join(["True"] * 2_000) + "\n",
        "or": lambda: "let a = " + " or ".join(["False"] * 2_000) + "\n",
        "comparison": lambda: "let a = " + "<=".join(["1"] * 6_000) + "\n",
        "union": lambda: "let a = (" + " |\n".join(f"[s={i}]" for i in range(9_000)) + ")\n",
        "meeting": lambda: "let a = (" + " &\n".join(f"[s{i}=1]" for i in range(9_000)) + ")\n",
        "axes": lambda: "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\n",
        "parameters": lambda: "def f(" + ",\n".join(f"a{i}" for i in range(9_000)) + "): 1\n",
        "names": lambda: "let " + ", ".join(f"a{i}" for i in range(2_000)) + " = range(2000)\n",
        "imports": lambda: "from std.pipeline import " + ", ".join(f"F as f{i}" for i in range(1_200)) + "\n",
        "clauses": lambda: "let a = [0 " + "\n".join(f"for x{i} in [0]" for i in range(300)) + "]\n",
        "conditions": lambda: "let a = [" + ",\n".join(f"s{i}=1" for i in range(20_000)) + "]\n",
        "steps": lambda: "mesh g = p: 1\norder on g: " + ", ".join("[comm=send]" for _ in range(1_400)) + "\n",
        "arrows": lambda: "order " + " -> ".join("[comm=send]" for _ in range(1_200)) + "\n",
        "overlaps": lambda: "order [comm=send] -> " + " & ".join("[comm=send]" for _ in range(1_200)) + "\n",
    }
)
def test_long_but_flat(tmp_path: Path, text: Text) -> None:
    """Long chains of one level are no deep tree: they check, or they are refused like anything else."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0 or refused(outcome)


# --------------------------------------------------------------------------------------------------------------- layout


@cases(
    {
        "tab": ("if True:\n\tprint 1\n", ("P0103",)),
        "tab after spaces": ("if True:\n  \tprint 1\n", ("P0103",)),
        "tabs and spaces": ("if True:\n    print 1\n\tprint 2\n", ("P0103",)),
        "tab in the first line": ("\tlet a = 1\n", ("P0103",)),
        "indent at the start": ("    let a = 1\n", ("P0102", "P0104")),
        "indent without a block": ("let a = 1\n    let b = 2\n", ("P0102", "P0104")),
        "bad dedent": ("if True:\n        print 1\n    print 2\n", ("P0104",)),
        "bad dedent to less": ("if True:\n    if True:\n        print 1\n   print 2\n", ("P0104",)),
        "no block": ("if True:\nprint 1\n", ("P0102",)),
        "no block at the end": ("if True:\n", ("P0102",)),
        "no block and no line end": ("if True:", ("P0102",)),
        "only a comment in the block": ("if True:\n    # nothing\n", ("P0102",)),
        "else alone": ("else:\n    print 1\n", ("P0102",)),
        "else after a loop": ("for i in range(2):\n    print i\nelse:\n    print 2\n", ("P0102",)),
        "else deeper": ("if True:\n    print 1\n    else:\n    print 2\n", ("P0102",)),
        "form feed": ("let a = 1\n\f\nlet b = 2\n", ("P0109",)),
        "vertical tab": ("let a =\v1\n", ("P0109",)),
        "backslash": ("let a = 1 + \\\n    2\n", ("P0109",)),
        "semicolon": ("let a = 1; let b = 2\n", ("P0109",)),
        "unicode line end": ("let a = 1\u2028let b = 2\n", ("P0109",)),
        "next line character": ("let a = 1\x85let b = 2\n", ("P0109",)),
    }
)
def test_layout(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


# -------------------------------------------------------------------------------------------------------- strings,
# signs


@cases(
    {
        "string": ('print "abc\n', ("P0106",)),
        "string at the end": ('print "abc', ("P0106",)),
        "single quotes": ("print 'abc\n", ("P0106",)),
        "quote at the end": ('print "', ("P0106",)),
        "escaped quote": ('print "abc\\"\n', ("P0106",)),
        "escape at the end": ('print "abc\\', ("P0106",)),
        "text": ('"""abc\nlet a = 1\n', ("P0106",)),
        "text at the end": ('"""', ("P0106",)),
        "text escaped": ('"""abc\\"""\n', ("P0106",)),
        "four quotes": ('""""\n', ("P0106",)),
        "bad escape": ('print "a\\qb"\n', ("P0106",)),
        "hex escape": ('print "\\x41"\n', ("P0106",)),
        "surrogate escape": ('print "\\ud800"\n', ("P0106",)),
        "bad escape in a text": ('"""a\n\\q"""\n', ("P0106",)),
        "bad escape in an import": ('import "./\\q.piper" as q\n', ("P0106",)),
        "curly quotes": ("print \u201cabc\u201d\n", ("P0109",)),
        "cyrillic name": ("let \u0430bc = 1\n", ("P0109",)),
        "cyrillic in a name": ("let b\u0430c = 1\n", ("P0109",)),
        "greek name": ("let \u03b1 = 1\n", ("P0109",)),
        "full width": ("let a \uff1d 1\n", ("P0109",)),
        "arabic digits": ("let a = \u0661\u0662\n", ("P0109",)),
        "superscript": ("let a = 2\u00b2\n", ("P0109", "P0110")),
        "minus sign": ("let a = 3 \u2212 1\n", ("P0109",)),
        "no-break space": ("let a\u00a0= 1\n", ("P0109",)),
        "zero width space": ("let a\u200b = 1\n", ("P0109",)),
        "mark inside": ("let a = \ufeff1\n", ("P0109",)),
        "right to left": ("let a = 1 \u202e# hidden\n", ("P0109",)),
        "right to left mark": ("\u200flet a = 1\n", ("P0109",)),
        "emoji": ("let \U0001f600 = 1\n", ("P0109",)),
        "emoji joined": ("let a = \U0001f468\u200d\U0001f469\n", ("P0109",)),
        "combining": ("let e\u0301 = 1\n", ("P0109",)),
        "combining only": ("\u0301\u0301\u0301\n", ("P0109",)),
        "private use": ("let a = \ue000\n", ("P0109",)),
        "not a character": ("let a = \uffff\n", ("P0109",)),
        "accent in a name": ("let caf\u00e9 = 1\n", ("P0109",)),
        "leading zero letter": ("let a = 0x10\n", ("P0110",)),
        "number and name": ("let a = 10abc\n", ("P0110",)),
        "two dots": ("let a = 1.2.3\n", ("P0110", "P0102")),
        "bare exponent": ("let a = 1e\n", ("P0110",)),
        "underscores": ("let a = 1__0\n", ("P0110",)),
        "wrong unit": ("let a = 25mb\n", ("P0110",)),
        "unicode digits in a number": ("let a = 1\u0661\n", ("P0109", "P0110")),
    }
)
def test_strings_and_signs(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    outcome = refused(check(tmp_path, text), *codes)
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", outcome.err), (
        "an invisible character is shown as it is"
    )


@texts(
    {
        "string": 'print "\u00e9 \u4e2d \U0001f600 \u05d0 \u202e e\u0301"\n',
        "comment": "let a = 1  # \u00e9 \u4e2d \U0001f600 \u05d0 \u202e e\u0301 \x1b[31m\n",
        "text": '"""\u00e9 \u4e2d\n\U0001f600\u2028\x85"""\n',
        "tag": 'mesh g = p: 1\nplace [stage="\u00e9\U0001f600"] on g\n',
    }
)
def test_unicode_where_it_belongs(tmp_path: Path, text: Text) -> None:
    assert bounded(check(tmp_path, text)).code == 0


@texts(
    {
        "require": 'require False, "\x1b]0;title\x07\x1b[2J"\n',
        "pass": 'order [pass="\x1b[31m"] -> [pass=F]\n',
        "import": 'import "./\x1b[31m.piper" as x\n',
        "right to left": 'require False, "\u202eabc"\n',
        "print": 'print "\x1b]0;title\x07"\n',
        "path": 'order [stage="\x1b[31m"] -> [pass=G]\n',
        "option": 'mesh g = p: 2\nreplicate [a=0] over g.p with grads="\x1b[31m"\n',
    }
)
def test_no_control_of_the_terminal(tmp_path: Path, text: Text) -> None:
    """A stranger's script must not write escape sequences to the terminal of whoever checks it."""
    outcome = bounded(check(tmp_path, text))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", outcome.out + outcome.err)


def test_a_message_is_one_line(tmp_path: Path) -> None:
    """`concise` is for grep: one diagnostic a line, whatever the script's own words are."""
    save(tmp_path, 'require False, "first\\nbad.piper:9:9: P0999 forged"\n')
    outcome = bounded(piperc("check", "--format", "concise", "bad.piper", cwd=tmp_path))
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------- too long


SPLIT = f"split batch into {MAX_SPLIT} as mb\n"
LARGE = f"mesh g = a: {MAX_DEVICES}\n"


def loops(depth: int, body: str, times: int = 1000) -> str:
    return lines(*("    " * i + f"for x{i} in range({times}):" for i in range(depth)), "    " * depth + body)


MESH = "mesh gpu = pp: 2, dp: 2\n"


@cases(
    {
        "nested loops": (loops(5, "print 1"), ("P0208",)),
        "nested loops of nothing": (loops(5, "let a = 1"), ("P0208",)),
        "nested comprehensions": (
            "let a = [0 for x in range(1000) for y in range(1000) for z in range(1000)]\n",
            ("P0208",),
        ),
        "filtered comprehension": ("let a = [0 for x in range(10000) for y in range(10000) if False]\n", ("P0208",)),
        "comprehension over empty ranges": (
            "let a = [0 for x in range(1000000) for y in range(1000000) for z in range(0)]\n",
            ("P0208",),
        ),
        "empty loops": (
            "for x in range(1000000):\n    for y in range(1000000):\n        for z in range(0): print 1\n",
            ("P0208",),
        ),
        "repeat": ("repeat 10**9: print 1\n", ("P0208",)),
        "repeat of nothing": ("repeat 10**18:\n    repeat 0: print 1\n", ("P0208",)),
        "repeat false": ("repeat 10**18:\n    if False: print 1\n", ("P0208",)),
        "range": ("let a = range(10**12)\n", ("P0208",)),
        "range of two": ("let a = range(-(10**12), 10**12)\n", ("P0208",)),
        "lists added": (lambda: doubled("[1]", "{0} + {0}", 60), ("P0208",)),
        "lists multiplied": (lambda: doubled("[1]", "{0} * 10", 60), ("P0208",)),
        "strings added": (lambda: doubled('"x"', "{0} + {0}", 60), ("P0208",)),
        "strings multiplied": ('let a = "x" * 10**12\n', ("P0208",)),
        "shared lists compared": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "let b = a60 == a60\n", ("P0208",)),
        "shared lists searched": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "let b = 1 in a60\n", ("P0208",)),
        "shared lists printed": (lambda: doubled("[1]", "[{0}, {0}]", 60) + "print a60\n", ("P0208",)),
        "shared strings printed": (lambda: doubled('"x" * 1000000', "[{0}, {0}]", 30) + "print a30\n", ("P0208",)),
        "shared lists as an option": (
            lambda: MESH + doubled("[1]", "[{0}, {0}]", 60) + "replicate [stage=0] over gpu.dp with grads=a60\n",
            ("P0208", "P0405"),
        ),
        "shared lists as a number": (
            lambda: MESH + doubled("[1]", "[{0}, {0}]", 60) + "replicate [stage=0] over gpu.dp with prefetch=a60\n",
            ("P0208", "P0405"),
        ),
        "shared lists as a step": (
            lambda: MESH + doubled("[[comm=send]]", "[{0}, {0}]", 60) + "order on gpu: a60\n",
            ("P0208", "P0204"),
        ),
        "shared lists in a chain": (
            lambda: doubled("[[comm=send]]", "[{0}, {0}]", 60) + "order a60 -> a60\n",
            ("P0208", "P0204"),
        ),
        "steps doubled": (
            lambda: "def twice(x): x, x\n" + doubled("twice([comm=send])", "twice({0})", 60) + "print a60\n",
            ("P0208", "P0204"),
        ),
        "overlaps doubled": (
            lambda: "def both(x): x & x\n" + doubled("both([comm=send])", "both({0})", 60) + "print a60\n",
            ("P0208", "P0204"),
        ),
        "calls doubled": (
            lambda: "def f0(): 1\n" + lines(*(f"def f{i + 1}(): f{i}() + f{i}()" for i in range(30))) + "print f30()\n",
            ("P0208",),
        ),
        "power": ("let a = 2**10**9\n", ("P0211",)),
        "power of power": ("let a = (2**62)**(2**62)\n", ("P0211",)),
        "product": ("let a = " + "*".join(["1000000007"] * 100) + "\n", ("P0211",)),
        "long number": ("let a = " + "9" * 5_000 + "\n", ("P0211",)),
        "twenty digits": ("let a = 99999999999999999999\n", ("P0211",)),
        "nineteen digits": ("let a = 9999999999999999999\n", ("P0211",)),
        "sum of large": ("let a = sum([2**62, 2**62, 2**62])\n", ("P0211",)),
        "large size": ("let a = 99999999999TB\n", ("P0211",)),
        "selector conjunction doubled": (lambda: doubled("[s=1]", "({0} & {0})", 60), ("P0208",)),
        "selector unions met": (
            lambda: "let u = (" + " | ".join(f"[a={i}]" for i in range(100)) + ")\nlet v = (u & u & u & u & u & u)\n",
            ("P0208",),
        ),
        "selector unions met one by one": (
            lambda: doubled("([s=0] | [s=1])", "({0} & ([t=0] | [t=1]))", 60),
            ("P0208",),
        ),
        "selector of many values": (
            lambda: "let r = range(1000000)\nlet s = [stage={" + ", ".join(["r"] * 300) + "}]\n",
            ("P0208",),
        ),
        "many large selectors": ("let r = range(1000000)\nlet s = [[stage=r] for i in range(100000)]\n", ("P0208",)),
        "large selectors printed": ("let s = [stage=range(100000)]\nprint [s for i in range(100000)]\n", ("P0208",)),
        "large selectors compared": (
            "let s = [stage=range(100000)]\nlet t = [stage=range(100000)]\nlet b = [s == t for i in range(100000)]\n",
            ("P0208",),
        ),
        "huge mesh": ("mesh g = a: 10**18\n", ("P0408",)),
        "huge mesh of axes": ("mesh g = a: 10**9, b: 10**9\n", ("P0408",)),
        "print in a loop": ("repeat 10**9: print 1, 2, 3\n", ("P0208",)),
        "long print in a loop": ('repeat 10**9: print "x" * 1000\n', ("P0208",)),
        "meshes printed": (MESH + "repeat 10**9: print gpu\n", ("P0208",)),
        "functions called": ('def f():\n    require True, "x"\nrepeat 10**9: f()\n', ("P0208",)),
        "locals copied": (
            lambda: lines(
                "def f():",
                *(f"    let x{i} = 1" for i in range(10_000)),
                "    repeat 10**9: let y = [1 for x in [1]]",
                "f()",
            ),
            ("P0208",),
        ),
        "slices": ("let a = range(1000000)\nlet b = [a[0:1] for i in range(1000000)]\n", ("P0208",)),
        "slices of strings": ('let a = "x" * 900000\nlet b = [a[1:] for i in range(1000000)]\n', ("P0208",)),
        "strings searched": ('let a = "x" * 900000\nlet b = [("y" in a) for i in range(1000000)]\n', ("P0208",)),
        "lists sorted": ("let a = range(100000)\nlet b = [sorted(a) for i in range(1000000)]\n", ("P0208",)),
        "parts of a mesh": (LARGE + "let b = [g[a=*] for i in range(100000)]\n", ("P0208",)),
        "ranges of a mesh": (LARGE + "let b = [g[a=0:60000] for i in range(100000)]\n", ("P0208",)),
        "lengths of parts": (
            LARGE.rstrip() + ", b: 1\nlet p = g[b=0]\nlet b = [len(p) for i in range(100000)]\n",
            ("P0208", "P0404"),
        ),
    }
)
def test_script_does_too_much(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@pytest.mark.slow
@texts(
    {
        "split": "split batch into 10**18 as mb\n",
        "place on a large mesh": LARGE + "for i in range(10000): place [stage=i] on g\n",
        "place many": MESH + "place [stage=0:10**12] on gpu\n",
        "place a product": MESH + "let r = range(1000)\nplace [a=r, b=r, c=r, d=r] on gpu\n",
        "place a product of ranges": MESH + "place [a=0:10000, b=0:10000, c=0:10000] on gpu\n",
        "place a huge split": MESH + SPLIT + "place [stage=0, mb=0:4] on gpu[pp=0]\n",
        "place in a loop": MESH + SPLIT + "for i in range(100000): place [stage=0, mb=i] on gpu[pp=0]\n",
        "place one after the other": (
            MESH + "split batch into 20000 as mb\nfor i in range(20000): place [stage=0, mb=i] on gpu[pp=0]\n"
        ),
        "place stages": MESH + "for i in range(200000): place [stage=i] on gpu\n",
        "place twice on many": LARGE + "place [s=0] on g[a=0:60000]\nplace [s=0] on g[a=0:60000]\n",
        "order a huge split": MESH + SPLIT + "place [stage=0] on gpu\norder on gpu: [stage=0, pass=F]\n",
        "order the end of a huge split": (
            MESH + SPLIT + "place [stage=0] on gpu\norder on gpu: [stage=0, pass=F, mb!=0]\n"
        ),
        "order a product": MESH + "let r = range(1000)\norder on gpu: [a=r, b=r, c=r, d=r]\n",
        "order a million": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 1000000: [s=0, pass=F, mb=next]\n"
        ),
        "order a million ending": (
            MESH + "split batch into 10 as mb\nplace [s=0] on gpu\norder on gpu:\n    repeat 10**9: [s=0, pass=F,"
            " mb=next?]\n"
        ),
        "order the last of many": (
            MESH
            + SPLIT
            + "place [s=0, mb=0:1000000] on gpu\norder on gpu:\n    repeat 100000: [s=0, pass=F, mb=next]\n"
        ),
        "order on a large mesh": LARGE + "for i in range(100000):\n    order on g: [comm=send]\n",
        "order on parts of a large mesh": LARGE + "for i in range(60000):\n    order on g[a=0:i+1]: [comm=send]\n",
        "order divides lanes": (
            "mesh g = a: 10000\norder on g:\n    repeat 10000: [comm=send]\nfor i in range(9999):\n    order on g[a=i]:"
            " [comm=send]\n"
        ),
        "order divides taken": (
            "mesh g = a: 10000\nsplit batch into 10000 as mb\nplace [s=0] on g\norder on g: [s=0]\n"
            "for i in range(9999):\n    order on g[a=i]: [comm=send]\n"
        ),
        "order many stages": (
            MESH + "place [stage=0:20000] on gpu\nfor i in range(20000):\n    order on gpu: [stage=i]\n"
        ),
        "order on many devices": LARGE + "for i in range(60000):\n    order on g[a=i]: [comm=send]\n",
        "many meshes": "for i in range(100000):\n    mesh g = a: i + 2\n",
        "many large meshes": "for i in range(100000):\n    mesh g = a: 60000 - i % 50000\n",
        "count": SPLIT + "tag stage=0 at m\nprint count([stage=*])\n",
        "count splits": lambda: lines(
            *(f"split batch into 1000 as s{i}" for i in range(9)), "tag stage=0 at m", "print count([stage=*])"
        ),
        "count in a loop": (
            "split batch into 100000 as mb\ntag stage=0 at m\nlet a = [count([stage=*]) for i in range(100000)]\n"
        ),
        "tags in a loop": 'for i in range(10000): tag stage=i at m\nlet a = [tags("stage") for i in range(10000)]\n',
        "paths": 'for i in range(200000): tag stage=i at m[i], n[0:i], "a.b.c"\n',
        "streams": 'for i in range(200000): stream [comm=send] on "x"\n',
        "chains": "for i in range(200000): order [comm=send] -> [comm=recv]\n",
        "requirements": 'for i in range(200000): require i >= 0, "never"\n',
        "deep call chain": lambda: (
            "def f0(): 1\n" + lines(*(f"def f{i + 1}(): f{i}()" for i in range(3_000))) + "print f3000()\n"
        ),
        "deep call chain of blocks": lambda: (
            "def f0():\n    return 1\n"
            + "".join(f"def f{i + 1}():\n    return f{i}()\n" for i in range(300))
            + "print f300()\n"
        ),
        "deep calls of deep expressions": lambda: (
            "def f0(x): x\n"
            + lines(*(f"def f{i + 1}(x): {'(1 + ' * 50}f{i}(x){')' * 50}" for i in range(20)))
            + "print f20(1)\n"
        ),
        "deep default chain": lambda: (
            "def f0(): 1\n" + lines(*(f"def f{i + 1}(x=f{i}()): x" for i in range(1_000))) + "print f1000()\n"
        ),
        "deep value printed": lambda: doubled("[1]", "[{0}]", 5_000) + "print a5000\n",
        "deep value compared": lambda: (
            doubled("[1]", "[{0}]", 5_000, "a") + doubled("[1]", "[{0}]", 5_000, "b") + "print a5000 == b5000\n"
        ),
        "deep value ordered": lambda: MESH + doubled("[[comm=send]]", "[{0}]", 5_000) + "order on gpu: a5000\n",
        "deep value forgotten": lambda: doubled("[1]", "[{0}]", 5_000),
        "deep value as an option": lambda: (
            MESH + doubled("[1]", "[{0}]", 5_000) + "replicate [s=0] over gpu.dp with grads=a5000\n"
        ),
        "deep calls of deeper expressions": lambda: (
            "def f0(x): x\n"
            + lines(*(f"def f{i + 1}(x): {'-(' * 55}f{i}(x){')' * 55}" for i in range(MAX_CALLS - 2)))
            + f"print f{MAX_CALLS - 2}(1)\n"
        ),
        "deep calls in deep blocks": lambda: (
            "def f0(x): x\n"
            + "".join(
                f"def f{i + 1}(x):\n"
                + lines(*(" " * d + "if True:" for d in range(1, 50)), " " * 50 + f"return {'[' * 50}f{i}(x){']' * 50}")
                for i in range(MAX_CALLS - 2)
            )
            + f"print f{MAX_CALLS - 2}(1)\n"
        ),
        "deep calls as arguments": lambda: "def f(x): x\nprint " + "f(" * 55 + "1" + ")" * 55 + "\n",
        "deep calls as defaults": lambda: (
            "def f0(): 1\n"
            + lines(*(f"def f{i + 1}(x=f{i}() + {'(1 + ' * 50}1{')' * 50}): x" for i in range(300)))
            + "print f300()\n"
        ),
        "deep comprehensions": lambda: "print " + "[x for x in " * 55 + "[1]" + "]" * 55 + "\n",
        "deep clauses": lambda: "print [0 " + " ".join(f"for x{i} in [0]" for i in range(300)) + "]\n",
        "deep blocks": lambda: lines(
            *(" " * i + f"for x{i} in [{'(' * 50}1{')' * 50}]:" for i in range(55)), " " * 55 + "print x0"
        ),
        "deep values in steps": lambda: (
            MESH
            + doubled("[[comm=send]]", "[{0}, {0}]", 12)
            + "order on gpu:\n"
            + lines(*("    a12 & a12" for _ in range(200)))
        ),
        "steps called": MESH + "def f(x): x, x, x\norder on gpu:\n    repeat 10**9: f([comm=send])\n",
        "steps from blocks": MESH + "def f():\n    repeat 10**6: [comm=send]\norder on gpu:\n    repeat 10**9: f()\n",
        "large steps kept": (
            "def f(x): x, x\n" + doubled("f([comm=send])", "f({0})", 13) + "let b = [f(a13) for i in range(100000)]\n"
        ),
        "large lists kept": "let b = [[x for x in range(1000)] for i in range(100000)]\n",
        "large lists repeated": "let a = [1] * 1000\nlet b = [a * 1000 for i in range(100000)]\n",
        "large strings kept": 'let b = ["x" * 100000 for i in range(100000)]\n',
        "large ranges kept": "let b = [[y for y in range(100)] + range(10000) for i in range(100000)]\n",
        "large selectors kept": "let r = range(9000)\nlet b = [[a=r, b=r, c=r] for i in range(100000)]\n",
        "large sets kept": lambda: (
            "let r = range(9000)\nlet b = [[a={" + ", ".join(["r"] * 50) + "}] for i in range(100000)]\n"
        ),
        "large selectors placed": MESH + "let r = range(9000)\nfor i in range(100000): place [a=r, b=i] on gpu\n",
        "large selectors ordered": (
            MESH + "let r = range(9000)\nplace [a=r] on gpu\norder on gpu:\n    repeat 10**6: [a=r, pass=F]\n"
        ),
        "large selectors missed": (
            MESH + "let r = range(9000)\nplace [a=1] on gpu\nfor i in range(10000):\n    order on gpu: [b=r]\n"
        ),
        "large unions": MESH + doubled("[a=1]", "({0} | [b=2] | [c=3])", 400) + "place a400 on gpu\n",
        "large unions ordered": lambda: (
            MESH
            + "place [s=0:1000] on gpu\nlet u = ("
            + " |\n".join(f"[s={i}]" for i in range(900))
            + ")\norder on gpu:\n    repeat 10**6: u\n"
        ),
        "large conjunctions": lambda: (
            MESH
            + "place ["
            + ", ".join(f"k{i}=1" for i in range(1_500))
            + "] on gpu\norder on gpu:\n    repeat 10**6: [k1=1, pass=F]\n"
        ),
        "many chunks met": (
            MESH + "place [a=0:140, b=0:140] on gpu\nfor i in range(10**5):\n    order on gpu: [a!=i, b!=i, pass=F,"
            " comm=send]\n"
        ),
        "many chunks ordered": MESH + SPLIT + "place [a=0:140, b=0:140] on gpu\norder on gpu: [a=*, pass=F]\n",
        "many chunks counted": (
            MESH + "place [a=0:140, b=0:140] on gpu\nlet c = [count([a=i, b=*]) for i in range(10**5)]\n"
        ),
        "many chunks replicated": MESH + "place [a=0:140, b=0:140] on gpu\nfor i in range(10**5): recompute [a=i]\n",
        "many splits": lambda: (
            lines(*(f"split batch into 2 as s{i}" for i in range(200)))
            + MESH
            + "place [a=1] on gpu\norder on gpu: [a=1]\n"
        ),
        "many splits ordered": lambda: (
            lines(*(f"split batch into 60000 as s{i}" for i in range(3)))
            + MESH
            + "place [a=1] on gpu\norder on gpu: [a=1, s0=0]\n"
        ),
        "many parts": (
            MESH
            + SPLIT
            + "for i in range(999): place [s=0, mb=i] on gpu[pp=0]\nfor i in range(60000): order on gpu[pp=0]: [s=0,"
            " pass=F, mb=next]\n"
        ),
        "many parts of many chunks": (
            MESH + "split batch into 900 as mb\nfor s in range(20):\n    for i in range(900): place [s=s, mb=i] on"
            " gpu[pp=0]\n"
        ),
        "next of the end": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 10**6: [s=0, pass=F, mb=next?] \n"
        ),
        "next of a part": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 20000: [s=0, pass=F, mb=next, mb=60000:]\n"
        ),
        "next of evens": (
            MESH
            + SPLIT
            + "place [s=0] on gpu\nlet e = [i for i in range(0, 20000, 2)]\norder on gpu:\n    repeat 9000: ([s=0,"
            " pass=F, mb=next] & [mb=e])\n"
        ),
        "lanes divided in halves": (
            LARGE + "order on g: [comm=send]\nfor i in range(1, 60000):\n    order on g[a=0:i]: [comm=send]\n"
        ),
        "lanes of every device": (
            LARGE + "for i in range(60000):\n    order on g[a=i]: [comm=send]\norder on g: [comm=recv]\norder on g:"
            " [comm=recv]\n"
        ),
        "sets of devices": LARGE + "for i in range(30000):\n    order on g[a={i, 2*i, 60000 - i}]: [comm=send]\n",
        "views": (
            "for i in range(100000):\n    mesh g = a: i % 50 + 1, b: i % 60 + 1, c: i % 7 + 1\n    replicate [s=1] over"
            " g.a\n"
        ),
        "mesh of axes": lambda: (
            "mesh g = "
            + ", ".join(f"a{i}: 1" for i in range(1_500))
            + "\nlet b = [g[a1=0, a1400=0] for i in range(10**6)]\n"
        ),
        "mesh of axes printed": lambda: (
            "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\nrepeat 10**6: print g\n"
        ),
        "mesh compared": lambda: (
            "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\nlet b = [g == g for i in range(10**6)]\n"
        ),
        "parts compared": (
            LARGE + "let p = g[a=0:60000]\nlet q = g[a=0:60000]\nlet b = [p == q for i in range(10**6)]\n"
        ),
        "parts printed": LARGE + "let p = g[a=0:60000]\nrepeat 10**6: print p\n",
        "parts kept": LARGE + "let b = [g[a=i:60000] for i in range(10**6)]\n",
        "functions compared": "def f(x): x\nlet b = [f == f for i in range(10**6)]\n",
        "long strings compared": 'let a = "x" * 900000\nlet c = "x" * 900000\nlet b = [a == c for i in range(10**6)]\n',
        "long strings searched": 'let a = "x" * 400000 + "y"\nlet c = "x" * 200000 + "z"\nprint c in a\n',
        "long strings in lists": 'let a = "x" * 900000\nlet b = [a in [a, a, a] for i in range(10**6)]\n',
        "long strings as tags": MESH + 'let a = "x" * 900000\nfor i in range(10**5): place [s=a, t=i] on gpu\n',
        "long strings as streams": 'let a = "x" * 900000\nfor i in range(10**5): stream [comm=send] on a\n',
        "zipped": "let r = range(100000)\nlet b = [zip(r, r) for i in range(10**6)]\n",
        "enumerated": "let r = range(100000)\nlet b = [enumerate(r) for i in range(10**6)]\n",
        "summed": "let r = range(100000)\nlet b = [sum(r) for i in range(10**6)]\n",
        "least": "let r = range(100000)\nlet b = [min(r) for i in range(10**6)]\n",
        "unpacked": lambda: (
            "let "
            + ", ".join(f"a{i}" for i in range(2_000))
            + " = range(2000)\nfor x, y in zip(range(1000000), range(1000000)): print x\n"
        ),
        "defaults": lambda: (
            "def f(" + ", ".join(f"a{i}={i}" for i in range(1_500)) + "): a0\nlet b = [f() for i in range(10**6)]\n"
        ),
        "long trails": lambda: (
            MESH
            + "def f0(): place [s=1] on gpu\n".replace(": place", ":\n    place")
            + "".join(f"def f{i + 1}():\n    f{i}()\n" for i in range(30))
            + "f30()\nf30()\n"
        ),
        "long word in a message": lambda: MESH + 'let s = "x" * 900000\norder [pass=s] -> [pass=F]\n',
        "long list in a message": lambda: MESH + "let s = range(900000)\nreplicate [s=0] over gpu.dp with grads=s\n",
        "long requirement": 'require False, "x" * 900000\n',
        "long key in a message": lambda: (
            MESH + "place [" + "k" * 9_000 + "=0] on gpu\norder on gpu: [" + "k" * 8_999 + "j=0]\n"
        ),
    }
)
def test_much_but_perhaps_fine(tmp_path: Path, text: Text) -> None:
    """Whatever the answer is, it comes in time."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0 or refused(outcome)


@texts(
    {
        "order a million": (
            MESH + SPLIT + "place [s=0] on gpu\norder on gpu:\n    repeat 1000000: [s=0, pass=F, mb=next]\n"
        ),
        "order a hundred thousand": (
            MESH + "split batch into 100000 as mb\nplace [s=0] on gpu\norder on gpu:\n    repeat 100000: [s=0, pass=F,"
            " mb=next]\n"
        ),
        "large mesh": LARGE + "order on g[a=0]: [comm=send]\n",
        "many lanes": (
            "mesh g = a: 3000\nfor i in range(3000):\n    place [stage=i] on g[a=i]\n    order on g[a=i]: [stage=i,"
            " pass=F]\n"
        ),
        "many large meshes": "for i in range(200):\n    mesh g = a: 60000 - i\n    order on g: [comm=send]\n",
        "a long timeline": (
            MESH
            + "split batch into 60000 as mb\nplace [s=0] on gpu\nreplicate [s=0] over gpu.dp\norder on gpu:\n    repeat"
            " 30000: [s=0, pass=F, mb=next]\n"
        ),
        "a wide timeline": (
            LARGE
            + "for i in range(5000): place [stage=i] on g[a=i]\nfor i in range(5000):\n    order on g[a=i]: [stage=i,"
            " pass=F]\n"
        ),
        "a large overlap": MESH + "split batch into 20000 as mb\nplace [s=0] on gpu\norder on gpu: [s=0, pass=F]\n",
        "a large overlap that waits": (
            MESH + "split batch into 20000 as mb\nplace [stage=0:2] on gpu\norder on gpu: [stage=1, pass=F] & [stage=0,"
            " pass=F]\n"
        ),
        "several passes of a communication": MESH + "order on gpu: [comm=send, pass={F, B}]\n",
        "any pass of a communication": MESH + "order on gpu: [comm=send, pass=*]\n",
        "no pass of a communication": MESH + "order on gpu: [comm=send, !pass]\n",
        "all but a pass of a communication": MESH + "order on gpu: [comm=send, pass!=F]\n",
        "any pass": MESH + "place [s=0] on gpu\norder on gpu: [s=0, pass=*]\n",
        "no pass": MESH + "place [s=0] on gpu\norder on gpu: [s=0, !pass]\n",
        "an update with a pass": MESH + "order on gpu: [update, pass=F]\n",
    }
)
def test_orders(tmp_path: Path, text: Text) -> None:
    save(tmp_path, text)
    bounded(piperc("orders", "bad.piper", cwd=tmp_path))


@cases(
    {
        "zero": ("let a = 1 // 0\n", ("P0212",)),
        "true division": ("let a = 1 / 0\n", ("P0212",)),
        "remainder": ("let a = 1 % 0\n", ("P0212",)),
        "floats": ("let a = 1.0 / 0.0\n", ("P0212",)),
        "sizes": ("let a = 1MB // 0\n", ("P0212",)),
        "sizes by sizes": ("let a = 1MB % 0B\n", ("P0212",)),
        "negative power": ("let a = 0 ** -1\n", ("P0212",)),
        "complex": ("let a = (-8) ** 0.5\n", ("P0212",)),
        "range step": ("let a = range(0, 9, 0)\n", ("P0212",)),
        "float power": ("let a = 10.0 ** 400\n", ("P0211",)),
        "size by nothing": ("let a = 1MB * (1e999 - 1e999)\n", ("P0211", "P0212", "P0110")),
        "size by infinity": ("let a = 1MB * 1e999\n", ("P0211", "P0212", "P0110")),
        "infinity as a count": ("repeat 1e999: print 1\n", ("P0204", "P0211", "P0110")),
        "string times a huge number": ('let a = "" * 9999999999999999999\n', ("P0211",)),
        "string times a huge negative number": ('let a = "a" * -9999999999999999999\n', ("P0211",)),
        "list times a huge number": ("let a = [] * 9999999999999999999\n", ("P0211",)),
        "index": ("let a = [1][5]\n", ("P0213",)),
        "negative index": ("let a = [1][-5]\n", ("P0213",)),
        "index of nothing": ("let a = [][0]\n", ("P0213",)),
        "min of nothing": ("let a = min([])\n", ("P0205",)),
        "sort of a mixture": ('let a = sorted([1, "a"])\n', ("P0204",)),
        "sort of lists": ("let a = sorted([[1], [2]])\n", ("P0204",)),
        "recursion": ("def f(): f()\nf()\n", ("P0206",)),
        "mutual recursion": ("def f(): g()\ndef g(): f()\nf()\n", ("P0206",)),
        "recursion of three": ("def f(): g()\ndef g(): h()\ndef h(): f()\nf()\n", ("P0206",)),
        "recursion through an argument": ("def f(g): g(g)\nf(f)\n", ("P0206",)),
        "recursion through a list": ("def f(g): g[0](g)\nf([f])\n", ("P0206",)),
        "recursion through two arguments": ("def f(g, h): g(h, g)\ndef k(g, h): g(h, g)\nf(k, f)\n", ("P0206",)),
        "recursion in a comprehension": ("def f(n): [f(x) for x in range(n)]\nlet a = f(3)\n", ("P0206",)),
        "recursion in an order": (MESH + "def f(): f(), f()\norder on gpu: f()\n", ("P0206",)),
        "recursion in a default": ("def g(): f()\ndef f(a=g()): a\nlet x = f()\n", ("P0206",)),
        "an argument of itself": ("def f(x): x\nlet a = f(f)(f)(f)(1)(2)\n", ("P0204",)),
    }
)
def test_values(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


# -------------------------------------------------------------------------------------------------------------- imports


@cases(
    {
        "unknown library": ("from std.nothing import f\n", ("P0209",)),
        "unknown name": ("from std.pipeline import nothing\n", ("P0209",)),
        "no such library": ("from numpy import array\n", ("P0209",)),
        "missing file": ('import "./nothing.piper" as n\n', ("P0209",)),
        "itself": ('import "./bad.piper" as b\n', ("P0210",)),
        "itself roundabout": ('import "./../folder/./bad.piper" as b\n', ("P0210",)),
        "directory": ('import "./directory.piper" as d\n', ("P0209",)),
        "parent": ('import ".." as d\n', ("P0209",)),
        "nothing": ('import "" as d\n', ("P0209",)),
        "dot": ('import "./.piper" as d\n', ("P0209",)),
        "binary file": ('import "./binary.piper" as b\n', ("P0101",)),
        "empty file": ('import "./empty.piper" as e\nprint e.x\n', ("P0201",)),
        "broken file": ('import "./broken.piper" as b\n', ("P0102",)),
        "absolute path": ('import "/etc/passwd" as p\n', ("P0209",)),
        "absolute script": ('import "/tmp/x.piper" as p\n', ("P0209",)),
        "another kind of file": ('import "../../../../../../../etc/passwd" as p\n', ("P0209",)),
        "python file": ('import "./x.py" as p\n', ("P0209",)),
        "device": ('import "../../../../../../dev/zero" as p\n', ("P0209",)),
        "url": ('import "http://example.com/x.piper" as p\n', ("P0209",)),
        "home": ('import "~/x.piper" as p\n', ("P0209",)),
        "fifo": ('import "./fifo.piper" as f\n', ("P0209",)),
        "link to a device": ('import "./zero.piper" as z\n', ("P0209",)),
        "broken link": ('import "./nowhere.piper" as n\n', ("P0209",)),
        "link to itself": ('import "./circle.piper" as c\n', ("P0209",)),
        "link to this file": ('import "./me.piper" as m\n', ("P0210",)),
        "nul": ('import "./a\0.piper" as n\n', ("P0209",)),
        "long name": ('import "./' + "a" * 5_000 + '.piper" as n\n', ("P0209",)),
        "long path": ('import "./' + "a/" * 5_000 + 'b.piper" as n\n', ("P0209",)),
        "through a file": ('import "./empty.piper/x.piper" as n\n', ("P0209",)),
        "line end in the name": ('import "./a\\nb.piper" as n\n', ("P0209",)),
        "file that is too long": ('import "./long.piper" as n\n', ("P0108",)),
        "file that does too much": ('import "./endless.piper" as n\n', ("P0208",)),
        "file that fails twice": ('import "./failing.piper" as a\nimport "./failing.piper" as b\n', ("P0212",)),
        "private name": ("from std.pipeline import _nothing\n", ("P0209",)),
        "in a block": ('if True:\n    import "./empty.piper" as e\n', ("P0111",)),
    }
)
def test_imports(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    folder = tmp_path / "folder"
    (folder / "directory.piper").mkdir(parents=True)
    save(folder, random.Random(4).randbytes(3_000), "binary.piper")
    save(folder, "", "empty.piper")
    save(folder, "let\n", "broken.piper")
    save(folder, "let a = 1 // 0\n", "failing.piper")
    save(folder, "repeat 10**9: print 1\n", "endless.piper")
    save(folder, "x" * 30_000, "long.piper")
    os.mkfifo(folder / "fifo.piper")
    for link, target in (
        ("zero", "/dev/zero"),
        ("nowhere", "nothing"),
        ("circle", "circle.piper"),
        ("me", "bad.piper"),
    ):
        (folder / f"{link}.piper").symlink_to(target)
    refused(check(folder, text), *codes)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_import_cycle(tmp_path: Path, length: int) -> None:
    for i in range(length):
        save(tmp_path, f'import "./m{(i + 1) % length}.piper" as m\n', f"m{i}.piper")
    outcome = refused(piperc("check", "m0.piper", cwd=tmp_path), "P0210")
    assert all(f"m{i}.piper" in outcome.err for i in range(length))


def test_import_cycle_from_outside(tmp_path: Path) -> None:
    save(tmp_path, 'import "./b.piper" as b\n')
    save(tmp_path, 'import "./c.piper" as c\n', "b.piper")
    save(tmp_path, 'import "./b.piper" as b\n', "c.piper")
    refused(piperc("check", "bad.piper", cwd=tmp_path), "P0210")


def test_long_import_chain(tmp_path: Path) -> None:
    length = 400
    for i in range(length):
        save(tmp_path, f'import "./m{i + 1}.piper" as m\n' if i + 1 < length else "let a = 1\n", f"m{i}.piper")
    outcome = bounded(piperc("check", "m0.piper", cwd=tmp_path))
    assert outcome.code == 0 or refused(outcome)


def test_same_function_text_in_two_files(tmp_path: Path) -> None:
    """Two functions of one text are still two functions."""
    save(tmp_path, 'from "./b.piper" import f as g\ndef f(): g()\nprint f()\n')
    save(tmp_path, "def g(): 1\ndef f(): g()\n", "b.piper")
    assert bounded(piperc("check", "bad.piper", cwd=tmp_path)).code == 0


def test_imports_of_imports(tmp_path: Path) -> None:
    """Every file imports the next one twice: loaded once each."""
    for i in range(30):
        save(tmp_path, f'import "./m{i + 1}.piper" as a\nimport "./m{i + 1}.piper" as b\n', f"m{i}.piper")
    save(tmp_path, "let a = 1 // 0\n", "m30.piper")
    refused(piperc("check", "m0.piper", cwd=tmp_path), "P0212")


# --------------------------------------------------------------------------------------------------------- command line


PARAMETERS = 'param n = 2\nparam x = 0.5\nparam b = True\nparam s = "a"\nparam m = 25MB\nprint n, x, b, s, m\n'


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("n=3", 0),
        ("n=-3", 0),
        ("n=1_000", 0),
        ("x=1e-3", 0),
        ("x=3", 0),
        ("b=false", 0),
        ("b=True", 0),
        ("s=", 0),
        ("s=a=b", 0),
        ("s=\U0001f600", 0),
        ("m=2GiB", 0),
        ("s=" + "x" * 100_000, 0),
        ("n=", 2),
        ("n", 2),
        ("=3", 2),
        ("", 2),
        ("=", 2),
        ("n==3", 2),
        (" n=3", 2),
        ("n-m=3", 2),
        ("3=n", 2),
        ("n=x", 2),
        ("n=1.5", 2),
        ("n=True", 2),
        ("n=1MB", 2),
        ("n=[1]", 2),
        ("n=1+1", 2),
        ("n=1\nparam q = 2", 2),
        ("n=" + "9" * 5_000, 2),
        ("n=" + "(" * 5_000, 2),
        ("n=" + "-" * 5_000 + "1", 2),
        ("n=99999999999999999999", 2),
        ("n=9223372036854775808", 2),
        ("n=\u0663", 2),
        ("n=1e999", 2),
        ("n='", 2),
        ('n="""', 2),
        ("n=\x1b[31m", 2),
        ("b=1", 2),
        ("m=25mb", 2),
        ("m=25", 2),
        ("N=3", 2),
        ("nn=3", 2),
        ("caf\u00e9=3", 2),
        ("z" * 50_000 + "=1", 2),
        ("n=" + "x" * 100_000, 2),
    ],
)
def test_parameters(tmp_path: Path, given: str, code: int) -> None:
    save(tmp_path, PARAMETERS)
    outcome = bounded(piperc("check", "bad.piper", "-p", given, cwd=tmp_path))
    assert outcome.code == code, outcome.err[:1500]
    assert code == 0 or outcome.codes[0] in ("P0902", "P0903")
    assert "\x1b" not in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("chekc", "bad.piper"),
        ("--format", "xml", "check", "bad.piper"),
        ("check", "--format", "bad.piper"),
        ("check", "--format", "xml", "bad.piper"),
        ("check", "--nothing", "bad.piper"),
        ("check", "bad.piper", "-p"),
        ("check", "bad.piper", "-p", "n=1", "-p", "n=2"),
        ("check", "nothing.piper"),
        ("check", "empty"),
        ("check", ""),
        ("check", "/dev/null/x"),
        ("check", "x" * 5_000),
        ("check", "a.py"),
        ("check", "-x"),
        ("orders",),
        ("orders", "bad.piper", "bad.piper"),
        ("orders", "bad.piper", "--json", "--csv"),
        ("explain", "P9999"),
        ("explain", "302"),
        ("explain", ""),
        ("explain", "../../etc/passwd"),
        ("explain", "P0101", "P0102"),
        ("fmt",),
        ("fmt", "nothing.piper"),
        ("fmt", "empty"),
        ("\x1b[31m",),
        ("check", "\x1b[31m.piper"),
        ("check", "\U0001f600.piper"),
        ("", "bad.piper"),
        ("check", "bad.piper", "--help=1"),
        ("check", "--", "-p", "n=1"),
        ("check", "@bad.piper"),
        ("check", "/proc/self/mem"),
        ("--version", "--nope"),
    ],
    ids=lambda words: "-".join(words)[:40] or "none",
)
def test_command_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    save(tmp_path, "param n = 2\n")
    (tmp_path / "empty").mkdir()
    outcome = bounded(piperc(*arguments, cwd=tmp_path))
    if outcome.code == 0:
        assert arguments[0] == "--version"
    else:
        assert outcome.code == 2, outcome.err
        assert re.search(r"\bP09\d\d\b", outcome.err), outcome.err
    assert "\x1b" not in outcome.err


@pytest.mark.parametrize("arguments", [("--help",), ("check", "--help"), ("check", "-h"), ("--version",), ("explain",)])
def test_help(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    outcome = bounded(piperc(*arguments, cwd=tmp_path))
    assert outcome.code == 0
    assert outcome.out


@pytest.mark.parametrize(
    "name", [b"\xff.piper", "\u00e9.piper".encode(), b"a\nb.piper", b"-x.piper", b" .piper", b"\x1b[31m.piper"]
)
@pytest.mark.parametrize("text", ["let a = 1\n", "let\n"], ids=["fine", "broken"])
def test_odd_file_names(tmp_path: Path, name: bytes, text: str) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(text)
    outcome = bounded(piperc("check", b"./" + name, cwd=tmp_path, env={"LC_ALL": "C.UTF-8"}))
    assert outcome.code == (0 if text != "let\n" else 1)
    assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("command", ["check", "fmt", "orders"])
def test_fifo_that_nobody_writes(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "fifo.piper")
    outcome = piperc(command, "fifo.piper", cwd=tmp_path, patience=3)
    assert not outcome.hung, "waits for a writer"
    assert bounded(outcome).code == 2


def test_unreadable_file(tmp_path: Path) -> None:
    save(tmp_path, "let a = 1\n")
    (tmp_path / "bad.piper").chmod(0)
    if os.access(tmp_path / "bad.piper", os.R_OK):
        pytest.skip("this user reads everything")
    assert bounded(piperc("check", "bad.piper", cwd=tmp_path)).code == 2


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_endless_device(tmp_path: Path, device: str) -> None:
    assert bounded(piperc("check", device, cwd=tmp_path)).code == 2


@pytest.mark.parametrize("command", ["check", "fmt", "orders"])
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_endless_standard_input(tmp_path: Path, command: str, device: str) -> None:
    assert bounded(piperc(command, "-", cwd=tmp_path, stdin=Path(device))).code == 1


def test_standard_input_is_no_file(tmp_path: Path) -> None:
    name = save(tmp_path, 'import "./a.piper" as a\n')
    refused(piperc("check", "-", cwd=tmp_path, stdin=tmp_path / name), "P0209")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("check", 'require False, "\u00e9\U0001f600"\n'),
        ("check", "let \u00e9 = 1\n"),
        ("check", 'print "\u00e9\U0001f600"\n'),
        ("fmt", "let a = 1  # \u00e9\U0001f600\n"),
        (
            "orders",
            'mesh g = p: 2\nplace [stage="\U0001f600"] on g\nplace [stage=1] on g\norder on g: [stage=*, pass=F]\n',
        ),
    ],
    ids=["message", "quoted line", "print", "fmt", "orders"],
)
def test_narrow_terminal_encodings(tmp_path: Path, encoding: str, command: str, text: str) -> None:
    name = save(tmp_path, text)
    bounded(piperc(command, "-", cwd=tmp_path, stdin=tmp_path / name, env={"PYTHONIOENCODING": encoding}))


def test_full_disk(tmp_path: Path) -> None:
    """What cannot be written is an error of its own, not a traceback."""
    save(tmp_path, "let a = 1\n")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "piperlang", "check", "bad.piper"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


def test_reader_gone(tmp_path: Path) -> None:
    save(tmp_path, "let a = 1\n")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "piperlang", "explain"],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert b"Traceback" not in done.stderr
    assert b"Exception" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(5_000)], ids=["empty", "garbage", "nuls"])
def test_damaged_cache(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "piperlang").mkdir()
    (tmp_path / "piperlang" / "grammar.tables").write_bytes(content)
    save(tmp_path, "let a = 1\n")
    outcome = piperc("check", "bad.piper", cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert "Traceback" not in outcome.err
    assert outcome.code == 0


def test_no_cache(tmp_path: Path) -> None:
    save(tmp_path, "let a = 1\n")
    outcome = bounded(
        piperc("check", "bad.piper", cwd=tmp_path, env={"XDG_CACHE_HOME": "/dev/null/nowhere", "HOME": "/dev/null"})
    )
    assert outcome.code == 0


# --------------------------------------------------------------------------------------------------------------- fmt


@pytest.mark.slow
@texts(
    {
        "list of selectors": most("[stage=0, mb=1:2],\n", "let a = [\n", "]\n", statements=0),
        "commented list": most("1,  # one\n", "let a = [\n", "]\n", statements=0),
        "comments above items": most("# above\n1,\n", "let a = [\n", "]\n", statements=0),
        "nested commented lists": most("[1,  # one\n2],\n", "let a = [\n", "]\n", statements=0),
        "deep commented lists": lambda: "let a = " + "[ # in\n" * 55 + "1" + " # out\n]" * 55 + "\n",
        "long sum": most("1 + 1 + 1 + 1 +\n", "let a = (\n", "1)\n", statements=0),
        "commented sum": most("1 +  # one\n", "let a = (\n", "1)\n", statements=0),
        "many comments": most("# x\n", statements=0),
        "comments beside": most("print 1  # x\n"),
        "comments in blocks": most("    # x\n    print 1  # y\n", "if x:\n", statements=0),
        "long function": most("    print 1\n", "def f():\n", statements=0),
        "functions": most("# about\ndef f{i}(x):\n    return x\n"),
        "functions after comments": both(
            most("# x\n", statements=0, share=0.5), most("def f{i}(x):\n    return x\n", share=0.4)
        ),
        "blank lines": most("print 1\n\n\n\n"),
        "long text": lambda: '"""' + "x\n" * (MAX_BYTES // 3) + '"""\n',
        "picks": most("[0:1]", "print ([1]\n", ")\n", statements=0, share=0.01),
    }
)
def test_formatting_much(tmp_path: Path, text: Text) -> None:
    """Formatting reads everything twice more, so it may take longer than checking; but not the square of it."""
    save(tmp_path, text)
    outcome = piperc("fmt", "bad.piper", cwd=tmp_path)
    assert not outcome.hung, f"stopped after {outcome.seconds:.1f} s"
    assert "Traceback" not in outcome.err
    assert outcome.megabytes < MEGABYTES


def test_formatting_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / save(tmp_path, "let a=1\n")
    path.chmod(0o640)
    assert bounded(piperc("fmt", "bad.piper", cwd=tmp_path)).code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == "let a = 1\n"
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith((".out", ".err"))) == ["bad.piper"]
