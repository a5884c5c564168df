"""Gradients of one weight that one stream makes are added up as they come, so that the order is always the same and one
of them takes memory, not all."""

from __future__ import annotations

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import GradientNorm, Instruction, ShardCollective, Shards, Update
from piperlang.plan.plan import DevicePlan

ADDED = (Kind.WEIGHT_GRADIENT, Kind.REDUCED)
"""Gradients as passes make them, and the parts of them that reductions give."""


def sums(device: DevicePlan) -> dict[ValueId, ValueId]:
    """Which gradients are added up into which sum."""
    stream = {key: x.stream for x in device.instructions for key in x.writes}
    found: dict[ValueId, ValueId] = {}
    for x in device.instructions:
        for keys in _added(x):
            if len(keys) > 1 and all(key.kind in ADDED for key in keys) and len({stream[key] for key in keys}) == 1:
                found.update(dict.fromkeys(keys, keys[0].total))
    return found


def _added(x: Instruction) -> list[tuple[ValueId, ...]]:
    """Which of the values that an instruction reads it adds up."""
    match x:
        case ShardCollective(shards=shards):
            return [one.sources for one in shards]
        case Update(parameters=parameters):
            return [one.gradients for one in parameters]
        case GradientNorm(terms=terms):
            return [one.gradients for one in terms]
    return []


ALONE = 2**18
"""Elements of a weight that is worth a message of its own: then nothing of it is copied."""


def travels_alone(one: Shards) -> bool:
    """Whether a weight of a gather or a scatter is moved from where it lies to where it stays: if it is large and its
    parts are equal."""
    return len({high - low for low, high in one.cuts}) == 1 and one.cuts[-1][1] >= ALONE


def owner(one: Shards) -> int | None:
    """The member that has all of a weight, where the others have nothing of it."""
    full = [member for member, (low, high) in enumerate(one.cuts) if high > low]
    return full[0] if len(full) == 1 and len(one.cuts) > 1 else None


def reads(instruction: Instruction, totals: dict[ValueId, ValueId]) -> tuple[ValueId, ...]:
    """What an instruction reads, each once: sums in place of what was added up."""
    return tuple(dict.fromkeys(totals.get(key, key) for key in instruction.reads))
