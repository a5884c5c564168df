"""model.py: what a user writes beside a schedule."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from piperlang.diagnostics import did_you_mean, error
from piperlang.source import Source

REQUIRED = ("model", "loss", "data")
OPTIONAL = ("optimizer", "lr_schedule")


@dataclass(frozen=True)
class ModelFile:
    path: Path
    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    data: Callable[[], Iterable[tuple[Any, Any]]]
    optimizer: Callable[[Any], Any] | None
    lr_schedule: Callable[[Any], Any] | None


def load_model(path: Path) -> ModelFile:
    """Run model.py and take its functions; whatever is wrong with it is a diagnostic at its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error("P0901", f"cannot read {path}", notes=[str(problem)], help="check the path") from None
    source = Source(str(path), text)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as problem:
        raise _failed(source, problem) from problem
    missing = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if missing:
        near = did_you_mean(missing[0], [name for name in vars(module) if not name.startswith("_")])
        raise error("P0801", f"{path.name} has no function `{missing[0]}`", source.span(0, 0), help=near or f"define `def {missing[0]}(...)`")
    found = [getattr(module, name, None) for name in REQUIRED + OPTIONAL]
    return ModelFile(path, *found)  # type: ignore[arg-type]


def _failed(source: Source, problem: Exception) -> Exception:
    """Point at the line of model.py that raised, or where its syntax breaks."""
    line = problem.lineno if isinstance(problem, SyntaxError) else None
    if line is None:
        here = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == source.name]
        line = here[-1] if here else None
    at = min(line or 1, len(source.line_starts))
    text = source.line(at)
    start = source.line_starts[at - 1] + len(text) - len(text.lstrip())
    span = source.span(start, max(start + 1, source.line_starts[at - 1] + len(text)))
    return error("P0801", f"{Path(source.name).name} does not run", span, f"{type(problem).__name__}: {problem}", help="run it with python to see the whole trace")
