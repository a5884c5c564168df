"""`piperc`: one command, a file per subcommand.

Exit codes: 0 fine, 1 diagnostics, 2 usage, 70 our bug, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

from piperlang import __version__, interrupts
from piperlang.cli import needs
from piperlang.cli.parsing import Parser
from piperlang.cli.progress import progress_of
from piperlang.cli.report import exit_code, model_first, parameters, report
from piperlang.diagnostics import PiperError, did_you_mean, error
from piperlang.diagnostics.render import FORMATS
from piperlang.syntax.parse import is_file

FINE, DIAGNOSTICS, USAGE, BUG, INTERRUPTED = 0, 1, 2, 70, interrupts.INTERRUPTED
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
    "init": "write a model and a schedule to begin with",
    "doctor": "tell what this machine has and what is missing",
    "completion": "print the completion script of a shell",
    "lsp": "serve an editor",
}
"""Each is a module of this folder with `arguments` and `run`, imported when it is asked for: starting must be quick."""


def command_parser(name: str) -> Parser:
    module = import_module(f"piperlang.cli.{name}")
    parser = Parser(prog=f"piperc {name}", description=module.__doc__)
    module.arguments(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="full",
        metavar="FORMAT",
        help=f"how diagnostics are written: {', '.join(FORMATS)} (default: full)",
    )
    parser.usage = f"piperc {name} [options] {parser.operands()}".rstrip()
    parser.set_defaults(command=name, run=module.run)
    return parser


def top_parser() -> Parser:
    """The parser of what comes before a command; it knows the commands by name only."""
    top = Parser(
        prog="piperc",
        usage="piperc MODEL.py SCHEDULE.piper [options]\npiperc COMMAND [options] ...",
        description="Schedules for distributed training, as a language.",
        epilog="`piperc COMMAND --help` has the options of one. `--format` may also stand before the command.",
    )
    top.add_argument(
        "--version", "-V", action="version", version=f"piperc {__version__}", help="print the version and exit"
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return top


def read(words: list[str]) -> tuple[Parser, list[str]]:
    """Which parser reads a command line, and what of it. `piperc MODEL.py` is short for `piperc train MODEL.py`."""
    words = _general_last(words)
    first = words[0]
    if first in ("-h", "--help", "-V", "--version"):
        return top_parser(), [first]
    if first == "help" and len(words) == 1:
        return top_parser(), ["--help"]
    if first == "help":  # as `git help` and `cargo help`
        return read([words[1], "--help"])
    if first.endswith(".py"):
        return command_parser("train"), words
    if first in COMMANDS:
        return command_parser(first), words[1:]
    raise _no_command(words)


def _general_last(words: list[str]) -> list[str]:
    """`piperc --format json check S` is `piperc check --format json S`: what every command has may stand before it."""
    general: list[str] = []
    rest = list(words)
    while rest and rest[0].partition("=")[0] == "--format":
        taken = 1 if "=" in rest[0] else 2
        general, rest = [*general, *rest[:taken]], rest[taken:]
    if general and not rest:
        raise error(
            "P0902",
            f"`{' '.join(general)}` without a command",
            help="piperc COMMAND [options] ...; `piperc --help` lists the commands",
        )
    return [rest[0], *general, *rest[1:]] if rest[0] in COMMANDS else [*rest, *general] if general else rest


def _no_command(words: list[str]) -> PiperError:
    first = words[0]
    flag = first.partition("=")[0]
    if first.startswith("-") and first != "-":
        return _option_first(flag, words)
    if first.endswith(".piper"):
        model = next((word for word in words if word.endswith(".py")), None)
        if model is not None:
            return model_first("train", model, first)
        return error(
            "P0902",
            "a schedule alone does not say what to do",
            help=f"`piperc check {first}` checks it, `piperc MODEL.py {first}` trains a model under it",
        )
    if first and is_file(Path(first), folder=True):
        return error("P0902", f"`{first}` is a folder", help=f"`piperc check {first}` checks all scripts in it")
    near = f"did you mean `--{first}`?" if f"--{first}" in top_parser().flags else did_you_mean(first, COMMANDS)
    return error("P0902", f"`{first}` is not a command", help=near or "`piperc --help` lists the commands")


def _option_first(flag: str, words: list[str]) -> PiperError:
    """An option where a command is due."""
    have = elsewhere(flag)
    meant = next(
        ("train" if word.endswith(".py") else word for word in words if word in COMMANDS or word.endswith(".py")), None
    )
    if have:
        where = f"piperc {meant} {flag} ..." if meant in have else f"piperc {have[0]} {flag} ..."
        return error("P0902", f"`{flag}` stands before the command", help=f"options come after it: {where}")
    near = did_you_mean(flag, [*top_parser().flags, "--format"]) if len(flag) > 3 else None
    return error("P0902", f"`{flag}` is not understood", help=near or "`piperc --help` lists what there is")


def elsewhere(flag: str) -> list[str]:
    """The commands that have a flag."""
    return [name for name in COMMANDS if flag in command_parser(name).flags]


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a narrow terminal is no reason to fail
        elif stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    format = _wanted_format(words)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except BaseException as problem:
        if interrupts.arrived():  # and became this on its way
            return _interrupted()
        return _told(problem, format)


def _told(problem: BaseException, format: str) -> int:
    """Say why a command ended; its exit code."""
    try:
        raise problem
    except PiperError as found:
        report(found.diagnostics, format)
        return exit_code(found.diagnostics)
    except SystemExit as ended:  # --help and --version
        return ended.code if isinstance(ended.code, int) else DIAGNOSTICS if ended.code else FINE
    except BrokenPipeError:
        # The reader of our output has gone: say nothing more, and keep Python from trying at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except OSError as found:
        if found.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            return _bug()
        with contextlib.suppress(OSError):
            print(f"piperc: cannot write: {found.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DIAGNOSTICS
    except BaseException:
        return _bug()


def _interrupted() -> int:
    if not interrupts.arrived():  # the entry point says so otherwise, once
        interrupts.say()
    return INTERRUPTED


def _run(words: list[str]) -> int:
    if not words:
        top_parser().print_help()
        return USAGE  # a script that has lost its arguments must not look like one that worked
    parser, rest = read(words)
    _refuse_models(parser, rest)
    options = parser.read(rest, elsewhere)
    model, script = getattr(options, "model", None), getattr(options, "script", None)
    if model and script and model.endswith(".piper") and script.endswith(".py"):
        raise model_first(options.command, script, model)
    needs.check(options)
    if hasattr(options, "parameters"):
        parameters(options)  # those that are not understood are refused before anything is loaded
    with progress_of(options):
        return int(options.run(options))


def _refuse_models(parser: Parser, words: list[str]) -> None:
    """A model given to a command that reads schedules or plans alone."""
    kinds = set(re.findall(r"\.(py|piper|plan)\b", parser.operands()))
    model = next((word for word in words if word.endswith(".py") and "=" not in word), None)
    if model is not None and kinds and "py" not in kinds:
        raise error("P0902", f"`{parser.prog}` takes no model", help=f"leave {model} out: {parser.usage}")


def _bug() -> int:
    """Say that the exception being handled is our fault."""
    traceback.print_exc()
    print("\nThis is a bug in piperc, not in your script. Please report it with the lines above.", file=sys.stderr)
    return BUG


def _wanted_format(words: list[str]) -> str:
    """The format asked for, even where the command line does not parse."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        value = following if word == "--format" else word.removeprefix("--format=")
        if value in FORMATS and word.startswith("--format"):
            return value
    return "full"


if __name__ == "__main__":
    sys.exit(main())
