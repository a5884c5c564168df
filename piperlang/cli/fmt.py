"""Format scripts in the canonical layout. Comments are kept; the meaning does not change.

For a folder, all scripts in it are formatted.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from contextlib import suppress
from pathlib import Path

from piperlang.cli.report import exit_code, open_script, report, scripts
from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.printable import printable
from piperlang.syntax.format import format_source


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scripts",
        nargs="+",
        metavar="FILE.piper",
        help="files or folders; `-` formats standard input to standard output",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    parser.add_argument("--diff", action="store_true", help="write nothing; print a diff")


def run(options: argparse.Namespace) -> int:
    names, problems = scripts(options.scripts)
    changed = 0
    for name in names:
        try:
            changed += _format(name, options)
        except PiperError as problem:
            problems.extend(problem.diagnostics)
    report(problems, options.format)
    return exit_code(problems) or int(changed > 0 and (options.check or options.diff))


def _format(name: str, options: argparse.Namespace) -> bool:
    source, path = open_script(name)
    text = format_source(source)
    # The bytes on disk: line endings and a byte order mark are part of the layout too.
    before = path.read_bytes() if path is not None else source.text.encode()
    same = text.encode() == before
    if options.diff:
        lines = difflib.unified_diff(source.text.splitlines(True), text.splitlines(True), name, name)
        sys.stdout.writelines(lines)
    elif options.check:
        if not same:
            print(f"{printable(name)} would change")
    elif path is None:
        sys.stdout.write(text)
        return False
    elif not same:
        _replace(path, text)
        print(f"{printable(name)} formatted")
    return not same


def _replace(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that a full disk cannot destroy the script."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.piperc")
    try:
        beside.write_bytes(text.encode())
        beside.chmod(path.stat().st_mode)
        beside.replace(path)
    except PermissionError as problem:
        raise error(
            "P0901",
            f"cannot write {path.name}",
            notes=[(problem.strerror or "").lower()],
            help="check the permissions of its folder",
        ) from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
