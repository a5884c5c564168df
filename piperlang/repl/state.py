"""A session after some statements, as a value: directives, graph, missing directives and
estimates. Each is computed on demand."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from piperlang.build.schedule import HasModel, SupportsCut
from piperlang.build.scheduler import Scheduler
from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.directives.order import Order
from piperlang.directives.split import Split
from piperlang.directives.tag import Tag
from piperlang.elaborate.directive import Directive, Step
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.lanes import Lane
from piperlang.elaborate.names import Names
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.values import Value
from piperlang.ir.graph import COMPUTE, Graph
from piperlang.ir.sort import topological
from piperlang.pipeline import evaluate
from piperlang.plan.estimate.cost import Costs
from piperlang.plan.estimate.memory import Peak, peaks
from piperlang.plan.estimate.summary import idle
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.simulate.timeline import Timeline
from piperlang.simulate.unit import UnitCosts, simulate
from piperlang.source import Source
from piperlang.syntax import tree

NAME = "session"
"""The name of a session's script in diagnostics."""
MISPLACED, UNEVEN, CYCLE, UNPLACED, UNUSED = "P0403", "P0412", "P0501", "P0402", "P0404"
FINAL = (MISPLACED, UNEVEN, CYCLE)
"""Codes that no later directive can fix: a directive that causes one of these is rejected."""

Tagged: TypeAlias = tuple[tuple[tuple[tuple[str, TagValue], ...], tuple[str, ...]], ...]


def axis_of(unused: Diagnostic) -> str | None:
    """`gpu.dp`, if the diagnostic is that no directive uses that axis."""
    found = re.fullmatch(r"axis `(\w+)` of mesh `(\w+)` is not used", unused.message)
    return f"{found[2]}.{found[1]}" if found else None


class Cuts:
    """A traced model that caches its cuts: the same tags give the same chunks, for any statement and
    any thread."""

    def __init__(self, program: SupportsCut) -> None:
        self.program = program
        self._known: dict[Tagged, HasModel] = {}
        self._one = threading.Lock()

    def cut(self, tags: Iterable[Tag]) -> HasModel:
        every = list(tags)
        known = tuple((tag.tags, tuple(map(str, tag.paths))) for tag in every)
        with self._one:
            if known not in self._known:
                self._known[known] = self.program.cut(every)
            return self._known[known]

    def check_tag(self, directive: Tag) -> None:
        self.program.check_tag(directive)


@dataclass(frozen=True)
class SessionSettings:
    """Data shared by all states of a session."""

    program: Cuts | None = None
    """None if the session has no model."""
    path: Path | None = None
    """The assumed file of the statements: imports are relative to it."""
    name: str = NAME
    """The name of the script in diagnostics."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    costs: UnitCosts = field(default_factory=UnitCosts)


class _Scheduler(Scheduler):
    """Applies directives; those that an earlier state has verified are not verified again."""

    def __init__(self, program: SupportsCut, verified: int) -> None:
        super().__init__(program)
        self.verified = verified

    def _verify(self) -> None:
        if len(self.schedule.directives) > self.verified:
            super()._verify()


class _Outline(Outline):
    """An outline that records its directives."""

    def __init__(self) -> None:
        super().__init__()
        self.directives: list[Directive] = []

    def apply(self, directive: Directive) -> None:
        super().apply(directive)
        self.directives.append(directive)


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step of a graph."""

    plan: Plan
    peaks: Sequence[Peak]
    idle: Sequence[float]

    @property
    def seconds(self) -> float:
        return self.plan.seconds

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / max(1, len(self.idle))

    @property
    def memory(self) -> dict[int, int]:
        """Peak bytes by device."""
        return {device.device: peak.bytes for device, peak in zip(self.plan.devices, self.peaks, strict=True)}


class State:
    def __init__(self, setting: SessionSettings, statements: tuple[str, ...] = (), before: State | None = None) -> None:
        """`before`: the state of the first few of these statements; their directives have been verified there."""
        self.setting, self.statements = setting, statements
        self.source = Source(setting.name, "".join(f"{text}\n" for text in statements))
        self.said: list[str] = []
        """What `print` wrote."""
        program = setting.program
        self.scheduler = None if program is None else _Scheduler(program, len(before.directives) if before else 0)
        self._outline = _Outline()
        found = evaluate(
            self.scheduler or self._outline, self.source, setting.path, self._overrides(), self.said.append
        )
        self.problems, self.interpreter = found.problems, found.interpreter

    def _overrides(self) -> dict[str, str]:
        """Parameters given on the command line, as far as they are declared: others may be declared later."""
        return {name: value for name, value in self.setting.overrides.items() if f"param {name}" in self.source.text}

    # -------------------------------------------------------------------------------------------------- directives

    @property
    def directives(self) -> Sequence[Directive]:
        return self.scheduler.schedule.directives if self.scheduler else self._outline.directives

    @property
    def chains(self) -> list[Order]:
        """`order A -> B`: orders between nodes on any devices."""
        return [x for x in self.directives if isinstance(x, Order) and x.where is None]

    @property
    def names(self) -> Mapping[str, Value]:
        return self.interpreter.module.names if self.interpreter else {}

    @property
    def outline(self) -> Outline:
        """Placements, splits and orders. With a model it needs the chunks."""
        return self.scheduler.schedule.outline if self.scheduler else self._outline

    @property
    def settled(self) -> bool:
        """Whether the chunks are known: after a `tag` the model is cut again only when the chunks are used."""
        return (
            self.scheduler is None
            or self.scheduler.schedule.settled
            or not any(isinstance(x, Tag) for x in self.directives)
        )

    def settle(self) -> None:
        """Cut the model now, if a `tag` deferred it."""
        if self.scheduler is not None and not self.settled:
            _ = self.scheduler.schedule.captured
            for name in ("trouble", "missing", "estimate", "timeline", "unordered"):
                self.__dict__.pop(name, None)

    def cut(self) -> None:
        """Cut the model by the current tags ahead of use; errors are left for the code that uses the chunks to
        report."""
        if self.scheduler is not None:
            with suppress(PiperError):
                self.scheduler.schedule.program.cut(self.scheduler.schedule.tag_directives)

    def line_of(self, directive: Directive | Step) -> str:
        """Where a directive was written: the user's own line, not that of a library function."""
        span = directive.span
        for call in reversed(directive.trail):
            if span.source.library:
                span = call.span
        return f"{span.source.name}:{span.first.line}"

    # ------------------------------------------------------------------------------------------------------- graph

    @cached_property
    def graph(self) -> Graph:
        """Raises a PiperError where there is none yet; a session without a model never has one."""
        assert self.scheduler is not None
        graph = self.scheduler.graph()
        topological(graph)
        return graph

    @cached_property
    def trouble(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that currently prevent a graph."""
        if self.scheduler is None or not self.settled or any(x.code in FINAL for x in self.missing):
            return ()
        try:
            _ = self.graph
        except PiperError as problem:
            return problem.diagnostics
        return ()

    @cached_property
    def missing(self) -> tuple[Diagnostic, ...]:
        """Diagnostics about what the script still lacks."""
        if not self.settled:
            return ()
        if self.scheduler is None:
            return tuple(self._outline.finish())
        found = self.scheduler.finish()
        if any(x.code == UNPLACED for x in found):
            return tuple(found)  # chunks that are not placed yet may use any axis
        known = " ".join(text for x in found for text in (x.message, *x.helps, axis_of(x) or ""))
        others = [x for x in self.outline.finish() if (axis := axis_of(x)) and not re.search(rf"\b{axis}\b", known)]
        return (*found, *others)

    @property
    def complete(self) -> bool:
        return not (self.problems or self.missing or self.trouble) and self.settled

    @cached_property
    def unordered(self) -> tuple[int, int]:
        """The number of passes that are not ordered, and of all passes; (0, 0) if there is no order at all."""
        if self.scheduler is None or self.trouble or not self.settled or not self.graph.orders:
            return 0, 0
        ordered = {node for order in self.graph.orders for group in order.groups for node in group}
        passes = [node.id for node in self.graph.nodes if node.op in COMPUTE and node.op != "R"]
        return sum(node not in ordered for node in passes), len(passes)

    # --------------------------------------------------------------------------------------------------- estimates

    @cached_property
    def estimate(self) -> Estimate | None:
        """None while chunks are not placed."""
        if (
            self.scheduler is None
            or not self.settled
            or self.trouble
            or any(x.code in (UNPLACED, *FINAL) for x in self.missing)
        ):
            return None
        plan = lower(self.graph)
        return Estimate(plan, peaks(plan, self.graph), idle(plan, self.graph, Costs(self.graph)))

    @property
    def lanes(self) -> list[Lane]:
        return self.outline.orders()

    @property
    def costs(self) -> UnitCosts:
        return replace(self.setting.costs, recomputed=self.outline.recomputed)

    @cached_property
    def timeline(self) -> Timeline | Diagnostic | None:
        """The orders simulated with unit costs; None if there is no order."""
        if not self.settled or not any(lane.steps for lane in self.lanes):
            return None
        try:
            found = simulate(self.lanes, self.costs)
        except PiperError as problem:
            return problem.diagnostics[0]
        return found if found.ran else None

    # ------------------------------------------------------------------------------------------------------ values

    def value(self, node: tree.Expr) -> Value:
        """The value of an expression, evaluated on a copy of this state: a called function may contain directives."""
        return self._beside(node).evaluate(node)

    def tag_values(self, name: str) -> list[TagValue]:
        """The values of `tags(name)`, or the microbatches of a split."""
        split: list[TagValue] = [
            n for x in self.directives if isinstance(x, Split) and x.name == name for n in range(x.count)
        ]
        tagged = sorted((self.scheduler or self._outline).tags(name), key=lambda value: (isinstance(value, str), value))
        return tagged + split

    def selector(self, node: tree.Expr) -> Selector:
        return self._beside(node).settled(node)

    def _beside(self, node: tree.Expr) -> Interpreter:
        other = State(self.setting, self.statements, self).interpreter
        assert other is not None
        bound = tree.Let((tree.Ident("_", span=node.span),), (node,), span=node.span)
        problems = [
            x
            for x in Names().check([*other.module.script.statements, bound])
            if x.span and x.span.source is node.span.source
        ]
        if problems:
            raise PiperError(*problems)
        return other


def refusals(before: State, after: State) -> tuple[Diagnostic, ...]:
    """Problems of the statements that `after` has and `before` has not, and that later statements cannot
    fix."""
    if after.problems:
        return after.problems
    known = {(x.code, x.message) for x in (*before.missing, *before.trouble)}
    final = [x for x in (*after.missing, *after.trouble) if x.code in FINAL and (x.code, x.message) not in known]
    if (
        not final
        and after.scheduler is None
        and isinstance(after.timeline, Diagnostic)
        and not isinstance(before.timeline, Diagnostic)
    ):
        final = [after.timeline]
    return tuple(final)
