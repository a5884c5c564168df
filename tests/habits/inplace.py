"""Operations in place: on activations, inputs, views, weights."""

from __future__ import annotations

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from tests.habits.habit import REFUSED, SAME, SAMPLES, WIDTH, Between, Category, Layers

INPLACE = Category("inplace", "In-place operations")

# ------------------------------------------------------------------------------------------------------- activations


@INPLACE.habit("relu_()")
class ReluInPlace(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](x).relu_()


@INPLACE.habit("nn.ReLU(inplace=True) at the start of every stage")
class ReluFirst(Layers):
    """It writes into what the stage before it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](self.relu(x) if i else x)


@INPLACE.habit("x += y on what the stage before it made")
class AddTo(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            return self.layers[i](x)
        y = self.layers[i](torch.tanh(x))
        x += y
        return x


@INPLACE.habit("a skip that sees a later write")
class SeenBySkip(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            a = self.layers[0](x)
            skip = a
        with annotate("stage", 1):
            a += 0.5
        with annotate("stage", 2):
            b = self.stage(2, a)
        with annotate("stage", 3):
            return self.stage(3, b) + skip


@INPLACE.habit("x[:, 0] = 0")
class FirstFeature(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 0] = 0
        return x


@INPLACE.habit("x[0] = 0: the first sample", REFUSED, whole=SAME)
class FirstSample(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[0] = 0
        return x


@INPLACE.habit("samples swapped by index", REFUSED, whole=SAME)
class Swapped(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[[0, 7]] = x[[7, 0]]
        return x


@INPLACE.habit("masked_fill_")
class MaskedFill(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).masked_fill_(x < 0, 0.1)


@INPLACE.habit("x[x < 0] = 0.1")
class ByMask(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x[x < 0] = 0.1
        return x


@INPLACE.habit("a write through a view of an earlier stage's output")
class ThroughView(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            a = self.layers[0](x)
            left = a[:, :4]
        with annotate("stage", 1):
            b = self.stage(1, x)
        with annotate("stage", 2):
            left.add_(b[:, 4:])
        with annotate("stage", 3):
            return self.stage(3, a)


@INPLACE.habit("a write into what another stage has already read", limit=1e-5)
class AlreadyRead(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            a = self.layers[0](x)
        with annotate("stage", 1):
            b = a * 2 + self.stage(1, x)
        with annotate("stage", 2):
            a.mul_(3)
        with annotate("stage", 3):
            return self.stage(3, b) + a


@INPLACE.habit("index_add_ along the features")
class IndexAdd(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add_(1, torch.arange(WIDTH).flip(0), x)


@INPLACE.habit("index_add_ along the samples", REFUSED, whole=SAME)
class IndexAddSamples(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.zeros_like(x).index_add_(0, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), x) if x.shape[0] == SAMPLES else x
        )


@INPLACE.habit("scatter_add_ within a sample")
class ScatterAdd(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).scatter_add_(1, x.argsort(-1), x)


@INPLACE.habit("out= under no_grad")
class OutArgument(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.empty_like(x)
            torch.abs(x, out=scale)
        return x * scale


@INPLACE.habit("x.data changed")
class ChangesData(Between):
    """tanh keeps its output for the backward, which then uses the changed values."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(0.5)
        return x


@INPLACE.habit("x.detach() changed")
class ChangesDetached(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.detach().mul_(0.5)
        return x


@INPLACE.habit("changed under no_grad")
class ChangesUnderNoGrad(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        with torch.no_grad():
            x.mul_(0.5)
        return x


@INPLACE.habit("steps of a loop written into a tensor made before")
class LoopWrites(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t])
            out[:, t] = state
        return out


@INPLACE.habit("copy_ into a tensor of a size in the code")
class FixedSize(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.shape[0], WIDTH + 2)
        out[:, :WIDTH].copy_(x)
        return out[:, 1 : WIDTH + 1]


@INPLACE.habit("unsqueeze_ and transpose_")
class ShapesInPlace(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        y.unsqueeze_(1)
        y.transpose_(1, 2)
        return y.squeeze_(2)


@INPLACE.habit("the input of the model changed in place")
class ChangesInput(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            x.mul_(2)
        return super().stage(i, x)


@INPLACE.habit("the input changed in place, then read by a later stage")
class ChangesInputLater(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            y = self.stage(0, x * 1.0)
            x.add_(1.0)
        with annotate("stage", 1):
            y = self.stage(1, y)
        with annotate("stage", 2):
            y = self.stage(2, y + x)
        with annotate("stage", 3):
            return self.stage(3, y)


def changed_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target.clamp_(-0.5, 0.5))


INPLACE.add("the target changed in place in the loss", loss=changed_target)


def changed_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.sub_(target)).square().mean()


@INPLACE.habit("the output changed in place in the loss", loss=changed_output)
class LinearLast(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](x) if i == 3 else super().stage(i, x)


# ----------------------------------------------------------------------------------------------------------- weights


@INPLACE.habit("a weight clamped in the forward, under no_grad", REFUSED)
class ClampsWeight(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[i].weight.clamp_(-0.1, 0.1)
        return super().stage(i, x)


@INPLACE.habit("a weight clamped in the forward, by .data", REFUSED)
class ClampsData(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        self.layers[i].weight.data.clamp_(-0.1, 0.1)
        return super().stage(i, x)


@INPLACE.habit("a weight normalized in the forward: w.data = ...", REFUSED)
class AssignsData(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[i].weight
        weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)
        return super().stage(i, x)


@INPLACE.habit("a weight changed after its use in the forward", REFUSED)
class ChangesAfter(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y = super().stage(i, x.detach() if i == 0 else x)
        if i == 0:
            with torch.no_grad():
                self.layers[0].bias.mul_(0.5)
        return y


@INPLACE.habit("a row of a weight set in the forward", REFUSED)
class SetsRow(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            with torch.no_grad():
                self.layers[1].weight[0] = 0.25
        return super().stage(i, x)


@INPLACE.habit("a frozen weight changed in the forward", REFUSED)
class ChangesFrozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.layers[1].weight.mul_(0.9)
        return super().stage(i, x)


@INPLACE.habit("a copy of a weight changed in the forward")
class ChangesCopy(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[i].weight.clone()
        weight.clamp_(-0.1, 0.1)
        return torch.tanh(f.linear(x, weight, self.layers[i].bias))


@INPLACE.habit("a teacher's weights averaged in the forward", REFUSED)
class Averages(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i != 1:
            return super().stage(i, x)
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.layers[1].parameters(), strict=True):
                mine.lerp_(other, 0.1)
        return super().stage(i, x) + self.teacher(x)


@INPLACE.habit("gradients cleared in the forward")
class ClearsGradients(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        return super().forward(x)
