"""Placements, and the collectives that turn one layout into another: on simulated devices no element is lost, whatever
the layouts are."""

from __future__ import annotations

import itertools
import pickle
from math import prod

import pytest
import torch

from piperlang.core.mesh import Mesh, Submesh
from piperlang.core.placement import (
    BATCH,
    DEFERRED,
    DISPATCHED,
    PARTIAL,
    REPLICATE,
    Dispatched,
    Placement,
    Shard,
    dispatched,
    parse,
)
from piperlang.ir.graph import Value
from piperlang.ir.layout import Layout
from piperlang.ir.model import Tensor
from piperlang.ir.redistribute import exchanging, moves
from piperlang.runtime.box import take
from piperlang.runtime.reference.boxes import boxes, move
from piperlang.source import Source, Span

MESH = Mesh("gpu", (("a", 2), ("b", 2)), Span(Source("s", "mesh"), 0, 4))
WHOLE, ONE = Submesh(MESH), Submesh(MESH, (("a", (0,)),))
TENSOR = Tensor("x", ((1, 0), (0, 4), (0, 8)), "float64", 8, 0)
SAMPLES = 8
ALONG = (REPLICATE, BATCH, PARTIAL, Shard(1), Shard(2))
LAYOUTS = [Layout(WHOLE, pair) for pair in itertools.product(ALONG, ALONG)]
LAYOUTS += [Layout(ONE, (one,)) for one in ALONG]


def spread(whole: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What each device has; of a sum, each device along the axis a different term."""
    value = Value(TENSOR, layout, 0, SAMPLES)
    sizes = [2] * len(layout.placements)
    found = []
    for at, box in zip(itertools.product(*map(range, sizes)), boxes(value), strict=True):
        share = prod((0.25, 0.75)[i] for i, one in zip(at, layout.placements, strict=True) if one is PARTIAL)
        found.append(take(whole, box) * share)
    return found


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_can_be_turned_into_every_other(source: Layout) -> None:
    whole = torch.arange(prod((SAMPLES, 4, 8)), dtype=torch.float64).view(SAMPLES, 4, 8)
    for target in LAYOUTS:
        summed = [i for i, one in enumerate(target.placements) if one is PARTIAL]
        if summed and (target.where != source.where or any(source.placements[i] is not PARTIAL for i in summed)):
            continue  # nothing is turned into a sum, and sums are finished before they are sent
        now, parts = source, spread(whole, source)
        for op, then in moves(source, target):
            assert op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "p2p")
            if then.where == now.where and op not in ("slice", "p2p"):
                assert exchanging(now, then)
            parts = move([(Value(TENSOR, now, 0, SAMPLES), parts)], Value(TENSOR, then, 0, SAMPLES))
            now = then
        assert now == target
        for found, wanted in zip(parts, spread(whole, target), strict=True):
            assert torch.equal(found, wanted), f"{source} -> {target}"


@pytest.mark.parametrize("one", [REPLICATE, BATCH, PARTIAL, DEFERRED, DISPATCHED, Shard(0), Shard(11)], ids=str)
def test_a_placement_is_one_object(one: Placement) -> None:
    assert pickle.loads(pickle.dumps(one)) is one
    assert parse(str(one)) is one
    assert parse(f"{one}?") is None


def test_tokens_that_follow_different_indices_are_placed_differently() -> None:
    mine, theirs = Dispatched("chosen", 8), Dispatched("chosen_1", 8)
    assert mine is not theirs
    assert mine is Dispatched("chosen", 8)
    assert dispatched((REPLICATE, theirs)) is theirs
    assert dispatched((REPLICATE, BATCH)) is None
