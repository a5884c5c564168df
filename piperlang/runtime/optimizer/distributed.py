"""One optimizer of the user, distributed: copies of it for the weights of each update instruction.

The user's own optimizer is on whole weights, so that parameter groups can be chosen by name, shape or position. It is
never stepped: it holds the options, which the learning rate schedule changes. Copies of it are stepped; their groups
contain the local shards of the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn, optim

from piperlang.capture.user.prints import text_of
from piperlang.capture.user.watched import WatchedModel
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Written
from piperlang.runtime.optimizer.copies import (
    DeviceUpdate,
    LocalOptimizer,
    WeightPart,
    copied,
    copied_group,
    copied_state,
    options,
    same_option,
    set_option,
)
from piperlang.runtime.optimizer.on_device import DeviceRates, counts_on_device
from piperlang.runtime.optimizer.options_only import (
    SharedState,
    attributes_of,
    check_groups,
    check_options,
    fingerprints,
    options_only,
    refuse_use,
    what_steps_read,
)
from piperlang.runtime.optimizer.settings import Changed, Settings, settings_of_optimizer, settings_of_weights
from piperlang.runtime.optimizer.user import UpdateScope, never_stepped, refused, scope_of

HALF = (torch.bfloat16, torch.float16)


class DistributedOptimizer:
    def __init__(
        self,
        user: optim.Optimizer,
        make: Callable[[Any], Any],
        model: nn.Module,
        trained: Collection[int],
        updates: Sequence[DeviceUpdate],
        masters: bool,
        updated: Mapping[str, str],
    ) -> None:
        """`make`: the function that made it. `trained`: ids of the parameters of all optimizers. The others as for
        Optimizers."""
        self.user, self.make, self.trained, self.masters, self.updated = user, make, trained, masters, updated
        self.local: dict[tuple[int, ValueId], tuple[LocalOptimizer, list[nn.Parameter | None]]] = {}
        """For every update, its optimizer and the parameter of each of its weights: None for a weight that is in no
        group."""
        self.bystanders: list[WatchedModel] = []
        """What copies of the optimizer hold of the model besides trained weights."""
        self.groups: list[list[dict[str, Any]]] = [[] for _ in user.param_groups]
        """For every group of the user's optimizer, the groups of copies with its options."""
        self.names: list[list[str]] = []
        """The weights of every group of the user's optimizer."""
        self.initial_state: dict[str, str] = {}
        self.weights: list[tuple[WeightPart, nn.Parameter]] = []
        """What is updated here, and the parameters of copies."""
        self.copies: list[tuple[optim.Optimizer, list[tuple[WeightPart, nn.Parameter]]]] = []
        """All copies, each with its weights."""
        self.attributes = fingerprints(attributes_of(user))
        """Fingerprints of its attributes before the first step."""
        self.scope = scope_of(user, make)
        self._make_copies(model, updates)
        self.shared = SharedState(user, make, copies=len(self.copies))
        self.reads = what_steps_read(user, make)
        """What a step reads, besides the optimizer itself."""

    def update(
        self,
        device: int,
        key: ValueId,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        skip: torch.Tensor | None,
    ) -> bool:
        """Update weights in place: now, or with the last update of the device if the optimizer reads all weights. Gives
        whether all of them still require gradients."""
        if (device, key) not in self.local:
            return True
        optimizer, parameters = self.local[device, key]
        optimizer.update(parameters, weights, gradients, skip)
        return all(parameter is None or parameter.requires_grad for parameter in parameters)

    def on_device(self, device: int, key: ValueId) -> bool:
        """Whether an update needs nothing of the host but learning rates."""
        found = self.local.get((device, key))
        return found is None or found[0].on_device

    def device_rates(self) -> list[DeviceRates]:
        """For one graph: of every group, the learning rate of updates that read it from the device."""
        counting = {
            id(group) for local, _ in self.local.values() if local.on_device for group in local.optimizer.param_groups
        }
        its = [[one for one in copies if id(one) in counting] for copies in self.groups]
        return [DeviceRates(some) for some in its if some]

    def forget_updates(self) -> None:
        """Those that have not been stepped yet."""
        for local, _ in self.local.values():
            local.forget()

    def check(self) -> None:
        """After a step: nothing has changed that copies do not know of."""
        if self.local:
            for watched in self.bystanders:
                watched.check("when the optimizer steps", line_of_function(self.make))
            self.shared.check()
            check_options(self.user, self.options, self.make)

    def pass_on(self, make_schedule: Callable[..., Any]) -> list[Changed]:
        """Copies the options that the schedule changed, and only those, because some optimizers write into their own
        groups."""
        check_groups(self.user, self.stand_ins, make_schedule)
        changes: list[Changed] = []
        for group, names, last, copies in zip(
            self.user.param_groups, self.names, self.options, self.groups, strict=True
        ):
            for name, value in options(group).items():
                if name not in last or not same_option(last[name], value):
                    last[name] = copy.deepcopy(value)
                    changes.append((names[:1], name, text_of(value)))
                    for one in copies:
                        set_option(one, name, value)
        return changes

    def settings(self) -> Settings:
        """What the user's functions have decided in this process, to be compared with other processes."""
        state = {name: {"state": text} for name, text in self.initial_state.items()}
        weights = settings_of_weights(self.user, self.names)
        return {name: {**values, **state.get(name, {})} for name, values in weights.items()} | {
            "": {**settings_of_optimizer(self.user), **self.reads.plain()}
        }

    def discard(self) -> None:
        if self.local:
            refuse_use(self.user)

    def states(self) -> list[Any]:
        """The state of every weight that is updated here."""
        return [state for optimizer, _ in self.copies for state in optimizer.state.values()]

    # --------------------------------------------------------------------------------------------------------- copies

    def _make_copies(self, model: nn.Module, updates: Sequence[DeviceUpdate]) -> None:
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)  # a tied weight has its first name
        whole = {first[id(parameter)]: parameter for group in self.user.param_groups for parameter in group["params"]}
        self.names = [sorted(first[id(parameter)] for parameter in group["params"]) for group in self.user.param_groups]
        self.initial_state = {name: text_of(self.user.state[p]) for name, p in whole.items() if p in self.user.state}
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
        self.weights += pairs
        if self.scope is UpdateScope.MODEL:
            # Parameters that no device updates never have a gradient. An optimizer that reads all weights still gets
            # them.
            others = whole.keys() - {part.weight for part, _ in pairs}
            pairs += [
                _unread(name, parameter, pairs[0][1].device) for name, parameter in whole.items() if name in others
            ]
        local = {id(whole[part.weight]): parameter for part, parameter in pairs}
        known: dict[int, Any] = {}
        made = copied(self.user, local, known, self.trained)
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
        self.copies.append((made, pairs))
        optimizer = LocalOptimizer(made, len(updates))
        optimizer.on_device = len(updates) == 1 and counts_on_device(made)
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


def _unread(name: str, parameter: nn.Parameter, where: torch.device) -> tuple[WeightPart, nn.Parameter]:
    """The whole of a parameter that no chunk reads."""
    part = WeightPart(name, parameter, tuple((0, size) for size in parameter.shape), None, False)
    return part, nn.Parameter(parameter.detach().to(where), parameter.requires_grad)
