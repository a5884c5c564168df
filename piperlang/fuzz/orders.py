"""Random full orders that are valid for a graph."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping

from piperlang.ir.graph import Graph, Node
from piperlang.ir.sort import edges

ORDERED = ("F", "B", "I", "W")


def random_orders(graph: Graph, draw: random.Random) -> list[str]:
    """Orders for submeshes: a random topological order of the whole graph, restricted to each submesh, sometimes
    with two steps joined.

    Submeshes may overlap, and orders on one device follow each other, so a new block starts where the submesh
    changes."""
    lines: list[str] = []
    current, joined = None, False
    left_out = {where for where in sorted({str(template.where) for template in graph.templates}) if draw.random() < 0.2}
    units = _units(graph)
    first: dict[Hashable, Node] = {}
    for number, unit in units.items():
        first.setdefault(unit, graph.nodes[number])
    mixed = _mixed(graph)
    for unit in _linear(graph, units, draw):
        node = first[unit]
        where = str(node.template.where)
        if node.op not in ORDERED or where in left_out or _work(node) in mixed:
            continue
        if where != current:
            lines.append(f"order on {where}:")
            current, joined = where, True  # nothing to join with yet
        if not joined and draw.random() < 0.15:
            lines[-1] += f" & {_step(node)}"
            joined = True
        else:
            lines.append(f"    {_step(node)}")
            joined = False
    return lines


def _work(node: Node) -> Hashable:
    """The nodes that one step selects: all chunks of a stage, for one microbatch."""
    return node.template.tags.get("stage", node.template.chunk), str(node.template.where), node.point


def _units(graph: Graph) -> Mapping[int, Hashable]:
    return {node.id: (_work(node), node.op) if node.op in ORDERED else node.id for node in graph.nodes}


def _mixed(graph: Graph) -> set[Hashable]:
    """Nodes that no single step can select: stages with B in one chunk and I/W in another, and nodes without a
    stage."""
    ops: dict[Hashable, set[str]] = {}
    for node in graph.nodes:
        if node.op in ORDERED:
            ops.setdefault(_work(node), set()).update({node.op} if "stage" in node.template.tags else {"B", "W"})
    return {work for work, found in ops.items() if "B" in found and found & {"I", "W"}}


def _step(node: Node) -> str:
    stage = node.template.tags["stage"]
    conditions = [f'stage="{stage}"' if isinstance(stage, str) else f"stage={stage}"]
    conditions += [f"{name}={at}" for name, at in zip(node.template.dims, node.point, strict=True)]
    return f"[{', '.join(conditions)}, pass={node.op}]"


def _linear(graph: Graph, units: Mapping[int, Hashable], draw: random.Random) -> list[Hashable]:
    """The units of a graph in a random topological order; cyclic ones, and units that depend on them,
    are left out."""
    users, _ = edges(graph)
    after: dict[Hashable, set[Hashable]] = {unit: set() for unit in units.values()}
    for i, those in enumerate(users):
        unit = units.get(i, ("gate", i))
        after.setdefault(unit, set()).update(
            other for user in those if (other := units.get(user, ("gate", user))) != unit
        )
    waits = dict.fromkeys(after, 0)
    for others in after.values():
        for other in others:
            waits[other] = waits.get(other, 0) + 1
    ready = [unit for unit, count in waits.items() if not count]
    done = []
    while ready:
        unit = ready.pop(draw.randrange(len(ready)))
        done.append(unit)
        for user in sorted(after.get(unit, ()), key=repr):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    known = set(units.values())
    return [unit for unit in done if unit in known]
