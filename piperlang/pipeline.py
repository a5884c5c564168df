"""The compiler's pipeline, once for every front end: the command line, the REPL, the Python API, editors, the fuzzer.

    text --evaluate--> directives --schedule--> graph --planned--> plan

`outline` evaluates a script without a model, `schedule` applies it to one, `replay` applies directives that another
script gave, and `planned` lowers a graph to a verified plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import piperlang.directives  # noqa: F401  (a script can use all directives)
from piperlang.build.schedule import HasModel, SupportsCut
from piperlang.build.scheduler import Scheduler
from piperlang.core.collector import uncollected
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.elaborate.directive import Directive, ScheduleTarget
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.modules import Importer, from_source
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.values import Value
from piperlang.ir.graph import Graph
from piperlang.source import Source

if TYPE_CHECKING:
    from piperlang.plan.plan import Plan


Classes: TypeAlias = list[tuple[int, ...]]
"""Devices that do the same."""


@dataclass(frozen=True)
class Outlined:
    """A script evaluated without a model: its outline, or its problems."""

    outline: Outline
    problems: tuple[Diagnostic, ...]
    params: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduled:
    """A script evaluated against a model."""

    scheduler: Scheduler
    problems: tuple[Diagnostic, ...]
    params: Mapping[str, Value] = field(default_factory=dict)

    @property
    def directives(self) -> tuple[Directive, ...]:
        """What was applied: `resolved` prints it as a script, `replay` applies it again."""
        return tuple(self.scheduler.schedule.directives)

    @property
    def captured(self) -> HasModel:
        """The model as the directives cut it into chunks."""
        return self.scheduler.schedule.captured

    def graph(self) -> Graph:
        with uncollected():
            return self.scheduler.graph()


@dataclass(frozen=True)
class Evaluated:
    """A script applied to a graph: its problems, and the interpreter with its names."""

    problems: tuple[Diagnostic, ...]
    interpreter: Interpreter | None = None
    """None if the script does not parse."""

    @property
    def params(self) -> Mapping[str, Value]:
        return self.interpreter.params if self.interpreter else {}


def outline(
    source: Source,
    path: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
    texts: Mapping[Path, str] | None = None,
) -> Outlined:
    """Parse, check and evaluate `source`; every error is returned as a diagnostic. `texts`: of files that it may
    import, in place of their contents."""
    graph = Outline()
    found = evaluate(graph, source, path, overrides, say, texts)
    return Outlined(graph, found.problems, found.params)


def schedule(
    program: SupportsCut,
    source: Source,
    path: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
    after: int | None = None,
) -> Scheduled:
    """Apply a script, or only its first directives, to a captured model; missing directives are problems too."""
    scheduler = Scheduler(program, after)
    with uncollected():
        found = evaluate(scheduler, source, path, overrides, say)
    return Scheduled(scheduler, found.problems or (tuple(scheduler.finish()) if after is None else ()), found.params)


def replay(program: SupportsCut, directives: Iterable[Directive]) -> Scheduled:
    """Directives, applied to a captured model without the script that gave them."""
    scheduler = Scheduler(program)
    try:
        for directive in directives:
            scheduler.apply(directive)
    except PiperError as problem:
        return Scheduled(scheduler, problem.diagnostics)
    return Scheduled(scheduler, tuple(scheduler.finish()))


def planned(graph: Graph, max_norm: float | None = None, skips: bool = False) -> Plan:
    """The verified plan of a graph. `max_norm`: gradients are clipped by their global norm. `skips`: a step whose loss
    or norm of the gradients is not finite changes nothing."""
    # Here, because scripts are outlined and formatted without them.
    from piperlang.plan.lower import lower
    from piperlang.plan.verify import check

    plan = _with_norm(lower(graph), graph, max_norm, skips)
    check(plan)
    return plan


def representative(
    graph: Graph, max_norm: float | None = None, skips: bool = False, most: int = 0
) -> tuple[Plan, Classes]:
    """A plan of one device of each class that does the same, and the classes: what a simulation needs of a graph over
    thousands of devices. It is not verified, and cannot be run. Where one cannot stand for all, or there are at most
    `most`, every device is a class of its own."""
    from piperlang.plan.classes import stand_for_all
    from piperlang.plan.linearize import alike
    from piperlang.plan.lower import lower

    with uncollected():
        classes = alike(graph)
        if sum(map(len, classes)) > most:
            plan = lower(graph, only={devices[0] for devices in classes})
            if stand_for_all(plan, classes):
                return _with_norm(plan, graph, max_norm, skips, classes), classes
        plan = lower(graph)
        return _with_norm(plan, graph, max_norm, skips), [(device.device,) for device in plan.devices]


def _with_norm(plan: Plan, graph: Graph, max_norm: float | None, skips: bool, classes: Classes | None = None) -> Plan:
    from piperlang.ir.sort import check_norm
    from piperlang.plan.rewrite.clip import with_norm

    if max_norm is None and not skips:
        return plan
    check_norm(graph)
    return with_norm(plan, max_norm, skips, classes)


def evaluate(
    graph: ScheduleTarget,
    source: Source,
    path: Path | None,
    overrides: Mapping[str, str] | None,
    say: Callable[[str], None],
    texts: Mapping[Path, str] | None = None,
) -> Evaluated:
    """Apply every directive of a script to a graph."""
    try:
        module = from_source(source, path.resolve() if path else None)
    except PiperError as problem:
        return Evaluated(problem.diagnostics)
    importer = Importer(texts or {})
    if module.path is not None:
        importer.open.append((module.path, source.span(0, 0)))
    interpreter = Interpreter(graph, module, overrides, say, importer)
    return Evaluated(tuple(interpreter.run()), interpreter)
