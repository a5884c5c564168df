"""The instruction set of a plan, declared once. What an instruction reads and writes, how it is saved, printed and
compared between ranks follows from its fields; the runtime and the verifier dispatch on its type.

A field is declared with its role:

- `read()` and `write()`: value ids that the instruction reads or writes;
- `per_rank()`: whatever differs between the ranks that run the same node (partners, tags, index ranges). All other
  fields are equal on every rank of a node, so that a plan can be kept once per distinct rank with these as functions
  of the mesh coordinate.

To add an instruction: declare it here, emit it in plan/lower/, execute it in runtime/device/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform, get_type_hints

from piperlang.core.value_id import ValueId
from piperlang.ir.layout import Box

Shape: TypeAlias = tuple[int, ...]
Interval: TypeAlias = tuple[int, int]
"""From the first element to the one after the last, of a flattened tensor."""

SYNC = "order"
"""The stream of messages that carry no data: the receiver may go on."""
NORM = "norm"
"""The stream on which the norm of all gradients is computed."""

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Bytes of an element; 1 for all other dtypes."""

READS, WRITES, VALUES, PER_RANK = "reads", "writes", "values", "per_rank"


def read(**options: Any) -> Any:
    return field(metadata={"role": READS}, **options)


def write(**options: Any) -> Any:
    return field(metadata={"role": WRITES}, **options)


def per_rank(*, role: str = "", values: bool = False, **options: Any) -> Any:
    """`values`: records that name value ids, which the instruction reads and writes."""
    return field(metadata={"role": VALUES if values else role, PER_RANK: True}, **options)


# ------------------------------------------------------------------------------------------------------------ records


class Message(NamedTuple):
    """One part of a point-to-point transfer."""

    peer: int
    tag: int
    box: Box | None
    """In the tensor of this device; None for all of it."""
    shape: Shape


class Block(NamedTuple):
    """One part of an all-to-all."""

    peer: int
    box: Box
    shape: Shape


class LocalCopy(NamedTuple):
    source: ValueId
    taken: Box
    put: Box

    def reads(self) -> tuple[ValueId, ...]:
        return (self.source,)


class Shards(NamedTuple):
    """One parameter or gradient of a collective: how its flat elements are divided among the members of the group."""

    sources: tuple[ValueId, ...]
    target: ValueId
    cuts: tuple[Interval, ...]
    """By member; empty where every member has all of it."""
    shape: Shape

    def reads(self) -> tuple[ValueId, ...]:
        return self.sources

    def writes(self) -> tuple[ValueId, ...]:
        return (self.target,)


class ParameterUpdate(NamedTuple):
    weight: str
    old: ValueId
    gradients: tuple[ValueId, ...]
    new: ValueId
    part: Interval | None
    """Of the flat elements of `old`, those that this device updates; None for all of them."""
    gradient_part: Interval | None
    sharded: bool
    """No device has the whole weight."""

    def reads(self) -> tuple[ValueId, ...]:
        return (self.old, *self.gradients)

    def writes(self) -> tuple[ValueId, ...]:
        return (self.new,)


class NormTerm(NamedTuple):
    """A gradient in the global norm."""

    weight: str
    gradients: tuple[ValueId, ...]
    gradient_part: Interval | None
    counts: bool
    """Of all devices that have this part, one counts."""

    def reads(self) -> tuple[ValueId, ...]:
        return self.gradients


class ZeroGradient(NamedTuple):
    """The gradient of an output that nothing is differentiated through."""

    output: int
    shape: Shape
    dtype: str


# ------------------------------------------------------------------------------------------------------- declaration

Ids = Callable[[Any], Iterable[ValueId]]
INSTRUCTIONS: dict[str, type[Instruction]] = {}
"""Every instruction by its mnemonic."""


@dataclass(frozen=True, slots=True)
class Instruction:
    op: ClassVar[str] = ""
    """The mnemonic, in printed plans and in files."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Fields that are equal on all ranks of a node."""
    ids: ClassVar[tuple[tuple[Ids, ...], tuple[Ids, ...]]] = ((), ())
    """How the value ids that it reads, and those that it writes, are found in its fields."""

    stream: str
    node: int
    """The graph node it belongs to: an index into the plan's names."""
    waits: tuple[int, ...]
    """Instructions on other streams of this device that must have ended."""
    reads: tuple[ValueId, ...] = field(init=False, compare=False, repr=False)
    writes: tuple[ValueId, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        reads, writes = self.ids
        object.__setattr__(self, "reads", tuple(chain.from_iterable([found(self) for found in reads])))
        object.__setattr__(self, "writes", tuple(chain.from_iterable([found(self) for found in writes])))

    def sent_bytes(self, members: int) -> float:
        """Bytes that this device gives to others; collectives by a ring over the `members` of their group."""
        return 0.0


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field, read, write, per_rank))
def instruction(op: str = "") -> Callable[[type[T]], type[T]]:
    """Declare an instruction: a frozen dataclass whose reads and writes are collected by field role. Without a mnemonic
    it is a base of others."""

    def declare(plain: type[T]) -> type[T]:
        cls: Any = dataclass(frozen=True, slots=True)(plain)
        hints = get_type_hints(cls)
        own = [one for one in fields(cls) if one.init and one.name not in ("stream", "node", "waits")]
        cls.shared = tuple(one.name for one in own if not one.metadata.get(PER_RANK))
        cls.ids = tuple(
            tuple(
                _ids(one.name, hints[one.name], role)
                for one in own
                if one.metadata.get("role") == role or _names_values(hints[one.name], role, one.metadata)
            )
            for role in (READS, WRITES)
        )
        if op:
            cls.op = op
            INSTRUCTIONS[op] = cls
        return cls  # type: ignore[no-any-return]

    return declare


def _names_values(hint: Any, role: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a field holds records that name values they read, or write."""
    return metadata.get("role") == VALUES and hasattr(hint.__args__[0], role)


def _ids(name: str, hint: Any, role: str) -> Ids:
    """How the value ids in a field are found: records, one id, an optional one, a tuple, or a tuple of tuples."""
    get = attrgetter(name)
    inner = getattr(hint, "__args__", (None,))[0]
    if hasattr(inner, role):
        of_record = getattr(inner, role)
        return lambda x: chain.from_iterable([of_record(one) for one in get(x)])
    if hint is ValueId:
        return lambda x: (get(x),)
    if hint == (ValueId | None):
        return lambda x: () if get(x) is None else (get(x),)
    if hint == tuple[ValueId, ...]:
        return get
    if hint == tuple[tuple[ValueId, ...], ...]:
        return lambda x: chain.from_iterable(get(x))
    raise TypeError(f"{name}: {hint} holds no value ids")


def item_bytes(dtype: str) -> int:
    return ITEM_BYTES.get(dtype, 1)


# ----------------------------------------------------------------------------------------------------------- compute


@instruction()
class Compute(Instruction):
    """One pass of a stage program."""

    program: int
    inputs: tuple[tuple[ValueId, ...], ...] = read()
    """By input slot of the program; several values are summed, none where the runtime supplies the input."""
    outputs: tuple[ValueId, ...] = write()
    first_sample: int = per_rank()
    coordinates: tuple[int, ...] = per_rank()
    """Along the axes that shard the program."""
    loss_share: float | None = None
    """What this microbatch's loss counts for, where the pass starts from the loss."""
    zeros: tuple[ZeroGradient, ...] = per_rank(default=())


@instruction("F")
class Forward(Compute):
    """The forward, which saves activations for the backward."""


@instruction("B")
class Backward(Compute):
    """Input and weight gradients in one."""


@instruction("I")
class InputGradient(Compute):
    """Input gradients, and the residuals that the weight gradient needs."""


@instruction("W")
class WeightGradient(Compute):
    """Weight gradients."""


@instruction("R")
class Recompute(Compute):
    """The forward again, for its activations only."""


# ------------------------------------------------------------------------------------------------------ point to point


@instruction("send")
class Send(Instruction):
    """`value` is None for a message without data."""

    value: ValueId | None = read()
    messages: tuple[Message, ...] = per_rank()
    dtype: str

    def sent_bytes(self, members: int) -> float:
        return float(sum(prod(one.shape) for one in self.messages) * item_bytes(self.dtype))


@instruction("recv")
class Receive(Instruction):
    target: ValueId = write()
    messages: tuple[Message, ...] = per_rank()
    local: tuple[LocalCopy, ...] = per_rank(values=True)
    """What this device has already."""
    shape: Shape = per_rank()
    dtype: str


# --------------------------------------------------------------------------------------------------------- collectives


@instruction()
class Collective(Instruction):
    """All members of a group enter it together."""

    group: int = per_rank()


@instruction("all_reduce")
class AllReduce(Collective):
    source: ValueId = read()
    target: ValueId = write()
    shape: Shape = per_rank()
    dtype: str
    keep: Box | None = per_rank()
    """Of the result, what this device keeps; None for all of it."""

    def sent_bytes(self, members: int) -> float:
        return 2 * (members - 1) / members * prod(self.shape) * item_bytes(self.dtype)


@instruction("all_to_all")
class AllToAll(Collective):
    """Activations from one placement to another: an all-gather is one whose blocks are all the same."""

    source: ValueId = read()
    target: ValueId = write()
    give: tuple[Block, ...] = per_rank()
    take: tuple[Block, ...] = per_rank()
    shape: Shape = per_rank()
    dtype: str


@instruction()
class Routing(Collective):
    """Tokens to and from their experts. Shapes are those of balanced experts; counts are known only at run time."""

    source: ValueId = read()
    target: ValueId = write()
    experts: int
    shape: Shape = per_rank()
    dtype: str

    def sent_bytes(self, members: int) -> float:
        return (members - 1) / members * prod(self.shape) * item_bytes(self.dtype)


@instruction("choose")
class ExchangeSplits(Routing):
    """Ranks exchange token counts, then the expert indices themselves. Dispatch and combine use the same splits."""

    splits: ValueId = write()


@instruction("dispatch")
class Dispatch(Routing):
    """Tokens to the ranks of their experts."""

    splits: ValueId = read()


@instruction("combine")
class Combine(Routing):
    """Tokens back to the ranks they came from."""

    splits: ValueId = read()


@instruction()
class ShardCollective(Collective):
    """Parameters or gradients of one bucket."""

    shards: tuple[Shards, ...] = per_rank(values=True)
    dtype: str

    def _ring(self, passes: int, members: int) -> float:
        return passes * (members - 1) / members * sum(prod(one.shape) for one in self.shards) * item_bytes(self.dtype)


@instruction("gather")
class GatherParameters(ShardCollective):
    """An all-gather of parameter shards."""

    def sent_bytes(self, members: int) -> float:
        return self._ring(1, members)


@instruction("scatter")
class ScatterGradients(ShardCollective):
    """A reduce-scatter of gradients."""

    def sent_bytes(self, members: int) -> float:
        return self._ring(1, members)


@instruction("reduce")
class ReduceGradients(ShardCollective):
    """An all-reduce of gradients."""

    share: float | None = per_rank(default=None)
    """Where several members have the same sum already: what each counts for."""

    def sent_bytes(self, members: int) -> float:
        return self._ring(2, members)


@instruction("norm")
class GradientNorm(Collective):
    """The norm of all gradients, and the factor that brings it down to `limit`."""

    target: ValueId = write()
    limit: float | None
    """None: gradients are not scaled."""
    terms: tuple[NormTerm, ...] = per_rank(values=True)
    skips: bool = False
    """Where the norm or a loss is not finite, the step changes nothing."""
    losses: tuple[ValueId, ...] = per_rank(role=READS, default=())
    """Looked at, too, if the instruction skips."""

    def sent_bytes(self, members: int) -> float:
        return 2 * (members - 1) / members * item_bytes("float64")


# ---------------------------------------------------------------------------------------------------------- local


@instruction("update")
class Update(Instruction):
    """One optimizer step, in place."""

    parameters: tuple[ParameterUpdate, ...] = per_rank(values=True)
    scale: ValueId | None = read(default=None)
    """The factor of a gradient norm."""


@instruction("copy")
class Copy(Instruction):
    """A slice, a concatenation, or zeros."""

    sources: tuple[ValueId, ...] = read()
    target: ValueId = write()
    copies: tuple[LocalCopy, ...] = per_rank()
    shape: Shape = per_rank()
    dtype: str


@instruction("offload")
class Offload(Instruction):
    """Activations to host memory."""

    source: ValueId = read()
    target: ValueId = write()


@instruction("fetch")
class Fetch(Instruction):
    """Activations back to the device."""

    source: ValueId = read()
    target: ValueId = write()


COLLECTIVES = tuple(op for op, cls in INSTRUCTIONS.items() if issubclass(cls, Collective))
ROUTING = ("choose", "dispatch", "combine")
