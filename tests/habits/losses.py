"""Losses: how they reduce, what they read, and what they mix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from tests.habits.habit import EITHER, REFUSED, SAME, SAMPLES, SUMMED, WIDTH, Category, Layers, labelled, vectors

LOSSES = Category("losses", "Losses")
T = torch.Tensor

# ------------------------------------------------------------------------------------------------------- reductions


@LOSSES.loss("mean by hand")
def mean(output: T, target: T) -> T:
    return (output - target).square().mean()


@LOSSES.loss("sum", limit=1e-4)
def total(output: T, target: T) -> T:
    return 0.02 * f.mse_loss(output, target, reduction="sum")


@LOSSES.loss("sum divided by the batch's size")
def per_sample(output: T, target: T) -> T:
    return (output - target).square().sum() / output.shape[0]


@LOSSES.loss("sum divided by a number in the code")
def fixed(output: T, target: T) -> T:
    return (output - target).square().sum() / 64


@LOSSES.loss("mean times the batch's size")
def scaled_by_size(output: T, target: T) -> T:
    return 0.02 * (output - target).square().mean() * output.shape[0]


@LOSSES.loss("mean of each sample, then their mean")
def two_means(output: T, target: T) -> T:
    return (output - target).square().mean(-1).mean(0)


@LOSSES.loss("mean of shape [1]")
def shaped(output: T, target: T) -> T:
    return (output - target).square().mean().reshape(1)


def _mask(target: T) -> T:
    return (target > 0.3).to(target.dtype)


@LOSSES.loss("a pair (sum, count)")
def pair(output: T, target: T) -> tuple[T, T]:
    mask = _mask(target)
    return ((output - target).square() * mask).sum(), mask.sum()


@LOSSES.loss("masked mean by hand")
def masked(output: T, target: T) -> T:
    mask = _mask(target)
    return ((output - target).square() * mask).sum() / mask.sum()


@LOSSES.loss("masked mean of each sample")
def masked_samples(output: T, target: T) -> T:
    mask = _mask(target)
    return (((output - target).square() * mask).sum(-1) / (mask.sum(-1) + 1)).mean()


@LOSSES.loss("mean over what a mask selects: loss[mask].mean()", REFUSED, whole=REFUSED)
def selected(output: T, target: T) -> T:
    return (output - target).square()[target > 0.3].mean()


@LOSSES.loss("nanmean", REFUSED, whole=SAME)
def nanmean(output: T, target: T) -> T:
    return torch.where(target > 0.3, (output - target).square(), float("nan")).nanmean()


@LOSSES.loss("huber and smooth L1 added")
def huber(output: T, target: T) -> T:
    return f.huber_loss(output, target) + 0.5 * f.smooth_l1_loss(output, target)


@LOSSES.loss("a sum and a mean added")
def sum_and_mean(output: T, target: T) -> T:
    return 0.01 * (output - target).square().sum() + (output - target).abs().mean()


@LOSSES.loss("scaled by a constant", limit=1e-4)
def scaled(output: T, target: T) -> T:
    return 16.0 * f.mse_loss(output, target)


@LOSSES.loss("in float64")
def double(output: T, target: T) -> T:
    return f.mse_loss(output.double(), target.double())


@LOSSES.loss("in bfloat16", limit=2e-2)
def half(output: T, target: T) -> T:
    return f.mse_loss(output.bfloat16(), target.bfloat16())


# ---------------------------------------------------------------------------------------------------------- classes


@LOSSES.loss("cross entropy", batch=labelled)
def cross_entropy(output: T, target: T) -> T:
    return f.cross_entropy(output, target)


def ignoring(step: int = 0) -> tuple[T, T]:
    """The two halves of the batch ignore different numbers of targets."""
    inputs, target = labelled()
    target[:3] = -100
    return inputs, target


@LOSSES.loss("cross entropy with ignore_index", batch=ignoring)
def ignored(output: T, target: T) -> T:
    return f.cross_entropy(output, target, ignore_index=-100)


@LOSSES.loss("cross entropy with ignore_index, scaled", batch=ignoring)
def ignored_scaled(output: T, target: T) -> T:
    return 0.5 * f.cross_entropy(output, target, ignore_index=-100)


@LOSSES.loss("cross entropy with label smoothing", batch=labelled)
def smoothed(output: T, target: T) -> T:
    return f.cross_entropy(output, target, label_smoothing=0.1)


@LOSSES.loss("cross entropy with label smoothing and ignore_index", batch=ignoring)
def smoothed_ignored(output: T, target: T) -> T:
    return f.cross_entropy(output, target, label_smoothing=0.1, ignore_index=-100)


@LOSSES.loss("cross entropy with class weights: a weighted mean", batch=labelled)
def weighted(output: T, target: T) -> T:
    return f.cross_entropy(output, target, weight=torch.linspace(0.2, 2.0, WIDTH))


@LOSSES.loss("nll_loss of log_softmax with ignore_index", batch=ignoring)
def nll(output: T, target: T) -> T:
    return f.nll_loss(f.log_softmax(output, -1), target)


@LOSSES.loss("nll_loss with class weights", batch=labelled)
def nll_weighted(output: T, target: T) -> T:
    return f.nll_loss(f.log_softmax(output, -1), target, weight=torch.linspace(0.2, 2.0, WIDTH))


@LOSSES.loss("cross entropy with probabilities as targets")
def soft(output: T, target: T) -> T:
    return f.cross_entropy(output, target.softmax(-1))


@LOSSES.loss("focal loss by hand", batch=labelled)
def focal(output: T, target: T) -> T:
    each = f.cross_entropy(output, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


@LOSSES.loss("BCE with pos_weight")
def bce(output: T, target: T) -> T:
    return f.binary_cross_entropy_with_logits(
        output, (target > 0).to(output.dtype), pos_weight=torch.linspace(1, 3, WIDTH)
    )


@LOSSES.loss("KL with reduction batchmean")
def kl(output: T, target: T) -> T:
    return f.kl_div(f.log_softmax(output, -1), target.softmax(-1), reduction="batchmean")


@LOSSES.loss("KL with the default reduction")
def kl_mean(output: T, target: T) -> T:
    return f.kl_div(f.log_softmax(output, -1), target.softmax(-1))


@LOSSES.loss("multi-margin loss", batch=labelled)
def margin(output: T, target: T) -> T:
    return f.multi_margin_loss(output, target)


@LOSSES.loss("cosine embedding loss")
def cosine(output: T, target: T) -> T:
    return f.cosine_embedding_loss(output, target, torch.ones(output.shape[0]))


@LOSSES.loss("Gaussian NLL with a learned variance")
def gaussian(output: T, target: T) -> T:
    return f.gaussian_nll_loss(output, target, output.square() + 0.1)


# ---------------------------------------------------------------------------------------------------- mixed samples


@LOSSES.loss("contrastive loss over the batch (InfoNCE)", REFUSED, whole=SAME)
def contrastive(output: T, target: T) -> T:
    scores = f.normalize(output, dim=-1) @ f.normalize(target, dim=-1).t()
    return f.cross_entropy(scores / 0.1, torch.arange(output.shape[0]))


@LOSSES.loss("triplets: the next sample is the negative", REFUSED, whole=SAME)
def triplet(output: T, target: T) -> T:
    return f.triplet_margin_loss(output, target, target.roll(1, 0))


@LOSSES.loss("differences of neighbours in the batch", REFUSED, whole=SAME)
def neighbours(output: T, target: T) -> T:
    return f.mse_loss(output, target) + (output[1:] - output[:-1]).square().mean()


@LOSSES.loss("root of the mean squared error", SUMMED, whole=SAME)
def root(output: T, target: T) -> T:
    return f.mse_loss(output, target).sqrt()


@LOSSES.loss("exp of the mean (perplexity)", SUMMED, batch=labelled, whole=SAME)
def perplexity(output: T, target: T) -> T:
    return f.cross_entropy(output, target).exp()


@LOSSES.loss("logarithm of the mean (PSNR)", SUMMED, whole=SAME)
def psnr(output: T, target: T) -> T:
    return 10 * f.mse_loss(output, target).log10()


@LOSSES.loss("divided by its own value: loss / loss.detach()", SUMMED, whole=SAME)
def relative(output: T, target: T) -> T:
    loss = f.mse_loss(output, target)
    return loss / loss.detach()


@LOSSES.loss("two losses balanced by their values", SUMMED, whole=SAME)
def balanced(output: T, target: T) -> T:
    first, second = f.mse_loss(output, target), f.l1_loss(output, target)
    return first + second * (first / second).detach()


@LOSSES.loss("the largest of the batch", REFUSED, whole=SAME)
def largest(output: T, target: T) -> T:
    return (output - target).square().mean(-1).max()


@LOSSES.loss("the hardest half of the batch", REFUSED, whole=SAME)
def hardest(output: T, target: T) -> T:
    each = (output - target).square().mean(-1)
    return each.topk(each.shape[0] // 2).values.mean()


@LOSSES.loss("logsumexp over the batch", REFUSED, whole=SAME)
def logsumexp(output: T, target: T) -> T:
    return torch.logsumexp((output - target).square().mean(-1), 0)


@LOSSES.loss("variance over the batch", SUMMED, whole=SAME)
def variance(output: T, target: T) -> T:
    return f.mse_loss(output, target) - 0.1 * output.var(0).mean()


@LOSSES.loss("targets normalized over the batch")
def normalized(output: T, target: T) -> T:
    return f.mse_loss(output, (target - target.mean(0)) / (target.std(0) + 1))


@LOSSES.loss("advantages normalized over the batch, detached")
def advantages(output: T, target: T) -> T:
    value = target.mean(-1)
    advantage = (value - value.mean()) / (value.std() + 1e-5)
    return (output.mean(-1) * advantage.detach()).mean()


@LOSSES.loss("dice over the batch", SUMMED, whole=SAME)
def dice(output: T, target: T) -> T:
    p, y = output.sigmoid(), (target > 0).to(output.dtype)
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


@LOSSES.loss("product of two means", SUMMED, whole=SAME)
def product(output: T, target: T) -> T:
    return f.mse_loss(output, target) * output.abs().mean()


@LOSSES.loss("mean over the batch before the difference", SUMMED, whole=SAME)
def moments(output: T, target: T) -> T:
    return (output.mean(0) - target.mean(0)).square().mean()


@LOSSES.loss("only the first sample", REFUSED, whole=SAME)
def first_sample(output: T, target: T) -> T:
    return (output[0] - target[0]).square().mean()


@LOSSES.loss("random targets in the loss", dropout=True)
def random_targets(output: T, target: T) -> T:
    return f.mse_loss(output, target + 0.1 * torch.randn_like(target))


@LOSSES.loss("clipped loss: clamp of the mean", SUMMED, whole=SAME)
def clamped(output: T, target: T) -> T:
    return f.mse_loss(output, target).clamp(max=1.25)


# ------------------------------------------------------------------------------------------ what the loss reads


class Uncertainty(nn.Module):
    """A loss with a parameter, which the optimizer is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, output: T, target: T) -> T:
        return ((output - target).square() * self.scale).mean()


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, output: T, target: T) -> T:
        return ((output - target).square() * self.scale).mean()


class Counting(nn.Module):
    """A coefficient that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: T, target: T) -> T:
        self.calls += 1
        return f.mse_loss(output, target) * (1 + 0.5 * self.calls)


class CountingModel(Layers):
    def __init__(self) -> None:
        super().__init__()
        COUNTING.calls = 0


COUNTING = Counting()
LOSSES.add("a loss with a parameter of its own", loss=Uncertainty())
LOSSES.add("a loss with a buffer of its own", loss=WithBuffer())
LOSSES.add("nn.MSELoss as a module", loss=nn.MSELoss())
LOSSES.add("a loss that counts its calls", CountingModel, REFUSED, loss=COUNTING)

AUXILIARY: list[T] = []
"""Where the model leaves what the loss reads."""


class Auxiliary(Layers):
    def __init__(self) -> None:
        super().__init__()
        AUXILIARY.clear()

    def stage(self, i: int, x: T) -> T:
        x = super().stage(i, x)
        if i == 1:
            AUXILIARY[:] = [x.square().mean(-1)]
        return x


@LOSSES.loss("reads what the model left in a list", model=Auxiliary)
def auxiliary(output: T, target: T) -> T:
    with annotate("stage", 3):
        return f.mse_loss(output, target) + 0.1 * AUXILIARY[0].mean()


HOLDER: list[nn.Module] = []


class WeightLayout(Layers):
    def __init__(self) -> None:
        super().__init__()
        HOLDER[:] = [self]


def _squares() -> T:
    return torch.stack([p.square().sum() for p in HOLDER[0].parameters()]).sum()


@LOSSES.loss("reads the model's weights for a penalty", model=WeightLayout)
def penalty(output: T, target: T) -> T:
    return f.mse_loss(output, target) + 0.05 * _squares()


@LOSSES.loss("a sum with a penalty on weights", model=WeightLayout)
def sum_penalty(output: T, target: T) -> T:
    return 0.02 * (output - target).square().sum() + 0.05 * _squares()


class Several(Layers):
    """Outputs of all stages."""

    def forward(self, x: T) -> list[T]:
        found = []
        for i in range(4):
            with annotate("stage", i):
                x = self.stage(i, x)
            found.append(x)
        return found


@LOSSES.loss("outputs of several stages", model=Several)
def deep(output: list[T], target: T) -> T:
    with annotate("stage", 3):
        return sum(f.mse_loss(each, target) * (i + 1) for i, each in enumerate(output))  # type: ignore[return-value]


class Penalized(Layers):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        with annotate("stage", 3):
            return y, sum(layer.weight.square().sum() for layer in self.layers)


@LOSSES.loss("a penalty on weights among the model's outputs", model=Penalized)
def returned_penalty(output: tuple[T, T], target: T) -> T:
    return f.mse_loss(output[0], target) + 0.05 * output[1]


@LOSSES.loss("a penalty on weights beside a pair (sum, count)", EITHER, model=Penalized)
def counted_penalty(output: tuple[T, T], target: T) -> tuple[T, T]:
    mask = _mask(target)
    return ((output[0] - target).square() * mask).sum() + 0.05 * output[1], mask.sum()


@LOSSES.loss("targets detached from the outputs: self-distillation", model=Several)
def distilled(output: list[T], target: T) -> T:
    with annotate("stage", 3):
        return f.mse_loss(output[3], target) + f.mse_loss(output[1], output[3].detach())


class Load(Layers):
    """A mixture whose balance is a product of means over the batch."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        with annotate("stage", 3):
            gates = torch.softmax(y, -1)
            return y, (gates.mean(0) * (gates > 0.125).to(gates.dtype).mean(0)).sum()


@LOSSES.loss("a balance of experts over the whole batch", SUMMED, whole=SAME, model=Load)
def balance(output: tuple[T, T], target: T) -> T:
    return f.mse_loss(output[0], target) + 0.1 * output[1]


def _unused(step: int = 0) -> tuple[T, T]:
    return vectors()[0], torch.zeros(SAMPLES)


LOSSES.add("the target is not used", loss=lambda output, target: output.square().mean(), batch=_unused)
