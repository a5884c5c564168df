"""Sums and means over the samples that are computed with.

Where other operators than linear ones read a sum or a mean over the samples, or a buffer becomes one, they read that of
the whole batch: devices that divide the batch add up their terms (trace/whole_sum.py). A variance over the samples is
computed from such sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from piperlang.capture.batch.mixing import Free, Mixed, Mixing, Repair
from piperlang.capture.batch.sample_table import name_of
from piperlang.capture.batch.samples import diagnosed
from piperlang.capture.batch.shares import exact, in_dtype_of, number_of_samples, share_of
from piperlang.capture.batch.walk import Walk, arguments_of
from piperlang.capture.trace.buffers import ancestors, root_of, written
from piperlang.capture.trace.insert import insert, insert_call
from piperlang.capture.trace.statistics import insert_statistics
from piperlang.capture.trace.sums import moments
from piperlang.capture.trace.trace import Traced
from piperlang.capture.trace.whole_sum import insert_whole_sum
from piperlang.diagnostics import Diagnostic

aten = torch.ops.aten


class _Summed(NamedTuple):
    mean: bool
    why: Diagnostic
    """Why a part of the batch does not do."""


def computed_with(small: Traced, walk: Walk) -> dict[fx.Node, _Summed]:
    """Sums and means over the samples that operators read which are not linear, and those that buffers become."""
    changed = {root_of(target) for node in small.graph.nodes for target in written(node)}
    found: dict[fx.Node, Diagnostic] = {}
    for node, why in _causes(small, walk).items():
        states = [walk.states[operand] for operand in node.all_input_nodes]
        if all(state.degree == 0 for state in states if isinstance(state, Free)):
            found |= {operand: why for operand in node.all_input_nodes if operand not in found}
    for place, node in small.changes.items():
        message = f"{small.weights[place].name} is computed from values of all samples"
        found.setdefault(node, diagnosed(Mixing(message, Repair.NORM), walk, node))
    summed = {
        node: _Summed(walk.states[node] == Mixed(-1), why)
        for node, why in found.items()
        if walk.states.get(node) in (Mixed(0), Mixed(-1)) and root_of(node) not in changed
    }
    # What is computed from one of them is looked at again when that one is a sum over the whole batch.
    return {node: how for node, how in summed.items() if ancestors([node]).isdisjoint(summed.keys() - {node})}


def sum_up(summed: Mapping[int, _Summed], traced: Traced) -> Traced:
    """Replaces these values by sums over the whole batch. The loss itself stays a sum or a mean over its part."""
    nodes = list(traced.graph.nodes)
    for value, (mean, why) in ((nodes[position], summed) for position, summed in summed.items()):
        users = [user for user in value.users if user.op != "output"]
        following = value.next
        if mean:
            traced, samples = number_of_samples(traced)
        with traced.graph.inserting_before(following):
            term = share_of(value, value, traced.samples, samples) if mean else exact(value, value)
            whole = in_dtype_of(value, insert_whole_sum(term, why))
            for place in [place for place, node in traced.changes.items() if node is value]:
                kept = insert(whole, aten.clone.default, whole)  # in another chunk than the term
                traced.output.replace_input_with(value, kept)
                traced = replace(traced, changes={**traced.changes, place: kept})
        for user in users:
            user.replace_input_with(value, whole)
    return traced


def _causes(small: Traced, walk: Walk) -> dict[fx.Node, Diagnostic]:
    """The operators that need the whole batch, where the loss or a buffer depends on them. One that uses a number which
    depends on the batch size is wrong with sums over the whole batch, too."""
    needed = ancestors([small.output])
    found: dict[fx.Node, Diagnostic] = {}
    for key, node in walk.causes.items():
        states = walk.states[node] if node in needed else None
        for state in states if isinstance(states, tuple) else (states,):
            if isinstance(state, Mixing) and id(state) == key and state.help != Repair.SIZE:
                found[node] = diagnosed(state, walk, node)
    return found


# ------------------------------------------------------------------------------------------------------- variances

_SPREADS = ("var", "std")


def variances(small: Traced, walk: Walk) -> dict[fx.Node, Diagnostic]:
    """Variances and standard deviations over the samples."""
    causes = _causes(small, walk)
    return {
        node: why
        for node, why in causes.items()
        if name_of(node.target) in _SPREADS and all(x.meta["val"].is_floating_point() for x in node.all_input_nodes)
    }


def write_variances(places: Mapping[int, Diagnostic], traced: Traced) -> Traced:
    nodes = list(traced.graph.nodes)
    for node, why in ((nodes[position], why) for position, why in places.items()):
        (x,) = node.all_input_nodes
        spread = _Spread.of(node)
        with traced.graph.inserting_before(node):
            sums = insert_statistics(node, x, spread.dims, why).sums
            result = in_dtype_of(node, insert_call(sums, spread.finished, sums))
        node.replace_all_uses_with(result)
        traced.graph.erase_node(node)
    return traced


class _Spread(NamedTuple):
    """A variance, or its root, of the sums that it is computed from."""

    dims: list[int]
    keepdim: bool
    correction: float
    root: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Spread:
        given = arguments_of(node)
        rank = node.all_input_nodes[0].meta["val"].dim()
        correction = given.get("correction", int(given.get("unbiased", True)))
        return cls(
            [dim % rank for dim in given.get("dim") or range(rank)],
            bool(given.get("keepdim")),
            1 if correction is None else correction,
            name_of(node.target) == "std",
        )

    def finished(self, sums: torch.Tensor) -> torch.Tensor:
        _, variance, count = moments(sums)
        variance = variance * count / (count - self.correction)
        if self.root:
            zero = variance == 0  # the root has no gradient there, as in `std`
            variance = torch.where(zero, 1.0, variance).sqrt() * ~zero
        return variance if self.keepdim else variance.squeeze(self.dims)
