"""Gradients of weights: summed once a step, in buckets, over every device that has computed a term, and used to update.

A weight's gradient is the sum over every device that has computed a term of it: the replicas of a chunk, both ends of
tied weights, both directions of a bidirectional pipeline. One rule covers them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from piperlang.build.nodes import Nodes
from piperlang.build.parameters import Replica, position, two_ways
from piperlang.build.schedule import BUCKET, UPDATED, Schedule
from piperlang.build.told_apart import ToldApart
from piperlang.core.placement import Shard
from piperlang.core.value_id import Kind, Point, ValueId
from piperlang.ir.graph import NodeTemplate, Steps
from piperlang.ir.layout import axes_of
from piperlang.ir.model import Model

Bucket = Sequence[Sequence[Replica]]
"""Weights that are reduced together, each with all its replicas."""


def reduce(model: Model, replicas: Iterable[Replica], nodes: Nodes, schedule: Schedule) -> dict[ValueId, ValueId]:
    """Add reductions, updates and gathers; gives the new key of every updated weight."""
    by_weight: dict[str, list[Replica]] = {}
    for replica in replicas:
        if replica.gradients:
            by_weight.setdefault(replica.weight, []).append(replica)
    updated: dict[ValueId, ValueId] = {}
    for bucket in _buckets(model, by_weight, ToldApart(schedule)):
        grads = _sum(bucket, nodes)
        for place in range(len(bucket[0])):
            updated |= _update([kept[place] for kept in bucket], [keys[place] for keys in grads], nodes)
    return updated


def _buckets(model: Model, by_weight: Mapping[str, list[Replica]], told_apart: ToldApart) -> Iterator[Bucket]:
    """The last layers first, as their gradients are ready first: a bucket is full before its last gradients are made,
    whatever chunks they are of."""
    groups: dict[object, list[list[Replica]]] = {}
    for weight, replicas in reversed(list(by_weight.items())):
        first = replicas[0]
        if any(_cut(replica) != _cut(first) for replica in replicas):
            raise two_ways(weight, first.site, replicas[-1].site)
        # What is summed across submeshes goes along groups of devices that have the same shard, so those must
        # be the same for the whole bucket.
        apart = len(replicas) > 1
        alike = tuple(
            (
                replica.where,
                replica.summed,
                tuple(replica.levels.items()),
                replica.site.group if apart else _with_others(replica, told_apart),
                _divided(replica) if apart else (),
            )
            for replica in replicas
        )
        groups.setdefault((alike, model.weights[weight].dtype), []).append(replicas)
    for group in groups.values():
        yield from _filled(model, group, _limit(group[0]))


def _filled(model: Model, weights: Iterable[list[Replica]], limit: int) -> Iterator[Bucket]:
    """A chunk whose gradients do not all fit begins a new bucket: the one before would wait for its backward, for a
    bias. Those of a chunk that is larger than a bucket are divided."""
    bucket: list[list[Replica]] = []
    room = limit
    for _, of_chunk in groupby(weights, key=lambda replicas: replicas[0].site.chunk.number):
        sized = [(replicas, model.weights[replicas[0].weight].bytes) for replicas in of_chunk]
        if bucket and room < sum(size for _, size in sized):
            yield bucket
            bucket, room = [], limit
        for replicas, size in sized:
            if bucket and room < size:
                yield bucket
                bucket, room = [], limit
            bucket.append(replicas)
            room -= size
    yield bucket


def _with_others(replica: Replica, told_apart: ToldApart) -> object:
    """Equal for replicas whose chunks may share a bucket. Weights that are kept in parts are gathered chunk by chunk,
    and so are their gradients: whole ones of several chunks would lie there together."""
    uses = replica.site.uses
    if replica.in_parts or any(use.in_parts for use in uses.values()):
        return replica.site.group
    return tuple((axis, use.bucket) for axis, use in uses.items() if use.divides_batch), told_apart.by(replica.site)


def _limit(replicas: Sequence[Replica]) -> int:
    """Bytes of weights in a bucket."""
    if len(replicas) == 1 and not replicas[0].summed:
        return UPDATED
    return max((use.bucket for use in replicas[0].site.uses.values() if use.divides_batch), default=BUCKET)


def _tags(replicas: Iterable[Replica]) -> dict[str, Any]:
    """Of the chunks of some weights, for a template."""
    first, *others = {replica.site.group: replica.site.chunk.tags for replica in replicas}.values()
    return {"tags": first, "also": tuple(others)}


def _cut(replica: Replica) -> list[tuple[int, int]]:
    """Which dims of a weight are divided, and in how many parts."""
    return [
        (place.dim, size)
        for (_, size), place in zip(axes_of(replica.where), replica.placements, strict=True)
        if isinstance(place, Shard)
    ]


def _divided(replica: Replica) -> tuple[str, ...]:
    """The axes along which dims of a weight are divided."""
    return tuple(
        axis
        for (axis, _), place in zip(axes_of(replica.where), replica.placements, strict=True)
        if isinstance(place, Shard)
    )


def _sum(bucket: Bucket, nodes: Nodes) -> list[list[tuple[ValueId, ...]]]:
    """For every weight and replica, the keys whose sum is its gradient: one key wherever anything had to be reduced."""
    keys = [[tuple(replica.gradients) for replica in replicas] for replicas in bucket]
    apart = len(bucket[0]) > 1
    # Shards of a gradient can be summed across submeshes only if both shard it alike.
    sizes = {
        tuple((dict(axes_of(replica.where))[axis], replica.owners.get(axis)) for axis in replica.flat(2))
        for replica in bucket[0]
    }
    for place, replica in enumerate(bucket[0]):
        scattered = tuple(axis for axis in replica.flat(2) if axis in replica.summed) if len(sizes) == 1 else ()
        if scattered and replica.site.uses[scattered[0]].in_parts:
            _scatter_each(bucket, place, keys, scattered, nodes)
        elif scattered:
            _together("reduce_scatter", bucket, place, keys, scattered, scattered, nodes)
        rest = tuple(axis for axis in replica.summed if axis not in scattered)
        if rest:
            _together("all_reduce", bucket, place, keys, rest, scattered, nodes)
    if apart:
        first, *others = bucket[0]
        template = nodes.template(
            NodeTemplate(
                "all_reduce", first.site.chunk.tags, first.where, beyond=tuple(replica.where for replica in others)
            )
        )
        flat = nodes.held[keys[0][0][0]].flat
        written = [
            _key(nodes, replica, f"t{len(nodes.templates)}", flat) for replicas in bucket for replica in replicas
        ]
        nodes.add(template, (), tuple(parts for per_replica in keys for parts in per_replica), tuple(written))
        return [
            [(written[w * len(replicas) + place],) for place in range(len(replicas))]
            for w, replicas in enumerate(bucket)
        ]
    return keys


def _together(
    op: str,
    bucket: Bucket,
    place: int,
    keys: list[list[tuple[ValueId, ...]]],
    axes: tuple[str, ...],
    flat: tuple[str, ...],
    nodes: Nodes,
) -> None:
    """One reduction for the bucket, of the sums over microbatches; its results take the place of their gradients."""
    replica = bucket[0][place]
    template = nodes.template(
        NodeTemplate(
            op,
            where=replica.where,
            axes=axes,
            phase=None,
            by=replica.site.uses[axes[0]].directive,
            **_tags(replicas[place] for replicas in bucket),
        )
    )
    written = [_key(nodes, replicas[place], f"{op[0]}{len(nodes.templates)}", flat) for replicas in bucket]
    nodes.add(template, (), tuple(keys[w][place] for w in range(len(bucket))), tuple(written))
    for w, key in enumerate(written):
        keys[w][place] = (key,)


def _scatter_each(
    bucket: Bucket, place: int, keys: list[list[tuple[ValueId, ...]]], axes: tuple[str, ...], nodes: Nodes
) -> None:
    """A reduction for every pass that makes gradients of the bucket: what is added up are parts."""
    by = bucket[0][place].site.uses[axes[0]].directive
    made: dict[int, list[tuple[int, ValueId]]] = {}
    for w, of_weight in enumerate(keys):
        for key in of_weight[place]:
            made.setdefault(nodes.made[key], []).append((w, key))
    templates: dict[object, NodeTemplate] = {}
    parts: list[list[ValueId]] = [[] for _ in bucket]
    for maker, gradients in made.items():
        its = nodes.nodes[maker].template
        template = templates.get(id(its))
        if template is None:
            template = templates[id(its)] = nodes.template(
                NodeTemplate("reduce_scatter", its.tags, its.where, its.dims, axes=axes, phase=None, by=by)
            )
        written = [
            _key(nodes, bucket[w][place], f"r{len(nodes.templates)}.{len(parts[w])}", axes) for w, _ in gradients
        ]
        nodes.add(template, nodes.nodes[maker].point, tuple((key,) for _, key in gradients), tuple(written))
        for (w, _), key in zip(gradients, written, strict=True):
            parts[w].append(key)
    for w, found in enumerate(parts):
        keys[w][place] = tuple(found)


WHOLE = 2
"""Gradients of how many passes may be whole at once where they are kept in parts: one that is made, and one that is on
its way."""


def hold_back(nodes: Nodes, orders: Sequence[Steps], turns: Mapping[int, int]) -> None:
    """Passes wait until gradients that were whole before they began are in parts, but for the last ones, or gradients
    would pile up behind slow communication. That is said of gradients which each pass adds up in parts, and where
    weights are in parts also of those that passes add up whole: of a chunk all of whose passes come one after the
    other."""
    scatters: dict[frozenset[int], list[int]] = {}
    """By the passes that make what they add up."""
    for node in nodes.nodes:
        if node.op == "reduce_scatter" and node.writes[0] in nodes.held:
            makers = frozenset(nodes.made[key] for keys in node.reads for key in keys)
            if (len(makers) == 1 and node.template.dims) or _gathered(node.writes[0], nodes):
                scatters.setdefault(makers, []).append(node.id)
    if not scatters:
        return
    lines: list[Line] = [
        {node: (at, position(nodes, node)) for at, group in enumerate(order.groups) for node in group}
        for order in orders
    ]
    lines_of: dict[int, list[Line]] = {}
    for line in lines:
        for number in line:
            lines_of.setdefault(number, []).append(line)
    for line in lines:
        for first, makers in _held(line, [its for its in scatters if its <= line.keys()]):
            # Devices that reduce together may have orders of their own.
            if all(other[it] < other[first] for other in lines_of[first] for it in makers if it in other):
                for scatter in scatters[makers]:
                    nodes.before(first, scatter)
    without: dict[object, Line] = {}
    for number in (number for makers in scatters if len(makers) == 1 for number in makers - lines_of.keys()):
        pass_ = nodes.nodes[number]
        its = without.setdefault((pass_.template.where, pass_.point), {})
        its[number] = (turns.get(number, 0), position(nodes, number))
    for line in without.values():
        for first, makers in _held(line, [frozenset([number]) for number in line]):
            for scatter in scatters[makers]:
                nodes.before(first, scatter)


Line: TypeAlias = dict[int, tuple[int, tuple[Point, int, str]]]
"""When passes come on a device."""


def _held(line: Line, groups: Sequence[frozenset[int]]) -> Iterator[tuple[int, frozenset[int]]]:
    """Of each group of passes the first, and the group whose gradients must be in parts before."""
    by_end = sorted(groups, key=lambda makers: max(map(line.__getitem__, makers)))
    ends = [max(map(line.__getitem__, makers)) for makers in by_end]
    for makers in by_end:
        first = min(makers, key=line.__getitem__)
        ended = bisect_left(ends, line[first])
        if ended >= WHOLE:
            yield first, by_end[ended - WHOLE]


def _gathered(gradient: ValueId, nodes: Nodes) -> bool:
    """Whether a reduced gradient is that of a weight which is gathered before passes read it."""
    return bool(nodes.held[ValueId(Kind.WEIGHT, gradient.name, gradient.owner)].flat)


def _key(nodes: Nodes, replica: Replica, suffix: str, flat: tuple[str, ...]) -> ValueId:
    key = ValueId(Kind.REDUCED, replica.weight, (replica.number,), None, f":{suffix}")
    nodes.held[key] = replica.divided(flat)
    return key


def _update(replicas: Sequence[Replica], grads: Sequence[tuple[ValueId, ...]], nodes: Nodes) -> dict[ValueId, ValueId]:
    first = replicas[0]
    dividing = next((use.directive for use in first.site.uses.values() if use.level or not use.divides_batch), None)
    template = nodes.template(NodeTemplate("update", where=first.where, by=dividing, **_tags(replicas)))
    keys = [replica.key.updated for replica in replicas]
    for replica, key in zip(replicas, keys, strict=True):
        nodes.held[key] = replica.held(1)
    reads = tuple(read for replica, parts in zip(replicas, grads, strict=True) for read in ((replica.key,), parts))
    node = nodes.add(template, (), reads, tuple(keys))
    for reader in dict.fromkeys(reader for replica in replicas for reader in replica.readers):
        nodes.before(node, reader)
    axes = tuple(axis for axis in first.flat(1) if axis not in first.flat(3))
    if axes:
        gather = nodes.template(
            NodeTemplate(
                "all_gather", where=first.where, axes=axes, by=first.site.uses[axes[0]].directive, **_tags(replicas)
            )
        )
        whole = [key.updated for key in keys]
        for replica, key in zip(replicas, whole, strict=True):
            nodes.held[key] = replica.held(3)
        nodes.add(gather, (), tuple((key,) for key in keys), tuple(whole))
        keys = whole
    return {replica.key: key for replica, key in zip(replicas, keys, strict=True)}
