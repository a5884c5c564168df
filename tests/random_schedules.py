"""Random legal scripts for a model with stages: placements, data degrees, ZeRO, splits, halves, recompute, offload, streams and full orders."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from piperlang.capture.program import Program
from piperlang.ir.graph import Graph
from piperlang.session import schedule
from piperlang.source import Source

ZERO = ("", " with states=sharded", " with grads=sharded, bucket=300B", " with params=sharded", " with params=sharded, prefetch=0, bucket=1KB")


@dataclass
class Draft:
    draw: random.Random
    stages: int
    tied: bool
    lines: list[str] = field(default_factory=list)
    wide: list[int] = field(default_factory=list)
    """Stages that lie along dp: only those can be replicated over it."""


def write(program: Program, seed: int, stages: int, tied: bool, samples: int = 8) -> str:
    """A script that compiles. Orders come last, taken from an order in which the graph can run."""
    draft = Draft(random.Random(seed), stages, tied)
    _devices(draft, samples)
    _extras(draft)
    if draft.draw.random() < 0.7:
        found = schedule(program, Source("draft.piper", "\n".join(draft.lines) + "\n"))
        assert not found.problems, ("\n".join(draft.lines), found.problems)
        draft.lines += _orders(draft, found.graph())
    return "\n".join(draft.lines) + "\n"


def _devices(draft: Draft, samples: int) -> None:
    draw = draft.draw
    pieces = draw.choice((1, 2, 4))
    ranks, width = draw.choice((1, 2, 3)), draw.choice((1, 2, 4) if pieces < 4 else (1, 2))
    draft.lines.append(f"mesh gpu = pp: {ranks}, dp: {width}")
    if pieces > 1:
        draft.lines.append(f"split batch into {pieces} as mb")
    inner = samples // pieces // width
    for stage in range(draft.stages):
        rank = draw.randrange(ranks)
        narrow = not draft.tied and width > 1 and draw.random() < 0.25
        part = f", dp={draw.randrange(width)}" if narrow else ", dp=0:2" if not draft.tied and width == 4 and draw.random() < 0.3 else ""
        draft.wide += [stage] if width > 1 and not narrow else []
        other = draw.randrange(ranks)
        if pieces > 1 and other != rank and draw.random() < 0.3:
            draft.lines.append(f"place [stage={stage}, mb=0:{pieces // 2}] on gpu[pp={rank}{part}]")
            draft.lines.append(f"place [stage={stage}, mb={pieces // 2}:] on gpu[pp={other}{part}]")
        else:
            draft.lines.append(f"place [stage={stage}] on gpu[pp={rank}{part}]")
    if draft.wide:
        _replicate(draft)
    if inner > 1 and draw.random() < 0.25:
        draft.lines.append(f"split [stage={draw.randrange(draft.stages)}] into 2 as part")


def _replicate(draft: Draft) -> None:
    """One way for all where weights are tied; else each stage its own."""
    draw = draft.draw
    if draft.tied or draw.random() < 0.5:
        draft.lines.append(f"replicate [pass=*] over gpu.dp{draw.choice(ZERO)}")
        return
    for stage in draft.wide:
        draft.lines.append(f"replicate [stage={stage}] over gpu.dp{draw.choice(ZERO)}")


def _extras(draft: Draft) -> None:
    draw = draft.draw
    for stage in range(draft.stages):
        kind = draw.random()
        if kind < 0.2:
            draft.lines.append(f"recompute [stage={stage}]")
        elif kind < 0.35:
            draft.lines.append(f"offload [stage={stage}] with prefetch={draw.randrange(3)}")
        if draw.random() < 0.4:
            draft.lines.append(f'stream [stage={stage}, pass=W] on "{draw.choice("ab")}"')
    if draw.random() < 0.3:
        draft.lines.append(f'stream [stage={draw.randrange(draft.stages)}, pass=F] on "forward"')


def _orders(draft: Draft, graph: Graph) -> list[str]:
    """Orders for the parts of the mesh: a random sequence in which the whole graph could run, seen from there.

    Parts may overlap, and orders on one device follow each other, so a new block begins wherever the part changes."""
    lines: list[str] = []
    current = None
    left_out = {where for where in sorted({str(family.where) for family in graph.families}) if draft.draw.random() < 0.2}
    for i in _linear(graph, draft.draw):
        node = graph.nodes[i]
        where = str(node.family.where)
        if node.op not in ("F", "B", "I", "W") or where in left_out:
            continue
        if where != current:
            lines.append(f"order on {where}:")
            current = where
        conditions = [f"{key}={value}" for key, value in sorted(node.family.tags.items())]
        conditions += [f"{name}={at}" for name, at in zip(node.family.dims, node.point, strict=True)]
        lines.append(f"    [{', '.join(conditions)}, pass={node.op}]")
    return lines


def _linear(graph: Graph, draw: random.Random) -> list[int]:
    waits = {node.id: set(graph.sources(node)) | set(graph.after.get(node.id, ())) for node in graph.nodes}
    users: dict[int, list[int]] = {}
    for node, makers in waits.items():
        for maker in makers:
            users.setdefault(maker, []).append(node)
    ready = [node for node, makers in waits.items() if not makers]
    done = []
    while ready:
        node = ready.pop(draw.randrange(len(ready)))
        done.append(node)
        for user in users.get(node, ()):
            waits[user].discard(node)
            if not waits[user]:
                ready.append(user)
    return done
