"""A session: the statements accepted so far, and those that were undone. Everything else is derived from them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from piperlang.core.selector import Selector
from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.printable import printable
from piperlang.diagnostics.render import Paint
from piperlang.elaborate.resolved import resolved
from piperlang.elaborate.values import Value, brief
from piperlang.ir.graph import Graph
from piperlang.progress.lines import counted
from piperlang.repl.answer import answer
from piperlang.repl.reading import statements
from piperlang.repl.show import Row, Shown
from piperlang.repl.state import NAME, Estimate, SessionSettings, State, refusals
from piperlang.simulate.unit import UnitCosts
from piperlang.source import Source
from piperlang.syntax import tree
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import is_file, parse, read

if TYPE_CHECKING:
    from piperlang.repl.model import OpenModel
    from piperlang.repl.training import SessionTraining
    from piperlang.runtime.driver.cluster import Cluster

KEPT = 40
"""Number of cached states: each has a graph of its own, which is large for a large model."""
FILE = f"{NAME}.piper"
"""The assumed file of the statements until they are saved: imports are relative to it."""


def _columns() -> int:
    return shutil.get_terminal_size((140, 24)).columns


@dataclass
class Screen:
    """The output of answers: its width, whether it has colors, and the sink for lines while a command runs."""

    width: Callable[[], int] = _columns
    paint: Paint = field(default_factory=Paint)
    say: Callable[[str], None] = print


class SessionCore:
    def __init__(
        self, model: OpenModel | None = None, overrides: Mapping[str, str] | None = None, screen: Screen | None = None
    ) -> None:
        self.model, self.screen = model, screen or Screen()
        self.setting = SessionSettings(model.program if model else None, Path(FILE), overrides=overrides or {})
        self.statements: tuple[str, ...] = ()
        self.undone: tuple[str, ...] = ()
        """Undone statements for `:redo`, the next one first."""
        self.saved: tuple[str, ...] = ()
        self.last_code: str | None = None
        """Code of the last diagnostic, for `:explain`."""
        self.training: SessionTraining | None = None
        self.workers: Cluster | None = None
        """Started by the first `:run` and kept for later ones."""
        self._states: dict[tuple[str, ...], State] = {}
        self._cutting: threading.Thread | None = None
        _ = self.state.estimate  # cut the model now, not at the first directive

    # ------------------------------------------------------------------------------------------------------- states

    @property
    def state(self) -> State:
        return self.at(len(self.statements))

    @property
    def graph(self) -> Graph:
        """The graph of the model under the statements so far."""
        if self.model is None:
            raise needs_model("a graph")
        return self.state.graph

    def at(self, count: int) -> State:
        """The state after the first `count` statements."""
        wanted = self.statements[:count]
        known = self._states.pop(wanted, None)
        if known is None:
            prefix = next((self._states[wanted[:n]] for n in range(count, -1, -1) if wanted[:n] in self._states), None)
            known = State(self.setting, wanted, prefix)
        return self._remember(known)

    def _remember(self, state: State) -> State:
        self._states[state.statements] = state
        while len(self._states) > KEPT:
            del self._states[next(iter(self._states))]
        return state

    def _estimate(self) -> Estimate | None:
        """The latest estimate; None while chunks are not placed."""
        for count in range(len(self.statements), -1, -1):
            state = self._states.get(self.statements[:count])
            if state is None or state.estimate is not None:
                return state.estimate if state else None
        return None

    # --------------------------------------------------------------------------------------------------- statements

    def cut_ahead(self) -> None:
        """Call before waiting for the next input: chunks that a `tag` created are traced while the user types,
        not when the input is executed."""
        if not self.state.settled:
            self._cutting = threading.Thread(target=self.state.cut)
            self._cutting.start()

    def apply(self, text: str) -> Shown:
        """Statements, all of them or none."""
        asked = self._asked(text)
        if asked is not None:
            return asked
        return self._take(tuple(statements(Source(NAME, text))), text)

    def _take(self, new: tuple[str, ...], text: str) -> Shown:
        if not new:
            return Shown()
        before, known = self.state, self._estimate()
        after = State(self.setting, self.statements + new, before)
        problems = refusals(before, after)
        if problems:
            call = self._called(text) if any(x.code == "P0111" for x in problems) else None
            if call is None:
                raise PiperError(*problems)
            return self._shown(before.value(call))
        self.statements, self.undone = after.statements, ()
        self._remember(after)
        found = answer(before, after, known, self.screen.width(), self.screen.paint)
        said = tuple(Row("print", line) for text in after.said[len(before.said) :] for line in text.split("\n"))
        return replace(found, rows=said + found.rows)

    def _asked(self, text: str) -> Shown | None:
        """An expression that is not a call is not a statement: show its value."""
        expression = expression_of(text)
        return (
            self._shown(self.state.value(expression))
            if expression is not None and not isinstance(expression, tree.CallOf)
            else None
        )

    def _called(self, text: str) -> tree.CallOf | None:
        expression = expression_of(text)
        return expression if isinstance(expression, tree.CallOf) else None

    def _shown(self, value: Value) -> Shown:
        if (
            isinstance(value, Selector)
            and self.model is not None
            and self.state.settled
            and not self.state.trouble
            and not value.next_keys()
        ):
            return Shown(block=f"{value}: {counted(sum(1 for _ in self.graph.select(value)), 'node')}")
        return Shown(block=printable(brief(value), keep="\n\t"))

    def undo(self, count: int = 1) -> tuple[str, ...]:
        """The undone statements, the last one first."""
        gone = self.statements[len(self.statements) - count :]
        self.statements = self.statements[: len(self.statements) - count]
        self.undone = gone + self.undone
        return tuple(reversed(gone))

    def redo(self, count: int = 1) -> tuple[str, ...]:
        back, self.undone = self.undone[:count], self.undone[count:]
        self.statements += back
        return back

    def set_costs(self, costs: UnitCosts) -> None:
        self.setting = replace(self.setting, costs=costs)
        self._states.clear()

    # -------------------------------------------------------------------------------------------------------- files

    def load(self, path: Path) -> Shown:
        """Append the statements of a script to those of the session."""
        source = read(path, str(path))
        script, problems = parse(source)
        if problems:
            raise PiperError(*problems)
        new = tuple(statements(source))
        if self.statements:
            return self._take(_undocumented(new) if script.doc is not None else new, source.text)
        elsewhere = self.setting
        self.setting = replace(self.setting, path=path)  # it may import files relative to itself
        self._states.clear()
        try:
            found = self._take(new, source.text)
        except PiperError:
            named = State(replace(self.setting, name=str(path)), new)  # its lines are those of the file
            refused = refusals(self.state, named)
            self.setting = elsewhere
            self._states.clear()
            raise PiperError(*refused) from None
        self.saved = self.statements
        return found

    def script(self) -> str:
        """The statements as a script in the canonical layout."""
        return format_source(Source(NAME, "".join(f"{text}\n" for text in self.statements)))

    def save(self, path: Path | str, overwrite: bool = False) -> str:
        path = Path(path)
        if is_file(path) and not overwrite:
            raise error("P0902", f"{path} exists", help=f"`:save! {path}` overwrites it")
        text = self.script()
        self._check_saved(path, text)
        write(path, text)
        self.saved = self.statements
        return text

    def _check_saved(self, path: Path, text: str) -> None:
        """The saved script must have the same meaning at its location: imports are relative to the file."""
        there = State(replace(self.setting, path=path), (text.rstrip("\n"),), self.state)
        if there.problems:
            raise PiperError(*there.problems)
        assert resolved(there.directives) == resolved(self.state.directives), (
            "the saved script differs from the session"
        )

    def __repr__(self) -> str:
        model = f"{self.model.file.path}, " if self.model is not None else ""
        return f"<session: {model}{counted(len(self.statements), 'statement')}{', not saved' if self.unsaved else ''}>"

    @property
    def unsaved(self) -> bool:
        return self.statements != self.saved

    def close(self) -> None:
        """Stop the training and its workers, if any."""
        training, workers = self.training, self.workers
        self.training = self.workers = None
        try:
            if training is not None:
                training.close()
        finally:
            if workers is not None:
                workers.close()

    # ------------------------------------------------------------------------------------------------------ commands

    def selector(self, text: str, where: str) -> Selector:
        """A selector as an argument of the command `where`."""
        source = Source(where, text)
        if not text:
            raise error("P0902", f"`{where}` needs a selector", help=f"{where} [stage=0, pass=F]")
        _, problems = parse(source)
        expression = expression_of(text, where)
        if expression is None and problems:
            raise PiperError(*problems)
        if expression is None:
            raise error(
                "P0902", f"`{where}` takes one selector", source.span(0, len(text)), help=f"{where} [stage=0, pass=F]"
            )
        return self.state.selector(expression)


def expression_of(text: str, name: str = NAME) -> tree.Expr | None:
    """The typed text, if it is a single expression and not a statement."""
    script, problems = parse(Source(name, text))
    if problems and "|" in text:  # a statement may not start with `A | B`; in parentheses it is an expression
        script, problems = parse(Source(name, f"({text.strip()})"))
    return None if problems else _expression(script)


def _expression(script: tree.Script) -> tree.Expr | None:
    if script.doc is not None or len(script.statements) != 1 or not isinstance(script.statements[0], tree.Steps):
        return None
    steps = script.statements[0].steps
    if len(steps) != 1:
        return None
    if isinstance(steps[0], tree.Overlap):  # outside an order, `&` intersects selectors
        return tree.Join("&", steps[0].items, span=steps[0].span)
    return steps[0]


def _undocumented(new: tuple[str, ...]) -> tuple[str, ...]:
    """Documentation must be at the start of a script; after other statements it becomes a comment."""
    doc, *rest = new
    lines = doc.strip().strip('"').strip().splitlines()
    comment = "\n".join(f"# {line.strip()}".rstrip() for line in lines)
    return (f"{comment}\n{rest[0]}", *rest[1:]) if rest else ()


def needs_model(what: str) -> PiperError:
    return error(
        "P0902",
        f"{what} needs a model; this session has none",
        help="start the session with a model: `piperc repl MODEL.py`",
    )


def write(path: Path, text: str) -> None:
    """The file argument of a command."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(
            "P0902",
            f"cannot write {path}",
            notes=[(problem.strerror or str(problem)).lower()],
            help="choose another file",
        ) from None
