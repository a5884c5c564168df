"""A diagnostic is data: what is wrong, where, why and how to repair it. Rendering is somebody else's work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piperlang.diagnostics.codes import CODES
from piperlang.source import Span

LIMIT = 20
"""Diagnostics shown per run: past that, the first ones matter more than the rest."""


@dataclass(frozen=True, slots=True)
class Label:
    """A second place that explains the first."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One entry of a call trail: which function was called, and where."""

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
    trail: tuple[Call, ...] = ()
    """Calls that led here, outermost first."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"diagnostic code {self.code} is not in the table")

    def within(self, trail: tuple[Call, ...]) -> Diagnostic:
        """The same diagnostic, known to have happened under `trail`."""
        return self if self.trail or not trail else replace(self, trail=trail)

    def seen_by_user(self) -> Diagnostic:
        """Point first at the user's own line when the error arose inside the standard library.

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


def _came_from(call: Call) -> Label:
    return Label(call.span, f"in this call of `{call.function}`")


class PiperError(Exception):
    """Carries one or more diagnostics to whoever shows them; never reaches a user as a traceback."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(d.message for d in diagnostics))
        self.diagnostics = diagnostics

    def __reduce__(self) -> tuple[type[PiperError], tuple[Diagnostic, ...]]:
        """Workers send it to the driver."""
        return type(self), self.diagnostics


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
    """The usual way to report one mistake: `raise error("P0201", ...)`."""
    helps = (help,) if help else ()
    return PiperError(Diagnostic(code, message, span, label, tuple(also), tuple(notes), helps))
