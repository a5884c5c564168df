"""Models that the user's code keeps a reference to. They are restored after a comparison, and using them during
training is refused.

`model()` may return an object that the file keeps (`NET = Net()` at module level, a list that it is appended to).
Devices train their own parts of the weights, so code that uses the kept object (labels from the current weights in
`data`, clamping in `on_step`) would work with weights that are not trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from piperlang.capture.user.where import here
from piperlang.diagnostics import PiperError, error

_held: WeakSet[nn.Module] = WeakSet()
_parts: WeakSet[nn.Module] = WeakSet()
"""All modules of all models that `model()` has given."""


def hold(model: nn.Module) -> None:
    """Remember a model that user code may hold a reference to."""
    _held.add(model)
    add_part(model)


def add_part(module: nn.Module) -> None:
    """A loss may be a module, which is traced with the model."""
    _parts.update(module.modules())


def is_part_of_model(module: nn.Module) -> bool:
    """Whether `model()` has given it: devices train their own parts of its tensors."""
    return module in _parts


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model, to restore them after a comparison changed them."""
    return {name: value.detach().clone() for name, value in _tensors(model)}


@torch.no_grad()
def restore(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, value in _tensors(model):
        value.grad = None
        value.data = before.get(name, value.data)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def refuse_use(traced_again: bool = False) -> list[nn.Module]:
    """From now on, using parameters of these models is an error: training has begun. Returns the models.
    `traced_again`: they become `usable` when a batch of another shape comes, so their values are not freed."""
    models = list(_held)
    _held.clear()
    _refuse(models, traced_again)
    return models


def _refuse(models: Iterable[nn.Module], traced_again: bool) -> None:
    for model in models:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, _Untrained | _Frozen):
                    module._parameters[name] = refused = (
                        _Untrained(torch.empty(0)) if parameter.requires_grad else _Frozen(parameter.detach(), False)
                    )
                    refused.initial = parameter if traced_again else None


@contextmanager
def usable() -> Iterator[None]:
    """Inside, models have their parameters with the initial values, and can be traced."""
    refused = [
        (module, name, parameter)
        for module in list(_parts)
        for name, parameter in module._parameters.items()
        if isinstance(parameter, _Untrained | _Frozen)
    ]
    before = set(_held)
    for module, name, parameter in refused:
        module._parameters[name] = parameter.initial
    try:
        yield
    finally:
        for module, name, parameter in refused:
            module._parameters[name] = parameter
        if refused:  # what `model` has returned meanwhile, too
            _refuse(set(_held) - before, traced_again=True)


def refuses_use(tensor: torch.Tensor) -> bool:
    """Whether it stands for a parameter of a model whose training has begun."""
    return isinstance(tensor, _Untrained | _Frozen)


class _Untrained(nn.Parameter):
    initial: nn.Parameter | None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refused()


class _Frozen(nn.Parameter):
    """A parameter that is not trained may be read, but not changed or trained."""

    initial: nn.Parameter | None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__set__" or (name.endswith("_") and not name.endswith("__")):
            raise _refused()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _refused() -> PiperError:
    return error(
        "P0808",
        "this code uses a model object that is not being trained",
        here(),
        notes=["devices train copies of what `model` returns; this object still has the initial weights"],
        help=(
            "compute values that depend on the current weights in the model's forward or in the loss; read trained"
            " weights from weights.pt in the run folder"
        ),
    )
