"""A session in a notebook.

`%load_ext piperlang`, then `%piper MODEL.py` opens one and `%%piper` cells apply statements and commands.
The session is the variable `piper`, and once `:run` has trained, the training is `trainer`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.render import Paint, render
from piperlang.ir.text import brief
from piperlang.progress.lines import counted
from piperlang.repl.commands import LINES, Quit
from piperlang.repl.reading import Grouped, is_command
from piperlang.repl.session import Screen, Session
from piperlang.repl.show import html

BEFORE = "piper_before"
"""The variable that holds a replaced session with unsaved statements."""
WIDTH = 110
"""Columns of a grid in a cell's output."""


class Refused(Exception):
    """Ends a cell with a diagnostic instead of a traceback."""

    def __init__(self, problem: PiperError) -> None:
        super().__init__("; ".join(f"{x.code}: {x.message}" for x in problem.diagnostics))
        self.problem = problem

    def _render_traceback_(self) -> list[str]:
        """Called by IPython to show the error."""
        return render(self.problem.diagnostics, "full", Paint(True)).split("\n")


class Magics:
    """%piper and %%piper of one shell."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.session: Session | None = None

    def piper(self, line: str, cell: str | None = None) -> None:
        """%piper [MODEL.py [SCHEDULE.piper]] opens a session, %piper :COMMAND runs a command; a %%piper cell applies
        statements and commands."""
        try:
            if line.strip() and not is_command(line):
                self._open(line)
            if is_command(line):
                self._execute(self._opened(), line.strip())
            if cell is not None:
                self._cell(cell)
            elif not line.strip():
                self._open("")
        except PiperError as problem:
            raise Refused(problem) from None

    def _open(self, line: str) -> None:
        files = shlex.split(line)
        models, scripts = [f for f in files if f.endswith(".py")], [f for f in files if f.endswith(".piper")]
        if len(models) > 1 or len(scripts) > 1 or len(models) + len(scripts) != len(files):
            raise error("P0902", f"invalid arguments `%piper {line}`", help="%piper [MODEL.py [SCHEDULE.piper]]")
        model = None
        if models:
            from piperlang.repl.model import open_model

            model = open_model(Path(models[0]).expanduser())
            print(f"traced {models[0]} {model.seconds:.1f} s ({model.nodes:,} nodes)")
        opened = Session(model, screen=Screen(width=lambda: WIDTH))
        if self.session is not None:
            self._put_aside(self.session)
        self.session = self.shell.user_ns["piper"] = opened
        if scripts:
            self._show(self.session.load(Path(scripts[0]).expanduser()))

    def _put_aside(self, before: Session) -> None:
        """Replace the session: stop its workers, and keep it if it has unsaved statements."""
        before.close()
        if before.unsaved and before.statements:
            self.shell.user_ns[BEFORE] = before
            print(
                f"the previous session has {counted(len(before.statements), 'unsaved statement')}: "
                f'it is now `{BEFORE}`; `{BEFORE}.save("FILE.piper")` saves them'
            )

    def _opened(self) -> Session:
        if self.session is None:
            self._open("")
        assert self.session is not None
        return self.session

    def _cell(self, cell: str) -> None:
        session, grouped = self._opened(), Grouped()
        for line in cell.splitlines():
            for text in grouped.take(line):
                self._execute(session, text)
        for text in grouped.rest():
            self._execute(session, text)

    def _execute(self, session: Session, text: str) -> None:
        try:
            self._show(session.execute(text))
        except Quit:
            session.close()
            print("session closed: its workers were stopped")
        if session.training is not None:
            self.shell.user_ns["trainer"] = session.training

    def _show(self, shown: Any) -> None:
        if str(shown):
            from IPython.display import display

            display(shown)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def load(shell: Any) -> None:
    magics = Magics(shell)
    shell.register_magic_function(magics.piper, "line_cell", "piper")
    plain = shell.display_formatter.formatters["text/plain"]  # for frontends without HTML
    plain.for_type_by_name("piperlang.ir.graph", "Graph", lambda graph, printer, cycle: printer.text(listed(graph)))
    formatter = shell.display_formatter.formatters["text/html"]
    formatter.for_type_by_name("piperlang.ir.graph", "Graph", drawn)
    formatter.for_type_by_name("piperlang.runtime.api", "Trainer", described)
    import atexit

    atexit.register(magics.close)


def listed(graph: Any) -> str:
    """A graph as text: the number of nodes, and the first ones."""
    lines = brief(graph).splitlines()
    more = [f"... and {len(lines) - LINES:,} more"] if len(lines) > LINES else []
    return "\n".join([counted(len(lines), "node"), *lines[:LINES], *more])


def drawn(graph: Any) -> str:
    """A graph as a drawing, or the number of nodes if it is too large to draw."""
    from piperlang.repl.commands import drawing

    return html(f"<p>{len(graph.nodes):,} nodes</p>{drawing(graph)}")


def described(trainer: Any) -> str:
    """The result of `piperlang.compile`."""
    return html(f"<p>a trainer for {len(trainer.plan.devices)} devices</p>{drawn(trainer.graph)}")
