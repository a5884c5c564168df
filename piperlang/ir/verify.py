"""What must hold of every graph, whatever passes made it. A fault here is a bug of ours, never of a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

from piperlang.core.collector import uncollected
from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import COLLECTIVES, Graph
from piperlang.ir.layout import devices_of
from piperlang.ir.redistribute import moves

GRADIENTS = (Kind.GRADIENT, Kind.WEIGHT_GRADIENT)
_MOVES = frozenset((*COLLECTIVES, "send", "slice", "concat", "share"))


class InvalidGraph(Exception):
    """A graph that would not train the model it was made from."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults[:10]))
        self.faults = faults


def verify(graph: Graph, sketch: bool = False) -> None:
    """Raise InvalidGraph with every fault found. A sketch has not all microbatches, so they are not counted."""
    with uncollected():
        faults = [*_flow(graph), *_places(graph), *_moves(graph), *_gradients(graph), *_updates(graph)]
        if not sketch:
            faults += _samples(graph)
    if faults:
        raise InvalidGraph(faults)


def _flow(graph: Graph) -> Iterator[str]:
    """Every value is made once, by one node, and read only where somebody makes it."""
    made, written = graph.made, 0
    for node in graph.nodes:
        for keys in node.reads:
            for key in keys:
                if key not in made and not _given(graph, key):
                    yield f"{node} reads {key}, which nobody makes"
        for key in node.writes:
            written += 1
            if made.get(key) != node.id:
                yield f"{node} makes {key}, which is not known, or made by another node too"
    if written != len(made):
        yield f"{len(made)} values are known to be made, nodes make {written}"


def _given(graph: Graph, key: ValueId) -> bool:
    if key.kind in (Kind.SUPPLIED, Kind.WEIGHT):
        return True
    value = graph.values.get(key)
    return value is not None and value.tensor.name in {name for chunk in graph.model.chunks for name in chunk.batch}


def _places(graph: Graph) -> Iterator[str]:
    """A node reads and writes values of its own devices."""
    values, held = graph.values, graph.held
    for node in graph.nodes:
        template = node.template
        here, op = template.where, template.op
        reads = node.reads if op != "recv" else ()
        for keys in (*reads, node.writes) if op != "send" else reads:
            for key in keys:
                lies = values[key].layout.where if key in values else held[key].where if key in held else here
                if lies is here or lies in template.beyond:
                    continue
                if devices_of(lies) != devices_of(here):  # another view of the same devices is as good
                    yield f"{node} touches {key}, which lies on {lies}"
        if template.chunk is not None and template.slots and len(template.slots) != len(node.reads):
            yield f"{node} has {len(node.reads)} reads for {len(template.slots)} slots"


def _moves(graph: Graph) -> Iterator[str]:
    """Communication is called what it does: the layouts on both sides say which operation it takes."""
    for node in graph.nodes:
        if node.template.op not in _MOVES or node.writes[0] in graph.held:
            continue
        after = graph.values[node.writes[0]]
        before = [graph.values[key] for key in node.reads[0]]
        if node.op == "concat" or after.inner != before[0].inner:
            fine = before[0].layout == after.layout and node.op in ("slice", "concat")
        else:
            op = "p2p" if node.op == "send" else node.op
            fine = [name for name, _ in moves(before[0].layout, after.layout)] == [op]
        if not fine:
            yield f"{node} cannot turn {before[0].layout} into {after.layout}"
        samples = [value for value in before if (value.first, value.samples) != (after.first, after.samples)]
        if samples:
            yield f"{node} turns samples {samples[0].first}+{samples[0].samples} into {after.first}+{after.samples}"


def _gradients(graph: Graph) -> Iterator[str]:
    """No part of a gradient is lost, and none counts twice."""
    read: dict[ValueId, float] = {}
    halves: set[tuple[ValueId, int | None, object]] = set()
    for node in graph.nodes:
        part = 1.0
        if node.op == "slice" and not graph.values[node.reads[0][0]].inner:
            # Cut for a split of some chunks: each takes its part, and together they must take all.
            part /= prod(of for _, of in graph.values[node.writes[0]].inner)
        for keys in node.reads:
            for key in keys:
                if key.kind not in GRADIENTS:
                    continue
                if node.op in ("I", "W"):  # two halves of one backward read a gradient once
                    if (key, node.template.chunk, node.point) in halves:
                        continue
                    halves.add((key, node.template.chunk, node.point))
                read[key] = read.get(key, 0.0) + part
    for node in graph.nodes:
        for key in node.writes:
            if key.kind in GRADIENTS and abs(read.get(key, 0.0) - 1) > 1e-6:
                yield f"{key} of {node} is read {read.get(key, 0.0):g} times, not once"


def _updates(graph: Graph) -> Iterator[str]:
    """Every weight that learns is updated once wherever it is kept, and kept afterwards as it was before."""
    learning = {
        graph.held[key].weight for node in graph.nodes for key in node.writes if key.kind is Kind.WEIGHT_GRADIENT
    }
    updates = Counter(
        node.reads[i][0] for node in graph.nodes if node.op == "update" for i in range(0, len(node.reads), 2)
    )
    for key in (key for key in graph.held if key.kind is Kind.WEIGHT and key not in graph.made):
        if graph.held[key].weight in learning and updates[key] != 1:
            yield f"{key} is updated {updates[key]} times, not once"
        after = graph.next.get(key)
        if after is not None and graph.held[after]._replace(weight="") != graph.held[key]._replace(weight=""):
            yield f"{key} is kept otherwise after its update"


def _samples(graph: Graph) -> Iterator[str]:
    """Every chunk sees every sample of the batch once."""
    seen: Counter[int] = Counter()
    for template in graph.templates:
        if template.op == "F" and template.chunk is not None and template.layout is not None:
            seen[template.chunk] += len(template.points) * template.samples * len(template.layout.separate())
    for chunk, samples in seen.items():
        if samples != graph.model.samples:
            yield f"chunk {chunk} sees {samples} samples of {graph.model.samples}"
