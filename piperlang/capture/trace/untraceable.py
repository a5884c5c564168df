"""Why a model cannot be traced: at the user's line, with its module, instead of torch.export's own reports."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from traceback import walk_tb
from typing import Any

import torch
from torch import fx, nn

from piperlang.capture.trace.random import is_of_loss, module_of
from piperlang.capture.trace.repeated import Unlike
from piperlang.capture.user.user_code import (
    Wrong,
    device_help,
    kind,
    module_of_frames,
    said,
    without_values,
    wrong_loss,
)
from piperlang.capture.user.where import line_in, line_of, line_of_function, line_of_operator, text_of
from piperlang.diagnostics import PiperError, error, noted_errors

_VALUES = "compute with the tensor itself, without `.item()` and `.tolist()`, and do not print or format its values"
_KERNEL = "wrap the kernel with torch.library.custom_op and describe its result with register_fake"


class UserRaised(Exception):
    """An exception of the user's forward or loss while it was traced. Not a RuntimeError: for those, torch.export
    prints the graph so far."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(said(problem))
        self.problem = problem


@contextmanager
def user_code() -> Iterator[None]:
    """Marks exceptions raised inside as the user's. A refusal that the user's code catches, and goes on with something
    that plain training does not do, is raised again."""
    with noted_errors() as refusals:
        try:
            yield
        except (PiperError, KeyboardInterrupt, Unlike):
            raise
        except BaseException as problem:
            raise UserRaised(problem) from problem
    if refusals:
        raise refusals[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's loggers and warnings on standard error, unless TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    loggers = [
        logging.getLogger(name)
        for name in ("torch", *logging.root.manager.loggerDict)
        if name == "torch" or name.startswith("torch.")
    ]
    handlers = {handler for logger in loggers for handler in logger.handlers if type(handler) is logging.StreamHandler}
    for handler in handlers:
        handler.addFilter(_nothing)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            warnings.filterwarnings("ignore", message=r".*(during export|inside torch.export)")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def untraceable(problem: Exception, model: nn.Module, loss: Callable[..., Any]) -> PiperError:
    """The diagnostic for an exception raised while the model was traced."""
    if not isinstance(problem, UserRaised):
        help = "make the model pass torch.export.export(model, inputs, strict=False)"
        wrong = _why(problem) or Wrong("the model cannot be traced", help)
        notes = [] if said(problem) in wrong.message else [f"torch.export: {said(problem)}"]
        return error("P0802", wrong.message, line_of(problem), notes=notes, help=wrong.help)
    path, module = module_of_frames(problem.problem, model)
    if module is None:
        return _raised("loss", "loss(output, target)", loss, problem.problem, _arguments(problem.problem, loss))
    forward = getattr(type(module), "forward", None)
    notes = [f"in module {path}"] if path else []
    if not path and isinstance(problem.problem, TypeError) and line_of(problem.problem) is None:
        notes = [
            "the model is called with the input of a batch: a dict as keyword arguments, a tuple or list as positional"
        ]
    return _raised("model.forward", "model()(input)", forward, problem.problem, notes)


def _raised(name: str, call: str, function: Any, problem: BaseException, notes: list[str]) -> PiperError:
    """The diagnostic for an exception of the user's code: a limitation of torch.export, or an exception that eager
    PyTorch would raise, too."""
    line, limit = line_of(problem), _why(problem)
    help = device_help(problem) or f"fix this line; to see the full traceback, call `{call}` in Python"
    wrong = limit or Wrong(f"{name} raised {said(problem)}", help)
    label = "raised here" if line and not limit else ""
    return error("P0802", wrong.message, line or line_of_function(function), label, notes=notes, help=wrong.help)


def _why(problem: BaseException) -> Wrong | None:
    """The limitation of torch.export that caused the exception, if it is a known one."""
    text, name = text_of(problem), type(problem).__name__
    if "data-dependent" in text or name in ("DynamicOutputShapeException", "DataDependentOutputException"):
        if "Size-like symbols: none" in text or name == "DataDependentOutputException":
            return Wrong(
                "data-dependent control flow: a branch or a loop reads the value of a tensor",
                "compute both sides and choose with torch.where(condition, a, b); branches on shapes are fine",
            )
        return _unknown_shape()
    if "numpy" in text.lower() and "tensor" in text.lower():
        return Wrong(
            "the model calls NumPy on a tensor, which torch.export cannot record",
            "use the torch operator of the same name, such as torch.tanh for np.tanh",
        )
    if "data pointer" in text:
        return Wrong("the model reads the memory of a tensor, which torch.export cannot record", _KERNEL)
    if name == "UnsupportedOperatorException" or "fake impl" in text or "'Meta' backend" in text:
        return Wrong(f"an operator cannot be traced: {said(problem)}", _KERNEL)
    if without_values(problem) and not device_help(problem):
        return Wrong("the model reads the values of a tensor, which are unknown while it is traced", _VALUES)
    return None


def _unknown_shape() -> Wrong:
    return Wrong(
        "data-dependent shape: the size of a tensor depends on the values of another",
        "keep shapes fixed: multiply by a mask or use torch.where; for dropless MoE routing, use"
        " piperlang.routed_linear",
    )


@contextmanager
def differentiating(node: fx.Node | None = None) -> Iterator[None]:
    """While the backward is traced: exceptions of the user's own backward, and operators without a backward, become
    diagnostics.

    `node`: the operator that is differentiated, if it is a single one."""
    try:
        with warnings.catch_warnings(record=True) as told:
            yield
    except (PiperError, KeyboardInterrupt):
        raise
    except BaseException as problem:
        # Autograd's warning contains the line of the forward.
        trace = "\n".join(str(warning.message) for warning in told)
        line = line_of(problem)
        why = _why(problem)
        if line is None and why is None and not any(words in text_of(problem) for words in _NO_BACKWARD):
            raise
        wrong = why or Wrong(f"the backward of the model raised {said(problem)}", _BACKWARD)
        notes = ["while the backward was traced", *([module_of(node)] if node is not None else [])]
        span = line or line_in(trace) or (line_of_operator(node) if node is not None else None)
        raise error(
            "P0802", wrong.message, span, "raised here" if line else "", notes=notes, help=wrong.help
        ) from problem


_NO_BACKWARD = (
    "no autograd formula",
    "derivative for",
    "invalid gradient",
    "incorrect number of gradients",
    "not differentiable",
    "inplace operation",
    "in-place operation",
)
_BACKWARD = (
    "fix the backward: `backward` of a torch.autograd.Function, or the function given to `register_autograd` for"
    " a custom operator"
)


def refuse_sparse(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise error(
                "P0802",
                "the model creates sparse gradients, which are not supported",
                line_of_operator(node),
                notes=[module_of(node)],
                help="remove `sparse=True`",
            )


def refuse_cond(graph: fx.Graph) -> None:
    """Refuse torch.cond: workers cannot unpickle its graph (tried: 2.11 and 2.13)."""
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.cond:
            raise error(
                "P0802",
                "torch.cond is not supported",
                line_of_operator(node),
                notes=[module_of(node)],
                help="compute both branches and choose with torch.where",
            )


def refuse_mistraced(graph: fx.Graph) -> None:
    """Refuse operators whose decompositions in torch compute different values than the operators, and transforms, whose
    operators compute only while the transform is open (tried: 2.13)."""
    for node in graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            raise error(
                "P0802",
                "the model uses `torch.vmap` or another transform of torch.func",
                line_of_operator(node),
                notes=[module_of(node)],
                help="write it with operators on whole batches, such as `torch.einsum` or `unsqueeze` and broadcasting",
            )
        if node.target in (
            torch.ops.aten.multilabel_margin_loss.default,
            torch.ops.aten.multilabel_margin_loss_forward.default,
        ):
            raise error(
                "P0802",
                "torch traces multilabel_margin_loss incorrectly",
                line_of_operator(node),
                notes=[module_of(node)],
                help="compute it with `clamp`, or use multilabel_soft_margin_loss",
            )


def refuse_loss(result: object, loss: Callable[..., Any]) -> None:
    """Refuse a result of the loss whose type has no gradient."""
    wrong = wrong_loss(result)
    if wrong is not None:
        raise error("P0807", wrong.message, line_of_function(loss), help=wrong.help)


def refuse_unknown_shapes(graph: fx.Graph, loss: Callable[..., Any]) -> None:
    """Refuse data-dependent shapes, which torch.export partly accepts: plans, memory and communication need to know
    every shape."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
                wrong, in_loss = _unknown_shape(), is_of_loss(node)
                raise error(
                    "P0802",
                    wrong.message,
                    line_of_operator(node) or (line_of_function(loss) if in_loss else None),
                    f"{node.target} here",
                    notes=["in the loss" if in_loss else module_of(node)],
                    help="give `bincount` a `minlength`" if "bincount" in str(node.target) else wrong.help,
                )


def _arguments(problem: BaseException, loss: Callable[..., Any]) -> list[str]:
    """A note about the arguments that the loss was called with."""
    code = getattr(unwrap(loss), "__code__", None)
    for frame, _ in walk_tb(problem.__traceback__):
        if frame.f_code is code:
            names = code.co_varnames[: min(code.co_argcount, 2)]
            return ["; ".join(f"`{name}` is {kind(frame.f_locals[name])}" for name in names if name in frame.f_locals)]
    return []
