"""Diagnostics to the terminal, scripts from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from piperlang.diagnostics import LIMIT, Diagnostic, error
from piperlang.diagnostics.render import Paint, printable, render
from piperlang.source import Source
from piperlang.syntax.parse import MAX_BYTES, decode, read


def paint(stream: TextIO) -> Paint:
    return Paint(stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def report(diagnostics: Iterable[Diagnostic], format: str, stream: TextIO | None = None) -> None:
    """Write diagnostics to stderr, so that stdout holds results only."""
    every = list(diagnostics)
    stream = stream or sys.stderr
    if not every:
        return
    print(render(every, format, paint(stream)), file=stream)
    if format == "full":
        count = "1 error" if len(every) == 1 else f"{len(every)} errors" if len(every) <= LIMIT else f"more than {LIMIT} errors"
        print(f"\n{count}; `piperc explain {every[0].code}` tells more", file=stream)


def say(text: str) -> None:
    """What a script prints: to stderr, and without characters that would steer the terminal."""
    print(printable(text, keep="\n\t"), file=sys.stderr)


def open_script(name: str) -> tuple[Source, Path | None]:
    """The script called `name`; `-` is standard input."""
    if name == "-":
        return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>"), None
    if name.endswith(".py"):
        raise error("P0902", f"{name} is a Python file", help="give the schedule: a .piper file")
    path = Path(name)
    return read(path, name), path


def add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", dest="parameters", metavar="NAME=VALUE", action="append", default=[], help="override a `param` of the script")


def parameters(options: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in options.parameters:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise error("P0902", f"`-p {text}` is not understood", help="write `-p name=value`")
        if name in found:
            raise error("P0902", f"parameter `{name}` is given twice", help="give it once")
        found[name] = value
    return found
