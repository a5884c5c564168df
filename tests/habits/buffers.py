"""Buffers, running statistics, and tensors that are neither buffer nor parameter."""

from __future__ import annotations

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from tests.habits.habit import REFUSED, SAME, SUMMED, WIDTH, Between, Category, Layers

BUFFERS = Category("buffers", "Buffers")


class Counted(Layers):
    """With a buffer that the habit counts in, and that scales the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.count()
        return super().stage(i, x) * (1 + 0.1 * self.steps if i == 1 else 1)

    def count(self) -> None:
        raise NotImplementedError


@BUFFERS.habit("counter by assignment: self.steps = self.steps + 1")
class ByAssignment(Counted):
    def count(self) -> None:
        self.steps = self.steps + 1


@BUFFERS.habit("counter by +=")
class ByPlus(Counted):
    def count(self) -> None:
        self.steps += 1


@BUFFERS.habit("counter by add_")
class ByAdd(Counted):
    def count(self) -> None:
        self.steps.add_(1)


@BUFFERS.habit("counter by copy_")
class ByCopy(Counted):
    def count(self) -> None:
        self.steps.copy_(self.steps + 1)


@BUFFERS.habit("counter by .data", REFUSED)
class ByData(Counted):
    def count(self) -> None:
        self.steps.data += 1


@BUFFERS.habit("counter by setattr on the module's _buffers")
class ByTable(Counted):
    def count(self) -> None:
        self._buffers["steps"] = self.steps + 1


@BUFFERS.habit("counter that nothing reads (for the checkpoint)")
class ForCheckpoint(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            self.steps += 1
        return super().stage(i, x)


@BUFFERS.habit("counter assigned, that nothing reads")
class ForCheckpointAssigned(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            self.steps = self.steps + 1
        return super().stage(i, x)


class Averaged(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))


@BUFFERS.habit("moving average of activations, assigned", SUMMED, whole=SAME)
class MeanAssigned(Averaged):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 1:
            x = x - self.mean
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


@BUFFERS.habit("moving average of activations, in place", SUMMED, whole=SAME)
class MeanInPlace(Averaged):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 1:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            x = x - self.mean
        return x


@BUFFERS.habit("moving average of a weight, used as a teacher")
class WeightAverage(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", self.layers[1].weight.detach().clone())

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(self.layers[1].weight, alpha=0.1)
        return super().stage(i, x) + (f.linear(x, self.teacher) if i == 1 else 0)


@BUFFERS.habit("moving average of a weight, assigned")
class WeightAverageAssigned(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", self.layers[1].weight.detach().clone())

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.teacher = 0.9 * self.teacher + 0.1 * self.layers[1].weight.detach()
        return super().stage(i, x) + (f.linear(x, self.teacher) if i == 1 else 0)


@BUFFERS.habit("running maximum", REFUSED, whole=SAME)
class RunningMaximum(Averaged):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 1:
            self.mean = torch.maximum(self.mean, x.detach().abs().amax(0))
            x = x / (1 + self.mean)
        return x


@BUFFERS.habit("queue of the last outputs (as in MoCo)", REFUSED, whole=SAME)
class Queue(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, WIDTH))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 3:
            x = x + 0.1 * self.queue.mean(0)
            self.queue = torch.cat([x.detach(), self.queue])[:16]
        return x


# ------------------------------------------------------------------------------------------------------------- norms


_ROUNDED = 1e-4
"""The gradient of a bias before a normalization is almost zero: mostly rounding, in eager PyTorch, too."""


@BUFFERS.habit("BatchNorm that trains", SUMMED, whole=SAME, limit=_ROUNDED)
class BatchNorm(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@BUFFERS.habit("BatchNorm without running statistics", SUMMED, whole=SAME, limit=_ROUNDED)
class BatchNormWithout(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


@BUFFERS.habit("running statistics read after the norm", SUMMED, whole=SAME, limit=_ROUNDED)
class ReadLate(BatchNorm):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.norm.running_mean * self.norm.running_var


@BUFFERS.habit("BatchNorm frozen by eval()")
class BatchNormFrozen(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm.running_mean.normal_()
        self.norm.eval()

    def train(self, mode: bool = True) -> BatchNormFrozen:
        super().train(mode)
        self.norm.eval()
        return self


@BUFFERS.habit("InstanceNorm with running statistics", REFUSED)
class InstanceNorm(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.view(-1, 2, 4)).flatten(1)


@BUFFERS.habit("GroupNorm and LayerNorm")
class GroupNorm(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH))


@BUFFERS.habit("batch statistics by hand: (x - x.mean(0)) / x.std(0)", SUMMED, whole=SAME)
class ByHand(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1)


# --------------------------------------------------------------------------------------------------- harmless buffers


@BUFFERS.habit("a buffer read in two stages")
class TwoStages(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.mean.uniform_(0.5, 1.5)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * (self.mean if i in (0, 3) else 1)


@BUFFERS.habit("a buffer that is not persistent")
class NotPersistent(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@BUFFERS.habit("a counter that is not persistent")
class CounterNotPersistent(Counted):
    def __init__(self) -> None:
        super().__init__()
        del self.steps
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def count(self) -> None:
        self.steps = self.steps + 1


@BUFFERS.habit("a buffer of None that the constructor sets")
class NoneThenSet(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.scale = torch.linspace(0.5, 1.5, WIDTH)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@BUFFERS.habit("a buffer of None that the first forward sets from the data", REFUSED)
class NoneThenData(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 1:
            if self.scale is None:
                self.scale = x.detach().abs().mean(0)
            x = x * self.scale
        return x


@BUFFERS.habit("a buffer of None that stays None")
class StaysNone(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) if self.mask is None else x


@BUFFERS.habit("a plain tensor attribute")
class Attribute(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, WIDTH)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@BUFFERS.habit("a plain tensor attribute with random values")
class RandomAttribute(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(WIDTH)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@BUFFERS.habit("a plain tensor attribute that counts", REFUSED)
class CountingAttribute(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(())

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.steps = self.steps + 1
        return super().stage(i, x) * (1 + 0.1 * self.steps if i == 1 else 1)


@BUFFERS.habit("a plain tensor attribute that counts in place", REFUSED)
class CountingInPlace(CountingAttribute):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.steps += 1
        return Layers.stage(self, i, x) * (1 + 0.1 * self.steps if i == 1 else 1)


@BUFFERS.habit("an attribute assigned in the forward and read in a later stage")
class Passed(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if i == 1:
            self.skip = x
        return x + self.skip if i == 3 else x


@BUFFERS.habit("a tensor of the module's file")
class Global(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * SCALE


SCALE = torch.linspace(0.5, 1.5, WIDTH)


@BUFFERS.habit("integer and bool buffers: positions and a mask")
class Positions(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("mask", torch.arange(WIDTH) < 6)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x)[:, self.order].masked_fill(~self.mask, 0.1)


@BUFFERS.habit("an integer buffer that float32 cannot hold")
class LargeInteger(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor([2**24 + 1]))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * (0.5 + (self.offset - 2**24) if i == 1 else 1)


@BUFFERS.habit("a buffer in float64 beside weights in float32")
class DoubleBuffer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return (super().stage(i, x) * self.scale).float() if i == 1 else super().stage(i, x)


@BUFFERS.habit("a buffer that is computed again in every forward")
class ComputedAgain(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(WIDTH), persistent=False)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            self.mask = torch.linspace(0.5, 1.5, WIDTH)
        return super().stage(i, x) * self.mask


@BUFFERS.habit("a buffer that changes in evaluation mode only")
class InEvaluation(Averaged):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        if not self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


@BUFFERS.habit("a buffer that learns: register_buffer of a tensor with requires_grad")
class LearningBuffer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH, requires_grad=True))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@BUFFERS.habit("codebook with moving averages (as in VQ-VAE)", SUMMED, whole=SAME)
class Codebook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            with annotate("stage", i):
                x = self.stage(i, x)
        with annotate("stage", 2):
            chosen = torch.cdist(x.detach(), self.codes).argmin(-1)
            taken = f.one_hot(chosen, 4).to(x.dtype)
            quantized = taken @ self.codes
            self.codes = 0.9 * self.codes + 0.1 * (taken.t() @ x.detach()) / (taken.sum(0).unsqueeze(-1) + 1)
            x = self.stage(2, x + (quantized - x).detach())
        with annotate("stage", 3):
            return self.stage(3, x)
