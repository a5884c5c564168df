"""A plan as text, derived from the declarations of its instructions: for golden tests, documentation and debugging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import PER_RANK, Instruction
from piperlang.plan.plan import DevicePlan, Plan


def text(plan: Plan) -> str:
    whole = f", of the whole batch: {', '.join(plan.whole)}" if plan.whole else ""
    lines = [f"samples {plan.samples}, loss is a {plan.combine}{whole}"]
    for k, program in enumerate(plan.programs):
        sharding = ", ".join(f"{divide.style} over {divide.axis}" for divide in program.sharding[0])
        lines.append(
            f"program {k}: {program.op} of chunk {program.chunk}, {program.samples} samples, {sharding or 'whole'}"
        )
    lines += [f"group {k}: {list(group.members)} on {group.stream}" for k, group in enumerate(plan.groups)]
    lines += [f"stream {stream}: {resources}" for stream, resources in sorted(plan.streams.items())]
    for device in plan.devices:
        lines += ["", f"device {device.device}", *_device(device)]
    return "\n".join(lines) + "\n"


def _device(device: DevicePlan) -> Iterator[str]:
    for key, shard in device.weights.items():
        part = "" if shard.interval is None else f" elements {shard.interval}"
        yield f"  keep {key}: {shard.weight}{list(shard.box)}{part}"
    for feed in device.feeds:
        yield f"  feed {feed.key}: {feed.name}{list(feed.box)}"
    for i, x in enumerate(device.instructions):
        yield f"  {i:>3}  {line(x)}"
    for old, new in device.next.items():
        yield f"  next {old}: {new}"
    for key, share in device.losses.items():
        yield f"  loss {key}: {share:g}"


def line(x: Instruction) -> str:
    """One instruction: `F on compute: x#0, saved:0#0 = w:a@0, batch:flat_0@0#0; program=0`. What differs between
    ranks comes last, in braces."""
    values = {*x.reads, *x.writes}
    told: dict[bool, list[str]] = {False: [], True: []}
    for one in fields(x):
        value = getattr(x, one.name)
        plain = one.name in ("stream", "node", "waits", "reads", "writes")
        if plain or value is False or value in (None, ()) or _names_only(value, values):
            continue
        told[bool(one.metadata.get(PER_RANK))].append(f"{one.name}={_short(value)}")
    written = f"{', '.join(map(str, x.writes))} = " if x.writes else ""
    head = f"{x.op} on {x.stream}: {written}{', '.join(map(str, x.reads)) or 'nothing'}"
    more = f"; {', '.join(told[False])}" if told[False] else ""
    ranked = f" {{{', '.join(told[True])}}}" if told[True] else ""
    waits = f" after {', '.join(map(str, x.waits))}" if x.waits else ""
    return f"{head}{more}{ranked}{waits}"


def _names_only(value: object, known: set[ValueId]) -> bool:
    """Whether a field says nothing but which values are read or written."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return all(_names_only(one, known) for one in value)
    return isinstance(value, ValueId) and value in known


def _short(value: object) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"({', '.join(_short(one) for one in value if one is not None)})"
    if isinstance(value, tuple):
        return f"[{', '.join(_short(one) for one in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
