"""Cuts the traced graph into chunks: maximal runs of operators with equal tags, in program order. A sum over the whole
batch ends a chunk, so that it can be added up over devices.

The chunks form a DAG: a value used three stages later has its own edge, several tensors may cross an edge, and integers
and masks have no backward edge."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from piperlang.capture.annotate import tags_of
from piperlang.capture.trace.buffers import ancestors, root_of, written
from piperlang.capture.trace.names import ModuleName, names_of
from piperlang.capture.trace.random import PLACE, module_of
from piperlang.capture.trace.trace import Traced
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import error
from piperlang.directives.tag import ModulePath, Tag

Tags = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class EdgeTensor:
    """A tensor between chunks, identified by the name of the node that computes it."""

    name: str
    fake: torch.Tensor
    differentiable: bool
    """Whether it receives a gradient."""


@dataclass(frozen=True)
class Subgraph:
    """A part of the model that is scheduled as one unit: F maps `weights`, `batch` and `inputs` to `outputs`."""

    number: int
    tags: Tags
    nodes: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    """Placeholders of the weights it reads."""
    batch: tuple[str, ...]
    """Placeholders of the batch's tensors it reads."""
    random: bool
    """Whether it reads `rng`."""
    inputs: tuple[EdgeTensor, ...]
    outputs: tuple[EdgeTensor, ...]
    """Values that other chunks read, the loss, and the new values of buffers."""
    changes: tuple[tuple[int, int], ...] = ()
    """Buffers among `weights` that the chunk changes, each with the output that is its new value."""


def cut(traced: Traced, directives: Iterable[Tag] = (), summed: Collection[str] = ()) -> list[Subgraph]:
    """`summed`: values that are added up over the parts of the batch, and so are never read by the chunk that computes
    them."""
    elsewhere = traced.elsewhere
    nodes = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output") and n not in elsewhere]
    tags = _tags(nodes, list(directives), ancestors(list(traced.changes.values())))
    groups: list[list[fx.Node]] = []
    for node in nodes:
        if groups and tags[node] == tags[groups[-1][-1]] and groups[-1][-1].name not in summed:
            groups[-1].append(node)
        else:
            groups.append([node])
    owner = {node: i for i, group in enumerate(groups) for node in group}
    _refuse_shared_writes(nodes, owner)
    result = set(traced.output.all_input_nodes)
    return [_chunk(i, tags[group[0]], group, traced, owner, traced.learning, result) for i, group in enumerate(groups)]


def _chunk(
    number: int,
    tags: Tags,
    group: list[fx.Node],
    traced: Traced,
    owner: dict[fx.Node, int],
    differentiable: set[fx.Node],
    result: set[fx.Node],
) -> Subgraph:
    read = list(
        dict.fromkeys(source for node in group for source in node.all_input_nodes if owner.get(source) != number)
    )
    changed = {place: node for place, node in traced.changes.items() if owner[node] == number}
    places = list(dict.fromkeys([*(node.name for node in read if node.op == "placeholder"), *changed]))
    outputs = [
        node
        for node in group
        if node not in changed.values()
        and (node in result or any(owner.get(user, number) != number for user in node.users))
    ]
    outputs += changed.values()

    def value(node: fx.Node) -> EdgeTensor:
        return EdgeTensor(node.name, traced.value(node), node in differentiable)

    weights = tuple(p for p in places if p in traced.weights)
    return Subgraph(
        number,
        tags,
        tuple(group),
        weights,
        tuple(p for p in places if p in traced.batch),
        PLACE in places,
        tuple(value(node) for node in read if node.op != "placeholder"),
        tuple(value(node) for node in outputs),
        tuple((weights.index(place), outputs.index(node)) for place, node in changed.items()),
    )


def _refuse_shared_writes(nodes: list[fx.Node], owner: dict[fx.Node, int]) -> None:
    """Refuse an in-place write that is visible through a view in another chunk: chunks exchange copies, so the write
    would be lost there."""
    writes = {target: node for node in nodes for target in written(node)}
    if not writes:
        return
    lying: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        lying.setdefault(root_of(node), []).append(node)
    for target, write in writes.items():
        for node in lying[root_of(target)]:
            if any(owner.get(other, owner[write]) != owner[write] for other in (node, *node.users)):
                raise error(
                    "P0803",
                    "a tensor is changed in place, and another chunk has a view of it",
                    line_of_operator(write),
                    str(write.target),
                    notes=[module_of(write)],
                    help=(
                        "make a new tensor instead of writing into a view: torch.cat, torch.where, index_put without"
                        " the underscore"
                    ),
                )


# ------------------------------------------------------------------------------------------------------------- tags


def _tags(nodes: list[fx.Node], directives: list[Tag], changing: set[fx.Node]) -> dict[fx.Node, Tags]:
    """The tags of every node. `changing`: operators that new values of buffers depend on."""
    by_names: dict[tuple[ModuleName, ...], dict[str, int | str]] = {}
    """An operator has the tags of its module."""
    own: dict[fx.Node, dict[str, int | str]] = {}
    for node in nodes:
        names = tuple(names_of(node))
        if names not in by_names:
            by_names[names] = _tags_at(names, directives)
        own[node] = by_names[names] | tags_of(node.meta.get("custom"))
    # An item of a tuple stays with the operator that returned the tuple.
    for node in nodes:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            own[node] = own[node.args[0]]
    # An untagged operator joins the latest tagged operator that it depends on, so that only its result crosses an edge;
    tagged = {node: i for i, node in enumerate(nodes) if own[node]}
    for node in nodes:
        if not own[node]:
            producers = [source for source in node.all_input_nodes if source in tagged]
            if producers:
                last = max(producers, key=tagged.__getitem__)
                own[node], tagged[node] = own[last], tagged[last]
    # one that reads no tagged operator (a mask, positions) joins the first operator that reads it.
    for node in reversed(nodes):
        if not own[node]:
            users = [own[user] for user in node.users if own.get(user)]
            own[node] = users[0] if users else {}
    # A counter that no operator reads joins the operator before it, or the one after it if there is none.
    for line in (nodes, nodes[::-1]):
        for before, node in pairwise(line):
            if not own[node] and node in changing:
                own[node] = own[before]
    return {node: tuple(sorted(tags.items())) for node, tags in own.items()}


def _tags_at(names: tuple[ModuleName, ...], directives: list[Tag]) -> dict[str, int | str]:
    """The tags of a module that has these names."""
    found: dict[str, int | str] = {}
    depth: dict[str, int] = {}
    for directive in directives:
        for module in directive.paths:
            length = max(matches(module, name) for name in names)
            for key, value in directive.tags if length else ():
                if length >= depth.get(key, 0):  # the deepest path applies; of equally deep ones, the last
                    found[key], depth[key] = value, length
    return found


def matches(module: ModulePath, name: ModuleName) -> int:
    """The number of path components in `module` if it names this module or one that contains it; else 0."""
    parts = name.parts
    if not name.least <= len(module.parts) <= len(parts):
        return 0
    for wanted, part in zip(module.parts, parts, strict=False):
        if isinstance(wanted, str):
            fits = wanted == part
        elif not part.isdigit():
            fits = False
        elif isinstance(wanted, tuple):
            low, high = wanted
            fits = (low is None or int(part) >= low) and (high is None or int(part) < high)
        else:
            fits = wanted is None or wanted == int(part)
        if not fits:
            return 0
    return len(module.parts)
