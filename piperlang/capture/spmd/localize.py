"""The joint graph of a sharded chunk as one device runs it: expert and tensor parallelism.

The joint graph is traced again on DTensors, whose rules propagate the placements of the inputs through each operator.
The result is a plain graph at local shapes. A sharding that needs communication inside the chunk is refused:
communication happens between chunks, where a schedule controls it. So is a sharding in which devices would run
different graphs, because a device slices its part out of a replicated value: the graph is traced for the first and for
the last device, and both must be equal.

Private API, kept in this file: the tables of `DTensor._op_dispatcher`, `torch._decomp.decomposition_table`,
`torch.testing._internal.distributed.fake_pg.FakeStore` and `torch.fx.experimental.proxy_tensor.make_fx` (tried on torch
2.11 and 2.13)."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from piperlang.capture.spmd.features import (
    Features,
    PerAxis,
    Unfit,
    candidates,
    check,
    operator_name,
    part_shape,
    refusal,
)
from piperlang.capture.trace import routed
from piperlang.capture.trace.early import EARLY
from piperlang.capture.trace.keep import keep
from piperlang.core import placement as ours
from piperlang.core.placement import PARTIAL, REPLICATE
from piperlang.ir.model import Divide, Slot

_COMMUNICATION = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor")
_COORDINATES = 2
"""The index in `rng` of the device's first coordinate."""
aten = torch.ops.aten
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""Operators that process samples (dim 0) and heads (dim 1) independently, with their backward and CPU variants."""
_MASKS = ("attn_mask", "attn_bias")
_OWN_MEANS = {
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
}
"""DTensor has rules for these that know of the mean."""
_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, EARLY}
"""Copies commute with partial sums. DTensor would otherwise reduce a partial value before it copies it."""


@dataclass(frozen=True)
class Local:
    """The graph that every device runs, and the placement of each value."""

    joint: fx.GraphModule
    placements: dict[Slot, PerAxis]


Tried: TypeAlias = dict[tuple[tuple[Slot, PerAxis], ...], Local | None]
"""The result for each set of placements; None where they need communication."""


def localize(
    joint: fx.GraphModule,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot | None],
    features: Mapping[Slot, Features],
    divides: Sequence[Divide],
    arriving: Mapping[Slot, PerAxis],
    rows: Collection[Slot] = (),
    before: Mapping[Slot, PerAxis] | None = None,
    tried: Tried | None = None,
) -> Local:
    """Shard a joint graph with the first placements that need no communication: as the inputs arrive if possible, else
    as the styles ask.

    `rows`: inputs that are routed tokens; each device gets those of its own experts. Here they are treated as sharded
    in their first dimension. `before`: the placements found for another number of samples; they are tried first, which
    is fast. `tried`: results for the same graph and axes, however its inputs arrived."""
    nodes = dict(zip(inputs, (node for node in joint.graph.nodes if node.op == "placeholder"), strict=True))
    values = {slot: node.meta["val"] for slot, node in nodes.items()}
    try:
        choices, asked = candidates(values, features, divides, arriving, rows)
        with _fake_group(divides):
            localization = _Localization(joint, values, outputs, divides)
            if before is not None:
                with suppress(Unfit):
                    return localization.again(before)
            tried = {} if tried is None else tried
            for choice in choices:
                known = tuple(choice.items())
                if known not in tried:
                    tried[known] = None
                    with suppress(Unfit):
                        tried[known] = localization.local(choice)
                found = tried[known]
                if found is not None:
                    return found
            raise localization.reason(choices[asked])
    except Unfit as problem:
        raise refusal(problem, divides, nodes, joint) from problem


# ----------------------------------------------------------------------------------------------------------- tracing


_COLLECTIVES_LOGGER = logging.getLogger("torch.distributed.tensor._collective_utils")


def _is_about_this_job(record: logging.LogRecord) -> bool:
    """False for the warning that DTensor replaces an all-to-all by an all-gather on CPU: tracing sends nothing, and
    jobs do not use DTensor."""
    return "CPU process group does not support alltoall" not in record.getMessage()


@contextmanager
def _fake_group(divides: Sequence[Divide]) -> Iterator[None]:
    """A fake process group, which DTensor needs even where nothing is sent. Creating it replaces `sys.excepthook`,
    which is restored."""
    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=math.prod(divide.size for divide in divides), store=FakeStore())
    _COLLECTIVES_LOGGER.addFilter(_is_about_this_job)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _COLLECTIVES_LOGGER.removeFilter(_is_about_this_job)
        sys.excepthook = hook


class _Localization:
    """A joint graph, to be tried with several sets of placements."""

    def __init__(
        self,
        joint: fx.GraphModule,
        values: Mapping[Slot, torch.Tensor],
        outputs: Sequence[Slot | None],
        divides: Sequence[Divide],
    ) -> None:
        self.joint, self.values, self.outputs, self.divides = joint, values, outputs, divides
        (output,) = (node for node in joint.graph.nodes if node.op == "output")
        self.results: Sequence[fx.Node | None] = output.args[0]
        self.nodes = {node.name: node for node in joint.graph.nodes}
        ranks = torch.arange(math.prod(divide.size for divide in divides), device="cpu")
        device = next(iter(values.values())).device.type
        # This process is rank 0. In the second mesh, rank 0 is the last device.
        self.meshes = [self._mesh(device, order) for order in (ranks, ranks.flip(0))]

    def _mesh(self, device: str, ranks: torch.Tensor) -> DeviceMesh:
        return DeviceMesh(
            device,
            ranks.view([divide.size for divide in self.divides]),
            mesh_dim_names=tuple(divide.axis for divide in self.divides),
        )

    def local(self, places: Mapping[Slot, PerAxis]) -> Local:
        check(places, {slot: self.values[slot] for slot in places}, self.divides)
        # The gradient of an output has the placement of the output, which is therefore determined first.
        found = self._outputs(places)
        incoming = {
            slot: tuple(REPLICATE if place is PARTIAL else place for place in found["output", slot[1]])
            for slot in self._incoming
        }
        return self._divided({**places, **incoming})

    def again(self, places: Mapping[Slot, PerAxis]) -> Local:
        """The local graph, if these placements are the ones that would be found."""
        found = self._divided({slot: places[slot] for slot in self.values})
        if found.placements != places:
            raise Unfit("different placements")
        return found

    def reason(self, places: Mapping[Slot, PerAxis]) -> Unfit:
        """Why these placements do not work. A reason found in the forward is preferred."""
        try:
            check(places, {slot: self.values[slot] for slot in places}, self.divides)
            self._everywhere(*self._forward(places))
            self.local(places)
        except Unfit as problem:
            return problem
        raise AssertionError("these placements work")

    @property
    def _incoming(self) -> list[Slot]:
        return [slot for slot in self.values if slot[0] == "grad_output"]

    def _forward(self, places: Mapping[Slot, PerAxis]) -> tuple[dict[Slot, PerAxis], list[Slot | None]]:
        """The placements and the requested values of the forward alone."""
        whole: PerAxis = (REPLICATE,) * len(self.divides)
        return {**places, **dict.fromkeys(self._incoming, whole)}, [
            slot if slot is not None and slot[0] == "output" else None for slot in self.outputs
        ]

    def _divided(self, places: Mapping[Slot, PerAxis]) -> Local:
        graph, found = self._everywhere(places, self.outputs)
        for (kind, i), chosen in found.items():
            source = (kind.removeprefix("grad_"), i)
            if kind != "output" and not all(map(_fits, places[source], chosen)):
                raise Unfit(
                    f"the placement of the {source[0]} is {_shown(places[source])}, but that of its gradient is"
                    f" {_shown(chosen)}",
                    self.results[list(self.outputs).index((kind, i))],
                )
        return Local(graph, {**places, **found})

    def _everywhere(
        self, places: Mapping[Slot, PerAxis], outputs: Sequence[Slot | None]
    ) -> tuple[fx.GraphModule, dict[Slot, PerAxis]]:
        """The graph of every device, if all devices run the same graph and it does not communicate."""
        graph, found = self._trace(places, outputs, self.meshes[0])
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", "") in _COMMUNICATION:
                origin = self._origin(node)
                raise Unfit(
                    f"{operator_name(origin)} needs communication between the devices: {operator_name(node)}", origin
                )
        other, _ = self._trace(places, outputs, self.meshes[1])
        if written(graph.graph) != written(other.graph):
            # DTensor inserts operators of its own where it uses a rule for the first time; later it uses the cached
            # rule.
            graph, found = self._trace(places, outputs, self.meshes[0])
        for one, theirs, node in itertools.zip_longest(written(graph.graph), written(other.graph), graph.graph.nodes):
            if one != theirs:
                origin = self._origin(node) if node is not None else None
                raise Unfit(
                    f"{operator_name(origin)} needs a slice of a value that is replicated on every device", origin
                )
        graph.recompile()
        return graph, found

    def _origin(self, node: fx.Node) -> fx.Node | None:
        """The operator of the joint graph that an operator of the local graph comes from."""
        origins = node.meta.get("from_node") or []
        return self.nodes.get(origins[-1].name) if origins else None

    def _trace(
        self, places: Mapping[Slot, PerAxis], outputs: Sequence[Slot | None], mesh: DeviceMesh
    ) -> tuple[fx.GraphModule, dict[Slot, PerAxis]]:
        found: dict[Slot, PerAxis] = {}

        def run(*parts: torch.Tensor) -> list[torch.Tensor | None]:
            results = self._run(parts, places, outputs, mesh)
            found.update({slot: place for slot, (_, place) in zip(outputs, results, strict=True) if slot is not None})
            return [part for part, _ in results]

        with self._tracing():
            graph = make_fx(run)(*self._fakes(places))
        _drop_views(graph.graph)
        return graph, found

    def _outputs(self, places: Mapping[Slot, PerAxis]) -> dict[Slot, PerAxis]:
        """The placements of the outputs, without a graph. Communication is not detected here."""
        forward, outputs = self._forward(places)
        with self._tracing():
            results = self._run(self._fakes(forward), forward, outputs, self.meshes[0])
        return {slot: place for slot, (_, place) in zip(outputs, results, strict=True) if slot is not None}

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        mode = next(iter(self.values.values())).fake_mode  # type: ignore[attr-defined]
        with mode, torch.no_grad(), implicit_replication(), traceback.preserve_node_meta():
            yield

    def _run(
        self,
        parts: Sequence[torch.Tensor],
        places: Mapping[Slot, PerAxis],
        outputs: Sequence[Slot | None],
        mesh: DeviceMesh,
    ) -> list[tuple[torch.Tensor | None, PerAxis]]:
        """The local parts of the requested values, and their placements."""
        values = [
            _divided(part, mesh, list(map(_placement, places[slot])), whole)
            for part, (slot, whole) in zip(parts, self.values.items(), strict=True)
        ]
        wanted = [node if slot is not None else None for slot, node in zip(outputs, self.results, strict=True)]
        results = _Runner(self.joint, _needed(wanted), mesh).run(*values, enable_io_processing=False)
        return [
            self._part(value, node) if node is not None else (None, ())
            for node, value in zip(wanted, results, strict=True)
        ]

    def _fakes(self, places: Mapping[Slot, PerAxis]) -> list[torch.Tensor]:
        return [self._fake(slot, places[slot]) for slot in self.values]

    def _fake(self, slot: Slot, places: PerAxis) -> torch.Tensor:
        value = self.values[slot]
        return torch.empty_like(value[tuple(slice(size) for size in part_shape(value.shape, places, self.divides))])

    def _part(self, value: torch.Tensor, node: fx.Node) -> tuple[torch.Tensor, PerAxis]:
        """The local part of a result, and its placements."""
        if not isinstance(value, DTensor):
            return value, (REPLICATE,) * len(self.divides)  # made from constants alone
        part, whole = value.to_local(), node.meta["val"]
        for placement, divide in zip(value.placements, self.divides, strict=True):
            if isinstance(placement, Partial) and placement.reduce_op == "avg":
                part = part / divide.size
        places = tuple(place for place in map(_place, value.placements) if place is not None)
        if len(places) < len(self.divides) or list(part.shape) != part_shape(whole.shape, places, self.divides):
            raise Unfit(
                f"the result of {operator_name(node)} has placements that are not supported between chunks:"
                f" {value.placements}",
                node,
            )
        return part.contiguous() if whole.is_contiguous() else part, places


class _Runner(fx.Interpreter):
    """Runs a joint graph on DTensors."""

    def __init__(self, joint: fx.GraphModule, needed: set[fx.Node], mesh: DeviceMesh) -> None:
        super().__init__(joint, garbage_collect_values=False)
        self.needed, self.mesh = needed, mesh
        self.whole: Any = None
        """The unsharded result of the operator that is running."""

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.needed and n.op == "call_function":
            return None
        self.whole = n.meta.get("val")
        try:
            return super().run_node(n)
        except Exception as problem:
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise Unfit(f"{operator_name(n)} cannot be sharded this way: {reason}", n) from problem

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.piper.keep.default:
            return self._keep(*args)
        if target is torch.ops.piper.uniform.default:  # the same numbers everywhere
            whole = [Replicate()] * self.mesh.ndim
            return _divided(target(args[0].to_local(), *args[1:]), self.mesh, whole, self.whole)
        if target in _COPIES and isinstance(args[0], DTensor):
            return _divided(target(args[0].to_local(), **kwargs), self.mesh, args[0].placements, self.whole)
        if getattr(target, "__name__", "").startswith(_ATTENTION):
            return self._attention(target, args, kwargs)
        if target is aten.slice_backward.default:
            return self._slice_backward(*args)
        if routed.is_routed(target):
            return self._routed(target, args)
        if _means(target) and target in decomposition_table:
            return decomposition_table[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _keep(self, like: DTensor, rng: DTensor, *constants: Any) -> DTensor:
        """A dropout mask is sharded as its input is. It needs to know how, to be that part of the unsharded mask."""
        placements = [Replicate() if _place(placement) is PARTIAL else placement for placement in like.placements]
        dims = [_place(placement) for placement in placements]
        if None in dims:
            raise ValueError("the input of dropout is not sharded evenly")
        divided = [
            number
            for axis, one in enumerate(dims)
            if isinstance(one, ours.Shard)
            for number in (one.dim, _COORDINATES + axis, self.mesh.size(axis))
        ]
        return _divided(
            keep(like.to_local(), rng.to_local(), *constants[:3], divided), self.mesh, placements, self.whole
        )

    def _slice_backward(self, grad: DTensor, sizes: Sequence[int], dim: int, *where: int) -> DTensor:
        if any(isinstance(one, Shard) and one.dim == dim % len(sizes) for one in grad.placements):
            raise ValueError("it slices a dimension that is sharded")
        done = torch.ops.piper.slice_backward(grad.to_local(), sizes[dim], dim, *where)
        return _divided(done, self.mesh, grad.placements, self.whole)

    def _routed(self, target: Any, args: tuple[Any, ...]) -> DTensor:
        """Routed tokens: piperlang's operators have piperlang's own rules."""
        names = [argument.name for argument in target._schema.arguments]
        tensors = {name: value for name, value in zip(names, args, strict=True) if isinstance(value, DTensor)}
        placements: list[Placement] = []
        experts = args[-1]
        for axis in range(self.mesh.ndim):
            dims = {name: _place(value.placements[axis]) for name, value in tensors.items()}
            if PARTIAL in dims.values():
                raise ValueError("a partial sum cannot be multiplied")
            result = routed.divided(
                target, {name: one.dim if isinstance(one, ours.Shard) else None for name, one in dims.items()}
            )
            placements.append(_placement(result))
            if isinstance(experts, int) and dims["chosen"] is ours.Shard(0):
                experts //= self.mesh.size(axis)
        local = [value.to_local() if isinstance(value, DTensor) else experts for value in args]
        return _divided(target(*local), self.mesh, placements, self.whole)

    def _attention(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """piperlang's own rule: DTensor has none for CPUs, ignores a mask that is a keyword argument, and would shard a
        mask that is the same for all heads."""
        named = dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | kwargs
        tensors = {
            name: value
            for name, value in named.items()
            if isinstance(value, DTensor) and value.dim() > 2 and name not in _MASKS
        }
        placements = tensors["query"].placements
        alone = all(placement in (Replicate(), Shard(0), Shard(1)) for placement in placements)
        if not alone or any(tensor.placements != placements for tensor in tensors.values()):
            raise ValueError("its inputs are neither all sharded by samples nor all sharded by heads")
        if named.get("attn_bias") is not None and (named.get("grad_input_mask") or [False])[-1]:
            raise ValueError("its mask requires gradients")
        local = {
            name: self._mask(value, placements) if name in _MASKS else _local(value) for name, value in named.items()
        }
        results = target(*list(local.values())[: len(args)], **{name: local[name] for name in kwargs})
        whole: Sequence[Any] = self.whole
        return tuple(
            _divided(part, self.mesh, placements, value) if isinstance(part, torch.Tensor) and part.dim() > 2 else part
            for part, value in zip(results, whole, strict=True)
        )

    def _mask(self, mask: Any, placements: Sequence[Placement]) -> Any:
        """The local part of a mask for a shard of the samples or heads: the whole mask where it is broadcast over
        them."""
        own = list(mask.placements) if isinstance(mask, DTensor) else [Replicate()] * len(placements)
        part = _local(mask)
        for axis, placement in enumerate(placements):
            dim = placement.dim - 4 + mask.dim() if isinstance(placement, Shard) and mask is not None else -1
            if dim >= 0 and own[axis] == Replicate() and mask.shape[dim] > 1 and mask.stride(dim) == 0:
                part = part.narrow(dim, 0, part.shape[dim] // self.mesh.size(axis))
            elif mask is not None and own[axis] != (Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate()):
                raise ValueError("its mask is not sharded like its inputs")
        return part


def _means(target: Any) -> bool:
    """Whether an operator computes with the sizes of its operands, and has to be divided into ones that do not.
    DTensor has no rule for it, and would run it on local sizes with the rule of what it consists of; or it has
    the one of operators that compute each element by itself, though a mean over all elements is a part of this one."""
    if not isinstance(target, OpOverload) or target in _OWN_MEANS:
        return False
    rules = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")  # the last is newer than 2.11
    known = [getattr(rules, table, {}) for table in tables]
    return any(one.name == "reduction" for one in target._schema.arguments) or not any(target in one for one in known)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _divided(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _placement(place: ours.Placement) -> Placement:
    """What DTensor calls it. What it does not know, such as samples, is the same for a chunk as a replicated value."""
    return Shard(place.dim) if isinstance(place, ours.Shard) else Partial() if place is PARTIAL else Replicate()


def _place(placement: Placement) -> ours.Placement | None:
    """None for placements other than even slices, as flattened dimensions can have."""
    if type(placement) is Shard:  # not a subclass, whose shards are not slices
        return ours.Shard(placement.dim)
    if isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg"):
        return PARTIAL
    return REPLICATE if isinstance(placement, Replicate) else None


def _shown(places: PerAxis) -> str:
    return ", ".join(map(str, places))


def _fits(place: ours.Placement, gradient: ours.Placement) -> bool:
    """Whether the placement of a gradient is valid for that of its value. The gradient of a replicated value is a
    partial sum, unless all devices compute the same."""
    return gradient is place or {place, gradient} == {REPLICATE, PARTIAL}


def _needed(targets: Iterable[fx.Node | None]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [node for node in targets if node is not None]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _drop_views(graph: fx.Graph) -> None:
    """Removes the no-op view that `from_local` adds, which would be saved for the backward in addition to its source,
    and unused operators."""
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        (source,) = view.all_input_nodes
        before, after = source.meta["val"], view.meta["val"]
        if before.shape == after.shape and before.stride() == after.stride():
            view.replace_all_uses_with(source)
            graph.erase_node(view)
    graph.eliminate_dead_code()


def written(graph: fx.Graph) -> list[tuple[str, str, str]]:
    """Operators with their constants, and their operands by number, because names depend on DTensor's caches."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[str, str, str]] = []
    for node in graph.nodes:
        constant = repr(getattr(graph.owning_module, node.target)) if node.op == "get_attr" else ""
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        found.append((node.op if node.op != "call_function" else str(node.target), repr(arguments), constant))
    return found
