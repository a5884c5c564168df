"""The guard's check of the optimizer: two updates of whole weights with the user's optimizer, and two updates of their
shards as the plan shards them, with the same gradients.

An optimizer that reads more than its shard, or parameter groups that differ for shards, lead to different weights. For
large models only some weights are compared, as many as fit a budget."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn, optim

from piperlang.capture.user.state import Frozen
from piperlang.capture.user.user_code import eagerly, said
from piperlang.capture.user.where import line_of, line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.plan.instructions import ParameterUpdate, Update
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.runtime.driver.training import Training
from piperlang.runtime.optimizer.copies import DeviceUpdate, WeightPart
from piperlang.runtime.optimizer.optimize import Optimizers, updated_weights
from piperlang.runtime.optimizer.options_only import IN_OPTIONS, refuse_use, what_steps_read
from piperlang.runtime.optimizer.user import UpdateScope, call_optimizer, call_schedule, scope_of

STEPS = 2
ELEMENTS = 1_000_000
"""About this many elements of weights are compared; if the optimizer reads all weights, all that a device has."""


def optimizer_errors(
    model: nn.Module, plan: Plan, training: Training, gradients: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, float]]:
    """The error of each weight relative to its change, compared with the user's own optimizer. Changes `model`."""
    whole: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        whole.setdefault(name, parameter)
    plain = call_optimizer(training.optimizer, model)
    scopes = [scope_of(one, training.optimizer) for one in plain.each]
    updates = _of_one_device(plan, whole) if UpdateScope.MODEL in scopes else _chosen(plan, whole)
    ours = Optimizers(model, training.optimizer, training.lr_schedule, updates, False, updated_weights(plan))
    chosen = {part.weight for update in updates for part in update.parts}
    before = {name: whole[name].detach().clone() for name in chosen}
    schedule = call_schedule(training.lr_schedule, plain) if training.lr_schedule is not None else None
    lasting = [_lasting(one, training) for one in plain.each]
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = gradients[name] / (step + 1) if name in chosen and name in gradients else None
        with eagerly(model, training.optimizer, "a step of the optimizer"):
            plain.step()
        for update in updates:
            given = [part.of(gradients[part.weight]) / (step + 1) for part in update.parts]
            with _on_parts(training):
                ours.update(update.device, update.key, [part.now for part in update.parts], given)
        if schedule is not None:
            with eagerly(model, training.optimizer, "a step of the learning rate schedule"):
                schedule.step()
        ours.advance()
    for one in plain.each:
        refuse_use(one)
    ours.discard()
    changed = next((found for one in lasting if (found := one.changed()) is not None), None)
    if changed is not None:
        raise error(
            "P0808",
            f"{changed} changes when the optimizer or its schedule steps",
            line_of_function(training.optimizer),
            notes=["the comparison before the first step has changed it already, and training would start from there"],
            help=f"{IN_OPTIONS}; `--no-verify` leaves the comparison out",
        )
    for update in updates:
        for part in update.parts:
            yield part.weight, _error(part, whole[part.weight].detach(), before[part.weight])


def _lasting(optimizer: optim.Optimizer, training: Training) -> Frozen:
    """What steps of the optimizer read that outlives the optimizer: globals and class attributes. If the steps of this
    comparison change it, training starts from other values than plain training does."""
    reads = what_steps_read(optimizer, training.optimizer)
    return Frozen(reads.reader, [], reads.classes, reads.line, reads.names)


@contextmanager
def _on_parts(training: Training) -> Iterator[None]:
    """Turns exceptions that an optimizer raises on shards, but not on whole weights, into diagnostics."""
    try:
        yield
    except PiperError:
        raise
    except Exception as problem:
        raise error(
            "P0601",
            "the optimizer fails on the part of the weights that one device has",
            line_of(problem) or line_of_function(training.optimizer),
            "raised here",
            notes=[said(problem)],
            help=(
                "keep per-element state of a weight in `self.state[p]`, which is sharded with it; or remove"
                " `states=sharded` and `shard`"
            ),
        ) from problem


def _error(part: WeightPart, now: torch.Tensor, before: torch.Tensor) -> float:
    if not part.now.numel():
        return 0.0
    wide = torch.complex128 if now.is_complex() else torch.float64
    expected, change = part.of(now).to(wide), (now - before).abs().max().double()
    resolution = torch.finfo(now.dtype).eps * before.abs().max().double()  # the precision of the weight itself
    return float((part.now.to(wide) - expected).abs().max() / (change + 100 * resolution).clamp(min=1e-30))


def _of_one_device(plan: Plan, whole: Mapping[str, nn.Parameter]) -> list[DeviceUpdate]:
    return next((its for device in plan.devices if (its := list(_updates(device, whole, whole.keys())))), [])


def _chosen(plan: Plan, whole: Mapping[str, nn.Parameter]) -> list[DeviceUpdate]:
    """Updates of all devices, for some weights: the smallest, and the smallest with two or more dimensions, because
    parameter groups often depend on that."""
    updated = updated_weights(plan)
    ranked = sorted((name for name in whole if name in updated), key=lambda name: whole[name].numel())
    names = set(next(([name] for name in ranked if whole[name].ndim > 1), []))
    left = ELEMENTS
    for name in ranked:
        left -= whole[name].numel()
        if left < 0:
            break
        names.add(name)
    found: dict[object, DeviceUpdate] = {}
    for device in plan.devices:
        for update in _updates(device, whole, names):
            found.setdefault(
                tuple((part.weight, part.box, part.flat) for part in update.parts), update
            )  # replicas have the same updates
    return [update for update in found.values() if update.parts]


def _updates(device: DevicePlan, whole: Mapping[str, nn.Parameter], names: Collection[str]) -> Iterator[DeviceUpdate]:
    for instruction in device.instructions:
        if isinstance(instruction, Update):
            changes = [change for change in instruction.parameters if change.weight in names]
            parts = [_part(device, change, whole) for change in changes]
            yield DeviceUpdate(device.device, instruction.writes[0], parts)


def _part(device: DevicePlan, change: ParameterUpdate, whole: Mapping[str, nn.Parameter]) -> WeightPart:
    shard = device.weights[change.old]
    bare = WeightPart(change.weight, torch.empty(0), shard.box, shard.updated(change.part), change.sharded)
    now = bare.of(whole[change.weight].detach()).clone()
    return WeightPart.of_shard(bare.weight, now, bare.box, bare.flat, bare.partial)
