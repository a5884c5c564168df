"""The graph as text, one node a line, short to read or with all it has; and as JSON.

The text is stable, so that two graphs can be compared with diff.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import COMPUTE, Graph, Node
from piperlang.ir.layout import axes_of, devices_of
from piperlang.ir.sort import topological


def text(graph: Graph) -> str:
    """In an order in which it can run."""
    return "\n".join(line(graph, graph.nodes[i]) for i in topological(graph)) + "\n"


def brief(graph: Graph) -> str:
    """The same order, each node in a few words: what it is, where it runs, what goes in and comes out."""
    return "\n".join(brief_line(graph, graph.nodes[i]) for i in topological(graph)) + "\n"


def brief_line(graph: Graph, node: Node) -> str:
    """`F[stage=0, mb=0]  gpu[pp=0]  25 weights -> [2, 16, 64]`.

    Weights and their gradients are counted, other values have their global shape. Of what a pass reads only the weights
    are named: the rest is what the nodes before it have written. Communication and updates give what they take. A
    stream of the script's own is named."""
    template = node.template
    where = " and ".join(map(str, (template.where, *template.beyond))) + (
        f" over {', '.join(template.axes)}" if template.axes else ""
    )
    reads = _amounts(graph, (key for keys in node.reads for key in keys[:1] if key.kind is Kind.WEIGHT))
    writes = _amounts(graph, node.writes)
    what = f"{reads} -> {writes}".strip() if template.op in COMPUTE else writes
    stream = f"stream {node.stream}" if node.stream not in ("compute", "comm") else ""
    return "  ".join(part for part in (node.name, where, what, stream) if part)


def _amounts(graph: Graph, keys: Iterable[ValueId]) -> str:
    """Shapes, and how many weights and gradients: `[4, 32], 2 gradients`."""
    shapes: list[str] = []
    counts: Counter[str] = Counter()
    for key in keys:
        value = graph.values.get(key)
        if key.kind is Kind.WEIGHT:
            counts["weight"] += 1
        elif key.kind in (Kind.WEIGHT_GRADIENT, Kind.REDUCED):
            counts["gradient"] += 1
        elif value is not None:
            shapes.append(str(list(value.tensor.shape(value.samples))))
        else:
            counts["activations"] = 1  # as many tensors as the backward needs
    if shapes or counts["weight"] or counts["gradient"]:
        del counts["activations"]
    return ", ".join(
        shapes
        + [what if what == "activations" else f"{n} {what}{'s' if n > 1 else ''}" for what, n in counts.items() if n]
    )


def line(graph: Graph, node: Node) -> str:
    template = node.template
    over = f" over {', '.join(template.axes)}" if template.axes else ""
    beyond = "".join(f" and {where}" for where in template.beyond)
    reads = ", ".join(" + ".join(map(str, keys)) or "0" for keys in node.reads)
    writes = ", ".join(described(graph, key) for key in node.writes)
    after = ", ".join(str(graph.nodes[i]) for i in sorted(graph.after.get(node.id, ())))
    return f"{node}{beyond}{over} stream {node.stream}: {reads} -> {writes}" + (f" after {after}" if after else "")


def described(graph: Graph, key: ValueId) -> str:
    """A value with its global shape and placements: `x#0: float32[4, 16]{dp: batch}`."""
    value, held = graph.values.get(key), graph.held.get(key)
    if value is not None:
        shape, dtype = value.tensor.shape(value.samples), value.tensor.dtype
        places = zip(axes_of(value.layout.where), value.layout.placements, strict=True)
    elif held is not None:
        weight = graph.model.weights[held.weight]
        shape, dtype = weight.shape, weight.dtype
        places = zip(axes_of(held.where), held.placements, strict=True)
    else:
        return str(key)  # activations: as many tensors as the backward needs
    owners = dict(held.owners) if held else {}
    lies = [f"{axis}: {place}" for (axis, _), place in places] + [
        f"{axis}: on {owners[axis]}" if axis in owners else f"{axis}: flat" for axis in (held.flat if held else ())
    ]
    return f"{key}: {dtype}{list(shape)}" + (f"{{{', '.join(lies)}}}" if lies else "")


def as_json(graph: Graph) -> dict[str, Any]:
    return {
        "version": 1,
        "samples": graph.model.samples,
        "chunks": [
            {"number": c.number, "tags": dict(c.tags), "modules": list(c.modules), "weights": list(c.weights)}
            for c in graph.model.chunks
        ],
        "nodes": [_node(graph, graph.nodes[i]) for i in topological(graph)],
        "values": dict(_values(graph)),
        "orders": [
            {"devices": sorted(order.devices), "steps": [list(group) for group in order.groups]}
            for order in graph.orders
        ],
    }


def _node(graph: Graph, node: Node) -> dict[str, Any]:
    template = node.template
    found: dict[str, Any] = {
        "id": node.id,
        "op": template.op,
        "tags": dict(template.tags),
        "split": dict(zip(template.dims, node.point, strict=False)),
        "on": str(template.where),
        "devices": sorted({device for where in (template.where, *template.beyond) for device in devices_of(where)}),
        "stream": node.stream,
        "reads": [list(map(str, keys)) for keys in node.reads],
        "writes": list(map(str, node.writes)),
        "after": sorted(graph.after.get(node.id, ())),
    }
    if template.phase is not None:
        found["pass"] = template.phase
    if template.chunk is not None:
        found["chunk"] = template.chunk
    if template.also:
        found["also"] = [dict(tags) for tags in template.also]
    if template.axes:
        found["over"] = list(template.axes)
    return found


def _values(graph: Graph) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in graph.values.items():
        layout = value.layout
        places = {axis: str(place) for (axis, _), place in zip(axes_of(layout.where), layout.placements, strict=True)}
        yield (
            str(key),
            {
                "dtype": value.tensor.dtype,
                "shape": list(value.tensor.shape(value.samples)),
                "on": str(layout.where),
                "lies": places,
                "first": value.first,
                "samples": value.samples,
            },
        )
    for key, held in graph.held.items():
        weight = graph.model.weights[held.weight]
        places = {axis: str(place) for (axis, _), place in zip(axes_of(held.where), held.placements, strict=True)}
        yield (
            str(key),
            {
                "dtype": weight.dtype,
                "shape": list(weight.shape),
                "on": str(held.where),
                "lies": places,
                "flat": list(held.flat),
                "owners": dict(held.owners),
            },
        )
