"""Model and loss as one module, so that one export records both, and the side effects of a call."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.trace.autocast import NotedGradients
from piperlang.capture.trace.experts import routed_experts
from piperlang.capture.trace.rewritten import rewritten
from piperlang.capture.trace.untraceable import refuse_loss, user_code
from piperlang.capture.user.environment import recorded_reads
from piperlang.capture.user.seeding import seeding_seen
from piperlang.capture.user.state import GENERATORS, Snapshot, StateChange, generators, is_attribute_of_model, snapshot
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import error


@dataclass
class Seen:
    """What was observed in a call of the model. A separate object, because export reverts attributes that a forward
    sets on a module."""

    watch: StateChange = field(default_factory=StateChange)
    set: dict[str, object] = field(default_factory=dict)
    """Attributes that the forward set, by module path and name."""
    reassigned: list[str] = field(default_factory=list)
    """Those of them that were tensors before."""
    leaves: int = 0
    """The number of values that the loss returned."""
    buffers: list[str] = field(default_factory=list)
    """Buffers whose final values are outputs, after the loss."""
    replaced: list[str] = field(default_factory=list)
    """Parameters that the forward replaced by other tensors."""
    environment: list[str] = field(default_factory=list)
    """Environment variables that were read."""
    seeds: bool = False
    """The forward or the loss seeded torch's generator."""

    def seeding(self) -> None:
        self.seeds = True


class Observed(nn.Module):
    layout: pytree.TreeSpec
    """The structure of a batch (inputs, target)."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.seen = Seen()
        self.first: list[Snapshot] = []
        """The state before the first call. A list, because export reverts attributes that a forward sets."""

    def left_behind(self) -> set[str]:
        """State that calls have changed and that a new model, and `seeded`, do not restore."""
        if not self.first:
            return set()
        changed = StateChange(self.first[0], snapshot(self.model, self.loss)).changed.difference(GENERATORS)
        return {name for name in changed if not is_attribute_of_model(name)}

    def forward(self, *flat: Any) -> Any:
        inputs, target = pytree.tree_unflatten(list(flat), self.layout)
        attributes, parameters = _attributes(self.model), _parameters(self.model)
        buffers = {path: (module, name, value) for path, module, name, value in _buffers(self.model)}
        before = snapshot(self.model, self.loss)
        if not self.first:
            self.first.append(before)
        watched = (user_code(), recorded_reads(self.seen.environment), seeding_seen(self.seen.seeding))
        with ExitStack() as stack:
            for context in (*watched, rewritten(), routed_experts(), NotedGradients()):
                stack.enter_context(context)
            result = self.loss(called(self.model, inputs), target)
            drawn = {name: print for name, print in generators().items() if name in before}  # they will be restored
        refuse_loss(result, self.loss)
        result = total_of(result)
        self.seen.watch = StateChange(before, {**snapshot(self.model, self.loss), **drawn})
        self.seen.set = _changed(attributes, _attributes(self.model))
        self.seen.reassigned = [
            path.lstrip(".") for path in self.seen.set if isinstance(attributes.get(path), torch.Tensor)
        ]
        self.seen.replaced = [path for path, value in _parameters(self.model).items() if parameters.get(path) != value]
        self.seen.leaves = len(pytree.tree_leaves(result))
        _refuse_created(self.model, buffers)
        # The current buffers: export does not record that a module assigns a new tensor to a buffer.
        self.seen.buffers = list(buffers)
        now = [module._buffers[name] for module, name, _ in buffers.values()]
        for module, name, value in buffers.values():
            module._buffers[name] = value
        return result, now


def called(model: nn.Module, inputs: Any) -> Any:
    """Calls the model on the inputs of a batch: a dict as keyword arguments, a tuple or list as positional arguments,
    anything else as one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def total_of(result: Any) -> Any:
    """The loss to minimise: the sum of the terms, if `loss` returns a dict of terms."""
    return sum(result.values()) if isinstance(result, Mapping) else result


def _changed(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    return {path: value for path, value in after.items() if path not in before or before[path] is not value}


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None:
                yield f"{path}.{name}".lstrip("."), module, name, value


def _refuse_created(model: nn.Module, before: Container[str]) -> None:
    """Refuse a buffer that is saved and that the forward creates: the program would create it in every step, and
    weights.pt would not have it. One that is not saved may be a cache, which may be computed again."""
    for path, module, name, _ in _buffers(model):
        if path not in before and name not in module._non_persistent_buffers_set:
            raise error(
                "P0803",
                f"the forward creates buffer {path}",
                line_of_function(type(module).forward),
                notes=["the traced program would create it anew in every step"],
                help=(
                    "register it in the constructor, with its shape and its first value; for a value that is computed"
                    " again in every call, use a local variable"
                ),
            )


def _parameters(model: nn.Module) -> dict[str, object]:
    """The tensor of each parameter name, and the memory it uses."""
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
    """Refuse tensors that share the memory of a parameter: an update of it would change them, too. `read`: tensors that
    the program reads besides parameters, by name.

    Attributes that the program does not read are allowed: old parametrizations have some that the forward sets
    again."""
    owners = {value.untyped_storage()._cdata: (name, value) for name, value in reversed(list(model.named_parameters()))}
    for name, value in (*model.named_parameters(), *model.named_buffers(), *read.items()):
        if not isinstance(value, torch.Tensor):  # a generator of random numbers
            continue
        owner, first = owners.get(value.untyped_storage()._cdata, ("", value))
        if first is not value and value.numel():
            raise error(
                "P0803",
                f"parameter {owner} and {name} share memory",
                line_of_function(type(model).__init__),
                notes=["in eager PyTorch, an update of the parameter changes the other tensor, too"],
                help=(
                    "compute values that depend on a parameter in the forward, or `clone()` it once; to tie weights,"
                    " assign the parameter itself"
                ),
            )


def refuse_replaced(observed: Observed) -> None:
    if observed.seen.replaced:
        raise error(
            "P0803",
            f"the forward replaces parameter {observed.seen.replaced[0]}",
            line_of_function(type(observed.model).forward),
            notes=["the next step would use a different tensor than the one that the optimizer updates"],
            help="compute with a new tensor and do not reassign the parameter",
        )
