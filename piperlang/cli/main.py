"""`piperc`: one command, a file per subcommand.

Exit codes: 0 success, 1 diagnostics, 2 usage error, 70 internal error, 130 interrupted, 143 terminated (SIGTERM), 129
hung up (SIGHUP).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

from piperlang import interrupts
from piperlang.cli import needs
from piperlang.cli.parsing import Parser
from piperlang.cli.progress import progress_of
from piperlang.cli.report import exit_code, model_first, parameters, report
from piperlang.diagnostics import PiperError, did_you_mean, error
from piperlang.diagnostics.render import FORMATS
from piperlang.elaborate.modules import IMPORT_PATH
from piperlang.syntax.parse import is_file
from piperlang.version import __version__

FINE, DIAGNOSTICS, USAGE, BUG, INTERRUPTED = 0, 1, 2, 70, interrupts.INTERRUPTED
COMMANDS = {
    "train": "train a model under a schedule; short form: `piperc MODEL.py SCHEDULE.piper`",
    "check": "check scripts, alone or with a model",
    "fmt": "format scripts",
    "graph": "print the training graph of a model",
    "plan": "compile, check and save the plan of a step",
    "run": "train with a saved plan",
    "ckpt": "list, verify and show checkpoints",
    "export": "write the weights of a run as plain safetensors",
    "import": "turn a state dict into files that training starts from",
    "fuzz": "compare random schedules with plain PyTorch",
    "orders": "show the order of passes per device",
    "simulate": "simulate a step on a described machine, or with measured times",
    "view": "draw a simulated step as a page, a picture or a trace",
    "compare": "compare schedules of a model in simulated steps",
    "profile": "measure what each instruction takes on workers",
    "repl": "apply directives one at a time, interactively",
    "explain": "explain a diagnostic code",
    "init": "write a starter model and schedule",
    "doctor": "check what this machine has for training",
    "completion": "print a shell completion script",
    "lsp": "run the language server",
}
"""Each is a module of this folder with `arguments` and `run`, imported on use to keep the start fast."""


def command_parser(name: str) -> Parser:
    module = import_module(f"piperlang.cli.{'import_weights' if name == 'import' else name}")
    parser = Parser(prog=f"piperc {name}", description=module.__doc__)
    module.arguments(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="full",
        metavar="FORMAT",
        help=f"output format of diagnostics: {', '.join(FORMATS)} (default: full)",
    )
    parser.usage = f"piperc {name} [options] {parser.operands()}".rstrip()
    parser.set_defaults(command=name, run=module.run)
    return parser


def top_parser() -> Parser:
    """The top-level parser; it knows the commands by name only."""
    top = Parser(
        prog="piperc",
        usage="piperc MODEL.py SCHEDULE.piper [options]\npiperc COMMAND [options] ...",
        description="A language for distributed training schedules.",
        epilog="`piperc COMMAND --help` lists the options of a command. `--format` is also allowed before the command.",
    )
    top.add_argument(
        "--version", "-V", action="version", version=f"piperc {__version__}", help="print the version and exit"
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return top


def read(words: list[str]) -> tuple[Parser, list[str]]:
    """The parser for a command line, and the words it reads. `piperc MODEL.py` is short for `piperc train MODEL.py`."""
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
    """`piperc --format json check S` is `piperc check --format json S`: a general option may precede the command."""
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
            "missing command",
            help=f"`piperc check {first}` checks the script, `piperc MODEL.py {first}` trains a model with it",
        )
    if first and is_file(Path(first), folder=True):
        return error("P0902", f"`{first}` is a folder", help=f"`piperc check {first}` checks all scripts in it")
    near = f"did you mean `--{first}`?" if f"--{first}" in top_parser().flags else did_you_mean(first, COMMANDS)
    return error("P0902", f"unknown command `{first}`", help=near or "`piperc --help` lists the commands")


def _option_first(flag: str, words: list[str]) -> PiperError:
    """An option in place of a command."""
    have = elsewhere(flag)
    meant = next(
        ("train" if word.endswith(".py") else word for word in words if word in COMMANDS or word.endswith(".py")), None
    )
    if have:
        where = f"piperc {meant} {flag} ..." if meant in have else f"piperc {have[0]} {flag} ..."
        return error("P0902", f"option `{flag}` is before the command", help=f"put options after the command: {where}")
    near = did_you_mean(flag, [*top_parser().flags, "--format"]) if len(flag) > 3 else None
    return error("P0902", f"unknown option `{flag}`", help=near or "`piperc --help` lists the commands and options")


def elsewhere(flag: str) -> list[str]:
    """The commands that have a flag."""
    return [name for name in COMMANDS if flag in command_parser(name).flags]


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding of the stream may lack characters
        elif stream is None:  # closed by the parent process
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
        # The reader of our output is gone: write nothing more, and keep Python from writing at exit.
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
        return USAGE  # a shell script that lost its arguments must not look successful
    parser, rest = read(words)
    _refuse_models(parser, rest)
    options = parser.read(rest, elsewhere)
    model, script = getattr(options, "model", None), getattr(options, "script", None)
    if model and script and model.endswith(".piper") and script.endswith(".py"):
        raise model_first(options.command, script, model)
    needs.check(options)
    if hasattr(options, "parameters"):
        parameters(options)  # those that are not understood are refused before anything is loaded
    with progress_of(options), _import_path(getattr(options, "import_path", ())):
        return int(options.run(options))


@contextlib.contextmanager
def _import_path(folders: Sequence[str]) -> Iterator[None]:
    """For all that evaluates scripts in this process."""
    before = os.environ.get(IMPORT_PATH)
    joined = os.pathsep.join([*folders, *([before] if before else [])])
    if not folders:
        yield
        return
    os.environ[IMPORT_PATH] = joined
    try:
        yield
    finally:
        os.environ.pop(IMPORT_PATH)
        if before is not None:
            os.environ[IMPORT_PATH] = before


def _refuse_models(parser: Parser, words: list[str]) -> None:
    """A model passed to a command that takes only schedules or plans."""
    kinds = set(re.findall(r"\.(py|piper|plan)\b", parser.operands()))
    before = ("", *words)
    model = next(
        (
            word
            for word, flag in zip(words, before, strict=False)
            if word.endswith(".py") and "=" not in word and flag != "--model"
        ),
        None,
    )
    if model is not None and kinds and "py" not in kinds:
        raise error("P0902", f"`{parser.prog}` takes no model", help=f"remove {model}: {parser.usage}")


def _bug() -> int:
    """Report the current exception as a bug of piperc."""
    traceback.print_exc()
    print("\nThis is a bug in piperc, not in your script. Please report it with the lines above.", file=sys.stderr)
    return BUG


def _wanted_format(words: list[str]) -> str:
    """The requested format, even if the command line does not parse."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        value = following if word == "--format" else word.removeprefix("--format=")
        if value in FORMATS and word.startswith("--format"):
            return value
    return "full"
