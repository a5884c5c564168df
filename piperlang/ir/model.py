"""A captured model as the passes see it: chunks, the tensors between them, and weights. Shapes only, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

from piperlang.core.placement import Dispatched, Placement
from piperlang.core.selector import TagValue
from piperlang.diagnostics import Diagnostic

Slot: TypeAlias = tuple[str, int]
"""An input or output of a pass: (weight | batch | rng | input | output | saved | kept | grad_..., index)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor whose shape depends on the number of samples: every dim is a * samples + b."""

    name: str
    dims: tuple[tuple[int, int], ...]
    dtype: str
    itemsize: int
    batch: int | None = None
    """The dim that goes through the samples, outermost in it; None if no dim does."""
    buried: bool = False
    """The samples are inside a dim, not outermost: it can be passed on, but not divided otherwise than it was made."""
    differentiable: bool = False
    own: bool = False
    """Every part of the batch has its own, so only a chunk with the same parts can read it: a sum or a mean over the
    samples, or what depends on their number or on the position of a sample among them."""
    summed: bool = False
    """A sum over the samples, which is added up over the devices that divide the batch before other chunks read it."""

    def shape(self, samples: int) -> tuple[int, ...]:
        return tuple(a * samples + b for a, b in self.dims)

    def bytes(self, samples: int) -> int:
        return prod(self.shape(samples)) * self.itemsize


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer; tied ones are one Weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trained: bool
    buffer: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


class Copies(NamedTuple):
    """Of weights, that training keeps beside them."""

    masters: bool = False
    """In float32, of weights in half precision: optimizers update these."""
    averages: bool = False
    """Moving averages, of what optimizers update."""


NO_COPIES = Copies()


class Scratch(NamedTuple):
    """What a pass has at one point, beyond its inputs and outputs; less than nothing where inputs that end there have
    made room for outputs."""

    activations: int
    """Bytes that grow with the samples, for all of them."""
    gradients: int
    """Bytes of gradients of weights, however many samples there are."""


@dataclass(frozen=True, slots=True)
class Pass:
    """F, B, I or W of a chunk: what it takes and gives, and what it costs at the size it was captured."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    flops_in: Mapping[str, int] = field(default_factory=dict)
    """By the dtype that they are in."""
    moved_bytes: int = 0
    scratch: tuple[Scratch, ...] = ()
    """At the points where it may be the most."""

    @property
    def flops(self) -> int:
        return sum(self.flops_in.values())


class Change(NamedTuple):
    """A buffer that a chunk changes: its number among the chunk's weights, and that of the output that it becomes."""

    weight: int
    output: int
    free: bool
    """The new value does not depend on the samples, so every part of the batch gives the same."""


@dataclass(frozen=True)
class Chunk:
    """A part of the model that runs as one."""

    number: int
    tags: Mapping[str, TagValue]
    weights: tuple[str, ...]
    """Names of weights, by slot."""
    batch: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    passes: Mapping[str, Pass]
    """F always; B where anything learns; I where an input wants a gradient, W where a weight does."""
    random: bool
    modules: tuple[str, ...]
    """Paths of the modules in it, for messages."""
    saved_bytes: int = 0
    kept_bytes: int = 0
    recomputes: bool = False
    """Its backward recomputes what is cheap."""
    saved_apart: int = 0
    """Of the saved bytes, those that share no memory with an input or output."""
    saved_in: tuple[Slot, ...] = ()
    """Inputs and outputs that activations share memory with, and so keep alive."""
    dispatch: Dispatched | None = None
    """By which of its inputs routed tokens are dispatched to its experts, if it has such experts."""
    changes: tuple[Change, ...] = ()
    mixing: Diagnostic | None = None
    """Why its batch cannot be divided, if it cannot."""
    summing: Diagnostic | None = None
    """Why its batch cannot be split into microbatches, though devices can divide it: it computes with sums over the
    batch."""
    digest: str = ""
    """Equal for chunks with the same operators on values of the same dtypes and sizes, however many samples."""

    @property
    def tagset(self) -> frozenset[tuple[str, TagValue]]:
        return frozenset(self.tags.items())

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in sorted(self.tags.items())) or "untagged"


@dataclass(frozen=True, slots=True)
class Divide:
    """One device axis along which the weights of a chunk are divided."""

    axis: str
    size: int
    style: str


Places: TypeAlias = Mapping[Slot, tuple[Placement, ...]]
"""For every slot of a chunk, its placement along each axis that shards the chunk."""


Sharding: TypeAlias = tuple[tuple[Divide, ...], tuple[tuple[Slot, tuple[Placement, ...]], ...]]
"""How a chunk is sharded: along which axes, and the placements of its inputs along them as they arrive."""


class Divider(Protocol):
    """Finds the placements of a chunk's tensors when its weights are sharded: the captured model, which traces it."""

    def divided(self, chunk: int, samples: int, sharding: Sharding) -> Places: ...


@dataclass(frozen=True)
class Model:
    chunks: Sequence[Chunk]
    tensors: Mapping[str, Tensor]
    """Everything that crosses between chunks, the batch's tensors, and the loss."""
    weights: Mapping[str, Weight]
    samples: int
    loss: str
    """The tensor that the last chunk gives."""
    combine: str
    """How losses of parts of the batch make the loss of the whole: `mean`, `sum`, or `count` for a sum that is divided
    by a count of the batch."""
    divider: Divider | None = None
    copies: Copies = NO_COPIES

    def has_master(self, weight: Weight) -> bool:
        return self.copies.masters and weight.dtype in ("bfloat16", "float16")

    @property
    def combines_samples(self) -> bool:
        """Whether what is computed for a sample depends on the others: no part of the batch can be computed alone."""
        return any(chunk.mixing is not None or chunk.summing is not None for chunk in self.chunks)

    @property
    def flops(self) -> int:
        """Of forward and backward on the whole batch."""
        return sum(done.flops for chunk in self.chunks for name, done in chunk.passes.items() if name in "FB")
