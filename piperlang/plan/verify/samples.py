"""Every sample of the batch is seen once by every chunk, and counts once in the loss."""

from __future__ import annotations

import itertools
from collections import Counter
from math import prod
from typing import Any

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import Compute, Forward
from piperlang.plan.plan import StageProgram
from piperlang.plan.verify.messages import fills
from piperlang.plan.verify.report import At, Checked

CODE = "P0504"


def placed(checked: Checked, at: At, x: Compute, program: StageProgram, share: float) -> None:
    """Which samples a device has, and what they count for."""
    plan, samples, first = checked.plan, program.samples, x.first_sample
    divides = program.sharding[0]
    if (
        not 0 <= first <= plan.samples - samples
        or len(x.coordinates) != len(divides)
        or any(not 0 <= k < d.size for k, d in zip(x.coordinates, divides, strict=True))
    ):
        checked.wrong(
            CODE,
            f"{samples} samples from number {first} at {list(x.coordinates)}: there is no such part of {plan.samples}",
            at,
        )
    if x.loss_share is not None and abs(x.loss_share - share) > 1e-12:
        checked.wrong(
            CODE,
            f"a loss of {samples} of {plan.samples} samples counts for {x.loss_share:g}",
            at,
            notes=(f"it should count for {share:g}",),
        )


def samples_seen(checked: Checked, firsts: list[list[int]]) -> None:
    """Every chunk sees every sample, and its backward those of its forward."""
    plan = checked.plan
    seen: dict[int, dict[str, Counter[tuple[int, int]]]] = {}
    for number, found in enumerate(firsts):
        program = plan.programs[number]
        seen.setdefault(program.chunk, {}).setdefault(program.op, Counter()).update(
            (first, first + program.samples) for first in found
        )
    for chunk, by in seen.items():
        forward, whole = by.get("F", Counter()), by.get("B", Counter())
        for other in [whole + by[op] for op in "IW" if by.get(op)] or ([whole] if whole else []):
            if forward != other:
                odd = min(set((forward - other) + (other - forward)))
                checked.wrong(
                    CODE,
                    f"chunk {chunk} runs forward and backward with different samples",
                    *_with(checked, chunk, odd[0]),
                    notes=(f"samples {odd[0]} to {odd[1]}",),
                )
                break
        end = 0
        for low, high in sorted(forward):
            if low != end:
                checked.wrong(
                    CODE,
                    f"chunk {chunk} does not see samples {min(low, end)} to {max(low, end)} once",
                    *_with(checked, chunk, low),
                )
                break
            end = high
        else:
            if end != plan.samples:
                checked.wrong(CODE, f"chunk {chunk} sees {end} of {plan.samples} samples", *_with(checked, chunk, -1))


def _with(checked: Checked, chunk: int, first: int) -> list[At]:
    """Passes of a chunk that begin with a sample, or any of them."""
    programs = checked.plan.programs
    found = [
        (at, x)
        for at, x in checked.each(Compute)
        if 0 <= x.program < len(programs) and programs[x.program].chunk == chunk
    ]
    return ([at for at, x in found if x.first_sample == first] or [at for at, _ in found])[:2]


def losses(checked: Checked) -> None:
    """What is counted makes up the batch."""
    plan = checked.plan
    found: list[tuple[int, int, At]] = []
    for d, device in enumerate(plan.devices):
        for key, share in device.losses.items():
            i = checked.made[d].get(key)
            if i is None:
                continue  # told already
            at = At(d, i, device.instructions[i])
            x = at.does
            program = plan.programs[x.program] if isinstance(x, Forward) else None
            if not isinstance(x, Forward) or program is None or x.outputs.index(key) != program.loss:
                checked.wrong(CODE, f"{key} is no loss", at)
                continue
            expected = plan.share(x)
            if len(set(plan.weights[x.first_sample : x.first_sample + program.samples])) > 1:
                checked.wrong(CODE, "a loss is of samples that count differently", at)
            if abs(share - expected) > 1e-12:
                checked.wrong(
                    CODE,
                    f"a loss of {program.samples} of {plan.samples} samples counts for {share:g}",
                    at,
                    notes=(f"it should count for {expected:g}",),
                )
            found.append((x.first_sample, x.first_sample + program.samples, at))
    found.sort(key=lambda item: item[:2])
    checked.steps += len(found)
    for (_, end, one), (start, _, other) in itertools.pairwise(found):
        if start != end:
            checked.wrong(
                CODE,
                f"samples {min(start, end)} to {max(start, end)} count {'twice' if start < end else 'nowhere'} in the"
                " loss",
                one,
                other,
            )
    if found and (found[0][0] != 0 or found[-1][1] != plan.samples):
        checked.wrong(
            CODE,
            f"losses are of samples {found[0][0]} to {found[-1][1]}, and the batch has {plan.samples}",
            found[0][2],
            *([found[-1][2]] if found[1:] else []),
        )
    if not found:
        checked.wrong(CODE, "no device counts a loss")


def data(checked: Checked) -> None:
    """Of every tensor of the batch, each chunk that reads it sees all samples; a value of the whole batch is given
    whole."""
    plan = checked.plan
    parts: dict[ValueId, dict[Any, int]] = {}
    feeds: list[dict[ValueId, Any]] = []
    for d, device in enumerate(plan.devices):
        feeds.append({key: box for key, _, box in device.feeds})
        for key, name, box in device.feeds:
            base = key.every_microbatch
            if key.kind is not Kind.BATCH or key.name != name:
                checked.wrong(CODE, f"device {device.device} is given {name} as {key}", *_reader(checked, d, key))
            parts.setdefault(base, {}).setdefault(tuple(box), d)
    extents: dict[str, tuple[tuple[int, ...], ValueId]] = {}
    for base, boxes in parts.items():
        if len({len(box) for box in boxes}) > 1:
            checked.wrong(
                CODE,
                f"the parts of {base} have different dims",
                *[at for d in dict.fromkeys(boxes.values()) for at in _reader(checked, d, base)][:2],
            )
            continue
        extent = tuple(max(high for _, high in dim) for dim in zip(*boxes, strict=True))
        checked.steps += len(boxes)
        whole, other = extents.setdefault(base.name, (extent, base))
        if base.name in plan.whole:
            fits = len(boxes) == 1 and all(low == 0 for box in boxes for low, _ in box)
        else:
            fits = bool(extent) and extent[0] % plan.samples == 0 and fills(list(boxes), extent)
        if not fits or whole != extent:
            readers = [at for d in dict.fromkeys((*boxes.values(),)) for at in _reader(checked, d, base)][:2]
            notes = (
                f"{base} is given in parts {sorted(boxes)}",
                *((f"{other} has {list(whole)}",) if whole != extent else ()),
            )
            checked.wrong(
                CODE,
                f"the parts of {base.name} do not make up the batch of {plan.samples} samples",
                *readers,
                notes=notes,
            )
    fed = [[k for k, slot in enumerate(program.inputs) if slot[0] == "batch"] for program in plan.programs]
    for at, x in checked.each(Compute):
        for k in fed[x.program]:
            key, samples = x.inputs[k][0], plan.programs[x.program].samples
            fed_box = feeds[at.device].get(key)
            if key.name in plan.whole:
                continue
            if fed_box and (
                fed_box[0][0] * samples != x.first_sample * (fed_box[0][1] - fed_box[0][0])
                or not prod(high - low for low, high in fed_box)
            ):
                checked.wrong(
                    CODE,
                    f"{key} is {list(fed_box[0])} of the batch, and the pass is of {samples} samples from number"
                    f" {x.first_sample}",
                    at,
                )


def _reader(checked: Checked, d: int, base: ValueId) -> list[At]:
    return [
        At(d, i, x)
        for i, x in enumerate(checked.plan.devices[d].instructions)
        if any(base in (key, key.every_microbatch) for key in x.reads)
    ][:1]
