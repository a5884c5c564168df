"""Weight updates: the user's optimizer, copied for the weights of each update instruction.

The user's own optimizer is created once per process, on whole weights, so that parameter groups can be chosen by name,
shape or position. It is never stepped: it holds the options, which the learning rate schedule changes. Copies of it are
stepped; their groups contain the local shards of the same weights."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from piperlang.capture.user.prints import text_of
from piperlang.capture.user.state import Frozen
from piperlang.capture.user.watched import WatchedModel
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Written
from piperlang.plan.instructions import Update
from piperlang.plan.plan import Plan
from piperlang.runtime.optimizer.copies import (
    LocalOptimizer,
    WeightPart,
    copied,
    copied_group,
    copied_state,
    options,
    same_option,
    set_option,
)
from piperlang.runtime.optimizer.options_only import (
    SharedState,
    check_groups,
    check_options,
    options_only,
    refuse_use,
    what_steps_read,
)
from piperlang.runtime.optimizer.settings import Settings, digest, settings_of_optimizer, settings_of_weights
from piperlang.runtime.optimizer.user import (
    UpdateScope,
    call_optimizer,
    call_schedule,
    never_stepped,
    refused,
    scope_of,
    step_schedule,
)

HALF = (torch.bfloat16, torch.float16)


def default_optimizer(params: Any) -> optim.Optimizer:
    """The optimizer of a model file without `optimizer`."""
    return optim.AdamW(params, lr=1e-3)


class DeviceUpdate(NamedTuple):
    """One update instruction of one device."""

    device: int
    key: ValueId
    parts: Sequence[WeightPart]
    by: Written | None = None
    """The directive that shards its weights, if known."""


class Optimizers:
    """All optimizers of one process, which may run several devices."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        make_schedule: Callable[[Any], Any] | None,
        updates: Sequence[DeviceUpdate],
        masters: bool = False,
        updated: Mapping[str, str] | None = None,
    ) -> None:
        """`masters`: weights in half precision have a float32 master weight, which is updated. `updated`: every weight
        that some device updates, with the script line that shards its update; without it, `updates` must be those of
        all devices."""
        self.make, self.masters = make, masters
        self.updated = (
            updated if updated is not None else {part.weight: "" for update in updates for part in update.parts}
        )
        self.local: dict[tuple[int, ValueId], tuple[LocalOptimizer, list[nn.Parameter | None]]] = {}
        """For every update, its optimizer and the parameter of each of its weights: None for a weight that is in no
        group."""
        self.schedule: Any = None
        self.passed_on = ""
        """A digest of what the schedule has changed in the last step, to be compared with other processes; empty where
        no schedule was stepped."""
        self.flags = [
            (name, weakref.ref(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
        ]
        """Of the model that the user's code may still reference; piperlang does not."""
        self.reads: Frozen | None = None
        """What the optimizer reads in a step, besides itself."""
        self.bystanders: list[WatchedModel] = []
        """What the model has besides trained weights: the model itself, and what copies of the optimizer hold of it."""
        if any(parameter.requires_grad for parameter in model.parameters()):
            self.user = call_optimizer(make, model)
            trained = {id(parameter) for group in self.user.param_groups for parameter in group["params"]}
            self.bystanders.append(WatchedModel(model.named_modules(), trained))
            self.scope = scope_of(self.user, make)
            self._make_copies(model, updates)
            self.shared = SharedState(self.user, make, devices=len({update.device for update in updates}))
            self.reads = what_steps_read(self.user, make)
            if make_schedule is not None:
                self.schedule, self.make_schedule = call_schedule(make_schedule, self.user), make_schedule
                self._pass_on()

    def update(
        self, device: int, key: ValueId, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Update weights in place: now, or with the last update of the device if the optimizer reads all weights."""
        if (device, key) in self.local:
            optimizer, parameters = self.local[device, key]
            optimizer.update(parameters, weights, gradients)
            if any(parameter is not None and not parameter.requires_grad for parameter in parameters):
                raise _frozen("of a weight", self.make)

    def advance(self) -> None:
        """The end of a training step on all devices of the process: the schedule is stepped, and the options it changed
        are copied to the copies."""
        self.passed_on = ""
        if not self.local:
            return
        self._check_bystanders("when the optimizer steps", self.make)
        self.shared.check()
        check_options(self.user, self.options, self.make)
        if self.schedule is None:
            return
        step_schedule(self.schedule, self.user, self.make_schedule)
        self._check_bystanders("when the schedule of `lr_schedule` steps", self.make_schedule)
        for name, reference, flag in self.flags:
            parameter = reference()
            if parameter is not None and parameter.requires_grad != flag:
                raise _frozen(f"of {name}", self.make_schedule)
        self._pass_on()

    def _check_bystanders(self, when: str, by: Callable[..., Any]) -> None:
        for watched in self.bystanders:
            watched.check(when, line_of_function(by))

    def _pass_on(self) -> None:
        """Copies the options that the schedule changed, and only those, because some optimizers write into their own
        groups."""
        check_groups(self.user, self.stand_ins, self.make_schedule)
        changes = []
        for group, names, last, copies in zip(
            self.user.param_groups, self.names, self.options, self.groups, strict=True
        ):
            for name, value in options(group).items():
                if name not in last or not same_option(last[name], value):
                    last[name] = copy.deepcopy(value)
                    changes.append((names[:1], name, text_of(value)))
                    for one in copies:
                        set_option(one, name, value)
        self.passed_on = digest(changes)

    def settings(self) -> Settings:
        """What the user's functions have decided in this process, to be compared with other processes."""
        if self.reads is None:
            return {}
        state = {name: {"state": text} for name, text in self.initial_state.items()}
        weights = settings_of_weights(self.user, self.names)
        return {name: {**values, **state.get(name, {})} for name, values in weights.items()} | {
            "": {**settings_of_optimizer(self.user), **self.reads.plain()}
        }

    def discard(self) -> None:
        """Discards optimizers that were made for a comparison: user code must not use them any more."""
        if self.local:
            refuse_use(self.user)

    def states(self) -> list[Any]:
        """The state of every weight that is updated here."""
        found = {id(local): local.optimizer for local, _ in self.local.values()}
        return [state for optimizer in found.values() for state in optimizer.state.values()]

    # --------------------------------------------------------------------------------------------------------- copies

    def _make_copies(self, model: nn.Module, updates: Sequence[DeviceUpdate]) -> None:
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)  # a tied weight has its first name
        whole = {first[id(parameter)]: parameter for group in self.user.param_groups for parameter in group["params"]}
        self.names = [sorted(first[id(parameter)] for parameter in group["params"]) for group in self.user.param_groups]
        """The weights of every group of the user's optimizer."""
        self.initial_state = {name: text_of(self.user.state[p]) for name, p in whole.items() if p in self.user.state}
        self.groups: list[list[dict[str, Any]]] = [[] for _ in self.user.param_groups]
        """For every group of the user's optimizer, the groups of copies with its options."""
        for together in self._together(whole, updates):
            self._copy(model, whole, together)
        self.options = [copy.deepcopy(options(group)) for group in self.user.param_groups]
        never_stepped(self.user)
        # The model is unsharded and may be large: from here on only the options are needed. The schedule is created
        # after this and never has access to weights.
        self.stand_ins = options_only(self.user)

    def _together(self, whole: Mapping[str, nn.Parameter], updates: Sequence[DeviceUpdate]) -> list[list[DeviceUpdate]]:
        """Which updates share a copy of the optimizer: each has its own, but those of a device share one if the
        optimizer reads all weights."""
        if self.scope is not UpdateScope.ELEMENT:
            for update in updates:
                divided = next((part.weight for part in update.parts if part.partial and part.weight in whole), None)
                if divided is not None:
                    raise self._refused(divided, "is sharded", update.by)
        if self.scope is not UpdateScope.MODEL:
            return [[update] for update in updates]
        devices: dict[int, list[DeviceUpdate]] = {}
        for update in updates:
            devices.setdefault(update.device, []).append(update)
        for device, its in devices.items():
            here = {part.weight for update in its for part in update.parts}
            missing = next((name for name in whole if name in self.updated and name not in here), None)
            if missing is not None:
                raise self._refused(missing, f"is not on device {device}")
        return list(devices.values())

    def _copy(self, model: nn.Module, whole: Mapping[str, nn.Parameter], updates: Sequence[DeviceUpdate]) -> None:
        """One copy of the optimizer for the weights of some updates."""
        parameters = [
            [self._parameter(part) if part.weight in whole else None for part in update.parts] for update in updates
        ]
        parts = [part for update in updates for part in update.parts]
        pairs = [(part, p) for part, p in zip(parts, chain(*parameters), strict=True) if p is not None]
        if not pairs:
            return
        if self.scope is UpdateScope.MODEL:
            # Parameters that no device updates never have a gradient. An optimizer that reads all weights still gets
            # them.
            others = whole.keys() - {part.weight for part, _ in pairs}
            pairs += [
                _unread(name, parameter, pairs[0][1].device) for name, parameter in whole.items() if name in others
            ]
        local = {id(whole[part.weight]): parameter for part, parameter in pairs}
        known: dict[int, Any] = {}
        made = copied(self.user, local, known)
        held = [(path, known[id(module)]) for path, module in model.named_modules() if id(module) in known]
        self.bystanders.append(WatchedModel(held, {id(parameter) for parameter in local.values()}))
        for part, parameter in pairs:
            original = whole[part.weight]
            if original in self.user.state:
                made.state[parameter] = copied_state(
                    self.user.state[original], part, original, parameter, self._refused
                )
        for group, copies in zip(self.user.param_groups, self.groups, strict=True):
            one = copied_group(group, local)
            if one["params"]:
                self._refuse_tensors(
                    group, [part for part, parameter in pairs if any(parameter is its for its in one["params"])]
                )
                made.param_groups.append(one)
                copies.append(one)
        optimizer = LocalOptimizer(made, len(updates))
        self.local |= {
            (update.device, update.key): (optimizer, its) for update, its in zip(updates, parameters, strict=True)
        }

    def _refuse_tensors(self, group: Mapping[str, Any], parts: Sequence[WeightPart]) -> None:
        """Refuse tensor options that may belong to the elements of a weight that is sharded."""
        divided = next((part.weight for part in parts if part.partial), None)
        name = next(
            (name for name, value in options(group).items() if isinstance(value, torch.Tensor) and value.numel() > 1),
            None,
        )
        if divided is not None and name is not None:
            raise error(
                "P0601",
                f"option `{name}` of a group is a tensor of shape {list(group[name].shape)}, but weight {divided} of"
                " the group is sharded",
                line_of_function(self.make),
                help=(
                    "keep per-element values of a weight in the optimizer's state: `self.state[p]`, which is sharded"
                    " with the weight"
                ),
            )

    def _parameter(self, part: WeightPart) -> nn.Parameter | None:
        """The parameter for a shard. Only a float32 master weight has data of its own; otherwise `update` sets it to
        the weight. None for an empty shard."""
        if not part.now.numel():
            return None
        half = self.masters and part.now.dtype in HALF
        return nn.Parameter(part.now.detach().float() if half else part.now.detach())

    def _refused(self, weight: str, why: str, by: Written | None = None) -> PiperError:
        return refused(self.user, self.make, self.scope, f"weight {weight} {why}", by, self.updated.get(weight, ""))


def _frozen(whose: str, by: Callable[..., Any]) -> PiperError:
    return error(
        "P0808",
        f"requires_grad {whose} has changed since the model was traced",
        line_of_function(by),
        notes=["the traced program trains the parameters that required gradients at that time"],
        help="freeze a group with a learning rate of 0 until it is trained, or train in two jobs",
    )


def _unread(name: str, parameter: nn.Parameter, where: torch.device) -> tuple[WeightPart, nn.Parameter]:
    """The whole of a parameter that no chunk reads."""
    part = WeightPart(name, parameter, tuple((0, size) for size in parameter.shape), None, False)
    return part, nn.Parameter(parameter.detach().to(where), parameter.requires_grad)


def updated_weights(plan: Plan) -> dict[str, str]:
    """Every weight that some device updates, with the script line that shards its update, if there is one."""
    found: dict[str, str] = {}
    for device in plan.devices:
        for instruction in device.instructions:
            for change in instruction.parameters if isinstance(instruction, Update) else ():
                line = plan.lines[instruction.node] if change.sharded else found.get(change.weight, "")
                found[change.weight] = line
    return found


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of gradients; in float32 where they are in half precision."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(torch.float32) if parts[0].dtype in HALF else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
