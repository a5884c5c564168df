"""Wrong arguments, parameters, files, streams and encodings: a diagnostic, in bounded time and memory
(tests/support/bounded.py)."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from piperlang.syntax.grammar import TABLES
from piperlang.syntax.parse import MAX_BYTES
from tests.support.bounded import MEGABYTES, Text, both, bounded, measured, most, piperc, refused, save, texts
from tests.support.often import one_in

pytestmark = measured

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


@pytest.mark.parametrize("content", one_in(3, [b"garbage", b"", bytes(5_000)]), ids=["garbage", "empty", "nuls"])
def test_damaged_cache(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "piperlang").mkdir()
    (tmp_path / "piperlang" / TABLES).write_bytes(content)
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
