"""Weight updates: the optimizers of the user, each distributed, and the learning rate schedules that change their
options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim

from piperlang.capture.user.state import Frozen
from piperlang.capture.user.watched import WatchedModel
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.plan.instructions import Update
from piperlang.plan.plan import Plan
from piperlang.runtime.optimizer.average import MovingAverages
from piperlang.runtime.optimizer.copies import DeviceUpdate, WeightPart
from piperlang.runtime.optimizer.distributed import HALF, DistributedOptimizer
from piperlang.runtime.optimizer.on_device import DeviceRates
from piperlang.runtime.optimizer.settings import Settings, digest, joined
from piperlang.runtime.optimizer.user import UserSchedules, call_optimizer, call_schedule, step_schedule


def default_optimizer(params: Any) -> optim.Optimizer:
    """The optimizer of a model file without `optimizer`."""
    return optim.AdamW(params, lr=1e-3)


class Optimizers:
    """All optimizers of one process, which may run several devices. The user's functions are called once."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        make_schedule: Callable[[Any], Any] | None,
        updates: Sequence[DeviceUpdate],
        masters: bool = False,
        updated: Mapping[str, str] | None = None,
        ema: float | None = None,
    ) -> None:
        """`masters`: weights in half precision have a float32 master weight, which is updated. `updated`: every weight
        that some device updates, with the script line that shards its update; without it, `updates` must be those of
        all devices. `ema`: the decay of moving averages of the weights."""
        self.make = make
        if updated is None:
            updated = {part.weight: "" for update in updates for part in update.parts}
        self.each: list[DistributedOptimizer] = []
        self.schedules: UserSchedules | None = None
        self.averages: MovingAverages | None = None
        self.passed_on = ""
        """A digest of what the schedules have changed in the last step, to be compared with other processes; empty
        where no schedule was stepped."""
        self.flags = [
            (name, weakref.ref(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
        ]
        """Of the model that the user's code may still reference; piperlang does not."""
        if any(parameter.requires_grad for parameter in model.parameters()):
            self.user = call_optimizer(make, model)
            trained = {
                id(p) for optimizer in self.user.each for group in optimizer.param_groups for p in group["params"]
            }
            self.bystanders = WatchedModel(model.named_modules(), trained)
            """What the model has besides trained weights."""
            self.each = [
                DistributedOptimizer(one, make, model, trained, updates, masters, updated) for one in self.user.each
            ]
            if ema is not None:
                self.averages = MovingAverages(ema, [weight for one in self.each for weight in one.weights])
            if make_schedule is not None:
                self.schedules, self.make_schedule = call_schedule(make_schedule, self.user), make_schedule
                self._pass_on()

    @property
    def reads(self) -> list[Frozen]:
        """What steps read, besides the optimizers themselves."""
        return [one.reads for one in self.each]

    @property
    def skip_on_device(self) -> bool:
        """Whether all of them can leave out a step without the host."""
        return all(local.skips for one in self.each for local, _ in one.local.values())

    def update(
        self,
        device: int,
        key: ValueId,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update weights in place: now, or with the last update of the device if the optimizer reads all weights.
        `skip`: 1 on the device if nothing is to be updated, otherwise 0; only if they all can `skip_on_device`."""
        for one in self.each:
            if not one.update(device, key, weights, gradients, skip):
                raise _frozen("of a weight", self.make)

    def on_device(self, device: int, key: ValueId) -> bool:
        """Whether an update needs nothing of the host but learning rates: those of a graph."""
        return all(one.on_device(device, key) for one in self.each)

    def device_rates(self) -> list[DeviceRates]:
        """For one graph: learning rates that its updates read from the device. Each graph has its own:
        there may be one for every shape of batches."""
        return [rates for one in self.each for rates in one.device_rates()]

    def forget_updates(self) -> None:
        """Those of a capture that has failed."""
        for one in self.each:
            one.forget_updates()

    def advance(self, skipped: bool = False) -> None:
        """The end of a training step on all devices of the process: the schedules are stepped, and the options that
        they changed are copied to the copies. `skipped`: it has changed nothing."""
        self.passed_on = ""
        if skipped or not any(one.local for one in self.each):
            return
        self.bystanders.check("when the optimizer steps", line_of_function(self.make))
        for one in self.each:
            one.check()
        if self.averages is not None:
            self.averages.update()
        if self.schedules is None:
            return
        step_schedule(self.schedules, self.user, self.make_schedule)
        when, line = "when the schedule of `lr_schedule` steps", line_of_function(self.make_schedule)
        for watched in (self.bystanders, *(watched for one in self.each for watched in one.bystanders)):
            watched.check(when, line)
        for name, reference, flag in self.flags:
            parameter = reference()
            if parameter is not None and parameter.requires_grad != flag:
                raise _frozen(f"of {name}", self.make_schedule)
        self._pass_on()

    def replay(self, steps: int) -> None:
        """Steps the schedules as often as a run has that is resumed."""
        if self.schedules is not None and any(one.local for one in self.each):
            for _ in range(steps):
                step_schedule(self.schedules, self.user, self.make_schedule)
            self._pass_on()

    def _pass_on(self) -> None:
        self.passed_on = digest([change for one in self.each for change in one.pass_on(self.make_schedule)])

    def averaged(self) -> list[WeightPart]:
        """Moving averages of the weights that are updated here."""
        return self.averages.parts() if self.averages is not None else []

    def settings(self) -> Settings:
        """What the user's functions have decided in this process, to be compared with other processes."""
        return joined([one.settings() for one in self.each])

    def discard(self) -> None:
        """Discards optimizers that were made for a comparison: user code must not use them any more."""
        for one in self.each:
            one.discard()

    def states(self) -> list[Any]:
        """The state of every weight that is updated here."""
        return [state for one in self.each for state in one.states()]

    def updated(self) -> list[torch.Tensor]:
        """What the optimizers update, master weights among them, and moving averages of it."""
        averages = [] if self.averages is None else self.averages.averages
        return [*averages, *(parameter for one in self.each for _, parameter in one.weights)]


def _frozen(whose: str, by: Callable[..., Any]) -> PiperError:
    return error(
        "P0808",
        f"requires_grad {whose} has changed since the model was traced",
        line_of_function(by),
        notes=["the traced program trains the parameters that required gradients at that time"],
        help="freeze a group with a learning rate of 0 until it is trained, or train in two jobs",
    )


def updated_weights(plan: Plan) -> dict[str, str]:
    """Every weight that some device updates, with the script line that shards its update, if there is one."""
    found: dict[str, str] = {}
    for device in plan.devices:
        for instruction in device.instructions:
            for change in instruction.parameters if isinstance(instruction, Update) else ():
                line = plan.nodes[instruction.node].line if change.sharded else found.get(change.weight, "")
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
