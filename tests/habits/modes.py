"""Modes, precision, dropout, embeddings and other layers with a will of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from piperlang.capture.annotate import annotate
from tests.habits.habit import (
    LENGTH,
    REFUSED,
    SAME,
    SAMPLES,
    WIDTH,
    WORDS,
    Between,
    Category,
    Layers,
    square,
    tokens,
    vectors,
    words,
)

MODES = Category("modes", "Modes and numerics")

# ------------------------------------------------------------------------------------------------------------- modes


@MODES.habit("eval() in the constructor: its dropout is off")
class EvalInInit(Between):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.eval()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


@MODES.habit("anomaly mode in the forward")
class Anomaly(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return super().forward(x)


@MODES.habit("use_deterministic_algorithms in the constructor")
class Deterministic(Layers):
    def __init__(self) -> None:
        super().__init__()
        torch.use_deterministic_algorithms(True)


@MODES.habit("autocast in the forward", limit=3e-2)
class Autocast(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = super().forward(x)
        return x.float()


@MODES.habit("autocast, with a part in float32", limit=3e-2)
class AutocastPart(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i != 2):
            return super().stage(i, x.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


def double_vectors(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH).double(), torch.randn(SAMPLES, WIDTH).double()


def half_vectors(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH).bfloat16(), torch.randn(SAMPLES, WIDTH).bfloat16()


@MODES.habit("parameters in float64", batch=double_vectors)
class Double(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.double()


@MODES.habit("parameters in bfloat16", batch=half_vectors, limit=5e-2)
class Half(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


@MODES.habit("a layer in bfloat16 between others in float32", limit=5e-2)
class HalfLayer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].bfloat16()

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x.bfloat16()).float() if i == 2 else super().stage(i, x)


@MODES.habit("set_default_dtype(float64) while the model is made", batch=double_vectors)
class DefaultDtype(Layers):
    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            super().__init__()
        finally:
            torch.set_default_dtype(torch.float32)


@MODES.habit("activations cast to float64 and back")
class CastBack(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.double(), -1).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------- dropout


@MODES.habit("F.dropout with training=True", dropout=True)
class AlwaysDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.dropout(x, 0.25, training=True)


@MODES.habit("F.dropout with its defaults", dropout=True)
class DefaultDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.dropout(x)


@MODES.habit("F.dropout with training=self.training", dropout=True)
class TrainingDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.dropout(x, 0.25, self.training)


@MODES.habit("nn.Dropout in a Sequential, and in place", dropout=True)
class SequentialDropout(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25), nn.Tanh(), nn.Dropout(0.1, inplace=True))
            for _ in range(4)
        )

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[i](x)


@MODES.habit("one nn.Dropout used twice", dropout=True)
class DropoutTwice(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().stage(i, self.dropout(x)))


@MODES.habit("dropout of a weight (DropConnect)", REFUSED)
class DropConnect(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(f.linear(x, f.dropout(self.layers[i].weight, 0.25, self.training), self.layers[i].bias))


@MODES.habit("a weight with dropout whose rows are as many as samples", REFUSED)
class DropRows(Layers):
    """SAMPLES rows: by its shape the weight could be a batch."""

    def __init__(self) -> None:
        super().__init__()
        assert WIDTH == SAMPLES

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.tanh(f.linear(x, f.dropout(self.layers[i].weight, 0.25, self.training)) + self.layers[i].bias)
            if i == 1
            else super().stage(i, x)
        )


def _pictures(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2, 2, 2)


@MODES.habit("dropout2d", dropout=True)
class Dropout2d(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.dropout2d(_pictures(x), 0.25, self.training).flatten(1)


@MODES.habit("alpha dropout", REFUSED)
class AlphaDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.alpha_dropout(x, 0.25, self.training)


@MODES.habit("dropout after the batch was moved to the second dimension", REFUSED)
class MovedDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.dropout(
            x.view(-1, 3, 8).transpose(0, 1) if x.shape[-1] == 24 else x.unsqueeze(0).expand(3, -1, -1),
            0.25,
            self.training,
        ).mean(0)


class Attention(nn.Module):
    """Self-attention over tokens in the second of four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            q, k, v = (t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.attend(q, k, v).transpose(1, 2).flatten(2)
        with annotate("stage", 2):
            x = torch.tanh(self.out(x))
        with annotate("stage", 3):
            return self.head(x)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return f.scaled_dot_product_attention(q, k, v, is_causal=True)


MODES.add("causal attention", Attention, batch=tokens, loss=words)


@MODES.habit("attention with dropout inside", batch=tokens, loss=words, dropout=True)
class AttentionDropout(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return f.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@MODES.habit("attention by hand, with dropout of the scores", batch=tokens, loss=words, dropout=True)
class AttentionByHand(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return f.dropout(torch.softmax(q @ k.transpose(-1, -2) / 2, -1), 0.1, self.training) @ v


@MODES.habit("nn.MultiheadAttention with dropout", batch=tokens, loss=words, dropout=True)
class Multihead(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        with annotate("stage", 2):
            x = torch.tanh(self.out(x))
        with annotate("stage", 3):
            return self.head(x)


@MODES.habit("nn.MultiheadAttention with the sequence first", batch=tokens, loss=words)
class SequenceFirst(Multihead):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids).transpose(0, 1)
        with annotate("stage", 1):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        with annotate("stage", 2):
            x = torch.tanh(self.out(x)).transpose(0, 1)
        with annotate("stage", 3):
            return self.head(x)


@MODES.habit("nn.TransformerEncoderLayer without dropout", batch=tokens, loss=words)
class Encoder(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = self.encoder(x)
        with annotate("stage", 2):
            x = torch.tanh(self.out(x))
        with annotate("stage", 3):
            return self.head(x)


# -------------------------------------------------------------------------------------------------------- embeddings


class Embedded(nn.Module):
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH, **self.options), nn.Linear(WIDTH, WORDS)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = torch.tanh(self.first(x))
        with annotate("stage", 2):
            x = torch.tanh(self.second(x))
        with annotate("stage", 3):
            return self.head(x)


def padded(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids, target = tokens()
    ids[:, -2:] = 0
    return ids, target


@MODES.habit("embedding with padding_idx", batch=padded, loss=words)
class Padding(Embedded):
    options = {"padding_idx": 0}  # noqa: RUF012


@MODES.habit("embedding with max_norm: the forward changes the weight", REFUSED, batch=tokens, loss=words)
class MaxNorm(Embedded):
    options = {"max_norm": 1.0}  # noqa: RUF012


@MODES.habit("embedding with sparse gradients", batch=tokens, loss=words)
class Sparse(Embedded):
    options = {"sparse": True}  # noqa: RUF012


@MODES.habit("embedding with scale_grad_by_freq: counts in the batch", REFUSED, batch=tokens, loss=words, whole=SAME)
class ByFrequency(Embedded):
    options = {"scale_grad_by_freq": True}  # noqa: RUF012


@MODES.habit(
    "EmbeddingBag over the tokens of a sample",
    batch=lambda step: (torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randn(SAMPLES, WIDTH)),
)
class Bag(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.bag(ids)
        return super().forward(x)


def _offsets(step: int) -> tuple[Any, torch.Tensor]:
    return (torch.randint(WORDS, (3 * SAMPLES,)), 3 * torch.arange(SAMPLES)), torch.randn(SAMPLES, WIDTH)


@MODES.habit("EmbeddingBag with offsets into the whole batch", REFUSED, batch=_offsets)
class BagOffsets(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with annotate("stage", 0):
            x = self.bag(ids, offsets)
        return super().forward(x)


# ------------------------------------------------------------------------------------------------------ other layers


@MODES.habit("LSTM over the tokens", batch=tokens, loss=words)
class Lstm(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x, _ = self.lstm(x)
        with annotate("stage", 2):
            x = torch.tanh(self.second(x))
        with annotate("stage", 3):
            return self.head(x)


@MODES.habit("convolution, pooling and GroupNorm")
class Convolution(Between):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 8, 2), nn.GroupNorm(2, 8)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.adaptive_avg_pool2d(self.norm(self.convolution(_pictures(x))), 1).flatten(1)


@MODES.habit("RReLU: random slopes", REFUSED)
class RandomRelu(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.rrelu(x, training=self.training)


@MODES.habit("Gumbel softmax", dropout=True)
class Gumbel(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return f.gumbel_softmax(x, hard=True)


@MODES.habit("fractional max pooling: random regions", REFUSED)
class Fractional(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (
            f.fractional_max_pool2d(x.view(-1, 1, 2, 4), (1, 2), output_size=(2, 3)).flatten(1)
            @ torch.ones(6, WIDTH)
            / 6
        )


@MODES.habit("a part scripted by torch.jit")
class Scripted(Between):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@MODES.habit("a part compiled by torch.compile")
class Compiled(Between):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@MODES.habit("cumulative sums and sorting within a sample")
class Sorting(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values + x.cumsum(-1) / 8


@MODES.habit("topk with ties broken by order", batch=vectors, loss=square)
class Ties(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.zeros_like(x).scatter(-1, x.relu().topk(3, -1).indices, 1.0)


@MODES.habit("singular values of a weight as a penalty on the outputs", limit=1e-4)
class Singular(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.linalg.svdvals(self.layers[0].weight)[0]


@MODES.habit("a fixed point found by a loop in the forward")
class FixedPoint(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        for _ in range(5):
            z = torch.tanh(self.layers[0](z) + x)
        return z


class DoublesTanh(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        return 2 * found if operator is torch.ops.aten.tanh.default else found


@MODES.habit("a dispatch mode of one's own", REFUSED)
class OwnMode(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with DoublesTanh():
            return torch.tanh(x)
