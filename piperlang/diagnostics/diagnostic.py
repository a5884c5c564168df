"""A diagnostic as data: the error, its location, the reason and a fix. Rendering is separate (render.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from piperlang.diagnostics.codes import CODES
from piperlang.source import Span

LIMIT = 20
"""Maximum number of diagnostics shown per run."""


@dataclass(frozen=True, slots=True)
class Label:
    """A secondary location that explains the primary one."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of the call stack: the called function, and the location of the call."""

    function: str
    span: Span


@dataclass(frozen=True, slots=True)
class Diagnostic:
    code: str
    message: str
    span: Span | None = None
    label: str = ""
    also: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()
    trail: tuple[Frame, ...] = ()
    """The call stack, outermost call first."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"diagnostic code {self.code} is not in the table")

    def within(self, trail: tuple[Frame, ...]) -> Diagnostic:
        """The same diagnostic with the call stack `trail`."""
        return self if self.trail or not trail else replace(self, trail=trail)

    def __str__(self) -> str:
        where = f"{self.span}: " if self.span is not None else ""
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        helps = "".join(f"\n  help: {help}" for help in self.helps)
        return f"{where}{self.code} {self.message}{notes}{helps}"

    def seen_by_user(self) -> Diagnostic:
        """Make the user's own line the primary location of an error inside the standard library.

        The user wrote the call, not the library, so the innermost call outside the library becomes the primary
        span and the library's line a secondary label. Calls of the user's own functions stay as labels.
        """
        if not self.trail or self.span is None:
            return self
        outer = [call for call in self.trail if not call.span.source.library]
        if not self.span.source.library:
            calls = [c for c in outer if c.span != self.span]
            return replace(self, trail=(), also=self.also + tuple(_came_from(c) for c in reversed(calls)))
        if not outer:
            return replace(self, trail=())
        call = outer[-1]
        inside = Label(self.span, self.label or f"inside `{call.function}`")
        rest = tuple(_came_from(c) for c in reversed(outer[:-1]))
        return replace(self, span=call.span, label="in this call", also=(inside, *self.also, *rest), trail=())


def _came_from(call: Frame) -> Label:
    return Label(call.span, f"in this call of `{call.function}`")


class PiperError(Exception):
    """Carries one or more diagnostics to the code that shows them; never shown as a traceback."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics
        for noted in _noted:
            noted.append(self)

    def __str__(self) -> str:
        """For a traceback in a notebook or a log: file, line, code, message, notes and help of every diagnostic."""
        return "\n".join(str(diagnostic) for diagnostic in self.diagnostics)

    def __reduce__(self) -> tuple[type[PiperError], tuple[Diagnostic, ...]]:
        """Picklable: workers send it to the driver."""
        return type(self), self.diagnostics


_noted: list[list[PiperError]] = []


@contextmanager
def noted_errors() -> Iterator[list[PiperError]]:
    """The errors that occur inside of the context, also those that a user's `except` catches."""
    noted: list[PiperError] = []
    _noted.append(noted)
    try:
        yield noted
    finally:
        _noted[:] = [one for one in _noted if one is not noted]


def error(
    code: str,
    message: str,
    span: Span | None = None,
    label: str = "",
    *,
    also: Iterable[Label] = (),
    notes: Iterable[str] = (),
    help: str | None = None,
) -> PiperError:
    """The usual way to report one error: `raise error("P0201", ...)`."""
    helps = (help,) if help else ()
    return PiperError(Diagnostic(code, message, span, label, tuple(also), tuple(notes), helps))
