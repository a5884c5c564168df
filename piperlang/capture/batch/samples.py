"""Whether the batch may be divided, and how the losses of its parts combine into the loss of the whole batch: what
follows from the walk over the program (`walk.py`)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from piperlang.capture.batch.mixing import Along, Free, Mixed, Mixing, Repair, State, growing
from piperlang.capture.batch.sample_rules import CLASSES
from piperlang.capture.batch.sample_table import name_of
from piperlang.capture.batch.walk import States, Walk, arguments_of, pairs, several
from piperlang.capture.trace.buffers import within_writes
from piperlang.capture.trace.random import is_of_loss, module_of
from piperlang.capture.trace.trace import Traced
from piperlang.capture.trace.whole_sum import is_whole_sum, reason
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import Diagnostic, Label


@dataclass(frozen=True)
class Samples:
    loss: str
    """`mean` or `sum`: how the losses of the parts of the batch combine into the loss of the whole batch."""
    dims: dict[str, tuple[int, int]]
    """By node: its batch dimension, and how many consecutive elements of it belong to one sample."""
    mixing: Diagnostic | None
    """Why the batch cannot be divided."""
    weighted: tuple[str, ...]
    """Means over the targets that are not ignored. Where parts of the batch ignore different numbers of targets, their
    weights differ."""
    free: frozenset[str] = frozenset()
    """Nodes whose values do not depend on how the batch is divided."""
    own: frozenset[str] = frozenset()
    """Nodes of which every part of the batch has its own value: sums and means over its samples, and what depends on
    their number or on the position of a sample among them."""
    summed: frozenset[str] = frozenset()
    """Sums over the samples that are added up over the devices that divide the batch, before other chunks read them."""
    reasons: Mapping[str, Diagnostic] = field(default_factory=dict)
    """By node, why it cannot be computed from a part of the batch: it mixes samples, or reads what does."""

    def mixing_in(self, nodes: Iterable[fx.Node]) -> Diagnostic | None:
        """Why operators need the whole batch."""
        if self.mixing is not None and not self.reasons:
            return self.mixing
        return next((self.reasons[node.name] for node in nodes if node.name in self.reasons), None)


def samples(small: Traced, large: Traced, walk: Walk | None) -> Samples:
    if walk is None:
        return Samples("mean", {}, _two_programs(small, large), ())
    state = walk.states[small.result]
    if isinstance(state, Along):
        state = Mixing("the loss is not a scalar", Repair.LAST)
    if isinstance(state, Mixed) and state.degree not in (0, -1):
        state = Mixing("the loss is neither a sum nor a mean over the samples", Repair.LAST)
    if isinstance(state, Free) and _is_own(state):
        state = Mixing("the loss depends on the batch size in another way than a sum or a mean", Repair.SIZE)
    loss = "sum" if isinstance(state, Mixed) and state.degree == 0 else "mean"
    weighted = tuple(node.name for node in small.graph.nodes if _is_weighted(node, walk.states))
    mixing = diagnosed(state, walk, small.result) if isinstance(state, Mixing) else None
    free = frozenset(
        node.name for node, found in walk.states.items() if found == Free(0) or found == Free(0, zero=True)
    )
    own = frozenset(node.name for node, found in walk.states.items() if any(map(_is_own, several(found))))
    reasons = {} if mixing is None else {small.result.name: mixing} | _reasons(walk, small.result)
    sums = [
        node
        for node in small.graph.nodes
        if is_whole_sum(node) and isinstance(walk.states[node.all_input_nodes[0]], Mixed)
    ]
    uncut = within_writes(small.graph, sums)
    for node in uncut:  # the sum of a part of the batch would be read
        mixing = mixing or reason(node)
        reasons = dict.fromkeys((one.name for one in _behind(node)), reason(node)) | reasons
    summed = frozenset(node.name for node in sums if node not in uncut)
    return Samples(loss, _dims(small, large, walk), mixing, weighted, free, own, summed, reasons)


def _behind(node: fx.Node) -> set[fx.Node]:
    """A node and all that depend on it."""
    found: set[fx.Node] = set()
    work = [node]
    while work:
        one = work.pop()
        if one not in found:
            found.add(one)
            work += one.users
    return found


def _reasons(walk: Walk, result: fx.Node) -> dict[str, Diagnostic]:
    """By node, why it mixes samples, if the loss depends on it. An output that nobody reads may be anything."""
    found: dict[str, Diagnostic] = {}
    work = [result]
    while work:
        node = work.pop()
        states = walk.states.get(node)
        if isinstance(states, Mixing) and node.name not in found:
            found[node.name] = diagnosed(states, walk, node)
            work += node.all_input_nodes
            if node.target is operator.getitem:  # of an operator with several outputs
                found[node.all_input_nodes[0].name] = found[node.name]
                work += node.all_input_nodes[0].all_input_nodes
    return found


def _is_own(state: State) -> bool:
    if isinstance(state, Free):
        return state.degree != 0 or not state.uniform
    return isinstance(state, Mixed) or (isinstance(state, Along) and state.degree != 0)


def _two_programs(small: Traced, large: Traced) -> Diagnostic:
    counts = (
        f"with {small.samples} samples it runs {len(small.graph.nodes)} operators, with {large.samples} samples it runs"
        f" {len(large.graph.nodes)}"
    )
    return Diagnostic(
        "P0805",
        "the model runs different operators for different batch sizes",
        notes=(counts,),
        helps=(Repair.ALIKE.value,),
    )


def _dims(small: Traced, large: Traced, walk: Walk) -> dict[str, tuple[int, int]]:
    found = {}
    for a, b in pairs(small.graph, large.graph):
        state, value = walk.states.get(a), a.meta.get("val")
        if isinstance(state, Along):
            found[a.name] = (state.dim, state.inner)
        elif (
            isinstance(state, Free)
            and isinstance(value, torch.Tensor)
            and len(grown := growing(value, b.meta["val"])) == 1
        ):
            found[a.name] = (grown[0], value.shape[grown[0]] // small.samples)
    return found


def _is_weighted(node: fx.Node, states: dict[fx.Node, States]) -> bool:
    if name_of(node.target) not in CLASSES or not isinstance(states[node], Mixed):
        return False
    arguments = arguments_of(node)
    return arguments["reduction"] == 1 and not arguments["target"].meta["val"].is_floating_point()


def diagnosed(state: Mixing, walk: Walk, last: fx.Node) -> Diagnostic:
    node = walk.causes.get(id(state), last)
    place = "in the loss" if is_of_loss(node) else module_of(node)
    line = line_of_operator(node)
    also = (Label(line, "in the model"),) if line is not None else ()
    return Diagnostic(
        "P0805", f"the batch cannot be divided: {state.message}", also=also, notes=(place,), helps=(state.help,)
    )
