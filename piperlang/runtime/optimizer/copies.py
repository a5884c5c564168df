"""Copies of the user's optimizer: the same class, options and attributes, on the local shards of some weights."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Written
from piperlang.ir.layout import Box
from piperlang.runtime.box import take
from piperlang.runtime.optimizer.user import ELEMENTWISE, PER_PARAMETER, step_hooks

Refuse = Callable[[str, str], PiperError]
"""Makes the error for a weight, from its name and the reason."""


class WeightPart(NamedTuple):
    """The part of a weight that an update changes: a box of it and, where ZeRO shards further, a flat interval of that
    box."""

    weight: str
    now: torch.Tensor
    box: Box
    flat: tuple[int, int] | None
    partial: bool

    @classmethod
    def of_shard(
        cls, weight: str, now: torch.Tensor, box: Box, flat: tuple[int, int] | None, partial: bool
    ) -> WeightPart:
        """An interval that is all of the box has the shape of the box: its optimizer may need the matrix."""
        shape = [high - low for low, high in box]
        if flat != (0, prod(shape)):
            return cls(weight, now, box, flat, partial)
        return cls(weight, now.view(shape), box, None, partial)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        local = take(whole, self.box)
        return local if self.flat is None else local.flatten()[slice(*self.flat)]


class DeviceUpdate(NamedTuple):
    """One update instruction of one device."""

    device: int
    key: ValueId
    parts: Sequence[WeightPart]
    by: Written | None = None
    """The directive that shards its weights, if known."""


def without_overlap(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements can be written one by one: the gradient of a sum is one number, expanded.

    Private API: `torch._debug_has_internal_overlap` (torch 2.11 and 2.13); 0 if no two elements share memory."""
    return gradient.clone() if torch._debug_has_internal_overlap(gradient) else gradient


SKIP_ON_DEVICE = {optim.Adam, optim.AdamW}
"""Those whose fused kernels take `found_inf` (torch 2.11 to 2.13). That of SGD does, too, but then leaves a momentum
that was never written."""


class LocalOptimizer:
    """A copy, and the weights that it will step: it steps when all its updates of a training step have arrived."""

    def __init__(self, optimizer: optim.Optimizer, updates: int) -> None:
        self.optimizer, self.updates = optimizer, updates
        self.writes = type(optimizer) not in ELEMENTWISE | PER_PARAMETER or bool(step_hooks(optimizer))
        """Whether its steps may write into gradients: those of torch do not."""
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.skips = type(optimizer) in SKIP_ON_DEVICE and fused and not step_hooks(optimizer)
        """Whether the device itself can leave out a step, so that the host does not wait for the decision."""
        self.on_device = False
        """Whether its steps need nothing of the host but a learning rate."""
        self.skip: torch.Tensor | None = None
        self.arrived = 0
        self.pending: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.replaced: set[nn.Parameter] = set()
        """Those to which it has assigned another tensor, which may be one of its states: they keep it, as a float32
        master weight keeps its own."""
        self.lock = threading.Lock()

    def update(
        self,
        parameters: Sequence[nn.Parameter | None],
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        skip: torch.Tensor | None = None,
    ) -> None:
        """Streams may be threads, so two updates may arrive at the same time. `skip`: 1 on the device if nothing is to
        be updated, otherwise 0."""
        self.skip = skip
        for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
            if parameter is None:
                continue
            weight = weight.view(parameter.shape)
            if parameter.dtype == weight.dtype and parameter not in self.replaced:
                parameter.data = weight
            parameter.grad = self._own(gradient.view_as(weight), weight, parameter.dtype)
            self.pending.append((parameter, weight))
        with self.lock:
            self.arrived += 1
            ready = self.arrived == self.updates
        if ready:
            self._step()

    def _own(self, gradient: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As in plain training: a gradient has the strides of its weight, which fused kernels ask for, and nothing else
        refers to it; weights that the model adds up have one tensor for both."""
        if gradient.stride() != weight.stride():
            return torch.empty_like(weight, dtype=dtype).copy_(gradient)
        found = without_overlap(gradient.to(dtype))
        return found.clone() if self.writes and found.data_ptr() == gradient.data_ptr() else found

    @torch.no_grad()
    def _step(self) -> None:
        _settle(self.updates > 1 and self.pending[0][1].is_cuda)
        if self.skip is not None:
            self.optimizer.found_inf = self.skip  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
        try:
            self.optimizer.step()
        finally:
            vars(self.optimizer).pop("found_inf", None)
        for parameter, weight in self.pending:
            if parameter.data_ptr() != weight.data_ptr():
                weight.copy_(parameter)
                self.replaced.add(parameter)
        _settle(self.updates > 1 and self.pending[0][1].is_cuda)
        self.forget()

    def forget(self) -> None:
        """The updates that have arrived."""
        for parameter, _ in self.pending:
            parameter.grad = None
        self.pending.clear()
        self.arrived = 0


def _settle(several: bool) -> None:
    """If updates come from several CUDA streams, all are stepped on one of them."""
    if several:
        torch.cuda.synchronize()


def copied(
    user: optim.Optimizer, local: Mapping[int, nn.Parameter], known: dict[int, Any], trained: Collection[int]
) -> optim.Optimizer:
    """A copy without groups and without the state of parameters. `local`: the parameters of the copy, by the id of the
    original parameter. `known` receives the objects that are copied along, by the id of the original. `trained`: ids of
    the parameters of all optimizers.

    copy.copy is not used because it calls `__getstate__`, which drops most attributes."""
    made: optim.Optimizer = type(user).__new__(type(user))
    known |= {id(user): made, **local}
    for name, value in vars(user).items():
        # A learning rate schedule wraps `step` on the instance; that wrapper would step the user's own optimizer.
        if name not in ("param_groups", "state", "step"):
            try:
                vars(made)[name] = copy.deepcopy(value, known)
            except Exception as problem:
                raise _no_copy(
                    user, f"its attribute `{name}`: {problem}", "use attributes that copy.deepcopy can copy"
                ) from problem
    if any(parameter in known and parameter not in local for parameter in trained):
        raise _no_copy(
            user,
            "an attribute other than its groups references parameters",
            "keep parameters only in `param_groups` and `state`",
        )
    made.state, made.param_groups = defaultdict(dict), []
    for key, value in user.state.items():
        if not isinstance(key, torch.Tensor):
            made.state[key] = copy.deepcopy(value, known)
    return made


def _no_copy(user: optim.Optimizer, why: str, help: str) -> PiperError:
    return error("P0601", f"{type(user).__name__} cannot be copied for each update", notes=[why], help=help)


def copied_group(group: Mapping[str, Any], local: Mapping[int, nn.Parameter]) -> dict[str, Any]:
    """The group with the parameters of the copy; parameters without one are left out."""
    here = [i for i, parameter in enumerate(group["params"]) if id(parameter) in local]
    made = copy.deepcopy(options(group))
    made["params"] = [local[id(group["params"][i])] for i in here]
    if "param_names" in group:
        made["param_names"] = [group["param_names"][i] for i in here]
    return made


def copied_state(state: Any, part: WeightPart, whole: nn.Parameter, parameter: nn.Parameter, refuse: Refuse) -> Any:
    """The state that an optimizer has for a weight before the first step, sharded as the weight is."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if value.shape == whole.shape:
            dtype = parameter.dtype if value.dtype == whole.dtype else value.dtype
            return part.of(value).to(parameter.device, dtype, copy=True)
        if part.partial and value.numel() > 1:
            raise refuse(part.weight, f"is sharded, but its state of shape {list(value.shape)} cannot be")
        return value.clone()

    return pytree.tree_map(cut, state)


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def same_option(a: Any, b: Any) -> bool:
    """Whether two options are equal; they may be tensors."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option. A tensor is changed in place, as LRScheduler does."""
    old = group.get(name)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        old.copy_(value)
    else:
        group[name] = copy.deepcopy(value)
