"""What the devices of a sharded chunk compute, put together, is what the whole chunk computes.

They run graphs that follow from the rules of torch's DTensor (capture/spmd/localize.py). A rule that is wrong for an
operator would train without an error: so each distinct graph is run on numbers of its shapes for every device in turn,
and compared with the graph of the whole chunk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from piperlang.capture.autodiff.pass_graph import PassGraphs
from piperlang.capture.program import CutProgram
from piperlang.capture.trace.random import mix
from piperlang.core.placement import DISPATCHED, PARTIAL, Placement, Shard
from piperlang.ir.model import Divide, Places, Slot
from piperlang.plan.plan import Plan, StageProgram
from piperlang.progress import Notice, emit
from piperlang.runtime.guard.rounding import FACTOR

Values = dict[Slot, torch.Tensor]
NOISE = 1e-2
"""A gradient that is small relative to the chunk's largest may be rounding: differences are relative to at least this
fraction of the largest."""


class ShardedDifference(NamedTuple):
    program: StageProgram
    slot: Slot
    error: float
    """Relative to the largest element."""


def differences(
    captured: CutProgram, plan: Plan, weights: Mapping[str, torch.Tensor], limit: float, epsilon: float
) -> Iterator[ShardedDifference]:
    """For every distinct sharded chunk, the largest difference. `weights`: their values, by place. What is above
    `limit` counts only if more than a change of all numbers by `epsilon` explains."""
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
            try:
                chunk = _Chunk(captured, program, places, weights, key in halved)
            except Exception as problem:  # as any operator of the user may raise
                name = captured.model.chunks[program.chunk]
                emit(Notice(f"shards of {name} were not compared: it fails on random numbers: {problem}", warning=True))
                continue
            found = max(chunk.differences(), key=lambda found: found.error)
            yield found if found.error <= limit else max(chunk.differences(epsilon), key=lambda found: found.error)


class _Chunk:
    def __init__(
        self,
        captured: CutProgram,
        program: StageProgram,
        places: Places,
        weights: Mapping[str, torch.Tensor],
        halved: bool,
    ) -> None:
        """`halved`: its backward runs as I and W."""
        self.captured, self.program, self.places, self.halved = captured, program, places, halved
        self.given = _numbers(captured.takes(program.chunk, program.samples))
        for i, place in enumerate(captured.chunks[program.chunk].weights):
            if ("weight", i) in self.given and place in weights:
                self.given["weight", i] = weights[place]
        self.expected = self._whole(self.given)

    def differences(self, epsilon: float = 0.0) -> Iterator[ShardedDifference]:
        """Of all outputs and gradients; with `epsilon`, beyond rounding."""
        expected, found = self.expected, self._sharded()
        moved = self._whole(_rounded(self.given, epsilon)) if epsilon else expected
        sizes = {slot: _most(torch.where(value.isfinite(), value, 0.0)) for slot, value in expected.items()}
        least = NOISE * max((size for (kind, _), size in sizes.items() if kind != "output"), default=0.0)
        for slot, value in expected.items():
            rounding = FACTOR * _most(_apart(moved[slot], value))
            apart = max(_most(_apart(found[slot], value)) - rounding, 0.0) if math.isfinite(rounding) else 0.0
            yield ShardedDifference(self.program, slot, apart / max(sizes[slot], least, 1e-30))

    def _whole(self, given: Values) -> Values:
        return _run(self.captured.pass_graphs(self.program.chunk, self.program.samples), given, self.halved)

    def _sharded(self) -> Values:
        """What the devices compute, put together."""
        divides = self.program.sharding[0]
        graphs = self.captured.pass_graphs(self.program.chunk, self.program.samples, self.program.sharding)
        parts: dict[Slot, dict[tuple[int, ...], torch.Tensor]] = {}
        for at in itertools.product(*(range(divide.size) for divide in divides)):
            own = {
                slot: torch.cat([value, value.new_tensor(at)])
                if slot[0] == "rng"
                else _part(value, self.places[slot], divides, at)
                for slot, value in self.given.items()
            }
            for slot, value in _run(graphs, own, self.halved).items():
                parts.setdefault(slot, {})[at] = value
        return {slot: _together(of_slot, self.places[slot]) for slot, of_slot in parts.items()}


def _numbers(like: Mapping[Slot, torch.Tensor]) -> Values:
    """Of the size that activations have; 0 where they may be indices, which every table has."""
    generator = torch.Generator().manual_seed(0)
    found: Values = {}
    for slot, fake in like.items():
        real = fake.is_floating_point() or fake.is_complex()
        drawn = torch.randn(fake.shape, generator=generator)
        drawn = drawn if real else drawn > 0 if fake.dtype is torch.bool else torch.zeros(fake.shape)
        found[slot] = drawn.to(fake.dtype).to(fake.device)
        if slot[0] == "rng":
            found[slot] = torch.tensor([mix(0, 0), 0], device=fake.device)
    return found


def _rounded(values: Values, epsilon: float) -> Values:
    generator = torch.Generator().manual_seed(1)

    def changed(value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, value.shape, generator=generator).mul(2).sub(1).to(value.device)
        return (value.double() * (1 + epsilon * signs)).to(value.dtype)

    return {slot: changed(value) if value.is_floating_point() else value for slot, value in values.items()}


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Elements that are equal, or no numbers on both sides, are not apart; if on one side, infinitely far."""
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one.to(other.dtype) - other).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def _most(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


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


def _together(parts: Mapping[tuple[int, ...], torch.Tensor], places: Sequence[Placement]) -> torch.Tensor:
    """Put together, the innermost axis first."""
    if not places:
        return parts[()]
    *outer, place = places
    together: dict[tuple[int, ...], torch.Tensor] = {}
    for prefix, group in itertools.groupby(sorted(parts), key=lambda at: at[:-1]):
        its = [parts[at] for at in group]
        if isinstance(place, Shard):
            together[prefix] = torch.cat(its, place.dim)
        elif place is PARTIAL:
            together[prefix] = torch.stack(its).sum(0)
        else:  # all are the same, or what they differ by is an error
            together[prefix] = its[0] + sum(_apart(one, its[0]) for one in its[1:])
    return _together(together, outer)
