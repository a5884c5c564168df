"""Model and loss as one module, so that one export sees both, and what a call of it does besides giving a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.environment import recorded_reads
from piperlang.capture.state import Watch, snapshot
from piperlang.capture.untraceable import refuse_loss, user_code
from piperlang.capture.where import line_of_function
from piperlang.diagnostics import error


@dataclass
class Seen:
    """What a call of the model showed. An object of its own, because export takes back what a forward sets on a
    module."""

    watch: Watch = field(default_factory=Watch)
    set: dict[str, object] = field(default_factory=dict)
    """Attributes that the forward has set, by module path and name."""
    reassigned: list[str] = field(default_factory=list)
    """Those of them that were tensors before."""
    leaves: int = 0
    """How many values the loss gave."""
    buffers: list[str] = field(default_factory=list)
    """Whose values at the end are outputs, after the loss."""
    replaced: list[str] = field(default_factory=list)
    """Parameters that the forward has put others in the place of."""
    environment: list[str] = field(default_factory=list)
    """Environment variables that were read."""


class Observed(nn.Module):
    layout: pytree.TreeSpec
    """Of a batch: its inputs and target."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.seen = Seen()

    def forward(self, *flat: Any) -> Any:
        inputs, target = pytree.tree_unflatten(list(flat), self.layout)
        attributes, parameters = _attributes(self.model), _parameters(self.model)
        buffers = {path: (module, name, value) for path, module, name, value in _buffers(self.model)}
        before = snapshot(self.model, self.loss)
        with user_code(), recorded_reads(self.seen.environment):
            result = self.loss(called(self.model, inputs), target)
        refuse_loss(result, self.loss)
        self.seen.watch = Watch(before, snapshot(self.model, self.loss))
        self.seen.set = _changed(attributes, _attributes(self.model))
        self.seen.reassigned = [
            path.lstrip(".") for path in self.seen.set if isinstance(attributes.get(path), torch.Tensor)
        ]
        self.seen.replaced = [path for path, value in _parameters(self.model).items() if parameters.get(path) != value]
        self.seen.leaves = len(pytree.tree_leaves(result))
        # What buffers are now: an assignment to one inside a module is nothing that export notices.
        self.seen.buffers = list(buffers)
        now = [module._buffers[name] for module, name, _ in buffers.values()]
        for module, name, value in buffers.values():
            module._buffers[name] = value
        return result, now


def called(model: nn.Module, inputs: Any) -> Any:
    """The model on the inputs of a batch: a dict by name, a tuple or list one by one, anything else as it is."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _changed(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    return {path: value for path, value in after.items() if path not in before or before[path] is not value}


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None:
                yield f"{path}.{name}".lstrip("."), module, name, value


def _parameters(model: nn.Module) -> dict[str, object]:
    """What each name of a parameter stands for: the tensor, and the memory that it has."""
    return {
        f"{path}.{name}".lstrip("."): (value, value.untyped_storage()._cdata) if value is not None else None
        for path, module in model.named_modules()
        for name, value in module._parameters.items()
    }


def _attributes(model: nn.Module) -> dict[str, object]:
    standard = vars(nn.Module()).keys()
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in standard
    }


def refuse_shared_storage(model: nn.Module, read: Mapping[str, torch.Tensor]) -> None:
    """Tensors that lie in the memory of a parameter: an update of it would change the others. `read`: what the program
    reads besides parameters, by name.

    Attributes that nobody reads do no harm: those of old parametrizations, which the forward sets anew."""
    owners = {value.untyped_storage()._cdata: (name, value) for name, value in reversed(list(model.named_parameters()))}
    for name, value in (*model.named_parameters(), *model.named_buffers(), *read.items()):
        if not isinstance(value, torch.Tensor):  # a generator of random numbers
            continue
        owner, first = owners.get(value.untyped_storage()._cdata, ("", value))
        if first is not value and value.numel():
            raise error(
                "P0803",
                f"parameter {owner} and {name} share their memory",
                line_of_function(type(model).__init__),
                notes=["an update of the parameter would change the other, too"],
                help=(
                    "compute what depends on a parameter in the forward, or `clone()` it once; tie whole weights by"
                    " assigning the parameter itself"
                ),
            )


def refuse_replaced(observed: Observed) -> None:
    if observed.seen.replaced:
        raise error(
            "P0803",
            f"the forward replaces parameter {observed.seen.replaced[0]}",
            line_of_function(type(observed.model).forward),
            notes=["the next step would train another tensor than the one that the optimizer has"],
            help="compute with a new tensor, and leave the parameter as it is",
        )
