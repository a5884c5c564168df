"""model.py: what a user writes beside a schedule."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piperlang.capture.where import line_at, line_of, line_of_function
from piperlang.diagnostics import PiperError, did_you_mean, error
from piperlang.source import Source

REQUIRED = ("model", "loss", "data")
OPTIONAL = ("optimizer", "lr_schedule")
VALIDATION, MAX_NORM = "validation", "max_norm"


@dataclass(frozen=True)
class ModelFile:
    path: Path
    text: str
    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    data: Callable[[], Iterable[tuple[Any, Any]]]
    optimizer: Callable[[Any], Any] | None
    lr_schedule: Callable[[Any], Any] | None
    validation: Callable[[], Iterable[tuple[Any, Any]]] | None = None
    """Batches to evaluate on, after training or every so often."""
    max_norm: float | None = None
    """Gradients are scaled so that the norm of all of them is at most this."""


def load_model(path: Path) -> ModelFile:
    """Run model.py and take its functions; whatever is wrong with it is a diagnostic at its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error("P0901", f"cannot read {path}", notes=[str(problem)], help="check the path") from None
    return from_text(path, text)


@lru_cache(maxsize=8)
def from_text(path: Path, text: str) -> ModelFile:
    """Run a model file whose text is known. Once: operators that it defines can be defined only once."""
    source = Source(str(path), text)
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # it may import its neighbours, as it could if python ran it
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
    made, loss, data, *others = (getattr(module, name, None) for name in REQUIRED + OPTIONAL)
    validation = getattr(module, VALIDATION, None)
    return ModelFile(
        path, text, _guarded(source, made), loss, _batches(source, data), *(_guarded(source, other) for other in others),  # type: ignore[arg-type,call-arg]
        _batches(source, validation) if callable(validation) else None, _max_norm(source, getattr(module, MAX_NORM, None)),
    )  # fmt: skip


def _max_norm(source: Source, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        line = next((i for i, text in enumerate(source.text.splitlines(), 1) if text.startswith(MAX_NORM)), 1)
        raise error("P0801", f"`{MAX_NORM}` is {value!r}", line_at(source, line), help="give the largest norm that gradients may have, such as `max_norm = 1.0`")
    return float(value)


@dataclass(frozen=True)
class Shipped:
    """A function of a model file for another process: the text travels, not what it made here."""

    path: Path
    text: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(from_text(self.path, self.text), self.name)(*arguments)


def shipped(file: ModelFile, name: str) -> Shipped | None:
    """The function called `name`, if the file has it."""
    return Shipped(file.path, file.text, name) if getattr(file, name) is not None else None


def _guarded(source: Source, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The same function; what it raises is a diagnostic at its line."""
    if function is None:
        return None

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except PiperError:
            raise
        except Exception as problem:
            raise _failed(source, problem) from problem

    return call


def _batches(source: Source, data: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """The same batches, each looked at before it is used."""
    span = line_of_function(data)

    def batches() -> Iterator[tuple[Any, Any]]:
        any_found = False
        try:
            for batch in data():
                any_found = True
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    raise error("P0801", f"`{data.__name__}` gives something else than pairs", span, f"gives {type(batch).__name__}", help="yield (input, target) pairs")
                other = next((x for x in pytree.tree_leaves(batch) if not isinstance(x, torch.Tensor)), None)
                if other is not None:
                    raise error("P0801", "a batch has something else than tensors in it", span, f"gives {type(other).__name__}", help="make every part of a batch a tensor whose first dimension counts samples")
                yield batch[0], batch[1]
        except PiperError:
            raise
        except Exception as problem:
            raise _failed(source, problem) from problem
        if not any_found:
            raise error("P0801", f"`{data.__name__}` gives no batch", span, help="yield (input, target) pairs")

    return batches


def _failed(source: Source, problem: Exception) -> Exception:
    """Point at the line of model.py that raised, or where its syntax breaks."""
    span = line_at(source, problem.lineno or 1) if isinstance(problem, SyntaxError) else line_of(problem) or line_at(source, 1)
    return error("P0801", f"{Path(source.name).name} does not run", span, f"{type(problem).__name__}: {problem}", help="run it with python to see the whole trace")
