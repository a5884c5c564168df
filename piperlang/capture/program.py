"""A model captured for scheduling: the description that passes read, and the graphs that devices run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from piperlang.capture.autodiff.cut import Subgraph, cut, matches
from piperlang.capture.autodiff.differentiate import Localize, divide, signature
from piperlang.capture.autodiff.joint import Joint
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.batch.layout import BatchLayout
from piperlang.capture.batch.samples import Samples, samples
from piperlang.capture.batch.sizes import Sizes, trace_sizes
from piperlang.capture.spmd.features import Unfit, features_of, operator_name, refusal
from piperlang.capture.spmd.localize import Tried, localize, written
from piperlang.capture.trace import routed
from piperlang.capture.trace.names import ModuleName, names_of
from piperlang.capture.trace.whole_sum import reason
from piperlang.capture.user.user_code import located
from piperlang.capture.user.where import line_of_function, line_of_operator
from piperlang.core.placement import DISPATCHED, Dispatched, Placement, Shard
from piperlang.diagnostics import Diagnostic, did_you_mean, error
from piperlang.directives.tag import ModulePath, Tag
from piperlang.ir import model as ir
from piperlang.ir.model import Sharding


@dataclass
class Program:
    """The traced model and loss. `cut` by tags gives a CutProgram; each distinct chunk is differentiated once."""

    sizes: Sizes
    copies: ir.Copies = ir.NO_COPIES
    rows: tuple[int, ...] = ()
    """Where it is planned for a padded batch: for each sample, the sample of the given batch that it repeats."""
    _known: dict[object, int] = field(default_factory=dict)
    _joints: dict[tuple[int, int], Joint] = field(default_factory=dict)
    _pieces: dict[tuple[int, int, Sharding, bool], PassGraphs] = field(default_factory=dict)
    _places: dict[tuple[int, int, Sharding], ir.Places] = field(default_factory=dict)
    _tried: dict[tuple[int, int, tuple[ir.Divide, ...]], Tried] = field(default_factory=dict)
    _promised: dict[tuple[int, Sharding], tuple[int, ir.Places]] = field(default_factory=dict)
    """The placements that passes were given, with the number of samples they were found for."""

    def padded(self, rows: tuple[int, ...]) -> Program:
        """The same program, planned for a batch of these samples of the given one; if there are none, for the given
        one."""
        return replace(self, sizes=replace(self.sizes, samples=len(rows)), rows=rows) if rows else self

    @property
    def compiles(self) -> bool:
        """Whether devices compile its stage programs, which makes operators cheap that only read and write memory."""
        traced = self.sizes.small
        return bool(traced.value(traced.result).device.type == "cuda")

    def cut(self, tags: Iterable[Tag] = ()) -> CutProgram:
        chunks = cut(self.sizes.small, tags, self.samples.summed)
        return CutProgram(self, chunks, frozenset(range(len(chunks)) if self.compiles else ()))

    def check_tag(self, directive: Tag) -> None:
        for path in directive.paths:
            self._check_path(path)

    def key(self, chunk: Subgraph) -> int:
        """An identifier that is equal for chunks that compute the same."""
        return self._known.setdefault(signature(self.sizes.small, chunk, self.sizes), len(self._known))

    def pass_graphs(
        self, chunk: Subgraph, key: int, samples: int, sharding: Sharding = ((), ()), cheap: bool = False
    ) -> PassGraphs:
        """`cheap`: the backward recomputes what is cheap."""
        known = (key, samples, sharding)
        if (*known, cheap) not in self._pieces:
            first = (key, self.sizes.samples, ((), ()))
            like = self.pass_graphs(chunk, *first, cheap) if known != first else None
            local = self._local(chunk, known) if sharding[0] else None
            made = divide(self.joint(chunk, key, samples), local, like, cheap)
            if not cheap and any(DISPATCHED in places for places in self._places.get(known, {}).values()):
                self._any_rows(chunk, known, made)
            promised = self._promised.get((key, sharding))
            if promised is not None and 1 < samples < promised[0] and promised[1] != self._places[known]:
                tags = ", ".join(f"{name}={value}" for name, value in sorted(chunk.tags)) or "untagged"
                raise error(
                    "P0411",
                    f"chunk {tags} is sharded differently with {samples} samples than with {promised[0]} samples",
                    help="put `split` and `replicate` before `shard`",
                )
            self._pieces[*known, cheap] = made
        return self._pieces[*known, cheap]

    def joint(self, chunk: Subgraph, key: int, samples: int) -> Joint:
        if (key, samples) not in self._joints:
            self._joints[key, samples] = Joint(self.sizes.small, chunk, self.sizes, samples)
        return self._joints[key, samples]

    def places(self, chunk: Subgraph, key: int, samples: int, sharding: Sharding) -> ir.Places:
        """The placements of all values of a chunk whose weights are sharded.

        If the placements for a larger number of samples are known, those are returned: styles shard features, so the
        number of samples does not matter as long as it is greater than one. The graphs for a device are traced at its
        own size (`pieces`), which checks it."""
        known = (key, samples, sharding)
        promised = self._promised.get((key, sharding))
        if (
            known in self._places
            or promised is None
            or not 1 < samples < promised[0]
            or any(divide.style == "experts" for divide in sharding[0])
        ):
            self.pass_graphs(chunk, key, samples, sharding)
            promised = samples, self._places[known]
            self._promised.setdefault((key, sharding), promised)
        return promised[1]

    def _local(self, chunk: Subgraph, known: tuple[int, int, Sharding]) -> Localize:
        divides = known[2][0]
        arriving = {
            slot: tuple(Shard(0) if place is DISPATCHED else place for place in places) for slot, places in known[2][1]
        }
        rows = self._rows(chunk) if any(divide.style == "experts" for divide in divides) else frozenset[ir.Slot]()

        def local(joint: fx.GraphModule, takes: Sequence[ir.Slot], gives: Sequence[ir.Slot | None]) -> fx.GraphModule:
            problem = self._unroutable(chunk, rows)
            if problem is not None:
                raise refusal(problem, divides, {}, joint)
            key, samples, sharding = known
            tried = self._tried.setdefault((key, samples, divides), {})
            _, before = self._promised.get((key, sharding), (0, None))
            found = localize(
                joint, takes, gives, features_of(self.sizes.small, chunk), divides, arriving, rows, before, tried
            )
            self._places[known] = {
                slot: _routed(places, divides) if _of(slot) in rows else places
                for slot, places in found.placements.items()
            }
            return found.joint

        return local

    # ------------------------------------------------------------------------------------------------ routed tokens

    def _rows(self, chunk: Subgraph) -> frozenset[ir.Slot]:
        """Inputs and outputs that are dispatched to the experts of their tokens, if this chunk has routed operators."""
        if not any(routed.operators(chunk.nodes)):
            return frozenset()
        nodes = {node.name: node for node in self.sizes.small.graph.nodes}
        crossing = [(("input", i), v) for i, v in enumerate(chunk.inputs)] + [
            (("output", i), v) for i, v in enumerate(chunk.outputs)
        ]
        return frozenset(slot for slot, v in crossing if (dims := self.sizes.dims(nodes[v.name])) and dims[0][0])

    def _unroutable(self, chunk: Subgraph, rows: frozenset[ir.Slot]) -> Unfit | None:
        """Why tokens cannot be dispatched to their experts; None if they can."""
        if not rows:
            return None
        first, apart = (
            next(routed.operators(chunk.nodes)),
            "compute and flatten the routing in one chunk, and the experts in the next: `with annotate(...)` around the"
            " experts alone",
        )
        if dispatch(chunk) is None:
            return Unfit(
                "tokens can be dispatched to their experts only if one tensor of expert indices routes all of them, and"
                " it is an input of this chunk",
                first,
                apart,
            )
        if chunk.random:
            return Unfit(
                "dropout masks depend on the position in the batch, which tokens lose when they are dispatched to their"
                " experts",
                first,
                "apply dropout before or after the experts",
            )
        return (
            Unfit("it reads a tensor of the batch, which is not dispatched to the experts", first, apart)
            if chunk.batch
            else None
        )

    def _any_rows(self, chunk: Subgraph, known: tuple[int, int, Sharding], made: PassGraphs) -> None:
        """Checks that the graphs are the same for any number of tokens, because that number depends on the data."""
        key, samples, sharding = known
        twice = (key, 2 * samples, sharding)
        other = divide(self.joint(chunk, key, 2 * samples), self._local(chunk, twice))
        for name in "FBIW":
            one, two = getattr(made, name), getattr(other, name)
            for ours, theirs, node in (
                zip(written(one.module.graph), written(two.module.graph), one.module.graph.nodes, strict=True)
                if one is not None
                else ()
            ):
                if ours != theirs:
                    raise refusal(
                        Unfit(
                            f"{operator_name(node)} depends on the number of routed tokens, which the data decides",
                            node,
                            "flatten tokens before the experts, and process each token independently in the experts",
                        ),
                        sharding[0],
                        {},
                        one.module,
                    )

    @cached_property
    def samples(self) -> Samples:
        """How the losses of parts of the batch combine, and whether the batch may be divided."""
        found = samples(self.sizes.small, self.sizes.large, self.sizes.walk)
        if not found.weighted:
            return found
        why = _weights_differ(found.weighted)
        return replace(
            found, mixing=found.mixing or why, reasons={**dict.fromkeys(found.weighted, why), **found.reasons}
        )

    @property
    def random(self) -> bool:
        return self.sizes.small.random

    def modules(self) -> set[tuple[str, ...]]:
        return {name.parts for node in self.sizes.small.graph.nodes for name in names_of(node)}

    def _check_path(self, path: ModulePath) -> None:
        known = self.modules()
        if any(matches(path, ModuleName(parts)) for parts in known):
            return
        around = {".".join(parts[:depth]) for parts in known for depth in range(1, len(parts) + 1)}
        raise error(
            "P0306",
            f"the model has no operator in `{path}`",
            path.span,
            "there is no such module, or it has no operators",
            help=did_you_mean(str(path), around) or _some(around),
        )


def capture(
    make_model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any],
    batch: tuple[Any, Any],
    seed: int = 0,
    copies: ir.Copies = ir.NO_COPIES,
) -> Program:
    """`copies`: what training keeps of weights, for estimates of memory."""
    with located(line_of_function(make_model)):
        return Program(trace_sizes(make_model, loss, batch, seed), copies)


class CutProgram:
    """The program cut into chunks."""

    def __init__(self, program: Program, chunks: list[Subgraph], cheap: frozenset[int]) -> None:
        """`cheap`: the numbers of the chunks whose backward recomputes what is cheap."""
        self.program, self.chunks, self.cheap = program, chunks, cheap
        self._others: dict[frozenset[int], CutProgram] = {}
        self.keys = [program.key(chunk) for chunk in chunks]
        self.model = self._describe()

    def recomputing(self, cheap: frozenset[int]) -> CutProgram:
        if cheap == self.cheap:
            return self
        if cheap not in self._others:
            self._others[cheap] = CutProgram(self.program, self.chunks, cheap)
        return self._others[cheap]

    def check_state(self) -> None:
        """Python state that the program has captured must not change. Called before every step."""
        self.program.sizes.small.frozen.check()

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the program reads besides the batch and the model's own tensors."""
        return self.program.sizes.small.constants

    @property
    def unsaved(self) -> frozenset[str]:
        """Constants of the program. No checkpoint has them: a program that has changed has others."""
        return frozenset(weight.name for weight in self.program.sizes.small.weights.values() if weight.constant)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Additional names of tied weights."""
        return {weight.name: weight.aliases for weight in self.program.sizes.small.weights.values() if weight.aliases}

    @property
    def weight_bytes(self) -> int:
        return sum(weight.bytes for weight in self.model.weights.values())

    @cached_property
    def layout(self) -> BatchLayout:
        """What batches look like."""
        sizes = self.program.sizes
        assert sizes.layout is not None
        return BatchLayout(
            sizes.layout,
            sizes.shapes,
            sizes.dtypes,
            tuple(sizes.small.batch),
            sizes.whole(self.given),
            self.program.rows,
        )

    @property
    def given(self) -> int:
        """The number of samples of the batch, before it is padded."""
        return max(self.program.rows) + 1 if self.program.rows else self.program.sizes.samples

    def pass_graphs(self, chunk: int, samples: int, sharding: Sharding = ((), ())) -> PassGraphs:
        return self.program.pass_graphs(self.chunks[chunk], self.keys[chunk], samples, sharding, chunk in self.cheap)

    def takes(self, chunk: int, samples: int) -> dict[ir.Slot, torch.Tensor]:
        """Fake tensors of all that the passes of a chunk take from elsewhere."""
        return self.program.joint(self.chunks[chunk], self.keys[chunk], samples).takes

    def divided(self, chunk: int, samples: int, sharding: Sharding) -> ir.Places:
        return self.program.places(self.chunks[chunk], self.keys[chunk], samples, sharding)

    # ------------------------------------------------------------------------------------------------ description

    def _describe(self) -> ir.Model:
        sizes = self.program.sizes
        traced = sizes.small
        nodes = {node.name: node for node in traced.graph.nodes}
        differentiable = {v.name for chunk in self.chunks for v in (*chunk.inputs, *chunk.outputs) if v.differentiable}
        crossing = {v.name for chunk in self.chunks for v in (*chunk.inputs, *chunk.outputs)} | set(traced.batch)
        for name in crossing - set(traced.batch):
            if traced.value(nodes[name]).numel() == 0:
                raise error(
                    "P0802",
                    "an empty tensor is passed from one chunk to another",
                    line_of_operator(nodes[name]),
                    help="create it in the chunk that reads it",
                )
        tensors = {name: self._tensor(nodes[name], name in differentiable) for name in nodes if name in crossing}
        chunks = [self._chunk(chunk) for chunk in self.chunks]
        weights = {
            w.name: ir.Weight(
                w.name, tuple(w.fake.shape), _dtype(w.fake), w.fake.element_size(), w.name in traced.trained, w.buffer
            )
            for w in traced.weights.values()
        }
        samples = self.program.samples
        return ir.Model(
            chunks, tensors, weights, sizes.samples, traced.result.name, samples.loss, self, self.program.copies
        )

    def _tensor(self, node: fx.Node, differentiable: bool) -> ir.Tensor:
        sizes = self.program.sizes
        value = sizes.small.value(node)
        dims = sizes.dims(node)
        batch = [i for i, (a, _) in enumerate(dims) if a]
        _, inner = self.program.samples.dims.get(node.name, (0, 0))
        buried = bool(batch) and inner not in (0, dims[batch[0]][0])
        return ir.Tensor(
            node.name,
            dims,
            _dtype(value),
            value.element_size(),
            batch[0] if batch else None,
            buried,
            differentiable,
            node.name in self.program.samples.own,
            node.name in self.program.samples.summed,
        )

    def _chunk(self, chunk: Subgraph) -> ir.Chunk:
        traced = self.program.sizes.small
        pieces = self.pass_graphs(chunk.number, self.program.sizes.samples)
        passes = {name: _pass(piece) for name in "FBIW" if (piece := getattr(pieces, name)) is not None}
        paths = dict.fromkeys(".".join(names_of(node)[0].parts) for node in chunk.nodes)
        return ir.Chunk(
            chunk.number,
            dict(chunk.tags),
            tuple(traced.weights[place].name for place in chunk.weights),
            chunk.batch,
            tuple(v.name for v in chunk.inputs),
            tuple(v.name for v in chunk.outputs),
            passes,
            chunk.random,
            tuple(path for path in paths if path),
            pieces.saved_bytes,
            pieces.kept_bytes,
            chunk.number in self.cheap,
            *pieces.saved(),
            dispatch(chunk),
            tuple(
                ir.Change(weight, output, chunk.outputs[output].name in self.program.samples.free)
                for weight, output in chunk.changes
            ),
            self.program.samples.mixing_in(chunk.nodes),
            next((reason(node) for node in chunk.nodes if node.name in self.program.samples.summed), None),
            self._digest(chunk),
        )

    def _digest(self, chunk: Subgraph) -> str:
        sizes = self.program.sizes
        parts = []
        for node in chunk.nodes:
            value = node.meta["val"]
            made = (str(value.dtype), sizes.dims(node)) if isinstance(value, torch.Tensor) else ()
            parts.append((str(node.target), made))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def dispatch(chunk: Subgraph) -> Dispatched | None:
    """The expert indices of a chunk's routed tokens: an input of the chunk, if there is one for all tokens."""
    choices = {Dispatched(*routed.choice_of(node)) for node in routed.operators(chunk.nodes)}
    return (
        next(iter(choices))
        if len(choices) == 1 and {found.indices for found in choices} <= {v.name for v in chunk.inputs}
        else None
    )


def _routed(places: tuple[Placement, ...], divides: Sequence[ir.Divide]) -> tuple[Placement, ...]:
    return tuple(
        DISPATCHED if place is Shard(0) and divide.style == "experts" else place
        for place, divide in zip(places, divides, strict=True)
    )


def _of(slot: ir.Slot) -> ir.Slot:
    """The slot whose gradient this is."""
    return slot[0].removeprefix("grad_"), slot[1]


def _weights_differ(nodes: Sequence[str]) -> Diagnostic:
    return Diagnostic(
        "P0805",
        "the batch cannot be divided: the loss contains a mean over targets, some of which may be ignored",
        notes=(
            f"in the loss: {', '.join(nodes)}",
            "microbatches and replicas that ignore more targets would need a smaller weight",
        ),
        helps=(
            (
                'divide by a fixed number: `cross_entropy(..., reduction="sum") / target.numel()`; a loss that is only'
                " such a mean, or a pair (sum, count), is supported"
            ),
        ),
    )


def _pass(piece: PassGraph) -> ir.Pass:
    return ir.Pass(
        piece.inputs,
        piece.outputs,
        piece.cost.flops,
        piece.cost.read_bytes + piece.cost.written_bytes,
        piece.cost.scratch,
    )


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _some(paths: set[str]) -> str | None:
    top = sorted(path for path in paths if "." not in path)
    return f"the model has {', '.join(top[:6])}{', ...' if len(top) > 6 else ''}" if top else None
