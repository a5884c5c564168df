"""What the devices of a sharded chunk compute, put together, is what the whole chunk computes.

They run graphs that follow from the rules of torch's DTensor (capture/spmd/localize.py). A rule that is wrong for an
operator would train without an error: so each distinct graph is run on numbers of its shapes for every device in turn,
and compared with the graph of the whole chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from piperlang.capture.autodiff.pass_graph import PassGraphs
from piperlang.capture.program import CutProgram
from piperlang.capture.trace.random import mix
from piperlang.core.placement import DISPATCHED, PARTIAL, Placement, Shard
from piperlang.ir.model import Divide, Places, Slot
from piperlang.plan.plan import Plan, StageProgram

Values = dict[Slot, torch.Tensor]
NOISE = 1e-2
"""A gradient that is small relative to the chunk's largest may be rounding: differences are relative to at least this
fraction of the largest."""


class Difference(NamedTuple):
    program: StageProgram
    slot: Slot
    error: float
    """Relative to the largest element."""


def differences(captured: CutProgram, plan: Plan) -> Iterator[Difference]:
    """For every distinct sharded chunk, the largest difference."""
    halved = {captured.keys[program.chunk] for program in plan.programs if program.op in ("I", "W")}
    known = set()
    for program in plan.programs:
        key = captured.keys[program.chunk]
        one = (key, program.samples, program.sharding)
        if not program.sharding[0] or one in known:
            continue
        known.add(one)
        places = captured.divided(program.chunk, program.samples, program.sharding)
        if not any(DISPATCHED in of_slot for of_slot in places.values()):
            yield max(_differences(captured, program, places, key in halved), key=lambda found: found.error)


def _differences(captured: CutProgram, program: StageProgram, places: Places, halved: bool) -> Iterator[Difference]:
    divides = program.sharding[0]
    given = _numbers(captured.takes(program.chunk, program.samples))
    expected = _run(captured.pass_graphs(program.chunk, program.samples), given, halved)
    local = captured.pass_graphs(program.chunk, program.samples, program.sharding)
    parts: dict[Slot, dict[tuple[int, ...], torch.Tensor]] = {slot: {} for slot in expected}
    for at in itertools.product(*(range(divide.size) for divide in divides)):
        own = {slot: _part(value, places[slot], divides, at) for slot, value in given.items() if slot in places}
        own |= {slot: torch.cat([value, value.new_tensor(at)]) for slot, value in given.items() if slot[0] == "rng"}
        for slot, value in _run(local, own, halved).items():
            parts[slot][at] = value
    sizes = {slot: float(value.abs().max()) if value.numel() else 0.0 for slot, value in expected.items()}
    least = NOISE * max((size for (kind, _), size in sizes.items() if kind != "output"), default=0.0)
    for slot, value in expected.items():
        apart = (
            (_whole(parts[slot], places[slot]).to(value.dtype) - value).abs().nan_to_num() if value.numel() else None
        )
        error = float(apart.max()) / max(sizes[slot], least, 1e-30) if apart is not None else 0.0
        yield Difference(program, slot, error)


def _numbers(like: Mapping[Slot, torch.Tensor]) -> Values:
    """Above 0, so that most functions are defined there; indices are those of the first two rows."""
    generator = torch.Generator().manual_seed(0)
    found: Values = {}
    for slot, fake in like.items():
        drawn = torch.rand(fake.shape, generator=generator)
        real = fake.is_floating_point() or fake.is_complex()
        value = drawn * 0.9 + 0.1 if real else drawn < 0.5
        found[slot] = value.to(fake.dtype).to(fake.device)
        if slot[0] == "rng":
            found[slot] = torch.tensor([mix(0, 0), 0], device=fake.device)
    return found


def _run(graphs: PassGraphs, given: Values, halved: bool) -> Values:
    """Outputs and gradients."""
    values = dict(given)
    back = (graphs.I, graphs.W) if halved else (graphs.B,)
    with torch.no_grad():
        for graph in (graphs.F, *back):
            if graph is not None:
                values.update(graph.run(values))
    return {
        slot: value.detach()
        for slot, value in values.items()
        if slot[0] in ("output", "grad_input", "grad_weight") and (value.is_floating_point() or value.is_complex())
    }


def _part(
    value: torch.Tensor, places: Sequence[Placement], divides: Sequence[Divide], at: Sequence[int]
) -> torch.Tensor:
    for place, divide, coordinate in zip(places, divides, at, strict=True):
        if isinstance(place, Shard):
            value = value.chunk(divide.size, place.dim)[coordinate]
        elif place is PARTIAL:  # terms that differ
            value = value * (0.25 if coordinate == 0 else 0.75 / (divide.size - 1)) if divide.size > 1 else value
    return value.contiguous()


def _whole(parts: Mapping[tuple[int, ...], torch.Tensor], places: Sequence[Placement]) -> torch.Tensor:
    """Put together, the innermost axis first."""
    if not places:
        return parts[()]
    *outer, place = places
    together: dict[tuple[int, ...], torch.Tensor] = {}
    for prefix, group in itertools.groupby(sorted(parts), key=lambda at: at[:-1]):
        its = [parts[at] for at in group]
        if isinstance(place, Shard):
            together[prefix] = torch.cat(its, place.dim)
        else:
            together[prefix] = torch.stack(its).sum(0) if place is PARTIAL else its[-1]
    return _whole(together, outer)
