"""How each value of a program depends on the samples of the batch, and why some values mix samples.

A value is Free: it does not depend on the data of the batch. Or it is Along: one of its dimensions is the batch
dimension. Or it is Mixed: a linear combination over all samples. A value of any other kind cannot be computed from
microbatches or replicas, so dividing the batch is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True)
class Free:
    """A value that does not depend on the data of the batch. It may still have dimensions of the batch size (zeros, a
    mask)."""

    degree: int | None = 0
    """The value is a constant times this power of the batch size. None: it depends on the batch size in another way."""
    zero: bool = False
    uniform: bool = True
    """Whether the value is the same for every sample. A value that is not, such as `arange` over the batch, depends on
    the position of a sample in the batch, which is different in a part of the batch."""
    place: int = 0
    """The value is this many times the position of the sample, and may be used to index that sample: `x[arange(len(x)),
    target]`. 0 otherwise."""


@dataclass(frozen=True)
class Along:
    """A value with a batch dimension. `dim` has outer * batch * inner elements; the batch part of the index is the
    position of the sample."""

    dim: int
    inner: int
    degree: int = 0
    """The value of each sample is scaled with this power of the batch size."""


@dataclass(frozen=True)
class Mixed:
    """A sum over the samples times this power of the batch size: 0 is the sum, -1 the mean."""

    degree: int

    def __str__(self) -> str:
        return {0: "sum", -1: "mean"}.get(self.degree, "scaled sum")


class Repair(StrEnum):
    """Help texts: how to change the model so that the batch can be divided."""

    WITHIN = "apply it within each sample, along a dimension other than the batch dimension"
    PER_SAMPLE = "apply it within each sample, and take the mean over the samples last"
    BALANCE = (
        "use a mean over the samples only as it is or multiplied by a constant; compute a load-balancing loss per"
        " sequence, as DeepSeek-V3 does, and take its mean"
    )
    NORM = "use a norm within each sample, such as LayerNorm or GroupNorm"
    RATIO = "divide by a constant, or divide each sample by a value of its own before taking the mean over the samples"
    SIZE = (
        "take means over the samples, and variances by `var`; use the batch size only as the number `x.shape[0]`"
        " itself, neither in an expression such as `x.shape[0] - 1` nor as a tensor"
    )
    MEAN = "take the mean over the samples: a constant added to a sum would be added once per microbatch and replica"
    EACH = "treat every sample alike: the first sample of a microbatch is not the first sample of the batch"
    PAIRS = "compare values within a sample; a loss over pairs of samples needs a batch that is not divided"
    ALIKE = "run the same operators for every batch size"
    FREQUENCIES = "remove `scale_grad_by_freq`"
    KNOWN = "rewrite it with other operators"
    ALONE = "do not combine it with values of single samples"
    NUMBERS = "compute with tensors"
    LAST = "take its mean over the samples"
    FIRST = "apply it to a value whose first dimension is the batch dimension"
    THROUGHOUT = "use only means over the samples, or only sums"


class Mixing(Exception):
    """The value cannot be computed from the parts of a divided batch."""

    def __init__(self, message: str, help: Repair) -> None:
        super().__init__(message)
        self.message, self.help = message, help.value


class Placed(Mixing):
    """The value depends on the position of a sample in the batch; or, found by trial, an operator mixes samples. An
    operator that decomposes into such operators is tried as a whole."""


State: TypeAlias = Free | Along | Mixed | Mixing


@dataclass(frozen=True, eq=False)
class Operand:
    state: State
    small: torch.Tensor
    large: torch.Tensor


@dataclass(frozen=True)
class OperatorCall:
    """One operator call, as it appears in both traces. Tensors among the arguments are Operands, the same objects in
    `small` and `large`."""

    name: str
    shown: str
    """The operator's name in messages: the one in the user's program, which may have been decomposed into this one."""
    target: Any
    small: dict[str, Any]
    large: dict[str, Any]
    results: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    samples: int
    times: int
    """The number of samples of the large batch divided by that of the small batch."""

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
        """The power of the batch size that a number among the arguments is proportional to."""
        return power(self.small.get(name), self.large.get(name), self.times)

    @property
    def changed(self) -> bool:
        """Whether a number among the arguments differs between the two traces."""
        pairs = zip(leaves(self.small.values()), leaves(self.large.values()), strict=False)
        return any(not same_number(a, b) for a, b in pairs if not isinstance(a, Operand))

    def placed(self) -> Placed:
        return Placed(f"{self.shown} depends on the position of a sample in the batch", Repair.EACH)

    def through(self) -> Mixing:
        return Mixing(
            f"{self.shown} operates along the batch dimension", Repair.NORM if "norm" in self.shown else Repair.WITHIN
        )

    def against(self) -> Mixing:
        return Mixing(f"{self.shown} combines different samples with each other", Repair.PAIRS)

    def sized(self) -> Mixing:
        return Mixing(f"{self.shown} uses a number that depends on the batch size", Repair.SIZE)

    def nonlinear(self, state: State) -> Mixing:
        """The error for a nonlinear operator on a Mixed value, or on a value that is scaled with the batch size."""
        return (
            Mixing(f"{self.shown} is applied to a {state} over the samples", Repair.BALANCE)
            if isinstance(state, Mixed)
            else self.sized()
        )

    def plain(self) -> list[Operand]:
        """The operands that depend on the data, for operators that may compute anything within a sample. Raises where
        one of them is a combination of samples."""
        for operand in self.data:
            if not isinstance(operand.state, Along) or operand.state.degree:
                raise self.nonlinear(operand.state)
        if any(isinstance(operand.state, Free) and operand.state.degree != 0 for operand in self.operands):
            raise self.sized()
        return self.data

    def aligned(self, operands: list[Operand], degree: int = 0, rank: int | None = None) -> Along:
        """The state of a broadcast result. Dimensions are aligned from the right."""
        places = {(o.state.dim - o.small.dim(), o.state.inner) for o in operands if isinstance(o.state, Along)}
        if len(places) != 1:
            raise self.against()
        ((place, inner),) = places
        return Along((self.rank if rank is None else rank) + place, inner, degree)


Rule: TypeAlias = Callable[[OperatorCall], State | tuple[State, ...]]


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with nested lists flattened."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from leaves(value)
        else:
            yield value


def same_number(a: Any, b: Any) -> bool:
    """Equality that treats NaN as equal to NaN."""
    return bool(a == b or (a != a and b != b))


def power(small: Any, large: Any, times: int) -> int | None:
    """The power of the batch size that takes one number to the other; None where there is none."""
    if same_number(small, large):
        return 0
    if not small or not large:
        return None
    return next((n for n in (1, -1, 2, -2) if math.isclose(large / small, float(times) ** n, rel_tol=1e-6)), None)


def growing(small: torch.Tensor, large: torch.Tensor) -> list[int]:
    """The dimensions that are longer in the large trace, which are batch dimensions. Compared as text, because
    data-dependent sizes cannot be compared."""
    return [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if str(a) != str(b)]
