"""A declared precision: `precision = "bf16-mixed"` in a model file, or `--precision`.

`bf16-mixed` runs the forward and the loss in `torch.autocast` with bfloat16; weights, gradients and the optimizer stay
in float32. `bf16-true` converts the model and its floating-point inputs to bfloat16; updates are made on float32 master
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.user.user_code import Wrong

MIXED, TRUE = "bf16-mixed", "bf16-true"
PRECISIONS = (MIXED, TRUE)


def wrong_precision(value: object) -> Wrong | None:
    if value is None or value in PRECISIONS:
        return None
    if isinstance(value, str) and "16" in value and not value.startswith("bf"):
        return Wrong(
            f'precision "{value}" is not supported: float16 needs a loss scale',
            f'use `precision = "{MIXED}"`, which has the range of float32',
        )
    return Wrong(f"`precision` is {value!r}", f'set it to "{MIXED}" or "{TRUE}", or leave it out for that of the model')


@dataclass(frozen=True)
class InPrecision:
    """Makes the model in a precision."""

    make: Callable[[], Any]
    precision: str

    @property
    def __wrapped__(self) -> Callable[[], Any]:
        """For inspect: the line is that of the function itself."""
        return self.make

    def __call__(self) -> Any:
        model = self.make()
        if isinstance(model, nn.Module):  # anything else is refused
            if self.precision == TRUE:
                model.to(torch.bfloat16)
            _wrap_forward(model, _in_autocast if self.precision == MIXED else _on_bfloat16)
        return model


def loss_in(loss: Callable[[Any, Any], Any], precision: str) -> Callable[[Any, Any], Any]:
    """A loss that belongs to a model in a precision. A module may have weights, and stays one."""
    if precision != MIXED:
        return loss
    if not isinstance(loss, nn.Module):
        return _in_autocast(loss)
    _wrap_forward(loss, _in_autocast)
    return loss


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _wrap_forward(module: nn.Module, wrap: Wrap) -> None:
    """By a class of its own: an attribute would be shared by copies of the module."""
    kind: Any = type(module)
    module.__class__ = _wrapped(kind, wrap)


@cache
def _wrapped(kind: Any, wrap: Wrap) -> type[nn.Module]:
    if getattr(kind, _MARK, None) is wrap:
        return kind  # type: ignore[no-any-return]
    body = {"forward": wrap(kind.forward), _MARK: staticmethod(wrap), "__module__": kind.__module__}
    found = type(kind.__name__, (kind,), body)
    found.__qualname__ = kind.__qualname__
    return found


_MARK = "__piperlang_precision__"


def _on_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    def converted(leaf: Any) -> Any:
        return leaf.to(torch.bfloat16) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(converted, (args, kwargs))
        return function(*args, **kwargs)

    return called


def _in_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        kind = next((tensor.device.type for tensor in tensors), "cpu")
        with torch.autocast(kind, torch.bfloat16):
            return function(*args, **kwargs)

    return called
