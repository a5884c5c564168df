"""Operators of one's own, control flow as operators, scripts, and layers that draw random numbers inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from tests.habits.habit import EITHER, REFUSED, SAME, SUMMED, WIDTH, Between, Category, Layers, tokens, words
from tests.habits.modes import Embedded

OPERATORS = Category("operators", "Operators")

# ---------------------------------------------------------------------------------------------------- custom operators


@torch.library.custom_op("habits::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 0.5 * x


@bend.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _bend_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _bend_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return gradient * (x.cos() + 0.25)  # on purpose not the derivative


bend.register_autograd(_bend_backward, setup_context=_bend_setup)


@OPERATORS.habit("an operator of one's own with a backward of its own", EITHER)
class UsesBend(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return bend(x)


@torch.library.custom_op("habits::centered", mutates_args=())
def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@centered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


centered.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0))


@OPERATORS.habit("an operator of one's own that mixes samples", REFUSED, whole=SAME)
class UsesCentered(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return centered(x)


@torch.library.custom_op("habits::mean_of_all", mutates_args=())
def mean_of_all(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


@mean_of_all.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


def _all_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _all_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return gradient * 2 * x / x.numel()


mean_of_all.register_autograd(_all_backward, setup_context=_all_setup)


def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean_of_all(output - target)


OPERATORS.add("a loss that is an operator of one's own", Layers, REFUSED, whole=SAME, loss=own_loss)


@torch.library.custom_op("habits::frozen", mutates_args=())
def frozen(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@frozen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@OPERATORS.habit("an operator of one's own without a backward", EITHER)
class UsesFrozen(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + frozen(x.detach())


@torch.library.custom_op("habits::doubled_", mutates_args=("x",))
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


@OPERATORS.habit("an operator of one's own that writes to its argument", EITHER)
class UsesDoubled(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(WIDTH)
        doubled_(scale)
        return x * scale


@torch.library.custom_op("habits::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@OPERATORS.habit("an operator of one's own that draws random numbers", REFUSED)
class UsesNoisy(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * noisy(x.detach())


CALLS = [0]


@torch.library.custom_op("habits::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return x.clone() * CALLS[0]


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@OPERATORS.habit("an operator of one's own that counts its calls", REFUSED)
class UsesCounted(Between):
    def __init__(self) -> None:
        super().__init__()
        CALLS[0] = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * counted(x.detach())


# ---------------------------------------------------------------------------------------------- control flow, scripts


@OPERATORS.habit("torch.cond on the whole batch", REFUSED, whole=REFUSED)
class CondBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: 2 * t, (x,))


@OPERATORS.habit("torch.cond on a buffer", REFUSED)
class CondBuffer(Between):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.tensor(True))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(self.flag, lambda t: t.sin(), lambda t: 2 * t, (x,))


@OPERATORS.habit("torch.where in place of a branch")
class Where(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum(-1, keepdim=True) > 0, x.sin(), 2 * x)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


@OPERATORS.habit("a function scripted by torch.jit", EITHER)
class UsesScripted(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return scripted(x)


@OPERATORS.habit("a part traced by torch.jit", EITHER)
class JitTraced(Between):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@OPERATORS.habit("einsum over the samples' pairs", REFUSED, whole=SAME)
class Pairs(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ci->bc", x, x).softmax(-1) @ x


@OPERATORS.habit("attention across the batch", REFUSED, whole=SAME)
class AcrossBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.scaled_dot_product_attention(x.unsqueeze(0), x.unsqueeze(0), x.unsqueeze(0)).squeeze(0)


@OPERATORS.habit("softmax over the batch", REFUSED, whole=SAME)
class SoftmaxBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.softmax(0)


@OPERATORS.habit("cumulative sum over the batch", REFUSED, whole=SAME)
class CumulativeBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) / 8


@OPERATORS.habit("samples sorted by a score", REFUSED, whole=SAME)
class SortedBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(-1).argsort()]


@OPERATORS.habit("convolution along the batch", REFUSED, whole=SAME)
class AlongBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.conv1d(x.t().unsqueeze(0), torch.ones(WIDTH, 1, 3) / 3, padding=1, groups=WIDTH).squeeze(0).t()


@OPERATORS.habit("the batch reshaped to pairs of samples", REFUSED, whole=SAME)
class PairsOfSamples(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(-1, 2, WIDTH)
        return (pairs - pairs.mean(1, keepdim=True)).view(-1, WIDTH)


@OPERATORS.habit("batch and features transposed, and mixed along the batch", REFUSED, whole=SAME)
class TransposedMix(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.layer_norm(x.t(), (x.shape[0],)).t()


@OPERATORS.habit("global maximum to scale by", REFUSED, whole=SAME)
class GlobalMaximum(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max()


@OPERATORS.habit("a mean over the batch, detached, subtracted", SUMMED, whole=SAME)
class DetachedMean(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.detach().mean(0)


@OPERATORS.habit("experts by top-k over the batch (expert choice)", REFUSED, whole=EITHER)
class ExpertChoice(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        values, rows = x[:, 0].topk(2, 0)
        return x.index_add(0, rows, values.unsqueeze(-1) * x[rows])


@OPERATORS.habit("fft along the features")
class Fourier(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x).abs(), n=WIDTH)


@OPERATORS.habit("fft along the batch", REFUSED, whole=SAME)
class FourierBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x, dim=0).real / 4


@OPERATORS.habit("a linear solve for each sample", limit=1e-4)
class Solve(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        matrix = torch.eye(WIDTH) * 3 + x.unsqueeze(-1) * x.unsqueeze(-2)
        return torch.linalg.solve(matrix, x.unsqueeze(-1)).squeeze(-1)


@OPERATORS.habit("a covariance over the batch, whitened", REFUSED, whole=SAME, limit=1e-3)
class Whitened(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        covariance = x.t() @ x / x.shape[0] + torch.eye(WIDTH)
        return torch.linalg.solve(covariance, x.t()).t()


@OPERATORS.habit("interpolation, unfold and pixel shuffle of pictures")
class Pictures(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x = f.interpolate(x.view(-1, 2, 2, 2), scale_factor=2, mode="bilinear", align_corners=False)
        return f.unfold(x, 2, stride=2).flatten(1).view(-1, 4, WIDTH).mean(1)


@OPERATORS.habit("gather along the batch by indices of the data", REFUSED, whole=SAME)
class GatherBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(0, x.argsort(0))


@OPERATORS.habit("gather along the features by indices of the data")
class GatherFeatures(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, x.argsort(1))


@OPERATORS.habit("one-hot positions within the batch", REFUSED, whole=SAME)
class Positions(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(-1)


@OPERATORS.habit("a learned embedding of the position in the batch", REFUSED, whole=SAME)
class PositionTable(Between):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[0]]


@OPERATORS.habit("a mask of every second sample", REFUSED, whole=SAME)
class EverySecond(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[0]) % 2).unsqueeze(-1)


@OPERATORS.habit("gradients of half of the samples stopped", REFUSED, whole=SAME)
class HalfDetached(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        return torch.cat([x[:half].detach(), x[half:]])


@OPERATORS.habit("loop over chunks of the batch")
class Chunks(Between):
    """Chunked to save memory; every sample is treated alike."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(part) for part in x.chunk(2)])


# ----------------------------------------------------------------------------------------- random numbers inside layers


def _recurrent(kind: Any) -> type[Embedded]:
    class Recurrent(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with annotate("stage", 0):
                x = self.embed(ids)
            with annotate("stage", 1):
                x, _ = self.recurrent(x)
            with annotate("stage", 2):
                x = torch.tanh(self.second(x))
            with annotate("stage", 3):
                return self.head(x)

    return Recurrent


for name in ("LSTM", "GRU", "RNN"):
    made = _recurrent(getattr(nn, name))
    OPERATORS.add(f"{name} with dropout between its layers", made, REFUSED, batch=tokens, loss=words)


def _random(name: str, function: Any, expected: str = REFUSED) -> None:
    class Random(Between):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    OPERATORS.add(name, Random, expected, dropout=True)


_random("F.dropout1d", lambda x: f.dropout1d(x.view(-1, 2, 4), 0.25).flatten(1), SAME)
_random("F.dropout3d", lambda x: f.dropout3d(x.view(-1, 2, 2, 2, 1), 0.25).flatten(1), SAME)
_random("F.feature_alpha_dropout", lambda x: f.feature_alpha_dropout(x.view(-1, 2, 4), 0.25, True).flatten(1))
_random("F.rrelu in place", lambda x: f.rrelu(x * 1.0, training=True, inplace=True))
_random("torch.bernoulli of probabilities", lambda x: x * torch.bernoulli(x.detach().sigmoid()), SAME)
_random("bernoulli_ in place", lambda x: x * torch.empty_like(x).bernoulli_(0.5), SAME)
_random("torch.multinomial", lambda x: x * (1 + torch.multinomial(x.detach().softmax(-1), 1)))
_random("torch.poisson", lambda x: x + 0.1 * torch.poisson(x.detach().abs()))
_random("torch.normal", lambda x: x + 0.1 * torch.normal(x.detach(), 1.0))
_random("uniform_ in place", lambda x: x + torch.empty_like(x).uniform_(0, 0.1), SAME)
_random("exponential_, cauchy_, log_normal_, geometric_", lambda x: x + 0.01 * torch.empty_like(x).log_normal_())
_random("cauchy_ in place", lambda x: x + 0.01 * torch.empty_like(x).cauchy_().clamp(-1, 1))
_random("geometric_ in place", lambda x: x + 0.01 * torch.empty_like(x).geometric_(0.5))
_random("random_ in place", lambda x: x + 0.01 * torch.empty_like(x).random_(0, 5))
_random("torch.randint_like", lambda x: x + 0.1 * torch.randint_like(x, 3))
_random("one number of torch.rand(1)", lambda x: x * torch.rand(1), SAME)
_random("torch.rand(1).item()", lambda x: x * torch.rand(1).item())
_random("torch.randn of the features alone", lambda x: x + 0.1 * torch.randn(WIDTH))
_random(
    "Tensor.random through torch.distributions.Bernoulli",
    lambda x: x * torch.distributions.Bernoulli(0.5).sample(x.shape),
    SAME,
)
_random("nn.init in the forward", lambda x: x @ nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)))


@OPERATORS.habit("nn.TransformerEncoderLayer with its dropout", batch=tokens, loss=words, dropout=True)
class EncoderDropout(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = self.encoder(x)
        with annotate("stage", 2):
            x = torch.tanh(self.second(x))
        with annotate("stage", 3):
            return self.head(x)


@OPERATORS.habit("nn.MultiheadAttention with dropout and its weights", EITHER, batch=tokens, loss=words, dropout=True)
class WeightsDropout(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = x + self.attention(x, x, x)[0]
        with annotate("stage", 2):
            x = torch.tanh(self.second(x))
        with annotate("stage", 3):
            return self.head(x)
