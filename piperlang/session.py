"""A script from text to result, the same for every front end: the command line, a REPL, an editor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.modules import Importer, from_source
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.values import Value
from piperlang.source import Source


@dataclass(frozen=True)
class Outlined:
    """A script evaluated without a model: what it says, or what is wrong with it."""

    outline: Outline
    problems: tuple[Diagnostic, ...]
    params: Mapping[str, Value] = field(default_factory=dict)


def outline(source: Source, path: Path | None = None, overrides: Mapping[str, str] | None = None, say: Callable[[str], None] = print) -> Outlined:
    """Parse, check and evaluate `source`; every mistake comes back as a diagnostic."""
    graph = Outline()
    try:
        module = from_source(source, path.resolve() if path else None)
    except PiperError as problem:
        return Outlined(graph, problem.diagnostics)
    importer = Importer()
    if module.path is not None:
        importer.open.append((module.path, source.span(0, 0)))
    interpreter = Interpreter(graph, module, overrides, say, importer)
    problems = interpreter.run()
    return Outlined(graph, tuple(problems), interpreter.params)
