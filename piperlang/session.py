"""A script from text to result, the same for every front end: the command line, a REPL, an editor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.elaborate import directive as d
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.modules import Importer, from_source
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.values import Value
from piperlang.ir.graph import Graph
from piperlang.passes.schedule import Program
from piperlang.passes.scheduler import Scheduler
from piperlang.source import Source


@dataclass(frozen=True)
class Outlined:
    """A script evaluated without a model: what it says, or what is wrong with it."""

    outline: Outline
    problems: tuple[Diagnostic, ...]
    params: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduled:
    """A script evaluated against a model."""

    scheduler: Scheduler
    problems: tuple[Diagnostic, ...]
    params: Mapping[str, Value] = field(default_factory=dict)

    def graph(self) -> Graph:
        return self.scheduler.graph()


def outline(source: Source, path: Path | None = None, overrides: Mapping[str, str] | None = None, say: Callable[[str], None] = print) -> Outlined:
    """Parse, check and evaluate `source`; every mistake comes back as a diagnostic."""
    graph = Outline()
    problems, params = _evaluate(graph, source, path, overrides, say)
    return Outlined(graph, problems, params)


def schedule(
    program: Program, source: Source, path: Path | None = None, overrides: Mapping[str, str] | None = None, say: Callable[[str], None] = print, after: int | None = None
) -> Scheduled:
    """Apply a script to a captured model, or only its first directives; what is missing at the end is a problem too."""
    scheduler = Scheduler(program, after)
    problems, params = _evaluate(scheduler, source, path, overrides, say)
    return Scheduled(scheduler, problems or (tuple(scheduler.finish()) if after is None else ()), params)


def _evaluate(
    graph: d.Graph, source: Source, path: Path | None, overrides: Mapping[str, str] | None, say: Callable[[str], None]
) -> tuple[tuple[Diagnostic, ...], Mapping[str, Value]]:
    try:
        module = from_source(source, path.resolve() if path else None)
    except PiperError as problem:
        return problem.diagnostics, {}
    importer = Importer()
    if module.path is not None:
        importer.open.append((module.path, source.span(0, 0)))
    interpreter = Interpreter(graph, module, overrides, say, importer)
    problems = interpreter.run()
    return tuple(problems), interpreter.params
