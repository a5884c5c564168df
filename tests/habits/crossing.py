"""What crosses from one stage to another, and what the stages share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.utils import checkpoint as recompute

from piperlang.capture.annotate import annotate
from tests.habits.habit import EITHER, REFUSED, SAME, SAMPLES, SUMMED, WIDTH, Category, Layers, vectors

CROSSING = Category("crossing", "Between stages")
T = torch.Tensor


class Crossing(Layers):
    """Stage 1 makes something from its input that stage 3 uses."""

    def forward(self, x: T) -> T:
        with annotate("stage", 0):
            x = self.stage(0, x)
        with annotate("stage", 1):
            x = self.stage(1, x)
            made = self.make(x)
        with annotate("stage", 2):
            x = self.stage(2, x)
        with annotate("stage", 3):
            return self.stage(3, self.use(x, made))

    def make(self, x: T) -> Any:
        raise NotImplementedError

    def use(self, x: T, made: Any) -> T:
        return x + made


def _crossing(name: str, make: Any, use: Any = None, expected: str = SAME, **others: Any) -> None:
    class Made(Crossing):
        def make(self, x: T) -> Any:
            return make(x)

        def use(self, x: T, made: Any) -> T:
            return use(x, made) if use else x + made

    CROSSING.add(name, Made, expected, **others)


_crossing("crossing: integers", lambda x: x.argmax(-1), lambda x, made: x + 0.1 * made.unsqueeze(-1))
_crossing("crossing: a bool mask", lambda x: x > 0, lambda x, made: x.masked_fill(made, 0.1))
_crossing("crossing: complex numbers", lambda x: torch.fft.rfft(x), lambda x, made: x + torch.fft.irfft(made, n=WIDTH))
_crossing("crossing: float64", lambda x: x.double(), lambda x, made: (x + made).float())
_crossing("crossing: bfloat16", lambda x: x.bfloat16(), lambda x, made: x + made.float(), limit=2e-2)
_crossing(
    "crossing: a transposed view",
    lambda x: x.view(-1, 2, 4).transpose(1, 2),
    lambda x, made: x + made.transpose(1, 2).flatten(1),
)
_crossing("crossing: an expanded tensor", lambda x: x.sum(-1, keepdim=True).expand(-1, WIDTH))
_crossing("crossing: a slice of the features", lambda x: x[:, ::2], lambda x, made: x + made.repeat_interleave(2, -1))
_crossing(
    "crossing: a tuple of a split", lambda x: x.split(4, -1), lambda x, made: x + torch.cat([made[1], made[0]], -1)
)
_crossing("crossing: a dict", lambda x: {"a": x.sin(), "b": x.cos()}, lambda x, made: x + made["a"] * made["b"])
_crossing("crossing: an empty tensor", lambda x: x[:, :0], lambda x, made: torch.cat([x, made], -1))
_crossing(
    "crossing: a tensor without the batch dimension",
    lambda x: torch.linspace(0.5, 1.5, WIDTH),
    lambda x, made: x * made,
)
_crossing("crossing: a number from the shape", lambda x: x.shape[1], lambda x, made: x / made)
_crossing("crossing: the transposed batch", lambda x: x.t(), lambda x, made: x + made.t())
_crossing(
    "crossing: samples and positions flattened",
    lambda x: x.view(-1, 2, 4).flatten(0, 1),
    lambda x, made: x + made.view(-1, WIDTH),
)
_crossing(
    "crossing: each sample repeated",
    lambda x: x.repeat_interleave(2, 0),
    lambda x, made: x + made.view(-1, 2, WIDTH).sum(1),
)
_crossing("crossing: a mean over the batch", lambda x: x.mean(0), None, SUMMED, whole=SAME)
_crossing("crossing: a number: the mean of everything", lambda x: x.mean(), None, SUMMED, whole=SAME)
_crossing("crossing: a detached copy", lambda x: x.detach())
_crossing(
    "crossing: sorted values and their indices", lambda x: x.sort(-1), lambda x, made: x + made[0] * (1 + 0.1 * made[1])
)
_crossing(
    "crossing: a view that the later stage writes to",
    lambda x: (x * 1.0)[:, :4],
    lambda x, made: x + made.add_(1.0).repeat(1, 2),
    EITHER,
)


class Weighted(Crossing):
    """The weight of a layer, or what is made of it, crosses: no batch dimension, but a gradient."""

    def make(self, x: T) -> Any:
        return self.layers[1].weight.square().sum(0)

    def use(self, x: T, made: Any) -> T:
        return x * made


CROSSING.add("something made of a weight, with a gradient", Weighted)


class Identity(Layers):
    def stage(self, i: int, x: T) -> T:
        return x if i in (1, 2) else super().stage(i, x)


CROSSING.add("stages that compute nothing", Identity, EITHER)


class Back(Layers):
    """Stage 0 computes again after stage 2."""

    def forward(self, x: T) -> T:
        for i in (0, 1, 2, 0, 3):
            with annotate("stage", i):
                x = self.stage(i, x)
        return x


CROSSING.add("a stage that comes again after later ones", Back, EITHER)


class Used(Layers):
    """Outputs of stage 0 in all stages."""

    def forward(self, x: T) -> T:
        with annotate("stage", 0):
            first = x = self.stage(0, x)
        for i in (1, 2, 3):
            with annotate("stage", i):
                x = self.stage(i, x) + first
        return x


CROSSING.add("an output of the first stage used in all others", Used)


class Late(Layers):
    """The input of the model in the last stage."""

    def forward(self, x: T) -> T:
        return super().forward(x) + x


CROSSING.add("the model's input used in the last stage", Late)

# ------------------------------------------------------------------------------------------------- buffers and stages


class Shared(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def stage(self, i: int, x: T) -> T:
        return super().stage(i, self.before(i, x))

    def before(self, i: int, x: T) -> T:
        raise NotImplementedError


@CROSSING.habit("a buffer changed in stage 1 and read in stage 3", EITHER)
class ChangedThenRead(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps = self.steps + 1
        return x * (1 + 0.1 * self.steps) if i == 3 else x


@CROSSING.habit("a buffer read in stage 0 and changed in stage 3", EITHER)
class ReadThenChanged(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 3:
            self.steps = self.steps + 1
        return x * (1 + 0.1 * self.steps) if i == 0 else x


@CROSSING.habit("a buffer changed in two stages", EITHER)
class ChangedTwice(Shared):
    def before(self, i: int, x: T) -> T:
        if i in (0, 3):
            self.steps = 2 * self.steps + 1
        return x * (1 + 0.01 * self.steps)


@CROSSING.habit("a buffer that counts samples: += x.shape[0]", EITHER)
class CountsSamples(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps += x.shape[0]
        return x


@CROSSING.habit("a buffer that counts elements: += x.numel()", EITHER)
class CountsElements(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps = self.steps + x.numel()
        return x * (1 + 0.001 * self.steps) if i == 2 else x


@CROSSING.habit("a buffer that sums the samples", SUMMED, whole=SAME)
class SumsSamples(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps = self.steps + x.detach().sum()
        return x


@CROSSING.habit("a buffer that takes the gradient's path: not detached", SUMMED, whole=EITHER)
class NotDetached(Shared):
    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps = x.mean()
            x = x * (1 + self.steps)
        return x


@CROSSING.habit("a counter inside a checkpoint, which counts twice", EITHER)
class InCheckpoint(Shared):
    def stage(self, i: int, x: T) -> T:
        return recompute.checkpoint(super().stage, i, x, use_reentrant=False) if i == 1 else super().stage(i, x)

    def before(self, i: int, x: T) -> T:
        if i == 1:
            self.steps += 1
        return x


@CROSSING.habit("a counter in place inside a checkpoint, read in the next step", EITHER)
class ReadInCheckpoint(InCheckpoint):
    def before(self, i: int, x: T) -> T:
        y = x * (1 + 0.1 * self.steps) if i == 1 else x
        return super().before(i, y)


@CROSSING.habit("a buffer toggled in every step", EITHER)
class Toggled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", torch.tensor(False))

    def stage(self, i: int, x: T) -> T:
        if i == 1:
            self.even = ~self.even
        return torch.where(self.even, super().stage(i, x), x) if i == 1 else super().stage(i, x)


@CROSSING.habit("a buffer changed by the loss", EITHER, loss=lambda output, target: _counting_loss(output, target))
class InLoss(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        HOLDER[:] = [self]


HOLDER: list[Any] = []


def _counting_loss(output: T, target: T) -> T:
    HOLDER[0].seen = HOLDER[0].seen + 1
    return f.mse_loss(output, target) * (1 + 0.1 * HOLDER[0].seen)


# ------------------------------------------------------------------------------------------------------ shared memory


@CROSSING.habit("a buffer in the memory of a parameter", EITHER)
class BufferOfWeight(Layers):
    """It follows the updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.layers[0].weight.data)

    def stage(self, i: int, x: T) -> T:
        return super().stage(i, x) + (f.linear(x, self.view) if i == 2 else 0)


@CROSSING.habit("an attribute in the memory of a parameter", EITHER)
class AttributeOfWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.view = self.layers[0].weight.data

    def stage(self, i: int, x: T) -> T:
        return super().stage(i, x) + (f.linear(x, self.view) if i == 2 else 0)


@CROSSING.habit("parameters that share .data", REFUSED)
class SharedData(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight.data = self.layers[0].weight.data


@CROSSING.habit("two buffers in one memory, one of them changed", EITHER)
class SharedBuffers(Layers):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(2)
        self.register_buffer("all", whole)
        self.register_buffer("first", whole[0])

    def stage(self, i: int, x: T) -> T:
        if i == 1:
            self.first += 1
        return super().stage(i, x) * (1 + 0.1 * self.all.sum()) if i == 2 else super().stage(i, x)


@CROSSING.habit("a part frozen during the forward and trainable after it", EITHER)
class FrozenInside(Layers):
    """As a discriminator in the generator's step: its weights get no gradient, its inputs do."""

    def stage(self, i: int, x: T) -> T:
        self.layers[2].requires_grad_(i != 2)
        x = super().stage(i, x)
        self.layers[2].requires_grad_(True)
        return x


@CROSSING.habit("a parameter made by the first forward", EITHER)
class MadeLater(Layers):
    """The optimizer does not know it."""

    def stage(self, i: int, x: T) -> T:
        if i == 1 and not hasattr(self, "late"):
            self.late = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        return super().stage(i, x) * (self.late if i == 1 else 1)


@CROSSING.habit("a layer replaced by the forward", EITHER)
class LayerReplaced(Layers):
    def stage(self, i: int, x: T) -> T:
        if i == 3:
            torch.manual_seed(5)
            self.layers[3] = nn.Linear(WIDTH, WIDTH)
        return super().stage(i, x)


def _aliased(step: int = 0) -> tuple[T, T]:
    x = torch.randn(SAMPLES, WIDTH)
    return x, x


@CROSSING.habit("the input is also the target, and is changed in place", EITHER, batch=_aliased)
class ChangesTarget(Layers):
    def forward(self, x: T) -> T:
        y = super().forward(x * 1.0)
        x.mul_(0.5)
        return y


@CROSSING.habit("inputs that are views of one tensor, one of them changed", EITHER, batch=lambda step: _views(step))
class ChangesView(Layers):
    def forward(self, x: T, left: T) -> T:  # type: ignore[override]
        left.mul_(0.5)
        return super().forward(x)


def _views(step: int) -> tuple[tuple[T, T], T]:
    x, target = vectors()
    return (x, x[:, :4]), target


# ---------------------------------------------------------------------------------------------------------- clipping


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


def left_out(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.1)


class Unread(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(WIDTH))


class PartlyFrozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class TwoTypes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def stage(self, i: int, x: T) -> T:
        return (super().stage(i, x) * self.scale).float() if i == 2 else super().stage(i, x)


class ComplexWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def stage(self, i: int, x: T) -> T:
        x = super().stage(i, x)
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH) if i == 1 else x


CROSSING.add("clipping with weights tied across stages", Tied, max_norm=0.05)
CROSSING.add(
    "clipping with parameters that the optimizer does not have", Layers, EITHER, max_norm=0.05, optimizer=left_out
)
CROSSING.add("clipping with a parameter that nothing reads", Unread, max_norm=0.05)
CROSSING.add("clipping with a frozen layer", PartlyFrozen, max_norm=0.05)
CROSSING.add("clipping with parameters of two types", TwoTypes, max_norm=0.05)
CROSSING.add("clipping with complex parameters", ComplexWeight, max_norm=0.05)


# ----------------------------------------------------------------------------------------------- uneven microbatches


def _half_ignored(step: int = 0) -> tuple[T, T]:
    """The first half of the batch has no target at all."""
    x, target = torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,))
    target[: SAMPLES // 2] = -100
    return x, target


def _half_masked(step: int = 0) -> tuple[T, T]:
    x, target = vectors()
    target[: SAMPLES // 2] = 0
    return x, target


def masked_pair(output: T, target: T) -> tuple[T, T]:
    mask = (target != 0).to(output.dtype)
    return ((output - target).square() * mask).sum(), mask.sum()


def int_pair(output: T, target: T) -> tuple[T, T]:
    mask = target != 0
    return ((output - target).square() * mask).sum(), mask.sum()


def python_pair(output: T, target: T) -> tuple[T, int]:
    return (output - target).square().sum(), output.shape[0]


def with_metric(output: T, target: T) -> tuple[T, T]:
    return f.mse_loss(output, target), (output.sign() == target.sign()).float().mean() + 1


CROSSING.add("a microbatch without any target (ignore_index)", batch=_half_ignored, loss=f.cross_entropy)
CROSSING.add("a microbatch whose count is 0", batch=_half_masked, loss=masked_pair)
CROSSING.add("a count of integers", batch=_half_masked, loss=int_pair)
CROSSING.add("a count that is a number of Python", Layers, EITHER, loss=python_pair)
CROSSING.add("a loss that gives a metric beside it", Layers, REFUSED, loss=with_metric)
