"""Buffers that the model changes in its forward, as values of the graph.

In plain PyTorch a buffer changes once per step, in the forward of the whole batch. Here the forward of a chunk returns
the new value as an additional output. A value that does not depend on the samples (a counter, the vectors of
spectral_norm), or follows from sums over the whole batch (running statistics, batch_norm.py), is the same for every
part of the batch, so any part may compute it. Any other value is correct only where the batch is not divided, which
build/graph.py checks. All other in-place writes to tensors that outlive the forward are refused: to parameters, plain
tensors and views of buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from piperlang.capture.trace.batch_norm import running, write_out
from piperlang.capture.trace.insert import insert
from piperlang.capture.trace.random import module_of
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import PiperError, error

aten = torch.ops.aten


def make_functional(graph: fx.Graph, kept: Mapping[str, str], buffers: Mapping[str, str]) -> None:
    """Replace in-place operators by operators that return new tensors.

    `kept`: the names of tensors that outlive a step (parameters, buffers, constants), by placeholder; `buffers`: those
    of them that may change. What reads a changed tensor reads the result of the replaced operator."""
    for node in list(graph.nodes):
        if node.target in (aten.batch_norm.default, aten.instance_norm.default):
            _normalize(node, buffers)
            continue
        for target in written(node):
            _refuse_custom(node)
            root, direct = _root(target)
            if root.op == "placeholder" and root.name not in kept:
                raise error(
                    "P0803",
                    "the model changes its batch in place",
                    line_of_operator(node),
                    notes=[
                        "eager PyTorch would change the tensor that `data` yielded, but devices work on copies of it",
                        module_of(node),
                    ],
                    help="work on a copy: `x = x.clone()`, or use the operator without the underscore",
                )
            alone = direct and len(written(node)) == 1 and not _viewed_later(root, node)
            if root.op == "placeholder" and root.name in kept and (root.name not in buffers or not alone):
                raise _refused(node, kept[root.name], view=not alone)
            if alone:
                _replace(graph, node, must=root.name in buffers, name=kept.get(root.name, ""))


def _refuse_custom(node: fx.Node) -> None:
    """Refuse a user-defined operator that writes to its arguments: only aten operators have functional forms."""
    namespace = getattr(node.target, "namespace", "aten")
    if namespace not in ("aten", "piper"):
        raise error(
            "P0803",
            f"operator {node.target} writes to its arguments",
            line_of_operator(node),
            notes=[module_of(node)],
            help="return new tensors and declare `mutates_args=()`",
        )


def root_of(node: fx.Node) -> fx.Node:
    """The tensor that owns the memory of a value."""
    return _root(node)[0]


def _viewed_later(root: fx.Node, write: fx.Node) -> bool:
    """Whether a view made before the write is read after it: then it must contain the written values."""
    views, readers = {root}, set()
    order = {node: i for i, node in enumerate(root.graph.nodes)}
    todo = [root]
    while todo:
        node = todo.pop()
        for user in node.users:
            if _aliased(user) is node and user not in views and order[user] < order[write]:
                views.add(user)
                todo.append(user)
            elif node is not root and any(_is_view(n) for n in _chain(node)):
                readers.add(user)
    return any(order[reader] > order[write] for reader in readers)


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The views and writes between a value and the tensor that owns its memory."""
    while (source := _aliased(node)) is not None:
        yield node
        node = source


def new_values(values: Mapping[str, fx.Node], names: Mapping[str, str]) -> dict[str, fx.Node]:
    """The buffers whose value has changed at the end of the forward, by placeholder."""
    changed = {}
    for place, node in values.items():
        if node.op == "placeholder" and node.name == place:
            continue
        (old,) = (other for other in node.graph.nodes if other.name == place)
        if (old.meta["val"].shape, old.meta["val"].dtype) != (node.meta["val"].shape, node.meta["val"].dtype):
            raise error(
                "P0803",
                f"buffer {names[place]} is replaced by a tensor of a different shape or dtype",
                line_of_operator(node),
                notes=[module_of(node)],
                help="keep the shape and dtype that it was registered with",
            )
        # The new value is a separate output, even if other operators read it, and no gradient flows through it.
        if node.op == "placeholder" or len(node.users) > 1 or node.meta["val"].requires_grad:
            with node.graph.inserting_before(_after(node)):
                node = insert(node, aten.clone.default, insert(node, aten.detach.default, node))
        changed[place] = node
    return changed


def _after(node: fx.Node) -> fx.Node:
    """The first operator after a node, placeholders skipped."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def written(node: fx.Node) -> list[fx.Node]:
    """Tensors that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    found = [
        given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in found if isinstance(value, fx.Node)]


def _root(node: fx.Node) -> tuple[fx.Node, bool]:
    """The tensor at the start of a chain of views and writes, and whether the chain has no view."""
    direct = True
    while (source := _aliased(node)) is not None:
        direct = direct and not _is_view(node)
        node = source
    return node, direct


def _aliased(node: fx.Node) -> fx.Node | None:
    """The argument that the result of an operator shares its memory with; None if it has its own."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None or not schema.arguments:
        return None
    targets = written(node)
    source = (
        targets[0] if targets else node.args[0] if node.args and schema.arguments[0].alias_info is not None else None
    )
    return source if isinstance(source, fx.Node) else None


def _is_view(node: fx.Node) -> bool:
    return not written(node)


def _replace(graph: fx.Graph, node: fx.Node, must: bool, name: str) -> None:
    """Replace an in-place operator by its functional form. One without such a form stays, unless it writes to a
    buffer."""
    plain = _functional(node.target)
    if plain is None:
        if must:
            raise _refused(node, name, view=False)
        return
    old: torch.Tensor = node.meta["val"]
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    with graph.inserting_before(node):
        new = insert(node, plain, *node.args, **kwargs)
        if new.meta["val"].shape != old.shape:
            new = insert(node, aten.expand.default, new, list(old.shape))
        if new.meta["val"].dtype != old.dtype:
            new = insert(node, aten.to.dtype, new, old.dtype)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _functional(target: Any) -> Any:
    """`add.Tensor` for `add_.Tensor`, `div.Tensor` for `div.out`."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    if name.endswith("_") and not name.startswith("_"):
        packet = getattr(aten, name[:-1], None)
        return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None
    wanted = [argument.name for argument in target._schema.arguments if not argument.is_out]
    packet = getattr(aten, name)
    for other in packet.overloads() if len(wanted) == len(target._schema.arguments) - 1 else ():
        found = getattr(packet, other)
        if not found._schema.is_mutable and [argument.name for argument in found._schema.arguments] == wanted:
            return found
    return None


def _normalize(node: fx.Node, buffers: Mapping[str, str]) -> None:
    """Batch normalization changes its running statistics, though its schema does not declare it: what comes after it
    reads the new ones."""
    given: Any = node.args
    mean, variance, training, momentum = given[3:7]
    if not training:
        return
    kept = [place for place in (mean, variance) if isinstance(place, fx.Node)]
    for place in kept:
        root, direct = _root(place)
        alone = direct and not _viewed_later(root, node)
        if node.target is aten.instance_norm.default or not alone or _buffer_of(place, buffers) is None:
            raise _refused(node, buffers.get(root.name, "running_mean"), view=True)
    if node.target is not aten.batch_norm.default:
        return
    later = _later(node)
    statistics = write_out(node)
    for place in kept:
        readers = [user for user in place.users if user in later]
        new = running(statistics, place, momentum, variance=place is variance)
        new.meta[_BUFFER] = _buffer_of(place, buffers)
        for reader in readers:
            reader.replace_input_with(place, new)


_BUFFER = "buffer"
"""In the metadata of new running statistics: the placeholder of the buffer."""


def _buffer_of(node: fx.Node, buffers: Mapping[str, str]) -> str | None:
    """The placeholder of the buffer whose current value a node is."""
    name: str = node.meta.get(_BUFFER, node.name)
    return name if name in buffers else None


def _later(node: fx.Node) -> set[fx.Node]:
    found = set()
    while node.next.op != "root":
        node = node.next
        found.add(node)
    return found


def _refused(node: fx.Node, name: str, view: bool) -> PiperError:
    how = "through a view, or with an operator that has no functional form" if view else "in place"
    return error(
        "P0803",
        f"the model changes {name} while it runs",
        line_of_operator(node),
        f"{node.target} writes to it {how}",
        notes=[module_of(node)],
        help=(
            "only read parameters and plain tensors in the forward; keep values that change from step to step in a"
            " registered buffer, and assign a new value: `self.x = f(self.x)`"
        ),
    )


def within_writes(graph: fx.Graph, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Of some nodes, those between a tensor that is written to in place and the last that reads it or a view of it:
    chunks exchange copies, so a program cannot be cut there."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    lying: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        lying.setdefault(root_of(node), []).append(node)
    changed = {root_of(target) for node in graph.nodes for target in written(node)}
    ranges = [
        (order[root], max(order[user] for node in lying[root] for user in (node, *node.users))) for root in changed
    ]
    return {node for node in nodes if any(low <= order[node] < high for low, high in ranges)}


def ancestors(nodes: Iterator[fx.Node] | list[fx.Node]) -> set[fx.Node]:
    """The operators that values depend on, including their own."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
