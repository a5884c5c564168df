"""What becomes of gradients: added up once a step, in buckets, over every device that has a part of them, and then used
to update.

A weight's gradient is the sum over every device that has computed a part of it: the replicas of a chunk, both ends of
tied weights, both directions of a bidirectional pipeline. One rule covers them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from piperlang.ir.graph import Family, Held, Key, Steps
from piperlang.ir.layout import axes_of
from piperlang.ir.model import Model, Place
from piperlang.passes.nodes import Nodes
from piperlang.passes.schedule import BUCKET
from piperlang.passes.weights import Home, position, two_ways

Bucket = Sequence[Sequence[Home]]
"""Weights that are reduced together, each with all its homes."""


def reduce(model: Model, homes: Iterable[Home], nodes: Nodes) -> dict[Key, Key]:
    """Add reductions, updates and gathers; gives the new key of every updated weight."""
    by_weight: dict[str, list[Home]] = {}
    for home in homes:
        if home.gradients:
            by_weight.setdefault(home.weight, []).append(home)
    updated: dict[Key, Key] = {}
    for bucket in _buckets(model, by_weight):
        grads = _sum(bucket, nodes)
        for place in range(len(bucket[0])):
            updated |= _update([kept[place] for kept in bucket], [keys[place] for keys in grads], nodes)
    return updated


def _buckets(model: Model, by_weight: Mapping[str, list[Home]]) -> Iterator[Bucket]:
    """The last layers first, as their gradients are ready first."""
    groups: dict[object, list[list[Home]]] = {}
    for weight, homes in reversed(list(by_weight.items())):
        first = homes[0]
        if any(_cut(home) != _cut(first) for home in homes):
            raise two_ways(weight, first.site, homes[-1].site)
        # What is added up across parts of the mesh goes along groups of devices that have the same part, so those must
        # be the same for the whole bucket.
        apart = len(homes) > 1
        alike = tuple(
            (home.where, home.summed, tuple(home.levels.items()), home.site.group, _divided(home) if apart else ())
            for home in homes
        )
        groups.setdefault((alike, model.weights[weight].dtype), []).append(homes)
    for group in groups.values():
        limit = max((use.bucket for use in group[0][0].site.uses.values() if use.divides_batch), default=BUCKET)
        bucket: list[list[Home]] = []
        filled = 0
        for homes in group:
            size = model.weights[homes[0].weight].bytes
            if bucket and filled + size > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(homes)
            filled += size
        yield bucket


def _cut(home: Home) -> list[tuple[Place, int]]:
    """Which dims of a weight are divided, and in how many parts."""
    return [
        (place, size)
        for (_, size), place in zip(axes_of(home.where), home.places, strict=True)
        if isinstance(place, int)
    ]


def _divided(home: Home) -> tuple[str, ...]:
    """The axes along which dims of a weight are divided."""
    return tuple(
        axis for (axis, _), place in zip(axes_of(home.where), home.places, strict=True) if isinstance(place, int)
    )


def _sum(bucket: Bucket, nodes: Nodes) -> list[list[tuple[Key, ...]]]:
    """For every weight and home, the keys whose sum is its gradient: one key wherever anything had to be reduced."""
    keys = [[tuple(home.gradients) for home in homes] for homes in bucket]
    apart = len(bucket[0]) > 1
    # Parts of a gradient can be added up across parts of the mesh only if both divide it alike.
    sizes = {tuple(dict(axes_of(home.where))[axis] for axis in home.flat(2)) for home in bucket[0]}
    for place, home in enumerate(bucket[0]):
        scattered = tuple(axis for axis in home.flat(2) if axis in home.summed) if len(sizes) == 1 else ()
        if scattered and home.site.uses[scattered[0]].in_parts:
            _scatter_each(bucket, place, keys, scattered, nodes)
        elif scattered:
            _together("reduce_scatter", bucket, place, keys, scattered, scattered, nodes)
        rest = tuple(axis for axis in home.summed if axis not in scattered)
        if rest:
            _together("all_reduce", bucket, place, keys, rest, scattered, nodes)
    if apart:
        first, *others = bucket[0]
        family = nodes.family(
            Family("all_reduce", first.site.chunk.tags, first.where, beyond=tuple(home.where for home in others))
        )
        flat = nodes.held[keys[0][0][0]].flat
        written = [_key(nodes, home, f"t{len(nodes.families)}", flat) for homes in bucket for home in homes]
        nodes.add(family, (), tuple(parts for per_home in keys for parts in per_home), tuple(written))
        return [[(written[w * len(homes) + place],) for place in range(len(homes))] for w, homes in enumerate(bucket)]
    return keys


def _together(
    op: str,
    bucket: Bucket,
    place: int,
    keys: list[list[tuple[Key, ...]]],
    axes: tuple[str, ...],
    flat: tuple[str, ...],
    nodes: Nodes,
) -> None:
    """One reduction for the bucket, of the sums over microbatches; its results take the place of their gradients."""
    home = bucket[0][place]
    family = nodes.family(
        Family(op, home.site.chunk.tags, home.where, axes=axes, phase=None, by=home.site.uses[axes[0]].directive)
    )
    written = [_key(nodes, homes[place], f"{op[0]}{len(nodes.families)}", flat) for homes in bucket]
    nodes.add(family, (), tuple(keys[w][place] for w in range(len(bucket))), tuple(written))
    for w, key in enumerate(written):
        keys[w][place] = (key,)


def _scatter_each(
    bucket: Bucket, place: int, keys: list[list[tuple[Key, ...]]], axes: tuple[str, ...], nodes: Nodes
) -> None:
    """A reduction for every pass that makes gradients of the bucket: what is added up are parts."""
    by = bucket[0][place].site.uses[axes[0]].directive
    made: dict[int, list[tuple[int, Key]]] = {}
    for w, of_weight in enumerate(keys):
        for key in of_weight[place]:
            made.setdefault(nodes.made[key], []).append((w, key))
    families: dict[object, Family] = {}
    parts: list[list[Key]] = [[] for _ in bucket]
    for maker, gradients in made.items():
        its = nodes.nodes[maker].family
        family = families.get(id(its))
        if family is None:
            family = families[id(its)] = nodes.family(
                Family("reduce_scatter", its.tags, its.where, its.dims, axes=axes, phase=None, by=by)
            )
        written = [_key(nodes, bucket[w][place], f"r{len(nodes.families)}.{len(parts[w])}", axes) for w, _ in gradients]
        nodes.add(family, nodes.nodes[maker].point, tuple((key,) for _, key in gradients), tuple(written))
        for (w, _), key in zip(gradients, written, strict=True):
            parts[w].append(key)
    for w, found in enumerate(parts):
        keys[w][place] = tuple(found)


WHOLE = 2
"""Gradients of how many passes may be whole at once where they are added up in parts: one that is made, and one that is
on its way."""


def hold_back(nodes: Nodes, orders: Sequence[Steps], turns: Mapping[int, int]) -> None:
    """Where every microbatch is reduced by itself, a pass waits until the gradients of the one before the last are in
    parts, or they would pile up behind slow communication."""
    scatters: dict[int, list[int]] = {}
    for node in nodes.nodes:
        makers = (
            {nodes.made[key] for keys in node.reads for key in keys}
            if node.op == "reduce_scatter" and node.family.dims and node.writes[0] in nodes.held
            else set()
        )
        if len(makers) == 1:
            scatters.setdefault(makers.pop(), []).append(node.id)
    if not scatters:
        return
    lines: list[list[int]] = [
        [
            node
            for group in order.groups
            for node in sorted((n for n in group if n in scatters), key=lambda n: position(nodes, n))
        ]
        for order in orders
    ]
    ordered = {node for line in lines for node in line}
    open_ones: dict[object, list[int]] = {}
    for pass_ in sorted(
        (number for number in scatters if number not in ordered), key=lambda n: (turns.get(n, 0), position(nodes, n))
    ):
        open_ones.setdefault((nodes.nodes[pass_].family.where, nodes.nodes[pass_].point), []).append(pass_)
    for line in (*lines, *open_ones.values()):
        for earlier, later in zip(line, line[WHOLE:], strict=False):
            for scatter in scatters[earlier]:
                nodes.before(later, scatter)


def _key(nodes: Nodes, home: Home, suffix: str, flat: tuple[str, ...]) -> Key:
    key = f"g:{home.weight}@{home.number}:{suffix}"
    nodes.held[key] = Held(home.weight, home.where, home.places, flat)
    return key


def _update(homes: Sequence[Home], grads: Sequence[tuple[Key, ...]], nodes: Nodes) -> dict[Key, Key]:
    first = homes[0]
    dividing = next((use.directive for use in first.site.uses.values() if use.level or not use.divides_batch), None)
    family = nodes.family(Family("update", first.site.chunk.tags, first.where, by=dividing))
    keys = [f"{home.key}'" for home in homes]
    for home, key in zip(homes, keys, strict=True):
        nodes.held[key] = home.held(1)
    reads = tuple(read for home, parts in zip(homes, grads, strict=True) for read in ((home.key,), parts))
    node = nodes.add(family, (), reads, tuple(keys))
    for reader in dict.fromkeys(reader for home in homes for reader in home.readers):
        nodes.before(node, reader)
    axes = tuple(axis for axis in first.flat(1) if axis not in first.flat(3))
    if axes:
        gather = nodes.family(
            Family("all_gather", first.site.chunk.tags, first.where, axes=axes, by=first.site.uses[axes[0]].directive)
        )
        whole = [f"{key}'" for key in keys]
        for home, key in zip(homes, whole, strict=True):
            nodes.held[key] = home.held(3)
        nodes.add(gather, (), tuple((key,) for key in keys), tuple(whole))
        keys = whole
    return {home.key: key for home, key in zip(homes, keys, strict=True)}
