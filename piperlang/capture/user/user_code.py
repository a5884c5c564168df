"""The user's functions: how each is called, what it must return, and its exceptions as diagnostics at the user's
line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from traceback import walk_tb
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.nn.parameter import is_lazy

from piperlang.capture.user.where import here, line_of, line_of_function, text_of
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.source import Span

CALLED = {
    "model": ("model()", 0),
    "loss": ("loss(output, target)", 2),
    "data": ("data()", 0),
    "validation": ("validation()", 0),
    "optimizer": ("optimizer(params)", 1),
    "lr_schedule": ("lr_schedule(optimizer)", 1),
    "on_step": ("on_step(row)", 1),
}
"""How each function is called, and with how many arguments."""

LONGEST = 300
"""The most characters of an exception's message that a diagnostic quotes."""


class Wrong(NamedTuple):
    """A value that cannot be used: the message, and how to fix it."""

    message: str
    help: str


def said(problem: BaseException) -> str:
    """An exception on one line: `ValueError: no such size`."""
    name = type(problem).__name__
    text = text_of(problem).strip()
    if "Original Traceback" in text:  # of a data loader process: the last line is its exception
        return _shortened(text.splitlines()[-1])
    text = " ".join(text.split())
    return _shortened(f"{name}: {text}") if text else name


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def kind(value: object) -> str:
    """A description of a value for messages: `None`, `the class Net`, `a tuple of 2`, `a value of type int`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType):
        return "a function"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    name = type(value).__name__
    return f"a {name} of {len(value)}" if isinstance(value, tuple | list | dict) else f"a value of type {name}"


def mistake(
    code: str, wrong: Wrong, span: Span | None = None, label: str = "", notes: tuple[str, ...] = ()
) -> Diagnostic:
    return Diagnostic(code, wrong.message, span, label, notes=notes, helps=(wrong.help,))


@contextmanager
def located(span: Span | None) -> Iterator[None]:
    """Diagnostics about the model that are raised inside without a location get `span`."""
    try:
        yield
    except PiperError as problem:
        raise PiperError(
            *(replace(d, span=span) if d.span is None and d.code.startswith("P08") else d for d in problem.diagnostics)
        ) from problem


@contextmanager
def located_at_call() -> Iterator[None]:
    """The same, with the line of the user's code that called piperlang."""
    try:
        yield
    except PiperError:
        with located(here()):
            raise


@contextmanager
def eagerly(model: nn.Module, loss: Callable[..., Any], what: str = "the model") -> Iterator[None]:
    """Turns an exception of plain training, without any schedule, into a P0801."""
    try:
        yield
    except (PiperError, KeyboardInterrupt):
        raise
    except BaseException as problem:
        path, module = module_of_frames(problem, model)
        backward = any(frame.f_code.co_name == "backward" for frame, _ in walk_tb(problem.__traceback__))
        called = type(module or model).forward if module or backward else loss
        line = line_of(problem)
        notes = (*((f"in module {path}",) if path else ()), "in eager PyTorch, without a schedule")
        help = device_help(problem) or "fix this line, or the values that reach it"
        wrong = Wrong(f"{what} raised {said(problem)}", help)
        raise PiperError(
            mistake("P0801", wrong, line or line_of_function(called), "raised here" if line else "", notes)
        ) from problem


def module_of_frames(problem: BaseException, model: nn.Module) -> tuple[str, nn.Module | None]:
    """The innermost module of the model that was running, and its path, found as `self` in the frames of the
    exception."""
    paths = {id(module): path for path, module in model.named_modules()}
    called = [frame.f_locals.get("self") for frame, _ in walk_tb(problem.__traceback__)]
    inner = next((module for module in reversed(called) if isinstance(module, nn.Module) and id(module) in paths), None)
    return (paths[id(inner)], inner) if inner is not None else ("", None)


@dataclass(frozen=True)
class Guarded:
    """A user function. Its exceptions become a P0801 at its line, on workers too."""

    function: Callable[..., Any]
    name: str
    """A key of CALLED."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For inspect: the signature and the line are those of the function itself."""
        return self.function

    @property
    def line(self) -> Span | None:
        return line_of_function(self.function)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turns an exception raised inside into a diagnostic at the line that raised it."""
        try:
            yield
        except (PiperError, KeyboardInterrupt):
            raise
        except BaseException as problem:
            if isinstance(problem, GeneratorExit) and line_of(problem) is None:
                raise  # nobody wants further batches
            raise PiperError(self._raised(problem)) from problem

    def _raised(self, problem: BaseException) -> Diagnostic:
        help = (
            device_help(problem) or f"fix this line; to see the full traceback, call `{CALLED[self.name][0]}` in Python"
        )
        return mistake(
            "P0801", Wrong(f"`{self.name}` raised {said(problem)}", help), line_of(problem) or self.line, "raised here"
        )


class UserFunction(Guarded):
    """`model`, `optimizer`, `lr_schedule` or `on_step`. A result that cannot be used is a P0801, too."""

    def __call__(self, *arguments: Any) -> Any:
        with self.guarded():
            result = self.function(*arguments)
        wrong = _RESULTS[self.name](result)
        if wrong is not None:
            raise PiperError(mistake("P0801", wrong, self.line))
        return result


def without_values(problem: BaseException) -> bool:
    """Whether an exception says that a tensor has no values, because it is a fake tensor."""
    words = (
        "data-dependent",
        "FakeTensor",
        "fake tensor",
        "tensor subclasses",
        "_local_scalar_dense",
        "data pointer of Tensor",
        "Meta tensor",
        "meta tensor",
    )
    return "fake_tensor" in type(problem).__module__ or any(word in said(problem) for word in words)


def device_help(problem: BaseException) -> str | None:
    """A help for tensors on a device that does not exist, or on different devices."""
    words = (
        "support for cuda",
        "compiled with CUDA",
        "Found no NVIDIA",
        "No CUDA GPUs",
        "same device",
        "two different devices",
    )
    known = any(word in said(problem) for word in words)
    return (
        "do not choose devices: piperc moves the model and its batches; create new tensors with `device=x.device`"
        if known
        else None
    )


# ------------------------------------------------------------------------------------------------- what they must be


def not_a_function(name: str, value: object) -> Wrong | None:
    """A name of the model file that must be a function and is not."""
    is_module = name == "model" and isinstance(value, nn.Module)
    if callable(value) and not is_module:
        return None
    call = CALLED[name][0]
    how = f"return {type(value).__name__}(...)" if is_module or isinstance(value, optim.Optimizer) else "return ..."
    return Wrong(
        f"`{name}` is {kind(value)}, not a function", f"define a function that returns it: `def {call}: {how}`"
    )


def wrong_signature(name: str, function: Callable[..., Any]) -> Diagnostic | None:
    """The diagnostic for a function whose signature does not match the call."""
    call, count = CALLED[name]
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as problem:
        wrong = Wrong(
            f"`{name}` cannot be called as `{call}`", f"write `def {call}:`, and give every other argument a default"
        )
        return mistake("P0801", wrong, line_of_function(function), str(problem))
    except ValueError:  # a builtin without a signature
        return None
    return None


def _no_module(made: object) -> Wrong | None:
    if isinstance(made, torch.jit.ScriptModule):
        return Wrong(
            "`model` returned a TorchScript module, which torch.export cannot record",
            "return the module itself, without torch.jit.script or torch.jit.trace",
        )
    if isinstance(made, nn.Module):
        return _lazy() if any(is_lazy(one) for one in (*made.parameters(), *made.buffers())) else None
    if made is None:
        return Wrong("`model` returned None", "return the module: `return` is missing at the end of the function")
    if isinstance(made, type):
        return Wrong(f"`model` returned {kind(made)}, not an instance", f"call it: `return {made.__name__}()`")
    return Wrong(f"`model` returned {kind(made)}", "return one torch.nn.Module and nothing else")


def _lazy() -> Wrong:
    return Wrong(
        "`model` has lazy modules, whose shapes are unknown until the first forward",
        "specify their sizes, such as `nn.Linear(4, 8)` instead of `nn.LazyLinear(8)`",
    )


def _each(check: Callable[[object], Wrong | None]) -> Callable[[object], Wrong | None]:
    """Of a list, every item is checked."""

    def checked(made: object) -> Wrong | None:
        if not isinstance(made, list | tuple) or not made:
            return check(made)
        return next((wrong for one in made if (wrong := check(one)) is not None), None)

    return checked


def _no_optimizer(made: object) -> Wrong | None:
    example = "`return torch.optim.AdamW(params, lr=1e-3)`"
    if made is None:
        return Wrong("`optimizer` returned None", f"return the optimizer: {example}")
    if isinstance(made, type):
        return Wrong(
            f"`optimizer` returned {kind(made)}, not an instance",
            f"call it with the parameters: `return {made.__name__}(params)`",
        )
    missing = [name for name in ("param_groups", "step") if not hasattr(made, name)]
    return (
        Wrong(
            f"`optimizer` returned {kind(made)}, which has no `{missing[0]}`",
            f"return a torch.optim.Optimizer, or a list of them: {example}",
        )
        if missing
        else None
    )


def _no_schedule(made: object) -> Wrong | None:
    example = "`return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)`"
    if made is None:
        return Wrong("`lr_schedule` returned None", f"return the schedule: {example}")
    if isinstance(made, type):
        return Wrong(
            f"`lr_schedule` returned {kind(made)}, not an instance",
            f"call it with the optimizer: `return {made.__name__}(optimizer, ...)`",
        )
    step = getattr(made, "step", None)
    if not callable(step):
        how = (
            "wrap it: `return torch.optim.lr_scheduler.LambdaLR(optimizer, f)`"
            if callable(made)
            else f"return a learning rate scheduler: {example}"
        )
        return Wrong(f"`lr_schedule` returned {kind(made)}, which has no method `step`", how)
    try:
        inspect.signature(step).bind()
    except TypeError:
        first = next(iter(inspect.signature(step).parameters))
        what = (
            f"{type(made).__name__}.step needs `{first}`, but the schedule that `lr_schedule` returns is stepped"
            " without arguments"
        )
        return Wrong(what, f"use a schedule that depends only on the step number: {example}")
    except ValueError:
        return None
    return None


_RESULTS: Mapping[str, Callable[[object], Wrong | None]] = {
    "model": _no_module,
    "optimizer": _each(_no_optimizer),
    "lr_schedule": _each(_no_schedule),
    "on_step": lambda _: None,  # its result is ignored
}


def wrong_max_norm(value: object) -> Wrong | None:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if number is None or (isinstance(number, Real) and not isinstance(number, bool) and float(number) > 0):
        return None
    return Wrong(
        f"`max_norm` is {_shortened(repr(value))}, not a positive number",
        "set it to the largest allowed norm of the gradients, such as `max_norm = 1.0`",
    )


def wrong_ema(value: object) -> Wrong | None:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if number is None or (isinstance(number, Real) and not isinstance(number, bool) and 0 <= float(number) < 1):
        return None
    return Wrong(
        f"`ema` is {_shortened(repr(value))}, not a number from 0 to below 1",
        "set it to the decay of the moving averages of the weights, such as `ema = 0.999`",
    )


def wrong_loss(result: object) -> Wrong | None:
    """A result of the loss that is neither a tensor, nor a pair (sum, count) of tensors, nor a dict of terms."""
    if isinstance(result, torch.Tensor):
        return None
    if isinstance(result, Mapping) and result:
        return _wrong_terms(result)
    if result is None:
        return Wrong("`loss` returned None", "return the loss: `return` is missing at the end of the function")
    if isinstance(result, int | float | torch.SymInt | torch.SymFloat):
        return Wrong(
            "`loss` returned a Python number, which has no gradient",
            "return the tensor itself, without `.item()` or `float()`",
        )
    if not isinstance(result, tuple | list) or len(result) != 2:
        return Wrong(
            f"`loss` returned {kind(result)}", "return a scalar tensor, (sum, count), or a dict of terms to add"
        )
    if not isinstance(result[0], torch.Tensor):
        return Wrong(f"the sum that `loss` returned is {kind(result[0])}", "return (sum, count) as tensors")
    if not isinstance(result[1], torch.Tensor):
        help = (
            "count with torch operators, such as `(target != -100).sum()`; if the count is the same for every batch,"
            " return the mean"
        )
        return Wrong(f"the count that `loss` returned is {kind(result[1])}, not a tensor", help)
    return None


def _wrong_terms(terms: Mapping[Any, object]) -> Wrong | None:
    """Terms that cannot be added. `loss` beside others may already be their sum, so that adding it counts them
    twice."""
    if "loss" in terms and len(terms) > 1:
        return Wrong(
            "`loss` returned a dict that has `loss` and other entries",
            'return the tensor to minimise, `result["loss"]`; or a dict of terms, which are added',
        )
    for name, value in terms.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            return Wrong(
                f"the entry {name!r} of the dict that `loss` returned is {kind(value)}{shape}",
                "return a dict of scalar tensors, which are added",
            )
    return None
