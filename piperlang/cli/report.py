"""Writes diagnostics to the terminal, and opens the scripts of a command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

from piperlang.diagnostics import LIMIT, Diagnostic, PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.diagnostics.printable import printable
from piperlang.diagnostics.render import FOR_PROGRAMS, Paint, render
from piperlang.source import Source
from piperlang.syntax.parse import MAX_BYTES, decode, is_file, read


def paint(stream: TextIO) -> Paint:
    return Paint(colored(stream))


def colored(stream: TextIO) -> bool:
    """Whether to write colors: NO_COLOR, then FORCE_COLOR, then whether it is a terminal that supports them.

    no-color.org and force-color.org: either applies if it is not empty, whatever its value. Neither says which one
    wins; here NO_COLOR does, as in Python."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def report(diagnostics: Iterable[Diagnostic], format: str, stream: TextIO | None = None) -> None:
    """Write diagnostics to stderr, so that stdout holds results only."""
    every = list(diagnostics)
    stream = stream or sys.stderr
    if not every:
        return
    print(render(every, format, paint(stream)), file=stream)
    if format == "full":
        count = (
            "1 error"
            if len(every) == 1
            else f"{len(every)} errors"
            if len(every) <= LIMIT
            else f"more than {LIMIT} errors"
        )
        print(f"\n{count}; for details, run `piperc explain {every[0].code}`", file=stream)


def result(diagnostics: Iterable[Diagnostic], format: str) -> None:
    """Write diagnostics where they are the result of a command: for programs to stdout, even if there are none."""
    every = list(diagnostics)
    if format not in FOR_PROGRAMS:
        report(every, format)
    elif text := render(every, format):
        print(text)


def exit_code(diagnostics: Sequence[Diagnostic]) -> int:
    """0 without diagnostics, 2 where all of them are about the command line, 1 otherwise."""
    return 0 if not diagnostics else 2 if all(d.code.startswith("P09") for d in diagnostics) else 1


def say(text: str) -> None:
    """Print the output of a script to stderr, without terminal control characters."""
    print(printable(text, keep="\n\t"), file=sys.stderr)


@cache
def _read_once(stream: TextIO) -> Source:
    """A command may open its script several times, but standard input can be read only once."""
    return decode(stream.buffer.read(MAX_BYTES + 1), "<stdin>")


def open_script(name: str) -> tuple[Source, Path | None]:
    """The script called `name`; `-` is standard input."""
    if name == "-":
        return _read_once(sys.stdin), None
    if name.endswith(".py"):
        raise error("P0902", f"{name} is a Python file", help="pass a schedule: a .piper file")
    path = Path(name)
    return read(path, name), path


def scripts(names: Iterable[str]) -> tuple[list[str], list[Diagnostic]]:
    """The scripts to check: files as given, and every .piper file of folders; and the problems with
    folders."""
    found: list[str] = []
    problems: list[Diagnostic] = []
    for name in names:
        if not is_file(Path(name), folder=True):
            found.append(name)
            continue
        inside, unread = _inside(name)
        found += inside
        problems += [unreadable(Path(p.filename), p).diagnostics[0] for p in unread]
        if not inside and not unread:
            problems.append(
                Diagnostic(
                    "P0901",
                    f"no .piper files in {name}",
                    helps=("folders are searched for *.piper; hidden folders are skipped",),
                )
            )
    return list(dict.fromkeys(found)), problems


def _inside(folder: str) -> tuple[list[str], list[OSError]]:
    unread: list[OSError] = []
    found = []
    for where, folders, files in os.walk(folder, onerror=unread.append):
        folders[:] = sorted(name for name in folders if not _left_out(where, name))
        # By os.path, not Path: a folder called `-` keeps its `./`.
        found += [
            os.path.join(where, name).removeprefix("./")
            for name in sorted(files)
            if name.endswith(".piper") and not name.startswith(".")
        ]
    return found, unread


def _left_out(where: str, name: str) -> bool:
    """Folders that are skipped: hidden ones, virtual environments, npm packages."""
    return name.startswith(".") or name == "node_modules" or os.path.exists(os.path.join(where, name, "pyvenv.cfg"))


def model_first(command: str, model: str, script: str) -> PiperError:
    short = f"piperc {model} {script}" if command == "train" else f"piperc {command} {model} {script}"
    return error("P0902", "the model must come before the schedule", help=short)


def add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        dest="parameters",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="override a `param` of the script",
    )
    add_import_path(parser)


def add_import_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import-path",
        metavar="DIR",
        action="append",
        default=[],
        help="a folder that the script may import from, besides its own; may be repeated",
    )


SOURCES = {".py": "a Python file", ".piper": "a schedule"}
"""No command has these for output. Models and scripts import others, so each may be one that the command reads."""
READ = ("model", "script", "other", "scripts", "machine", "profile")
"""Options and operands that name files that a command reads."""


def check_output(name: str, flag: str, options: argparse.Namespace, kinds: Sequence[str] = ()) -> Path:
    """Refuse a file that cannot be written before what goes into it is made, which may take minutes. `kinds`: the
    endings that it may have, in either case."""
    path = Path(name)
    if not name:
        raise error("P0902", f"the name of `{flag}` is empty", help=f"name a file: `{flag} FILE`")
    if kinds and path.suffix.lower() not in kinds:
        raise error("P0902", f"`{flag} {path}`: unknown kind of file", help=f"end it with {', '.join(kinds)}")
    for problem, help in ((_unwritable(path), "check the path"), (_precious(path, options), "name another file")):
        if problem is not None:
            raise error("P0902", f"`{flag} {path}` cannot be written", notes=[problem], help=help)
    return path


def _unwritable(path: Path) -> str | None:
    folder = path.absolute().parent
    if is_file(path, folder=True):
        return "it is a folder"
    if not is_file(folder, folder=True):
        return f"there is no folder {folder}"
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        return "permission denied"
    return None


def _precious(path: Path, options: argparse.Namespace) -> str | None:
    """Why an existing file must not be overwritten."""
    if not os.path.exists(path):
        return None
    given = [vars(options).get(name) for name in READ]
    files = [file for one in given for file in (one if isinstance(one, list) else [one]) if file is not None]
    if any(os.path.exists(file) and os.path.samefile(file, path) for file in files):
        return "this command reads it"
    kind = SOURCES.get(Path(os.path.realpath(path)).suffix.lower())
    return f"it is {kind}, which would be lost" if kind is not None else None


def write_output(path: Path, text: str, flag: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(
            "P0902",
            f"`{flag} {path}` cannot be written",
            notes=[(problem.strerror or str(problem)).lower()],
            help="check the path",
        ) from None


def parameters(options: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in options.parameters:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise error("P0902", f"invalid parameter `-p {text}`", help="write `-p name=value`")
        if name in found:
            raise error("P0902", f"parameter `{name}` is given twice", help="pass it once")
        found[name] = value
    return found
