"""Compiles the backward: explicit F, B, I and W graphs of a chunk.

The joint graph of a chunk (joint.py) is partitioned by dependency alone. F is what the outputs need, and what is marked
as early (cross_entropy.py). Of the rest, I is what the gradients of the inputs need, and W is what remains. B is I and
W in one graph. None recomputes what another computed, except views of what is there anyway and, where the script says
so, what is cheap (min_cut.py).

Graphs identify their values by slot (the third weight, the first input) instead of by name, so equal chunks share them:
sixteen equal layers are differentiated, and later compiled, once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from piperlang.capture.autodiff.cost import bytes_of, cost
from piperlang.capture.autodiff.cut import Subgraph
from piperlang.capture.autodiff.joint import Joint, sources
from piperlang.capture.autodiff.min_cut import VIEWS, fewest_bytes
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.batch.sizes import Sizes
from piperlang.capture.trace.early import EARLY
from piperlang.capture.trace.functions import identity
from piperlang.capture.trace.random import PLACE
from piperlang.capture.trace.trace import Traced
from piperlang.ir.model import Slot

Localize: TypeAlias = Callable[[fx.GraphModule, Sequence[Slot], Sequence[Slot | None]], fx.GraphModule]
"""Turns a joint graph, with its inputs and outputs, into the graph that each device runs."""


def differentiate(traced: Traced, chunks: Sequence[Subgraph], cheap: bool = False) -> list[PassGraphs]:
    """The graphs of every chunk. Equal chunks get the same object."""
    known: dict[object, PassGraphs] = {}
    found: list[PassGraphs] = []
    for chunk in chunks:
        key = signature(traced, chunk)
        if key not in known:
            known[key] = divide(Joint(traced, chunk), cheap=cheap)
        found.append(known[key])
    return found


def divide(
    joint: Joint, local: Localize | None = None, like: PassGraphs | None = None, cheap: bool = False
) -> PassGraphs:
    """The graphs of a chunk; with `local`, for one of the devices that shard its weights. `cheap`: the backward
    recomputes what is cheap.

    `like`: the graphs of the same chunk at another batch size. What a copy is there may be a view here: with one sample
    a slice of the batch is contiguous. The backward then reads nothing of the chunk's inputs that it does not read
    there: the forward saves it."""
    made = _Division(joint, local, cheap).divide()
    more = made.reads_beyond(like) if like is not None else frozenset[Slot]()
    return _Division(joint, local, cheap, more).divide() if more else made


def signature(traced: Traced, chunk: Subgraph, sizes: Sizes | None = None) -> object:
    """Equal for chunks that compute the same: operators, constants, shapes and data flow; with `sizes`, at any batch
    size."""
    numbers: dict[fx.Node, int] = {}
    parts: list[object] = []
    for slot, node, learns in sources(traced, chunk):
        numbers[node] = len(numbers)
        value = traced.value(node)
        parts.append((slot, tuple(value.shape), value.dtype, value.stride(), learns))
    for node in chunk.nodes:
        numbers[node] = len(numbers)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        parts.append((node.op, str(node.target), identity(node.target), repr(arguments)))
        if sizes is not None:
            parts.append(repr(sizes.arguments(node, sizes.large.samples, lambda _: None)))
    names = {node.name: node for node in chunk.nodes}
    parts.append(tuple((numbers[names[v.name]], v.differentiable) for v in chunk.outputs))
    return tuple(parts)


def value_name(chunk: Subgraph, slot: Slot) -> str:
    """The name of the value in a slot of a chunk, unique in the whole graph. A gradient is named `grad:` and the name
    of its value."""
    kind, i = slot
    if kind.startswith("grad_"):
        return f"grad:{value_name(chunk, (kind.removeprefix('grad_'), i))}"
    if kind in ("saved", "kept"):
        return f"{kind}:{chunk.number}:{i}"
    if kind == "rng":
        return PLACE
    values = {"weight": chunk.weights, "batch": chunk.batch}
    if kind in values:
        return values[kind][i]
    return (chunk.inputs if kind == "input" else chunk.outputs)[i].name


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})


def _copies(results: Sequence[tuple[Slot, fx.Node]], read: Collection[StorageWeakRef]) -> list[bool]:
    """Which gradients have to be copied: those that cross between chunks and are not contiguous, or are there twice;
    and those of weights that share memory with another, or with what others `read`.

    Gradients of microbatches are added up in place, in the first of them. With one sample, the gradient of a weight
    that is added to an activation may be the gradient of that activation itself."""
    crossing: set[fx.Node] = set()
    taken = set(read)
    found = []
    for slot, node in results:
        copied = False
        if slot[0] == "grad_weight":
            copied = _storage(node) in taken
            taken.add(_storage(node))
        elif slot[0] == "grad_input":
            copied = node in crossing or not node.meta["val"].is_contiguous()
            crossing.add(node)
        found.append(copied)
    return found


def _storage(node: fx.Node) -> StorageWeakRef:
    """Equal for a traced value and its views."""
    return StorageWeakRef(node.meta["val"].untyped_storage())  # type: ignore[no-untyped-call]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _sorted(targets: Iterable[fx.Node], inside: set[fx.Node]) -> Iterable[fx.Node]:
    """Operators in an order in which they can run: `targets` as they are given, and before each what it still needs."""
    done: dict[fx.Node, None] = {}
    for target in targets:
        todo = [target] if target in inside else []
        while todo:
            missing = [source for source in todo[-1].all_input_nodes if source in inside and source not in done]
            if missing:
                todo += reversed(missing)
            else:
                done[todo.pop()] = None
    return done


class _Division:
    def __init__(
        self, joint: Joint, local: Localize | None, cheap: bool, closed: frozenset[Slot] = frozenset()
    ) -> None:
        """`closed`: inputs of the chunk that its backward does not read."""
        self.mode, self.cheap, self.closed = joint.traced.mode, cheap, closed
        self.joint = joint.module if local is None else local(joint.module, joint.inputs, joint.outputs)
        places = [node for node in self.joint.graph.nodes if node.op == "placeholder"]
        self.slots: dict[fx.Node, Slot] = dict(zip(places, joint.inputs, strict=True))
        (output,) = (node for node in self.joint.graph.nodes if node.op == "output")
        results = [(slot, node) for slot, node in zip(joint.outputs, output.args[0], strict=True) if slot is not None]
        self.outputs = [(slot, node) for slot, node in results if slot[0] == "output"]
        self.grads = [(slot, node) for slot, node in results if slot[0] != "output"]
        self.nodes = [node for node in self.joint.graph.nodes if node.op not in ("placeholder", "output")]
        crossing = [*places, *(node for slot, node in results if slot[0] != "grad_weight")]
        self.crossing = {_storage(node) for node in crossing if _is_tensor(node)}
        """The memory of what other chunks read, too."""

    # ------------------------------------------------------------------------------------------------ division

    def divide(self) -> PassGraphs:
        early = [node for node in self.nodes if node.target is EARLY]
        forward = self._with_parts(self._needed([*(node for _, node in self.outputs), *early]))
        f_made = self._kept_of(forward, self.grads, set())
        f_made |= {node for node, slot in self.slots.items() if slot in self.closed}
        back = self._needed((node for _, node in self.grads), f_made)
        input_grads = [(slot, node) for slot, node in self.grads if slot[0] == "grad_input"]
        weight_grads = [(slot, node) for slot, node in self.grads if slot[0] == "grad_weight"]
        half = self._with_parts(self._needed((node for _, node in input_grads), f_made))
        i_made = self._kept_of(half, weight_grads, f_made)
        rest = self._needed((node for _, node in weight_grads), f_made | i_made)

        saved = self._read(back, self.grads, f_made)
        kept = self._read(rest, weight_grads, i_made)
        name_saved: list[tuple[Slot, fx.Node]] = [(("saved", i), node) for i, node in enumerate(saved)]
        name_kept: list[tuple[Slot, fx.Node]] = [(("kept", i), node) for i, node in enumerate(kept)]
        given = {node: slot for slot, node in name_saved}
        f = self._piece([*self.outputs, *name_saved], {}, set(), set())
        if not self.grads:
            return PassGraphs(f, None, None, None, 0, 0)
        again = set(forward)
        b = self._piece(self.grads, given, f_made, again)
        i = self._piece([*input_grads, *name_kept], given, f_made, again) if input_grads else None
        given |= {node: slot for slot, node in name_kept}
        w = self._piece(weight_grads, given, f_made | i_made, again.union(half)) if weight_grads else None
        return PassGraphs(f, b, i, w, bytes_of(saved), bytes_of(kept) if i and w else 0)

    def _with_parts(self, made: list[fx.Node]) -> list[fx.Node]:
        """Operators, and the parts of their results that others read: a tuple of tensors is not kept as a whole."""
        its = set(made)
        for node in made:
            if all(user.target is operator.getitem and _is_tensor(user) for user in node.users):
                its.update(node.users)
        return [node for node in self.nodes if node in its]

    def _kept_of(
        self, made: Sequence[fx.Node], results: Sequence[tuple[Slot, fx.Node]], there: set[fx.Node]
    ) -> set[fx.Node]:
        """Of what one pass has made, what it may keep for a later one, which computes `results`, and does not compute
        itself. `there`: what is kept already."""
        if not self.cheap:
            return {node for node in made if not self._is_view_of_given(node)}
        its = set(made)
        later = self._needed((node for _, node in results), its | there)
        read = [source for node in later for source in node.all_input_nodes] + [node for _, node in results]
        free = there | {node for node, slot in self.slots.items() if self._is_there_anyway(slot)}
        free |= {node for node in self.nodes if node.op == "get_attr"}
        return fewest_bytes([node for node in read if node in its or node.op == "placeholder"], its, free) & its

    def _needed(self, targets: Iterable[fx.Node], stop: set[fx.Node] | None = None) -> list[fx.Node]:
        """The operators that `targets` depend on, in order, not searching past `stop`."""
        found: set[fx.Node] = set()
        todo = list(targets)
        while todo:
            node = todo.pop()
            if node in found or node.op == "placeholder" or (stop and node in stop):
                continue
            found.add(node)
            todo.extend(node.all_input_nodes)
        return [node for node in self.nodes if node in found]

    def _read(self, users: Iterable[fx.Node], results: list[tuple[Slot, fx.Node]], made: set[fx.Node]) -> list[fx.Node]:
        """The nodes in `made` that `users` read or that are `results`."""
        read = {source for node in users for source in node.all_input_nodes if source in made}
        read |= {node for _, node in results if node in made}
        return [node for node in self.joint.graph.nodes if node in read]

    def _is_view_of_given(self, node: fx.Node) -> bool:
        """Whether a node is a view of a weight or of the batch, through any number of views."""
        while node.target in VIEWS:
            node = node.all_input_nodes[0]
            if node.op == "placeholder":
                return self._is_there_anyway(self.slots[node])
        return False

    def _is_there_anyway(self, slot: Slot) -> bool:
        return slot[0] in ("weight", "batch") and slot not in self.closed

    # -------------------------------------------------------------------------------------------------- graphs

    def _piece(
        self, results: list[tuple[Slot, fx.Node]], given: dict[fx.Node, Slot], there: set[fx.Node], again: set[fx.Node]
    ) -> PassGraph:
        """The graph that computes `results`. `there`: what other passes have kept, in the slots `given`. `again`: what
        they have computed; if it is computed once more, then when it is first read, so that it does not lie in memory
        all at once."""
        graph = fx.Graph()
        nodes = self._needed((node for _, node in results), there)
        inside = set(nodes)
        wanted = {source for node in nodes for source in node.all_input_nodes} | {node for _, node in results}
        outer = [node for node in self.joint.graph.nodes if node in wanted and node not in inside]
        slots = [given[node] if node in given else self.slots[node] for node in outer]
        copied = {node: graph.placeholder("_".join(map(str, slot))) for node, slot in zip(outer, slots, strict=True)}
        first = [node for node in nodes if node not in again]
        for node in _sorted([*first, *(node for _, node in results)], inside):
            if node.target is EARLY:
                copied[node] = copied[node.all_input_nodes[0]]
                continue
            copied[node] = graph.node_copy(node, lambda n: copied[n])
            if node.target is torch.ops.aten.view.default:
                # Some kernels return a memory layout that differs from the traced one. A view may then be
                # impossible where a copy works.
                copied[node].target = torch.ops.aten.reshape.default
        graph.output(
            tuple(
                _contiguous(graph, copied[node]) if copy else copied[node]
                for (_, node), copy in zip(results, _copies(results, self.crossing), strict=True)
            )
        )
        module = fx.GraphModule(self.joint, graph)
        return PassGraph(
            module,
            tuple(slots),
            tuple(slot for slot, _ in results),
            cost(
                module,
                [node.meta["val"] for node in outer],
                self.mode,
                _places(slots, "saved", "kept", "grad_output"),
                _places([slot for slot, _ in results], "grad_weight"),
            ),
        )


def _places(slots: Sequence[Slot], *kinds: str) -> set[int]:
    return {i for i, slot in enumerate(slots) if slot[0] in kinds}
