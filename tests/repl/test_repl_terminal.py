"""`piperc repl` in a real terminal: a pseudo-terminal, and a screen that is looked at the way a person would."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from tests.support import ROOT

WIDTH, HEIGHT = 96, 100
"""Of the screen in docs/repl.md, and high enough for all of it."""
PROMPT = re.compile(r"(piper:\d+>|     \.\.\.) ?(.*)")


class Screen:
    """A terminal of a fixed size with a program in it."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self.stream = pyte.ByteStream(self.screen)
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(state),
            "COLUMNS": str(WIDTH),
            "LINES": str(HEIGHT),
        }
        environment.pop("NO_COLOR", None)
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "piperlang", "repl", *arguments],
            env=environment,
            dimensions=(HEIGHT, WIDTH),
            cwd=str(ROOT),
        )

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, seen: Callable[[Screen], bool], seconds: float = 300.0) -> None:
        """Read what the program writes until the screen shows it."""
        end = time.monotonic() + seconds
        while not seen(self):
            assert time.monotonic() < end, f"not seen in {seconds} s:\n{self.text}"
            try:
                data = self.process.read_nonblocking(65536, timeout=0.2)
                self.stream.feed(data)
                if b"\x1b[6n" in data:  # it asks where the cursor is
                    self.process.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert seen(self), self.text
                return

    def shows(self, pattern: str, seconds: float = 300.0) -> None:
        self.until(lambda screen: re.search(pattern, screen.text, re.MULTILINE) is not None, seconds)

    def type(self, keys: str) -> None:
        """Key by key: a burst would be taken for a paste."""
        for key in keys:
            self.process.send(key)
            time.sleep(0.01)

    def enter(self, line: str, shows: str) -> None:
        self.type(f"{line}\r")
        self.shows(shows)

    def ended(self) -> int:
        self.process.expect(pexpect.EOF, timeout=300)
        self.process.close()
        assert self.process.exitstatus is not None
        return int(self.process.exitstatus)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []

    def start(*arguments: str) -> Screen:
        opened.append(Screen(tmp_path, *arguments))
        return opened[-1]

    yield start
    for screen in opened:
        screen.process.close(force=True)


def test_completion_blocks_history_and_leaving(terminal: Callable[..., Screen]) -> None:
    screen = terminal("examples/02_gpt/model.py")
    screen.shows(r"^piper:1>", 120)
    screen.enter("mesh gpu = pp: 2", r"^piper:2>")

    # Completion of a keyword, of a tag with its values, and of a mesh axis.
    screen.type("pla")
    screen.shows(r"place\s+place SELECTOR on")
    screen.type("\t [st")
    screen.shows(r"stage=\s+a tag: 0, 1, 2, 3")
    screen.type("\t0:2] on gp")
    screen.shows(r"gpu\[pp=\s+2 devices")
    screen.type("u[pp=0]\r")
    screen.shows(r"^piper:3>")
    screen.enter("place [stage=2:4] on gpu[pp=1]", r"^piper:4>")
    screen.enter("split batch into 2 as mb", r"^piper:5>")

    # A library function with its signature and its documentation.
    screen.type("from std.pipeline import one")
    screen.shows(r"one_f_one_b\(gpu, ranks, microbatches\)\s+One forward, one backward")
    screen.process.send("\x03")  # Ctrl-C clears the line
    screen.shows(r"^piper:5>\s*$")

    # A block of several lines, indented by itself, ended by an empty line; a selector left open across lines.
    screen.type("order on gpu[pp=0]:\r")
    screen.shows(r"^     \.\.\.$")
    screen.type("repeat 2: [stage=0, pass=F, mb=next],\x7f\r")
    screen.type("repeat 2: [\r")
    screen.type("stage=0, pass=B, mb=next]\r")
    screen.type("\r")
    screen.shows(r"device 0 \| F0 F1 B0--- B1---")
    screen.shows(r"^piper:6>")
    assert "     ...     repeat 2: [stage=0, pass=F, mb=next]" in screen.text
    assert "     ...         stage=0, pass=B, mb=next]" in screen.text

    # A mistake keeps the state; the diagnostic is in colour; the history brings the line back.
    screen.enter("place [stage=0] on gpu[pp=1]", r"error\[P0401\]")
    screen.shows(r"^piper:6>\s*$")
    row = next(i for i, line in enumerate(screen.lines) if "error[P0401]" in line)
    assert screen.screen.buffer[row][0].fg == "red"
    screen.process.send("\x1b[A")
    screen.shows(r"^piper:6> place \[stage=0\] on gpu\[pp=1\]")
    screen.process.send("\x03")
    screen.type("\x12mesh")  # Ctrl-R
    screen.shows(r"mesh gpu = pp: 2\s*$")
    screen.process.send("\x07")
    screen.process.send("\x03")

    # A suggestion from the history, taken with the right arrow.
    screen.shows(r"^piper:6>\s*$")
    screen.type("split b")
    screen.shows(r"^piper:6> split batch into 2 as mb")
    screen.process.send("\x03")
    screen.process.send("\x04")  # Ctrl-D
    screen.shows("5 statements not saved: `:save FILE`, or Ctrl-D again to quit")
    screen.process.send("\x04")
    assert screen.ended() == 0


@pytest.mark.slow
def test_tags_are_cut_while_the_next_statement_is_typed(terminal: Callable[..., Screen]) -> None:
    screen = terminal("examples/02_gpt/model.py")
    screen.shows(r"^piper:1>", 120)
    screen.enter('tag part="up" at blocks[*].up', r"^piper:2>")
    screen.enter("mesh gpu = tp: 2", r"^piper:3>")
    screen.enter("place [stage=*] on gpu", r"^piper:4>")
    screen.enter(':count [part="up"]', r"piper:4>[\s\S]*\d+[\s\S]*piper:4>\s*$")
    screen.type('tag part="down" at blocks[*].down\r:quit\r')  # leaves while the chunks are traced
    screen.shows("not saved")
    screen.type(":quit\r")
    assert screen.ended() == 0
    assert "Traceback" not in screen.text


@pytest.mark.slow
def test_history_is_kept_between_sessions(terminal: Callable[..., Screen]) -> None:
    first = terminal()
    first.shows(r"^piper:1>")
    first.enter("let answer = 42", r"^piper:2>")
    first.enter(":quit", "1 statement not saved: `:save FILE`, or `:quit` again to quit")
    first.enter("answer", r"^42$")  # stays, and would ask again
    first.enter(":quit", r"(?s)1 statement not saved.*1 statement not saved")
    first.type(":quit\r")
    assert first.ended() == 0
    second = terminal()
    second.shows(r"^piper:1>")
    second.process.send("\x1b[A" * 4)
    second.shows(r"^piper:1> let answer = 42")


@pytest.mark.slow
def test_ctrl_c_stops_a_run_and_stays_in_the_session(terminal: Callable[..., Screen]) -> None:
    screen = terminal("examples/02_gpt/model.py")
    screen.shows(r"^piper:1>", 120)
    screen.type(":run 5000 inline\r")
    screen.shows(r"^step    3  loss", 120)
    screen.process.send("\x03")
    screen.shows(r"stopped before step \d+; `:run` continues")
    screen.shows(r"^piper:1>\s*$")
    screen.type(":run 1 inline\r")
    screen.shows(r"continuing after step \d+")
    screen.shows(r"trained 1 step on 1 device")
    screen.type(":quit\r")
    assert screen.ended() == 0


def block(kind: str) -> list[str]:
    page = (ROOT / "docs" / "repl.md").read_text(encoding="utf-8")
    return page.partition(f"```{kind}\n")[2].partition("\n```")[0].split("\n")


@pytest.mark.slow
def test_the_screen_of_the_documentation(terminal: Callable[..., Screen]) -> None:
    """Its lines are typed, and the screen is what the page shows."""
    screen = terminal("examples/02_gpt/model.py")
    screen.shows(r"^piper:1>", 120)
    expected, menu = block("screen"), block("menu")
    for line in expected:
        typed = PROMPT.match(line)
        if typed:
            screen.until(lambda screen: screen.lines[screen.screen.cursor.y].startswith(typed[1]))  # noqa: B023
            screen.type(typed[2].strip() + "\r")
    screen.until(lambda screen: expected[-1] in screen.lines)
    first = screen.lines.index(expected[0])
    assert screen.lines[first : first + len(expected)] == expected
    screen.type(menu[0].partition("> ")[2])
    screen.shows(re.escape(menu[1]))
