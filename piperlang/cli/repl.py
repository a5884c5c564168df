"""Apply directives one at a time: piperc repl [MODEL.py [SCHEDULE.piper]].

Each statement is applied at once. The answer shows what it matched, which communication it added, what is missing, and
how the estimates changed. `:help` lists the commands. Without a model, the session shows orders and placements only.
Without a terminal it reads standard input: answers go to standard output, diagnostics to standard error, and the exit
code is 1 if a statement was rejected.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from piperlang.cli.parsing import SEED
from piperlang.cli.progress import display_on
from piperlang.cli.report import add_parameters, paint, parameters
from piperlang.diagnostics import Diagnostic, error
from piperlang.diagnostics.render import render
from piperlang.interrupts import unwatched
from piperlang.progress import displayed_by, phase
from piperlang.repl.session import Screen, Session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="MODEL.py is traced once; the statements of SCHEDULE.piper are applied first",
    )
    parser.add_argument("--strict", action="store_true", help="without a terminal: stop at the first error")
    parser.add_argument("--seed", type=SEED, default=0, help="random seed of weights, data and dropout")
    add_parameters(parser)


def run(options: argparse.Namespace) -> int:
    model, script = _files(options.files)
    session = _opened(options, model)

    def tell(problems: Iterable[Diagnostic]) -> None:
        print(render(problems, options.format, paint(sys.stderr)), file=sys.stderr)

    lines = sys.stdin or io.StringIO()  # closed by the parent process: nothing to read
    interactive = lines.isatty() and sys.stdout is not None and sys.stdout.isatty()
    try:
        if script is not None:
            session.load(Path(script))
        unknown = sorted(
            session.setting.overrides.keys()
            - (session.state.interpreter.params.keys() if session.state.interpreter else set())
        )
        if unknown and script is not None:
            raise error(
                "P0903",
                f"the script has no parameter `{unknown[0]}`",
                help="remove it, or declare it: `param name = value`",
            )
        unwatched()  # Ctrl-C ends a statement, or a step of `:run`, not the session
        if not interactive:
            from piperlang.repl.piped import piped

            return piped(session, lines, options.strict, tell)
        from piperlang.repl.terminal import Terminal

        return Terminal(session, model, script, tell).run()
    finally:
        session.close()


def _files(files: list[str]) -> tuple[str | None, str | None]:
    models, scripts = [f for f in files if f.endswith(".py")], [f for f in files if f.endswith(".piper")]
    other = next((f for f in files if f not in models and f not in scripts), None)
    if other is not None:
        raise error(
            "P0902", f"{other} is neither a .py nor a .piper file", help="piperc repl [MODEL.py [SCHEDULE.piper]]"
        )
    if len(models) > 1 or len(scripts) > 1:
        raise error(
            "P0902",
            f"a session takes one model and one script, not {len(models)} and {len(scripts)}",
            help="`:load FILE` adds a script",
        )
    if models and files[0] != models[0]:
        raise error("P0902", "the model must come first", help=f"piperc repl {models[0]} {scripts[0]}")
    return models[0] if models else None, scripts[0] if scripts else None


def _opened(options: argparse.Namespace, model: str | None) -> Session:
    screen = Screen(paint=paint(sys.stdout), say=lambda line: print(line, flush=True))
    if model is None:
        return Session(None, parameters(options), screen)
    from piperlang.repl.model import open_model

    with _telling(options.format):
        opened = open_model(Path(model), options.seed)
        with phase("cutting the model"):
            return Session(opened, parameters(options), screen)


@contextmanager
def _telling(format: str) -> Iterator[None]:
    """Opening reports progress as training does, a line per phase and at least one every two seconds, but on standard
    error: the session cannot answer before it is done."""
    if format == "json" and not sys.stderr.isatty():
        yield
        return
    display = display_on(sys.stderr, keeps_phases=True)
    try:
        with displayed_by(display):
            yield
    finally:
        display.close()
