"""Random valid scripts for a model: meshes, placements, splits, data and tensor strategies, recompute, offload,
streams, and orders of the library or full random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from piperlang.fuzz.orders import random_orders
from piperlang.fuzz.traits import ShardCandidate, Traits
from piperlang.ir.graph import Graph

Mesh = tuple[tuple[str, int], ...]
"""Axes and their sizes; stages are placed along the axis `pp`, the batch or weights are divided along all others."""
ZERO = (
    "",
    " with states=sharded",
    " with grads=sharded, bucket=300B",
    " with params=sharded",
    " with params=sharded, prefetch=0, bucket=1KB",
    " with params=sharded, keep=pass",
    " with params=sharded, keep=turn",
    " with grads=sharded, accumulate=sharded",
    " with grads=sharded, partition=weights",
    " with params=sharded, partition=weights, bucket=300B",
    " with params=sharded, accumulate=sharded, bucket=300B",
    " with params=sharded, accumulate=sharded, keep=turn, prefetch=0",
)
SCHEDULES = {
    "gpipe": ("loop", 1),
    "one_f_one_b": ("loop", 1),
    "zero_bubble": ("loop", 1),
    "looped_bfs": ("loop", 0),
    "interleaved": ("loop", 0),
    "interleaved_zero_bubble": ("loop", 0),
    "zbv": ("vee", 2),
    "dualpipev": ("vee", 2),
    "dualpipe": ("mirror", 1),
}
"""The library's schedules: their placement function, and the stages per rank, 0 for any number."""
PP = "pp"


@dataclass
class Draft:
    draw: random.Random
    traits: Traits
    mesh: Mesh
    pieces: int
    library: str | None = None
    """One of the library's schedules."""
    mirrored: bool = False
    """The second half of the microbatches goes through the ranks in reverse."""
    shards: list[tuple[ShardCandidate, str]] = field(default_factory=list)
    """The sharded parts, and the axis of each."""
    places: list[str] = field(default_factory=list)
    narrow: set[int | str] = field(default_factory=set)
    """Stages on a single device of their rank: they are not divided."""
    view: Mesh = ()
    """Another mesh over the same devices."""
    viewed: set[int | str] = field(default_factory=set)
    """Stages on all of that."""

    @property
    def ranks(self) -> int:
        return dict(self.mesh).get(PP, 1)

    @property
    def wide(self) -> Mesh:
        return tuple((axis, size) for axis, size in self.mesh if axis != PP and size > 1)


def write(traits: Traits, seed: int, mesh: Mesh | None = None, devices: int = 12) -> str:
    """A script that compiles, reproducible from the seed; on `mesh`, or on a random mesh of up to `devices` devices."""
    draft = _drawn(traits, random.Random(seed), mesh, devices)
    _place(draft)
    if mesh is None:
        _view(draft, random.Random(seed + 2))
    data = _data(draft, random.Random(seed + 1))
    extras = _extras(draft)
    lines: list[str] = []
    graph = None
    # Which parts can be sharded, and which schedules fit, depends on the model: if the compiler rejects both together,
    # one is left out, then the other, then both.
    for keep_shards, keep_order in ((True, True), (True, False), (False, True), (False, False)):
        shards = draft.shards if keep_shards else []
        lines = _lines(draft, shards, data, extras, draft.library if keep_order else None)
        try:
            graph = traits.compiles(lines)
        except Exception:
            break  # a compiler bug: it will appear when the script is run
        if graph is not None:
            break
    if graph is not None:
        lines = _streamed(draft, lines, graph)
        if not any(line.startswith(f"{draft.library}(") for line in lines) and draft.draw.random() < 0.7:
            lines += random_orders(graph, draft.draw)
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- devices


def _drawn(traits: Traits, draw: random.Random, mesh: Mesh | None, devices: int) -> Draft:
    pieces = draw.choice([n for n in (1, 2, 4) if traits.samples % n == 0]) if traits.divides else 1
    found = mesh if mesh is not None else _mesh(traits, draw, devices, pieces)
    while pieces > 1 and traits.samples % (pieces * _degree(found)):
        pieces //= 2
    draft = Draft(draw, traits, found, pieces)
    fitting = [name for name in SCHEDULES if _fits(draft, name)] if PP in dict(found) else []
    if fitting and draw.random() < 0.4:
        draft.library = draw.choice(fitting)
    draft.mirrored = draft.library is None and pieces > 1 and draft.ranks > 1 and draw.random() < 0.2
    if draft.wide and draw.random() < 0.4:
        _divide(draft)
    return draft


def _mesh(traits: Traits, draw: random.Random, devices: int, pieces: int) -> Mesh:
    ranks = draw.choice([n for n in (1, 2, 2, 3, 4) if n <= devices])
    axes: list[tuple[str, int]] = [(PP, ranks)]
    for axis in draw.choice((["dp"], ["dp"], ["tp"], ["dp", "tp"])) if traits.divides else []:
        sizes = [
            n
            for n in (1, 2, 4)
            if n * prod(size for _, size in axes) <= devices
            and traits.samples % (pieces * n * _degree(tuple(axes))) == 0
        ]
        axes.append((axis, draw.choice(sizes or [1])))
    return tuple(axes)


def _degree(mesh: Mesh) -> int:
    return prod(size for axis, size in mesh if axis != PP)


def _fits(draft: Draft, name: str) -> bool:
    place, each = SCHEDULES[name]
    stages, ranks = len(draft.traits.stages), draft.ranks
    right = stages % ranks == 0 if each == 0 else stages == each * ranks
    return draft.traits.numbered and right and (place != "mirror" or (ranks % 2 == 0 and draft.pieces > 1))


def _divide(draft: Draft) -> None:
    """Up to two parts of the model are sharded along one axis; the rest divides the batch there."""
    axis, size = draft.draw.choice(draft.wide)
    tried = draft.draw.sample(draft.traits.parts, min(len(draft.traits.parts), 3))
    for part in tried:
        alike = [other for other, _ in draft.shards]
        if (
            len(alike) < 2
            and all(other.rest == part.rest and other.selector != part.selector for other in alike)
            and draft.traits.allows(part, size)
        ):
            draft.shards.append((part, axis))


# ----------------------------------------------------------------------------------------------------------- placement


def _place(draft: Draft) -> None:
    """The placement of the stages, if the library does not place them."""
    draw, half = draft.draw, draft.pieces // 2
    if draft.traits.loose or not draft.traits.stages:
        draft.places.append(
            f"place {'[!stage]' if draft.traits.stages else '[pass=*]'} on"
            f" {_part(draft, draw.randrange(draft.ranks), '')}"
        )
    for stage in draft.traits.stages:
        rank = draw.randrange(draft.ranks)
        free = not (draft.traits.tied or draft.shards or draft.library)
        narrow = free and draft.wide and draw.random() < 0.25
        part = "".join(f", {axis}={draw.randrange(size)}" for axis, size in draft.wide) if narrow else ""
        if free and not narrow and draft.wide and draft.wide[0][1] == 4 and draw.random() < 0.3:
            part = f", {draft.wide[0][0]}=0:2"
        if narrow:
            draft.narrow.add(stage)
        other = draft.ranks - 1 - rank if draft.mirrored else draw.randrange(draft.ranks)
        if draft.pieces > 1 and other != rank and (draft.mirrored or draw.random() < 0.3):
            draft.places.append(f"place [stage={_value(stage)}, mb=0:{half}] on {_part(draft, rank, part)}")
            draft.places.append(f"place [stage={_value(stage)}, mb={half}:] on {_part(draft, other, part)}")
        else:
            draft.places.append(f"place [stage={_value(stage)}] on {_part(draft, rank, part)}")


def _view(draft: Draft, draw: random.Random) -> None:
    """Now and then, some stages are on a mesh of their own over all devices, or each on the same two rows of it, in an
    order of its own."""
    traits, size = draft.traits, prod(size for _, size in draft.mesh)
    fixed = traits.tied or draft.shards or draft.library or draft.mirrored or not traits.divides
    if fixed or size < 2 or traits.samples % (draft.pieces * size) or draw.random() < 0.5:
        return
    inner = draw.choice([n for n in (1, 1, 2) if size % n == 0])
    draft.view = (("a", size // inner), ("b", inner))
    draft.viewed = {stage for stage in traits.stages if stage not in draft.narrow and draw.random() < 0.6}
    moved = tuple(f"place [stage={_value(stage)}{end}" for stage in draft.viewed for end in ("]", ","))
    draft.places = [line for line in draft.places if not line.startswith(moved)]
    rows = draw.sample(range(size // inner), 2) if size // inner > 2 and draw.random() < 0.8 else []
    for stage in (stage for stage in traits.stages if stage in draft.viewed):
        draw.shuffle(rows)
        where = f"view[a={{{rows[0]}, {rows[1]}}}]" if rows else "view"
        draft.places.append(f"place [stage={_value(stage)}] on {where}")


def _part(draft: Draft, rank: int, narrowed: str) -> str:
    picks = [f"{PP}={rank}"] if PP in dict(draft.mesh) else []
    picks += [narrowed.removeprefix(", ")] if narrowed else []
    return f"gpu[{', '.join(picks)}]" if picks else "gpu"


def _value(stage: int | str) -> str:
    return f'"{stage}"' if isinstance(stage, str) else str(stage)


# ---------------------------------------------------------------------------------------------------------------- data


def _data(draft: Draft, draw: random.Random) -> dict[str, list[tuple[str, str]]]:
    """For every axis except pp, which chunks are replicated over it and how: all alike if weights are tied, else
    possibly each stage in its own way."""
    found: dict[str, list[tuple[str, str]]] = {}
    if draft.viewed:
        for name, its in (("gpu", set(draft.traits.stages) - draft.viewed - draft.narrow), ("view", draft.viewed)):
            for axis in (axis for axis, size in (draft.wide if name == "gpu" else draft.view) if size > 1):
                ways = [(f"stage={_value(s)}", draw.choice(ZERO)) for s in draft.traits.stages if s in its]
                found[f"{name}.{axis}"] = ways
        return found
    for axis, _ in draft.wide:
        stages = [stage for stage in draft.traits.stages if stage not in draft.narrow]
        if (
            draft.traits.tied
            or draft.traits.loose
            or draft.library
            or draft.shards
            or not stages
            or draw.random() < 0.5
        ):
            found[f"gpu.{axis}"] = [("pass=*", draw.choice(ZERO))]
        else:
            found[f"gpu.{axis}"] = [(f"stage={_value(stage)}", draw.choice(ZERO)) for stage in stages]
    return {} if len(draft.narrow) == len(draft.traits.stages) > 0 else found


def _replicated(data: dict[str, list[tuple[str, str]]], shards: Sequence[tuple[ShardCandidate, str]]) -> list[str]:
    lines = []
    for axis, ways in data.items():
        rest = next((part.rest for part, along in shards if f"gpu.{along}" == axis), "")
        for who, how in ways:
            selector = rest if who == "pass=*" and rest else f"[{who}, {rest[1:]}" if rest else f"[{who}]"
            lines.append(f"replicate {selector} over {axis}{how}")
    return lines


def _lines(
    draft: Draft,
    shards: Sequence[tuple[ShardCandidate, str]],
    data: dict[str, list[tuple[str, str]]],
    extras: Sequence[str],
    library: str | None,
) -> list[str]:
    lines = [f"from std.pipeline import {library}, {SCHEDULES[library][0]}"] if library else []
    lines += [*draft.traits.tags, *(line for part, _ in shards for line in part.lines)]
    lines.append(f"mesh gpu = {', '.join(f'{axis}: {size}' for axis, size in draft.mesh)}")
    lines += [f"mesh view = {', '.join(f'{axis}: {size}' for axis, size in draft.view)}"] if draft.viewed else []
    lines += [f"split batch into {draft.pieces} as mb"] if draft.pieces > 1 or library else []
    chunks = len(draft.traits.stages) // draft.ranks
    if library:
        place = SCHEDULES[library][0]
        lines.append(
            f"{place}(gpu,"
            f" {draft.ranks}{f', {draft.pieces}' if place == 'mirror' else f', {chunks}' if place == 'loop' else ''})"
        )
        data = {axis: [("pass=*", ways[0][1])] for axis, ways in data.items()} or {
            f"gpu.{axis}": [("pass=*", "")] for axis, _ in draft.wide
        }
    else:
        lines += draft.places
    lines += _replicated(data, shards)
    lines += [f"shard {part.selector} over gpu.{axis} with style={part.style}" for part, axis in shards]
    lines += [line for line in extras if not ((library or draft.viewed) and line.startswith("split"))]
    if library:
        lines.append(
            f"{library}(gpu, {draft.ranks}, {draft.pieces}{f', chunks={chunks}' if SCHEDULES[library][1] == 0 else ''})"
        )
    return lines


# -------------------------------------------------------------------------------------------------------------- extras


def _extras(draft: Draft) -> list[str]:
    draw, lines = draft.draw, []
    stages = [_value(stage) for stage in draft.traits.stages]
    inner = draft.traits.samples // draft.pieces // _degree(draft.mesh)
    if stages and inner > 1 and inner % 2 == 0 and draft.traits.divides and draw.random() < 0.25:
        lines.append(f"split [stage={draw.choice(stages)}] into 2 as part_of")
    for stage in stages:
        kind = draw.random()
        if kind < 0.2:
            lines.append(f"recompute [stage={stage}]{draw.choice(('', ' with policy=cheap'))}")
        elif kind < 0.35:
            lines.append(f"offload [stage={stage}] with prefetch={draw.randrange(3)}")
        if draw.random() < 0.4 and draft.library is None:
            lines.append(f'stream [stage={stage}, pass=W] on "{draw.choice("ab")}"')
    if stages and draw.random() < 0.3:
        lines.append(f'stream [stage={draw.choice(stages)}, pass=F] on "forward"')
    return lines


def _streamed(draft: Draft, lines: list[str], graph: Graph) -> list[str]:
    """Communication on streams of its own, if there is any."""
    there = {
        "p2p" if template.op in ("send", "recv") else template.op
        for template in graph.templates
        if template.communicates
    }
    draw = draft.draw
    resources = ("", "", " with priority=high", " with priority=normal, ctas=4")
    streams = [f'stream [comm={op}] on "{op}"{draw.choice(resources)}' for op in sorted(there) if draw.random() < 0.2]
    order = lines[-1:] if lines[-1].endswith(")") else []  # that of the library comes last
    return [*lines[: len(lines) - len(order)], *streams, *order]
