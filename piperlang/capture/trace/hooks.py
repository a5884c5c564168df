"""Gradient hooks, and backward calls inside the forward. The traced program cannot contain them, so they are refused.

Private API, kept in this file: the dicts in which torch keeps hooks of modules and tensors (tried on torch 2.11 and
2.13)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import TorchDispatchMode

from piperlang.capture.user.prints import is_users_own
from piperlang.capture.user.where import here, is_users_file, line_of_function
from piperlang.diagnostics import PiperError, error

_REPAIR = (
    "write it as a torch.autograd.Function whose backward does the same; to clip gradients by their norm, set"
    " `max_norm` in the model file"
)


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks that the constructor registered on modules and parameters."""
    for path, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            raise _refused(hook, f"module {path or '(the model itself)'} has a backward hook")
    for hook in (*module_globals._global_backward_hooks.values(), *module_globals._global_backward_pre_hooks.values()):
        raise _refused(hook, "a backward hook is registered for all modules")
    for name, parameter in model.named_parameters():
        for hook in (
            *(parameter._backward_hooks or {}).values(),
            *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
        ):
            raise _refused(hook, f"parameter {name} has a gradient hook")


@contextmanager
def only_forward() -> Iterator[None]:
    """While a model is traced: operations that change or compute gradients are refused at the line that does it."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "register_hook", _no_hook),
        (torch.Tensor, "register_post_accumulate_grad_hook", _no_hook),
        (saved_tensors_hooks, "__enter__", _no_saved_tensors_hooks),
        (torch.inference_mode, "__enter__", _no_inference_mode),
        (torch.autograd, "grad", _no_backward),
        (torch.autograd, "backward", _no_backward),
        (TorchDispatchMode, "__enter__", _no_dispatch_mode),
        (torch.Tensor, "grad_fn", property(_no_grad_fn)),
        (torch.autograd.graph, "get_gradient_edge", _no_gradient_edge),
    ]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, value in kept:
            if value is None:  # it has it from another class
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_enter_saved, _enter_inference = saved_tensors_hooks.__enter__, torch.inference_mode.__enter__
_enter_dispatch: Any = TorchDispatchMode.__enter__
_grad_fn: Any = torch.Tensor.grad_fn


def _no_hook(self: torch.Tensor, hook: Callable[..., Any], **_: Any) -> Any:
    raise _refused(hook, "the model registers a gradient hook on a tensor", at_call=True)


def _no_saved_tensors_hooks(self: saved_tensors_hooks) -> None:
    """torch's own hooks, for checkpointing and for offloading activations, do not change gradients and are allowed."""
    if type(self) is saved_tensors_hooks:
        raise _refused(self.unpack_hook, "the model changes the tensors saved for the backward", at_call=True)
    _enter_saved(self)


def _no_inference_mode(self: torch.inference_mode) -> None:
    if self.mode:
        raise error(
            "P0810",
            "the model runs a part in inference mode",
            here(),
            "torch.inference_mode",
            help="use torch.no_grad(): its results may be used in training",
        )
    _enter_inference(self)


def _no_dispatch_mode(self: TorchDispatchMode) -> Any:
    """torch's own modes are part of the trace."""
    if is_users_own(type(self)):
        raise error(
            "P0802",
            "the model runs operators in a dispatch mode of its own",
            here(),
            f"`{type(self).__qualname__}`",
            notes=["the traced program contains operators, and not what a mode makes of them"],
            help="call functions that compute what the mode computes",
        )
    return _enter_dispatch(self)


def _no_grad_fn(self: torch.Tensor) -> Any:
    """torch's own code may look at it."""
    if is_users_file(sys._getframe(1).f_code.co_filename):
        raise _no_gradient_edge()
    return _grad_fn.__get__(self)


def _no_gradient_edge(*_: Any) -> Any:
    raise error(
        "P0810",
        "the model uses the autograd graph of its forward",
        here(),
        "`grad_fn` of a tensor",
        notes=["the traced program is differentiated as a whole, without this graph and the hooks of its nodes"],
        help=_REPAIR,
    )


def _no_backward(*_: Any, **__: Any) -> Any:
    raise error(
        "P0810",
        "the model computes gradients inside its forward",
        here(),
        notes=["the traced program is differentiated as a whole; second derivatives are not supported"],
        help=(
            "write the derivative as a formula in the forward or as a torch.autograd.Function; add an auxiliary loss"
            " to the returned loss"
        ),
    )


def _refused(hook: Callable[..., Any], what: str, at_call: bool = False) -> PiperError:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    span = here() if at_call else line_of_function(hook)
    return error(
        "P0810",
        what,
        span,
        f"hook `{name}`",
        notes=["the traced program computes gradients without calling hooks"],
        help=_REPAIR,
    )
