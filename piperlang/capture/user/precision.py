"""A declared precision: `precision = "bf16-mixed"` in a model file, or `--precision`.

`bf16-mixed` runs the forward and the loss in `torch.autocast` with bfloat16; weights, gradients and the optimizer stay
in float32. `bf16-true` converts the model to bfloat16; updates are made on float32 master weights."""

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
            if self.precision == MIXED:
                _enter_autocast(model)
            else:
                model.to(torch.bfloat16)
        return model


def loss_in(loss: Callable[[Any, Any], Any], precision: str) -> Callable[[Any, Any], Any]:
    """A loss that belongs to a model in a precision. A module may have weights, and stays one."""
    if precision != MIXED:
        return loss
    if not isinstance(loss, nn.Module):
        return _in_autocast(loss)
    _enter_autocast(loss)
    return loss


def _enter_autocast(module: nn.Module) -> None:
    """Not by an attribute of the module, which copies of it would share."""
    kind: Any = type(module)
    module.__class__ = _class_in_autocast(kind)


@cache
def _class_in_autocast(kind: Any) -> type[nn.Module]:
    """The class with its forward in autocast."""
    if getattr(kind, _MARK, False):
        return kind  # type: ignore[no-any-return]
    body = {"forward": _in_autocast(kind.forward), _MARK: True, "__module__": kind.__module__}
    found = type(kind.__name__, (kind,), body)
    found.__qualname__ = kind.__qualname__
    return found


_MARK = "__piperlang_autocast__"


def _in_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        kind = next((tensor.device.type for tensor in tensors), "cpu")
        with torch.autocast(kind, torch.bfloat16):
            return function(*args, **kwargs)

    return called
