"""What values hold of the samples of a batch, and why some mix them.

A value is free of the batch's data; or it goes along the samples, one dimension of it counting them; or it is mixed: a
linear combination over all samples. What fits none of these is not made of what the parts of a divided batch make, and
is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Free:
    """No data of the batch in it. Dimensions as long as the batch it may have (zeros, a mask)."""

    degree: int | None = 0
    """It is a constant times this power of the batch's size; None: it changes with that size in another way."""
    zero: bool = False
    uniform: bool = True
    """The same for every sample. What is not (`arange` over the batch) says where in the batch a sample stands, which
    is another place in a part of it."""
    place: int = 0
    """It is this many times the number of the sample, and may be used to find that sample: `x[arange(len(x)),
    target]`."""


@dataclass(frozen=True)
class Along:
    """`dim` has outer * batch * inner elements, and the batch's part of the index is the number of the sample."""

    dim: int
    inner: int
    degree: int = 0
    """Each sample's part is a value of its own, times this power of the batch's size."""


@dataclass(frozen=True)
class Mixed:
    """A sum over the samples, times this power of the batch's size: 0 is the sum, -1 the mean."""

    degree: int

    def __str__(self) -> str:
        return {0: "sum", -1: "mean"}.get(self.degree, "scaled sum")


class Repair(StrEnum):
    """What to do about it."""

    WITHIN = "let it work within each sample: along another dimension than that of the samples"
    PER_SAMPLE = "take it within each sample, and the mean over the samples last"
    BALANCE = (
        "use the mean over the samples only as it is, or times a constant; compute a balancing loss per sequence, as"
        " DeepSeek-V3 does, and take its mean"
    )
    NORM = "use a norm within each sample, such as LayerNorm or GroupNorm"
    RATIO = "divide by a constant, or by a number of each sample's own before the mean over the samples is taken"
    SIZE = (
        "take means over the samples; of the size of the batch use nothing but x.shape[0], as a number and not as a"
        " tensor"
    )
    MEAN = "take the mean over the samples: a constant added to a sum would be added once for every part"
    EACH = "treat every sample alike: the first sample of a part is not the first of the batch"
    PAIRS = "compare within a sample; a loss over pairs of samples needs the whole batch in one place"
    ALIKE = "let the model run the same operators for every size of the batch"
    FREQUENCIES = "leave `scale_grad_by_freq` out"
    KNOWN = "write it with other operators"
    ALONE = "use it without the samples"
    NUMBERS = "compute with tensors"
    LAST = "take its mean over the samples"
    FIRST = "apply it to a value whose first dimension is the batch"
    THROUGHOUT = "use means over the samples throughout, or sums throughout"


class Mixing(Exception):
    """The value is not what the same operators make of parts of the batch."""

    def __init__(self, message: str, help: Repair) -> None:
        super().__init__(message)
        self.message, self.help = message, help.value


class Placed(Mixing):
    """It depends on where in the batch a sample stands."""


State: TypeAlias = Free | Along | Mixed | Mixing


@dataclass(frozen=True, eq=False)
class Operand:
    state: State
    small: torch.Tensor
    large: torch.Tensor


@dataclass(frozen=True)
class Call:
    """An operator as both traces call it. Tensors among the arguments are Operands, the same in both."""

    name: str
    shown: str
    """The name of the operator that the program wrote, which may have been decomposed into this one."""
    target: Any
    small: dict[str, Any]
    large: dict[str, Any]
    results: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    samples: int
    times: int
    """How many times the samples of the small batch the large one has."""

    @property
    def operands(self) -> list[Operand]:
        return [leaf for leaf in leaves(self.small.values()) if isinstance(leaf, Operand)]

    @property
    def data(self) -> list[Operand]:
        return [operand for operand in self.operands if not isinstance(operand.state, Free)]

    @property
    def rank(self) -> int:
        return self.results[0][0].dim()

    def degree(self, name: str) -> int | None:
        """Which power of the batch's size a number among the arguments follows."""
        return power(self.small.get(name), self.large.get(name), self.times)

    @property
    def changed(self) -> bool:
        """Whether a number among the arguments is another in the large trace."""
        pairs = zip(leaves(self.small.values()), leaves(self.large.values()), strict=False)
        return any(not same_number(a, b) for a, b in pairs if not isinstance(a, Operand))

    def placed(self) -> Placed:
        return Placed(f"{self.shown} depends on where in the batch a sample stands", Repair.EACH)

    def through(self) -> Mixing:
        return Mixing(f"{self.shown} goes through the samples", Repair.NORM if "norm" in self.shown else Repair.WITHIN)

    def against(self) -> Mixing:
        return Mixing(f"{self.shown} sets samples against each other", Repair.PAIRS)

    def sized(self) -> Mixing:
        return Mixing(f"{self.shown} uses a number that depends on the size of the batch", Repair.SIZE)

    def nonlinear(self, state: State) -> Mixing:
        """Anything but a linear operator on a mixed value, or on one that the batch's size has scaled."""
        return (
            Mixing(f"{self.shown} of a {state} over the samples", Repair.BALANCE)
            if isinstance(state, Mixed)
            else self.sized()
        )

    def plain(self) -> list[Operand]:
        """The operands with data, as operators want them that may do anything with a sample, and nothing with a
        combination of samples."""
        for operand in self.data:
            if not isinstance(operand.state, Along) or operand.state.degree:
                raise self.nonlinear(operand.state)
        if any(isinstance(operand.state, Free) and operand.state.degree != 0 for operand in self.operands):
            raise self.sized()
        return self.data

    def aligned(self, operands: list[Operand], degree: int = 0, rank: int | None = None) -> Along:
        """Dimensions are matched from the right, as in broadcasting."""
        places = {(o.state.dim - o.small.dim(), o.state.inner) for o in operands if isinstance(o.state, Along)}
        if len(places) != 1:
            raise self.against()
        ((place, inner),) = places
        return Along((self.rank if rank is None else rank) + place, inner, degree)


Rule: TypeAlias = Callable[[Call], State | tuple[State, ...]]


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What lists within the values hold."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from leaves(value)
        else:
            yield value


def same_number(a: Any, b: Any) -> bool:
    """A NaN is the same as another."""
    return bool(a == b or (a != a and b != b))


def power(small: Any, large: Any, times: int) -> int | None:
    """Which power of the batch's size leads from one number to the other."""
    if same_number(small, large):
        return 0
    if not small or not large:
        return None
    return next((n for n in (1, -1, 2, -2) if math.isclose(large / small, float(times) ** n, rel_tol=1e-6)), None)


def growing(small: torch.Tensor, large: torch.Tensor) -> list[int]:
    """The dimensions that are longer in the large trace: they go through the samples. As text, because sizes that
    depend on data refuse to be compared."""
    return [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if str(a) != str(b)]
