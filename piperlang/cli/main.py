"""`piperc`: one command, a file per subcommand. Exit codes: 0 fine, 1 diagnostics, 2 usage, 70 our bug, 130 interrupted."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from piperlang import __version__
from piperlang.cli.report import report
from piperlang.diagnostics import PiperError, did_you_mean, error
from piperlang.diagnostics.render import FORMATS

FINE, DIAGNOSTICS, USAGE, BUG, INTERRUPTED = 0, 1, 2, 70, 130
COMMANDS = {
    "train": "train a model under a schedule; `piperc MODEL.py SCHEDULE.piper` is short for it",
    "check": "check scripts, alone or with a model",
    "fmt": "format scripts",
    "graph": "print the training graph of a model",
    "plan": "make, check and save the plan of a step",
    "run": "train by a saved plan",
    "fuzz": "compare random schedules with the plain model",
    "orders": "show the order of work per device",
    "repl": "apply directives one at a time, interactively",
    "explain": "explain a diagnostic code",
}
"""Each is a module of this folder with `arguments` and `run`, imported when it is asked for: starting must be quick."""

FLAGS = ("--format", "--json", "--csv", "--check", "--numerics", "--after", "--svg", "--seed", "--steps", "--out", "--executor", "--address", "--devices", "--timeout", "--mesh", "--count", "--backend", "--compile", "--no-compile", "--verify", "--no-verify", "--masters", "--validate-every", "--diff", "--help", "--version", "-p")


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are diagnostics like all others."""

    def error(self, message: str) -> NoReturn:
        choices = re.search(r"invalid choice: '([^']*)'", message)
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        help = f"`{self.prog} --help` lists what there is"
        if choices:
            legal = message.partition("(choose from ")[2].rstrip(")").replace("'", "")
            message = f"`{choices[1]}` is not one of {legal}"
            help = did_you_mean(choices[1], [*COMMANDS, *FORMATS]) or help
        elif unknown:
            message = f"`{unknown[1]}` is not understood"
            help = did_you_mean(unknown[1].partition("=")[0], FLAGS) or help
        raise error("P0902", message, help=help)


def parser(wanted: str | None) -> argparse.ArgumentParser:
    """The command line, in full for the command that is wanted."""
    top = _Parser(prog="piperc", description="Schedules for distributed training, as a language.")
    top.add_argument("--version", action="version", version=f"piperc {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name != wanted:
            continue
        module = import_module(f"piperlang.cli.{name}")
        sub.description = module.__doc__
        module.arguments(sub)
        sub.add_argument("--format", choices=FORMATS, default="full", help="how diagnostics are written (default: full)")
        sub.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a narrow terminal is no reason to fail
    format = _wanted_format(words)
    try:
        if words and words[0].endswith(".py"):
            words = ["train", *words]
        wanted = next((word for word in words if word in COMMANDS), None)
        options = parser(wanted).parse_args(words)
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except PiperError as problem:
        report(problem.diagnostics, format)
        usage = all(d.code.startswith("P09") for d in problem.diagnostics)
        return USAGE if usage else DIAGNOSTICS
    except SystemExit as ended:  # --help and --version
        return ended.code if isinstance(ended.code, int) else DIAGNOSTICS if ended.code else FINE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone: say nothing more, and keep Python from trying at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            return _bug()
        with contextlib.suppress(OSError):
            print(f"piperc: cannot write: {problem.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DIAGNOSTICS
    except Exception:
        return _bug()


def _bug() -> int:
    """Say that the exception being handled is our fault."""
    traceback.print_exc()
    print("\nThis is a bug in piperc, not in your script. Please report it with the lines above.", file=sys.stderr)
    return BUG


def _wanted_format(words: list[str]) -> str:
    """The format asked for, even where the command line does not parse."""
    for i, word in enumerate(words):
        value = word.partition("=")[2] if word.startswith("--format=") else words[i + 1] if word == "--format" and i + 1 < len(words) else ""
        if value in FORMATS:
            return value
    return "full"


if __name__ == "__main__":
    sys.exit(main())
