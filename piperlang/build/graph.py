"""The graph of a schedule: compute nodes here, activations between them in activations.py, weights in parameters.py,
gradients in gradients.py, orders in orders.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from piperlang.build.activations import Edge, Flow
from piperlang.build.gradients import hold_back, reduce
from piperlang.build.nodes import Nodes
from piperlang.build.orders import Temporal
from piperlang.build.parameters import Weights
from piperlang.build.schedule import Schedule
from piperlang.build.sites import Site, Sites
from piperlang.core.collector import uncollected
from piperlang.core.placement import dispatched
from piperlang.core.value_id import RNG, SEED, Kind, Point, ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.ir.graph import Graph, NodeTemplate, Steps, Value
from piperlang.ir.model import Slot, Tensor
from piperlang.ir.sort import topological


def build(schedule: Schedule, sketch: bool = False) -> Graph:
    """The graph as the directives so far make it. A sketch has one microbatch of everything: enough to see what there
    is."""
    with uncollected():
        return _Build(schedule, sketch).graph()


class _Build:
    def __init__(self, schedule: Schedule, sketch: bool) -> None:
        self.schedule, self.model, self.sketch = schedule, schedule.model, sketch
        self.sites = Sites(schedule, sketch)
        self.nodes = Nodes(schedule)
        self.flow = Flow(self.nodes, schedule)
        self.weights = Weights(self.model, self.sites, self.nodes)
        self.readers: dict[str, list[tuple[int, int]]] = {}
        for chunk in self.model.chunks:
            for i, name in enumerate(chunk.inputs):
                self.readers.setdefault(name, []).append((chunk.number, i))
        self.losses: list[ValueId] = []
        self.fetched: list[tuple[int, list[tuple[int, int]]]] = []
        """For chunks whose activations come back ahead of time: how far, and every fetch with the backward that is
        first to read it."""
        self.again: list[tuple[int, int]] = []
        """What recomputes activations or brings them back, with the backward that is first to read them."""
        self.gradients: dict[str, Tensor] = {}

    def graph(self) -> Graph:
        for chunk in self.model.chunks:
            for site in self.sites.of[chunk.number]:
                self._forward(site)
        for chunk in reversed(self.model.chunks):
            if "B" in chunk.passes:
                for site in self.sites.of[chunk.number]:
                    self._backward(site)
        self.weights.refuse_unchanged()
        updated = (
            reduce(self.model, list(self.weights.replicas.values()), self.nodes, self.schedule) | self.weights.changes
        )
        temporal = Temporal(self.schedule, self.nodes)
        orders = [] if self.sketch else temporal.orders()
        chains = [] if self.sketch else temporal.chains()
        self._no_sooner_than_its_backward(orders)
        n = self.nodes
        graph = Graph(
            self.model,
            n.nodes,
            [template for template in n.templates if template.points],
            n.values,
            n.held,
            n.made,
            n.after,
            orders,
            tuple(self.schedule.directives),
            tuple(self.losses),
            updated,
            chains,
            self.schedule.outline.resources(),
        )
        # What is counted in passes is counted in an order in which the graph can run. Without chains that is known
        # without looking.
        turns = self._turns(graph) if chains else {}
        self.weights.prefetch(orders, turns)
        hold_back(self.nodes, orders, turns)
        if self.fetched and not self.sketch:
            self._fetch_ahead(self._turns(graph))
        return graph

    def _turns(self, graph: Graph) -> dict[int, int]:
        """Where each node stands in an order in which the graph can run."""
        try:
            return {node: at for at, node in enumerate(topological(graph))}
        except PiperError:
            return {}  # reported by whoever sorts the graph next

    def _no_sooner_than_its_backward(self, orders: Sequence[Steps]) -> None:
        """Activations are made again when the backward may begin. A chunk with the loss waits for no gradient, and
        would have them as soon as its forward is over."""
        later: dict[int, list[int]] = {}
        for node, backward in self.again:
            later.setdefault(backward, []).append(node)
        for order in orders:
            for before, group in order.fences(lambda node: self.nodes.nodes[node].stream):
                for node in (node for backward in group for node in later.get(backward, ())):
                    self._wait(node, list(before))
        for node, backward in self.again:
            self._wait(node, list(self.nodes.after.get(backward, ())))

    def _fetch_ahead(self, position: Mapping[int, int]) -> None:
        """Activations come back so many backwards ahead, in the order of the script where it gives one, whichever way
        its microbatches go."""
        for ahead, pairs in self.fetched if position else ():
            ranked = sorted(pairs, key=lambda pair: position[pair[1]])
            for (_, earlier), (fetch, _) in zip(ranked, ranked[ahead:], strict=False):
                self.nodes.before(fetch, earlier)

    # ------------------------------------------------------------------------------------------------- forward

    def _forward(self, site: Site) -> None:
        chunk, number = site.chunk, site.chunk.number
        inputs = chunk.passes["F"].inputs
        keeps = "B" in chunk.passes and site.group not in self.schedule.recomputed
        template = self._template("F", site, inputs, chunk.passes["F"].outputs)
        offloads = site.group in self.schedule.offloaded and "B" in chunk.passes
        out = (
            self.nodes.template(
                NodeTemplate(
                    "offload", chunk.tags, site.where, site.dims, number, by=self.schedule.offloaded[site.group]
                )
            )
            if offloads
            else None
        )
        for point in site.points:
            if chunk.dispatch is not None:  # routed tokens follow it
                self._given(site, ("input", chunk.inputs.index(chunk.dispatch.indices)), point, "F")
            reads = tuple(self._given(site, slot, point, "F") for slot in inputs)
            writes = [ValueId(Kind.ACTIVATION, name, (), point) for name in chunk.outputs]
            for j, name in enumerate(chunk.outputs):
                self._value(writes[j], self.model.tensors[name], site, ("output", j), point)
            for change in chunk.changes:
                writes[change.output] = self.weights.changed(site, change, point)
            if self.model.loss in chunk.outputs:
                self.losses.append(ValueId(Kind.ACTIVATION, self.model.loss, (), point))
            saved = ValueId(Kind.SAVED, "", (number,), point)
            if keeps:
                writes.append(saved)
            node = self.nodes.add(template, point, reads, tuple(writes))
            self.weights.read_by(site, "F", point, node)
            if out is not None:
                self.nodes.add(out, point, ((saved,),), (ValueId(Kind.HOST, "", (number,), point),))

    def _template(self, op: str, site: Site, slots: tuple[Slot, ...], outputs: tuple[Slot, ...] = ()) -> NodeTemplate:
        return self.nodes.template(
            NodeTemplate(
                op,
                site.chunk.tags,
                site.where,
                site.dims,
                site.chunk.number,
                op if op != "R" else None,
                slots,
                outputs,
                site.local_samples,
                site.sharding,
                site.spread,
            )
        )

    def _value(self, key: ValueId, tensor: Tensor, site: Site, slot: Slot, point: Point) -> None:
        self.nodes.values[key] = Value(tensor, site.layouts[slot], site.first(point), site.samples, site.inner(point))

    def _gradient_of(self, tensor: Tensor) -> Tensor:
        if tensor.name not in self.gradients:
            self.gradients[tensor.name] = replace(tensor, name=f"d:{tensor.name}")
        return self.gradients[tensor.name]

    def _given(self, site: Site, slot: Slot, point: Point, phase: str) -> tuple[ValueId, ...]:
        """What a pass reads from outside its chunk: weights, the batch, random numbers, inputs."""
        kind, i = slot
        if kind == "weight":
            return (self.weights.key(site, i, phase, point),)
        if kind == "input":
            name = site.chunk.inputs[i]
            maker, j = self.sites.maker[name]
            source = self.sites.at(maker, self._point_in(maker, site, point))
            have, want = source.layouts["output", j], site.layouts[slot]
            value = ValueId(Kind.ACTIVATION, name)
            return self.flow.fetch(Edge(value, self.model.tensors[name], source, have, site, want, "F"), point)
        if kind == "batch":
            key = ValueId(Kind.BATCH, site.chunk.batch[i], (site.chunk.number,), point)
            self._value(key, self.model.tensors[site.chunk.batch[i]], site, slot, point)
            return (key,)
        return (RNG,)

    def _point_in(self, other: int, site: Site, point: Point) -> Point:
        """The microbatch of another chunk whose site holds this microbatch."""
        first = self.sites.of[other][0]
        return point if first.dims == site.dims else point[: site.outer] + (0,) * (len(first.dims) - first.outer)

    # ------------------------------------------------------------------------------------------------ backward

    def _backward(self, site: Site) -> None:
        chunk = site.chunk
        templates: dict[str, NodeTemplate] = {}
        again = self._template("R", site, chunk.passes["F"].inputs) if site.group in self.schedule.recomputed else None
        offloaded = self.schedule.offloaded.get(site.group)
        fetch = (
            self.nodes.template(NodeTemplate("fetch", chunk.tags, site.where, site.dims, chunk.number, by=offloaded))
            if offloaded
            else None
        )
        ahead = next((o.value for o in offloaded.options if o.name == "prefetch"), 0) if offloaded else 0
        pairs: list[tuple[int, int]] = []
        for point in site.points:
            arrived = self._gradients(site, point)
            saved = ValueId(Kind.SAVED, "", (chunk.number,), point)
            makers = [self.nodes.made[key] for keys in arrived.values() for key in keys if key in self.nodes.made]
            remade = []
            if again is not None:
                reads = tuple(self._given(site, slot, point, "R") for slot in again.slots)
                node = self.nodes.add(again, point, reads, (saved,))
                self.weights.read_by(site, "R", point, node)
                self._wait(node, makers)
                remade.append(node)
            fetched = None
            if fetch is not None:
                host = ValueId(Kind.HOST, "", (chunk.number,), point)
                fetched = self.nodes.add(fetch, point, ((host,),), (saved.fetched,))
                saved = saved.fetched
                if ahead == 0:
                    self._wait(fetched, makers)
                    remade.append(fetched)
            for op in self.schedule.halves(site.group, point):
                if op in chunk.passes:
                    if op not in templates:
                        templates[op] = self._template(
                            op, site, _bundled(chunk.passes[op].inputs), chunk.passes[op].outputs
                        )
                    node = self._pass(op, templates[op], site, point, arrived, saved)
                    self.again += [(one, node) for one in remade]
                    remade = []
                    if fetched is not None:
                        pairs.append((fetched, node))
                        fetched = None
        if isinstance(ahead, int) and ahead > 0:
            self.fetched.append((ahead, pairs))

    def _wait(self, node: int, makers: list[int]) -> None:
        for maker in makers:
            self.nodes.before(node, maker)

    def _gradients(self, site: Site, point: Point) -> dict[int, tuple[ValueId, ...]]:
        """For every output that has one, the parts of its gradient: one from each reader."""
        found: dict[int, tuple[ValueId, ...]] = {}
        for j, name in enumerate(site.chunk.outputs):
            tensor = self.model.tensors[name]
            if name == self.model.loss:
                found[j] = (SEED,)
                continue
            parts: list[ValueId] = []
            for reader, i in self.readers.get(name, ()) if tensor.differentiable else ():
                if ("grad_input", i) not in self.model.chunks[reader].passes.get(
                    "B", self.model.chunks[reader].passes["F"]
                ).outputs:
                    continue
                source = self.sites.at(reader, self._point_in(reader, site, point))
                half = self.schedule.halves(source.group, self._point_in(reader, site, point))[0]
                have, want = source.layouts["grad_input", i], site.layouts["grad_output", j]
                gradient = ValueId(Kind.GRADIENT, name, (reader, i))
                edge = Edge(gradient, self._gradient_of(tensor), source, have, site, want, half)
                parts += self.flow.fetch(edge, point)
            found[j] = tuple(parts)
            if not parts and tensor.differentiable and dispatched(site.layouts["output", j].placements):
                raise error(
                    "P0411",
                    f"output {name} of {site.chunk} receives no gradient",
                    site.by.span if site.by else None,
                    "placed here",
                    notes=[
                        "its tokens are dispatched to experts, so the size of a zero gradient is not known before the"
                        " step"
                    ],
                    help="`.detach()` it where it is made, or let the loss depend on it",
                )
        return found

    def _pass(
        self,
        op: str,
        template: NodeTemplate,
        site: Site,
        point: Point,
        arrived: dict[int, tuple[ValueId, ...]],
        saved: ValueId,
    ) -> int:
        chunk = site.chunk
        bundles = {"saved": saved, "kept": ValueId(Kind.RESIDUALS, "", (chunk.number,), point)}
        reads = tuple(
            (
                (bundles[slot[0]],)
                if slot[0] in bundles
                else arrived[slot[1]]
                if slot[0] == "grad_output"
                else self._given(site, slot, point, op)
            )
            for slot in template.slots
        )
        writes: list[ValueId] = []
        for kind, i in template.outputs:
            if kind == "grad_input":
                name = chunk.inputs[i]
                writes.append(ValueId(Kind.GRADIENT, name, (chunk.number, i), point))
                self._value(writes[-1], self._gradient_of(self.model.tensors[name]), site, (kind, i), point)
            elif kind == "grad_weight":
                writes.append(self.weights.gradient(site, i, point))
        if op == "I" and any(kind == "kept" for kind, _ in template.outputs):
            writes.append(bundles["kept"])
        node = self.nodes.add(template, point, reads, tuple(writes))
        self.weights.read_by(site, op, point, node)
        return node


def _bundled(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """What F saves, and what I keeps, are each one value of the graph."""
    return tuple(dict.fromkeys((kind, 0) if kind in ("saved", "kept") else (kind, i) for kind, i in slots))
