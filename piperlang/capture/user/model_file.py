"""The user's model.py, which a schedule runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from piperlang.capture.user.batches import UserBatches
from piperlang.capture.user.precision import TRUE, InPrecision, loss_in, wrong_precision
from piperlang.capture.user.seeding import seeded
from piperlang.capture.user.user_code import (
    CALLED,
    UserFunction,
    Wrong,
    mistake,
    not_a_function,
    said,
    wrong_ema,
    wrong_max_norm,
    wrong_signature,
)
from piperlang.capture.user.weight_files import FromFiles, StoredWeights, wrong_weights
from piperlang.capture.user.where import bind, line_at, line_of, remember
from piperlang.diagnostics import Diagnostic, PiperError, error, listed, nearest
from piperlang.diagnostics.files import unreadable
from piperlang.ir.model import Copies
from piperlang.source import Source, Span

REQUIRED = ("model", "loss", "data")
OPTIONAL = ("optimizer", "lr_schedule", "validation", "on_step")
MAX_NORM = "max_norm"
PRECISION = "precision"
EMA = "ema"
WEIGHTS = "initial_weights"
BODIES = {
    "model": "return MyModule()",
    "loss": "return torch.nn.functional.mse_loss(output, target)",
    "data": "yield input, target",
}
"""The shortest body of each required function."""


@dataclass(frozen=True)
class ModelFile:
    path: Path
    text: str
    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    data: Callable[[], Iterator[tuple[Any, Any]]]
    optimizer: Callable[[Any], Any] | None
    lr_schedule: Callable[[Any], Any] | None
    validation: Callable[[], Iterator[tuple[Any, Any]]] | None = None
    """Validation batches, used after training or every N steps."""
    max_norm: float | None = None
    """Gradients are clipped to this global norm."""
    on_step: Callable[[dict[str, Any]], Any] | None = None
    """Called in the driver after every step, with the step's entry in metrics.jsonl."""
    precision: str | None = None
    """That of `model` and `loss`, if the file or the command line declares one."""
    ema: float | None = None
    """The decay of moving averages of the weights, which are saved, too."""
    weights: StoredWeights | None = None
    """The files of the initial weights."""

    @property
    def copies(self) -> Copies:
        """Of weights, that training keeps."""
        return Copies(masters=self.precision == TRUE, averages=self.ema is not None)

    def at(self, precision: str | None, weights: Path | None = None) -> ModelFile:
        """The file in this precision, and with initial weights from these files, unless they are None."""
        known = self.weights.path if self.weights is not None else None
        precision, weights = precision or self.precision, weights or known
        if (precision, weights) == (self.precision, known):
            return self
        wrong = wrong_weights(weights)
        if wrong is not None:
            raise PiperError(mistake("P0801", wrong, None))
        return _made(self.path, self.text, _run(self.path, self.text)[1], precision, weights)


def load_model(path: Path, seed: int = 0) -> ModelFile:
    """Run model.py and return its functions. Every mistake in it is a diagnostic at its line. `seed`: for random
    numbers that it draws when it is run, such as the weights of a model at its top level."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise unreadable(path, problem) from None
    with seeded(seed):
        return from_text(path, text)


def from_text(path: Path, text: str) -> ModelFile:
    """Run a model file from its text."""
    source, module, file = _run(path, text)
    remember(source)  # of the file loaded last: other files may have the same name
    _enter(module)
    return file


_entered: dict[str, ModuleType] = {}


def model_modules() -> tuple[ModuleType, ...]:
    """The modules that model files of this process have become, unless somebody has taken their names since."""
    return tuple(module for name, module in _entered.items() if sys.modules.get(name) is module)


def _enter(module: ModuleType) -> None:
    """Makes the module of a model file known by its name, as an imported one is: dataclasses, pickle and
    `sys.modules[__name__]` look there. A module that has the name already keeps it."""
    name = module.__name__
    if sys.modules.get(name) is not _entered.get(name):
        name = module.__name__ = f"piperc_{name}"
    sys.modules[name] = _entered[name] = module


@lru_cache(maxsize=8)
def _run(path: Path, text: str) -> tuple[Source, ModuleType, ModelFile]:
    """Runs a model file once: operators that it defines can be registered only once."""
    source = Source(str(path), text)
    remember(source)
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # it may import modules beside it, as if run by python
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    _enter(module)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except (PiperError, KeyboardInterrupt):
        raise
    except BaseException as problem:
        raise _not_imported(source, problem) from problem
    problems = [*_missing(source, module), *_unusable(source, module)]
    if problems:
        raise PiperError(*problems)
    return source, module, _made(path, source.text, module, getattr(module, PRECISION, None))


def _made(path: Path, text: str, module: ModuleType, precision: str | None, files: Path | None = None) -> ModelFile:
    """`files`: of the initial weights; by default, those that the model file names."""
    found: dict[str, Any] = {name: getattr(module, name, None) for name in (*REQUIRED, *OPTIONAL)}
    given = files or getattr(module, WEIGHTS, None)
    weights = None if given is None else StoredWeights(path.parent.resolve() / given)
    if weights is not None:
        found["model"] = FromFiles(found["model"], weights)
    if precision is not None:
        found["model"] = InPrecision(found["model"], precision)
        found["loss"] = loss_in(found["loss"], precision)
    norm, ema = getattr(module, MAX_NORM, None), getattr(module, EMA, None)

    def guarded(name: str, wrapper: type[Any]) -> Any:
        return wrapper(found[name], name) if found[name] is not None else None

    return ModelFile(
        path,
        text,
        model=guarded("model", UserFunction),
        loss=found["loss"],  # not wrapped: it may be a module with weights of its own
        data=guarded("data", UserBatches),
        optimizer=guarded("optimizer", UserFunction),
        lr_schedule=guarded("lr_schedule", UserFunction),
        validation=guarded("validation", UserBatches),
        max_norm=None if norm is None else float(norm),
        on_step=guarded("on_step", UserFunction),
        precision=precision,
        ema=None if ema is None else float(ema),
        weights=weights,
    )


@dataclass(frozen=True)
class Shipped:
    """A function of a model file for another process: the text of the file is sent, not the function object."""

    path: Path
    text: str
    name: str
    precision: str | None = None
    weights: Path | None = None

    @property
    def __wrapped__(self) -> Any:
        """For inspect: the signature and the line are those of the function itself."""
        return getattr(from_text(self.path, self.text).at(self.precision, self.weights), self.name)

    def __call__(self, *arguments: Any) -> Any:
        return self.__wrapped__(*arguments)


def shipped(file: ModelFile, name: str) -> Shipped | None:
    """The function called `name`, if the file has it."""
    if getattr(file, name) is None:
        return None
    return Shipped(file.path, file.text, name, file.precision, file.weights.path if file.weights else None)


# ------------------------------------------------------------------------------------------------------- what is wrong


def _missing(source: Source, module: ModuleType) -> Iterator[Diagnostic]:
    """One diagnostic for all missing functions, with a help for each."""
    missing = [name for name in REQUIRED if getattr(module, name, None) is None]
    if not missing:
        return
    what = f"function `{missing[0]}`" if len(missing) == 1 else f"functions {listed(missing, 'and')}"
    helps = tuple(_how_to_add(name, source, module) for name in missing)
    yield Diagnostic("P0801", f"{Path(source.name).name} has no {what}", source.span(0, 0), helps=helps)


def _how_to_add(name: str, source: Source, module: ModuleType) -> str:
    """The name that may be misspelled, or the lines to add."""
    functions = [
        key
        for key, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__code__.co_filename == source.name
    ]
    near = nearest(name, [key for key in functions if key not in CALLED])
    if near:
        return f"did you mean `{near}`? rename it to `{name}`"
    own = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and _line_of_name(source, key, ast.ClassDef)
    ]
    body = BODIES[name].replace("MyModule", own[-1] if own else "MyModule")
    return f"add `def {CALLED[name][0]}: {body}`"


def _unusable(source: Source, module: ModuleType) -> Iterator[Diagnostic]:
    """Diagnostics for definitions that exist but cannot be used."""
    for name in (*REQUIRED, *OPTIONAL):
        value = getattr(module, name, None)
        if value is None:
            continue
        line, wrong = _line_of_name(source, name) or line_at(source, 1), not_a_function(name, value)
        bind(value, line)
        if wrong is not None:
            yield mistake("P0801", wrong, line)
        elif (problem := wrong_signature(name, value)) is not None:
            yield problem
    checks: dict[str, Callable[[Any], Wrong | None]] = {
        MAX_NORM: wrong_max_norm,
        PRECISION: wrong_precision,
        EMA: wrong_ema,
        WEIGHTS: partial(wrong_weights, folder=Path(source.name).parent),
    }
    for name, check in checks.items():
        wrong = check(getattr(module, name, None))
        if wrong is not None:
            yield mistake("P0801", wrong, _line_of_name(source, name) or line_at(source, 1))


def _line_of_name(source: Source, name: str, kind: type[ast.stmt] = ast.stmt) -> Span | None:
    """The last module-level line that binds a name."""
    lines = [node.lineno for node in ast.parse(source.text).body if isinstance(node, kind) and name in _bound(node)]
    return line_at(source, lines[-1]) if lines else None


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def _not_imported(source: Source, problem: BaseException) -> Exception:
    """The diagnostic at the line of model.py, or of a module that it imports, that raised or has the syntax error."""
    name = Path(source.name).name
    help = f"run `python {name}` to see the full traceback"
    span = line_of(problem) or line_at(source, 1)
    if isinstance(problem, SyntaxError) and problem.filename == source.name:
        span, help = line_at(source, problem.lineno or 1), "fix the syntax of this line or of the line before it"
    elif isinstance(problem, ModuleNotFoundError) and problem.name:
        help = f"install `{problem.name.partition('.')[0]}` for {sys.executable}, or put its file beside {name}"
    return error("P0801", f"{name} cannot be imported", span, said(problem), help=help)
