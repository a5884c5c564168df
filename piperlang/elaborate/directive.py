"""What all directives have in common. Each has a file in piperlang/directives/ with its class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import Frame
from piperlang.elaborate.options import Kind, Option
from piperlang.source import Span
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True, kw_only=True)
class Written:
    """The location of a directive, and its call stack, outermost call first."""

    span: Span
    trail: tuple[Frame, ...] = ()

    def of_user(self, span: Span) -> Span:
        """`span` is in it. What the library writes is known by the line that calls the library."""
        calls = [frame.span for frame in self.trail if not frame.span.source.library]
        return calls[-1] if calls and span.source.library else span

    def apart_from(self, other: Written, span: Span) -> Span:
        """What tells this from `other`, which the same line may have written: `span`, which is in it, or a call."""
        calls = (mine.span for mine, its in zip(self.trail, other.trail, strict=False) if mine.span != its.span)
        return next(calls, self.of_user(span))


@dataclass(frozen=True, kw_only=True)
class Directive(Written, ABC):
    """One evaluated directive. `str` prints it as a statement; two effects apply it, without and with a model.

    The docstring of a subclass is its help: the syntax in the first line, then what it does. A subclass registers
    itself for its syntax nodes; whatever else is known about a directive is derived from its class and the grammar."""

    options: tuple[Option, ...] = ()

    nodes: ClassVar[tuple[type[tree.Directive], ...]]
    legal: ClassVar[Mapping[str, Kind]] = {}
    """The options after `with`."""
    uses_chunks: ClassVar[bool] = True
    """Whether it relies on how the model is cut into chunks."""
    others_rely_on_it: ClassVar[bool] = False
    """If it fails, later directives that use chunks are not applied: they would only fail with it."""

    def __init_subclass__(cls) -> None:
        for node in cls.nodes:
            BY_NODE[node] = cls

    @classmethod
    def help(cls) -> str:
        return cleandoc(cls.__doc__ or "")

    @classmethod
    def word(cls) -> str:
        """The keyword that starts the statement."""
        return cls.help().split(maxsplit=1)[0]

    @classmethod
    @abstractmethod
    def read(cls, script: Interpreter, node: Any) -> Directive:
        """Evaluate and check the operands of a statement."""

    @abstractmethod
    def __str__(self) -> str: ...

    def apply_to_outline(self, outline: Outline) -> None:
        """The effect on a script without a model; by default there is none."""

    @abstractmethod
    def apply_to_schedule(self, schedule: Schedule) -> None:
        """The effect on a model."""

    def selectors(self) -> Iterable[Selector]:
        """What it selects."""
        return [value for value in vars(self).values() if isinstance(value, Selector)]

    @property
    def with_options(self) -> str:
        return f" with {', '.join(map(str, self.options))}" if self.options else ""


BY_NODE: dict[type[tree.Directive], type[Directive]] = {}
"""The class of each statement. `import piperlang.directives` fills it."""


@dataclass(frozen=True)
class Step(Written):
    """One step of an order: the selectors in it may overlap."""

    items: tuple[Selector, ...]

    def __str__(self) -> str:
        return " & ".join(f"({item})" if len(item.alternatives) > 1 else str(item) for item in self.items)


class ScheduleTarget(Protocol):
    """The evaluator's interface to the graph: it applies each directive, then queries the result.

    The outline of a script alone implements it (elaborate/outline.py), and so does the graph of a model.
    """

    def apply(self, directive: Directive) -> None: ...

    def count(self, selector: Selector) -> int: ...

    def tags(self, name: str) -> Iterable[TagValue]: ...
