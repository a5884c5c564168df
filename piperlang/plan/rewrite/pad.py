"""A batch that cannot be divided into as many equal parts as the plan has: its samples are repeated.

Losses of the parts of a batch are combined by their shares. A part whose samples are each repeated equally often has
the mean of these samples, and counts for as many as there are; a part that is filled up with any sample counts nothing.
So the batch is laid out in parts of the loss that are full, that have a divisor of their size, or that have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, lcm
from typing import NamedTuple

from piperlang.plan.instructions import Compute
from piperlang.plan.plan import DevicePlan, Plan


class Padding(NamedTuple):
    rows: tuple[int, ...]
    """For every sample of the padded batch, the sample of the batch that it repeats."""
    weights: tuple[float, ...]
    """What each counts for; together, the number of samples of the batch."""


def padding(plan: Plan, samples: int, repeats: bool) -> Padding | None:
    """How a batch of this many samples is padded for a plan that divides the batch as `plan` does. None if it need not
    be, or cannot. `repeats`: whether a sample may count in parts; not if masks of dropout depend on its position."""
    every = lcm(*(plan.samples // program.samples for program in plan.programs))
    count = max(plan.samples // program.samples for program in plan.programs if program.loss is not None)
    if samples % every == 0:
        return None
    step = every // count
    for size in range(step * ceil(samples / count / step), samples * step + 1, step):
        full, rest = divmod(samples, size)
        parts = [*[size] * full, *_divisors(rest, size)]
        if len(parts) <= count and (repeats or not rest):
            return _laid_out(parts + [0] * (count - len(parts)), size)
    return None


def _divisors(rest: int, size: int) -> Iterator[int]:
    """Divisors of `size` whose sum is `rest`, the largest first."""
    while rest:
        part = next(number for number in range(rest, 0, -1) if size % number == 0)
        yield part
        rest -= part


def _laid_out(parts: list[int], size: int) -> Padding:
    rows: list[int] = []
    first = 0
    for part in parts:
        rows += [first + i * part // size for i in range(size)] if part else [0] * size
        first += part
    return Padding(tuple(rows), tuple(part / size for part in parts for _ in range(size)))


def padded(plan: Plan, weights: tuple[float, ...]) -> Plan:
    """The same plan for a batch whose samples count for these weights."""
    plan = replace(plan, weights=weights)
    return replace(plan, devices=[_shared(device, plan) for device in plan.devices])


def _shared(device: DevicePlan, plan: Plan) -> DevicePlan:
    instructions = [
        replace(x, loss_share=plan.share(x)) if isinstance(x, Compute) and x.loss_share is not None else x
        for x in device.instructions
    ]
    made = {key: x for x in instructions if isinstance(x, Compute) for key in x.outputs}
    return replace(device, instructions=instructions, losses={key: plan.share(made[key]) for key in device.losses})
