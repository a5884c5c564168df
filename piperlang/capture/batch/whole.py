"""Values of the whole batch.

A value that depends on the batch alone and has no batch dimension, such as the number of targets that are not masked,
cannot be computed from a part of the batch. It is computed once per step from the whole batch, and given to the program
as another tensor of the batch. A loss such as `(losses * mask).sum() / mask.sum()` is then a sum over the samples.

Where a mean over the samples, or a value that does not depend on them, is added to a sum over the samples, it is
multiplied by the share of the samples that a part has, which makes it a sum, too.

Sums and means that are computed with are another matter (sum_up.py)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import fx

from piperlang.capture.batch.mixing import Free, Mixed, Mixing, Repair, growing
from piperlang.capture.batch.shares import in_dtype_of, number_of_samples, placeholder, share_of
from piperlang.capture.batch.sum_up import computed_with, sum_up, variances, write_variances
from piperlang.capture.batch.walk import Known, States, Walk, walk_samples
from piperlang.capture.trace.buffers import root_of, written
from piperlang.capture.trace.trace import Traced

Edit: TypeAlias = Callable[[Traced], Traced]
"""A change of a trace. It finds nodes by their position, which is the same at all batch sizes."""


def edits(small: Traced, large: Traced) -> tuple[list[Edit], Traced, Traced, Walk | None]:
    """Changes the traces until no more can be done. Returns the edits, for traces at other batch sizes, both traces,
    and how their values depend on the samples."""
    done: list[Edit] = []
    known = Known()
    while True:
        walk = walk_samples(small, large, known)
        edit = _next(small, large, walk) if walk is not None else None
        if edit is None:
            return done, small, large, walk
        done.append(edit)
        small, large = edit(small), edit(large)


def _next(small: Traced, large: Traced, walk: Walk) -> Edit | None:
    position = {node: i for i, node in enumerate(small.graph.nodes)}
    whole = [position[node] for node in _whole(small, large, walk)]
    if whole:
        return partial(_give, whole)
    weighed = [(position[node], [position[operand] for operand in _unlike(node, walk)]) for node in _sums(walk)]
    if any(operands for _, operands in weighed):
        return partial(_weigh, weighed)
    summed = {position[node]: how for node, how in computed_with(small, walk).items()}
    if summed:
        return partial(sum_up, summed)
    spread = {position[node]: why for node, why in variances(small, walk).items()}
    return partial(write_variances, spread) if spread else None


# --------------------------------------------------------------------------------- values that depend on the batch


def _whole(small: Traced, large: Traced, walk: Walk) -> list[fx.Node]:
    """The last values that depend on the batch alone and combine its samples, on each path to the loss."""
    elsewhere = small.elsewhere
    twin = dict(zip(small.graph.nodes, large.graph.nodes, strict=True))
    changed = {root_of(target) for node in small.graph.nodes for target in written(node)}
    constants = {p for p, w in small.weights.items() if w.name in small.constants and not w.requires_grad}
    alone: set[fx.Node] = set()
    for node in small.graph.nodes:
        if node.op == "placeholder":
            fits = node.name in small.batch or node.name in constants
        else:
            fits = _is_plain(node) and alone.issuperset(node.all_input_nodes)
        if fits and root_of(node) not in changed:
            alone.add(node)

    def grows(node: fx.Node) -> bool:
        one, two = node.meta.get("val"), twin[node].meta.get("val")
        return not isinstance(one, torch.Tensor) or bool(growing(one, two))

    return [
        node
        for node in small.graph.nodes
        if node in alone
        and node not in elsewhere
        and _combines(walk.states.get(node))
        and not grows(node)
        and any(user not in elsewhere and (user not in alone or grows(user)) for user in node.users)
        and node not in small.output.all_input_nodes
    ]


def _is_plain(node: fx.Node) -> bool:
    """An operator, not a call of functorch: its values inside of vmap do not show their batch dimension."""
    return isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem


def _combines(state: States | None) -> bool:
    return isinstance(state, Mixed | Mixing) or (isinstance(state, Free) and state.degree is None)


def _give(positions: list[int], traced: Traced) -> Traced:
    """Gives these values to the program, which no longer computes them."""
    nodes = list(traced.graph.nodes)
    whole = dict(traced.whole)
    for position in positions:
        place = placeholder(traced.graph, "whole", nodes[position])
        nodes[position].replace_all_uses_with(place)
        whole[place.name] = nodes[position]
    return replace(traced, whole=whole)


# -------------------------------------------------------------------------------------------- sums and other values


def _sums(walk: Walk) -> list[fx.Node]:
    """Operators that add values to a sum over the samples that are not such sums."""
    states = {id(state): state for state in walk.states.values() if isinstance(state, Mixing)}
    repairs = (Repair.THROUGHOUT.value, Repair.MEAN.value)
    return [node for key, node in walk.causes.items() if key in states and states[key].help in repairs]


def _unlike(node: fx.Node, walk: Walk) -> list[fx.Node]:
    """The operands of such an operator that are not sums."""
    states = {operand: walk.states[operand] for operand in node.all_input_nodes}
    if not all(
        state in (Mixed(0), Mixed(-1)) or (isinstance(state, Free) and state.degree == 0) for state in states.values()
    ):
        return []
    return [
        operand
        for operand, state in states.items()
        if Mixed(0) in states.values() and (state == Mixed(-1) or (isinstance(state, Free) and not state.zero))
    ]


def _weigh(places: list[tuple[int, list[int]]], traced: Traced) -> Traced:
    nodes = list(traced.graph.nodes)
    traced, whole = number_of_samples(traced)
    for position, operands in places:
        for operand in (nodes[i] for i in operands):
            user = nodes[position]  # a part's share is that of the chunk that adds
            with traced.graph.inserting_before(user):
                share = in_dtype_of(operand, share_of(user, operand, traced.samples, whole))
            user.replace_input_with(operand, share)
    return traced
