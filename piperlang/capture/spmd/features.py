"""What a shard style divides: the feature dimensions of weights, found from the operators that read them, and candidate
placements of all values, in the order to try them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from piperlang.capture.autodiff.cut import Subgraph
from piperlang.capture.trace.trace import Traced
from piperlang.core.placement import REPLICATE, Placement, Shard
from piperlang.diagnostics import PiperError, error
from piperlang.ir.model import Divide, Slot

Features: TypeAlias = tuple[int | None, int | None]
"""The dimensions of output and of input features; None where there is none."""

PerAxis: TypeAlias = tuple[Placement, ...]
"""A placement for each axis."""

aten = torch.ops.aten
_ATTEMPTS = 16
_KINDS = {"weight": "a weight", "batch": "a tensor of the batch", "rng": "the random state", "input": "an input"}
_SAME = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.to.dtype,
}
_PRODUCTS = {aten.mm.default, aten.matmul.default, aten.bmm.default}


_APART = "tag this part separately, so that it becomes a chunk that is sharded differently or not at all"


class Unfit(Exception):
    """Placements that do not work, and the operator or value that causes it."""

    def __init__(self, reason: str, at: fx.Node | Slot | None = None, help: str = _APART) -> None:
        super().__init__(reason)
        self.reason, self.at, self.help = reason, at, help


# ---------------------------------------------------------------------------------------------------------- features


def features_of(traced: Traced, chunk: Subgraph) -> dict[Slot, Features]:
    """The feature dimensions of every weight of a chunk. Where operators disagree about a weight, the first one
    decides."""
    found: dict[str, Features] = {}
    for node in chunk.nodes:
        for argument, features in _read(node):
            source, order = _weight(argument)
            if source is not None and source.name in traced.weights:
                out, into = (None if dim is None else order[dim] for dim in features)
                found.setdefault(source.name, (out, into))
    return {("weight", i): found.get(name, (None, None)) for i, name in enumerate(chunk.weights)}


def _read(node: fx.Node) -> list[tuple[Any, Features]]:
    """The weights that an operator reads, with their feature dimensions as the operator sees them."""
    arguments: list[Any] = [*node.args, None, None, None]
    if node.target is aten.linear.default:
        return [(arguments[1], (0, 1)), (node.kwargs.get("bias", arguments[2]), (0, None))]
    if node.target is aten.addmm.default:
        return [(arguments[2], (1, 0)), (arguments[0], (-1, None))]
    if node.target in _PRODUCTS and arguments[1].meta["val"].dim() > 1:
        return [(arguments[1], (-1, -2))]
    if (
        node.target is aten.add.Tensor
        and isinstance(arguments[0], fx.Node)
        and arguments[0].target in _PRODUCTS | {aten.einsum.default}
    ):
        return [(arguments[1], (-1, None))]  # a bias that is added separately
    if node.target is aten.embedding.default:
        return [(arguments[0], (1, None))]
    if node.target is aten.einsum.default and len(arguments[1]) == 2:
        return _einsum(arguments[0].replace(" ", ""), arguments[1])
    return []


def _einsum(equation: str, operands: list[Any]) -> list[tuple[Any, Features]]:
    """Output features are indices of the result that only this operand has; input features are summed over."""
    read, _, result = equation.partition("->")
    if "." in read or not result:
        return []
    first, second = read.split(",")
    found: list[tuple[Any, Features]] = []
    for operand, own, other in zip(operands, (first, second), (second, first), strict=True):
        out = [dim for dim, letter in enumerate(own) if letter in result and letter not in other]
        into = [dim for dim, letter in enumerate(own) if letter not in result]
        found.append((operand, (out[-1] if out else None, into[-1] if into else None)))
    return found


def _weight(node: Any) -> tuple[fx.Node | None, list[int]]:
    """The placeholder that a node is a view of, and its dimension for each dimension of the view."""
    turns: list[tuple[int, int]] = []
    while isinstance(node, fx.Node) and node.op != "placeholder":
        if node.target in (aten.t.default, aten.numpy_T.default):
            turns.append((0, 1))
        elif node.target is aten.transpose.int:
            turns.append((node.args[1], node.args[2]))  # type: ignore[arg-type]
        elif node.target not in _SAME:
            return None, []
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None, []
    order: list[int] = list(range(node.meta["val"].dim()))
    for a, b in reversed(turns):
        if len(order) > 1:
            order[a], order[b] = order[b], order[a]
    return node, order


# ------------------------------------------------------------------------------------------------------------ places


def candidates(
    values: Mapping[Slot, torch.Tensor],
    features: Mapping[Slot, Features],
    divides: Sequence[Divide],
    arriving: Mapping[Slot, PerAxis],
    rows: Collection[Slot] = (),
) -> tuple[list[dict[Slot, PerAxis]], int]:
    """The placements to try, in order, and the index of those that the styles ask for: if none work, their failure is
    reported. `rows`: inputs that are routed tokens."""
    experts = [_experts(values) if divide.style == "experts" else 0 for divide in divides]
    choices: dict[Slot, list[PerAxis]] = {}
    asked: dict[Slot, PerAxis] = {}
    for slot, value in values.items():
        if slot[0] == "grad_output":
            continue  # follows the output
        per_axis = [
            (
                [Shard(0)]
                if divide.style == "experts" and slot in rows
                else _choices(slot, value, divide, features.get(slot, (None, None)), e)
            )
            for divide, e in zip(divides, experts, strict=True)
        ]
        options = list(itertools.product(*per_axis))
        asked[slot] = options[0]
        choices[slot] = list(dict.fromkeys([arriving[slot], *options] if slot in arriving else options))
    combinations = (
        dict(zip(choices, combination, strict=True)) for combination in itertools.product(*choices.values())
    )
    first, *others = itertools.islice(combinations, _ATTEMPTS)
    found = [first, *([asked] if asked != first else []), *(other for other in others if other != asked)]
    return found, found.index(asked)


def _experts(values: Mapping[Slot, torch.Tensor]) -> int:
    found = {value.shape[0] for (kind, _), value in values.items() if kind == "weight" and value.dim() >= 3}
    if len(found) != 1:
        if not found:
            raise Unfit(
                "no weight of the chunk has three or more dimensions, the first of which must be the experts",
                help="for a chunk without experts, use `with style=columns`, `rows` or `sequence`",
            )
        raise Unfit(
            "the first dimension of weights with three or more dimensions must be the number of experts, but it has"
            f" different sizes: {sorted(found)}"
        )
    return found.pop()


def _choices(slot: Slot, value: torch.Tensor, divide: Divide, features: Features, experts: int) -> list[Placement]:
    """The placements of a value along one axis, the best first."""
    kind, last = slot[0], value.dim() - 1
    if divide.size == 1:
        return [REPLICATE]
    if kind == "weight":
        dim = {
            "columns": features[0],
            "rows": features[1],
            "experts": 0 if value.dim() and value.shape[0] == experts else None,
        }.get(divide.style)
        return [REPLICATE if dim is None else Shard(dim)]
    wanted: list[int] = []
    if divide.style == "experts" and kind == "input":
        wanted = [dim for dim, size in enumerate(value.shape) if size == experts]
    elif divide.style == "rows" and value.is_floating_point():
        wanted = [last]
    elif divide.style == "sequence" and last >= 1 and (kind == "batch" or value.is_floating_point()):
        wanted = [1]
    return [*(Shard(dim) for dim in wanted if dim >= 0 and value.shape[dim] % divide.size == 0), REPLICATE]


def check(places: Mapping[Slot, PerAxis], values: Mapping[Slot, torch.Tensor], divides: Sequence[Divide]) -> None:
    """Refuse impossible placements before anything is traced."""
    for slot, chosen in places.items():
        shape = list(values[slot].shape)
        for dim in {place.dim for place in chosen if isinstance(place, Shard)}:
            times = math.prod(divide.size for place, divide in zip(chosen, divides, strict=True) if place is Shard(dim))
            if shape[dim] % times:
                raise Unfit(
                    f"dimension {dim} of {_KINDS[slot[0]]} of shape {shape} is not divisible by {times}",
                    slot,
                    f"shard it over a number of devices that divides {shape[dim]}, or {_APART}",
                )
    for axis, divide in enumerate(divides):
        if (
            divide.style == "sequence"
            and divide.size > 1
            and all(chosen[axis] is REPLICATE for chosen in places.values())
        ):
            raise Unfit(f"no input of the chunk has a second dimension that is divisible by {divide.size}")


def part_shape(shape: Sequence[int], places: PerAxis, divides: Sequence[Divide]) -> list[int]:
    """The local shape on one device."""
    box = [(0, size) for size in shape]
    for place, divide in zip(places, divides, strict=True):
        place.narrow(box, None, 0, divide.size)
    return [high for _, high in box]


# ---------------------------------------------------------------------------------------------------------- refusals


def refusal(
    problem: Unfit, divides: Sequence[Divide], nodes: Mapping[Slot, fx.Node], joint: fx.GraphModule
) -> PiperError:
    """The diagnostic, without chunk and line, which the caller adds. `nodes`: the placeholders of the joint graph."""
    how = " and ".join(f"over {divide.axis} with style={divide.style}" for divide in divides)
    return error(
        "P0411",
        f"the chunk cannot be sharded {how}",
        notes=[problem.reason, *_where(_blamed(problem, nodes, joint))],
        help=problem.help,
    )


def _blamed(problem: Unfit, nodes: Mapping[Slot, fx.Node], joint: fx.GraphModule) -> fx.Node | None:
    """The operator that causes the problem: for a value its first reader, for a whole chunk its first operator."""
    if isinstance(problem.at, fx.Node):
        return problem.at
    readers = (
        nodes[problem.at].users
        if problem.at is not None
        else [node for node in joint.graph.nodes if node.op == "call_function"]
    )
    return next(iter(readers), None)


def _where(node: fx.Node | None) -> list[str]:
    """The module of an operator. For an operator without one, such as a sum of gradients, that of the nearest operator
    that it reads."""
    while node is not None:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            path = [path for path, _ in stack.values()][-1]
            return [f"in module {path.removeprefix('model').strip('.') or '(the model itself)'}"]
        node = next(iter(reversed(node.all_input_nodes)), None)
    return []


def operator_name(node: fx.Node | None) -> str:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return (
        str(schema.name).removeprefix("aten::") if schema is not None else str(getattr(node, "target", "an operator"))
    )
