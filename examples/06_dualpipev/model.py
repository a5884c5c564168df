"""A transformer with a mixture of experts in every layer. Attention, dispatch, experts and combine are chunks of their
own."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

LAYERS, EXPERTS, CHOSEN, HEADS, WIDTH, WORDS, LENGTH, SAMPLES = 4, 4, 2, 2, 32, 16, 12, 32
ROOM = LENGTH * 3 // 4
"""How many words of one sequence an expert takes; what is too much goes past it."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).reshape(samples, length, -1))


class Dispatch(nn.Module):
    """Which words go to which expert, and with what weight they come back. Slots are counted within a sequence, so
    samples stay independent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        gates = torch.softmax(self.gate(x), -1)
        routed = f.one_hot(gates.topk(CHOSEN, -1).indices, EXPERTS).sum(-2)
        slot = routed.cumsum(1) - 1
        kept = routed * (slot < ROOM)
        sent = (kept.unsqueeze(-1) * f.one_hot(slot.clamp(0, ROOM - 1), ROOM)).to(x.dtype)
        return torch.einsum("stec,std->secd", sent, x), sent * gates.unsqueeze(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, packed: Tensor) -> Tensor:
        hidden = f.silu(torch.einsum("secd,edh->sech", packed, self.up))
        return torch.einsum("sech,ehd->secd", hidden, self.down)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dispatch, self.experts = Attention(), Dispatch(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("part", "attention"):
            x = self.attention(x)
        with annotate("part", "dispatch"):
            packed, weight = self.dispatch(x)
        with annotate("expert", "all"):
            done = self.experts(packed)
        with annotate("part", "combine"):
            return x + torch.einsum("stec,secd->std", weight, done)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        with annotate("stage", 0), annotate("part", "attention"):
            x = self.embed(words) + self.position(torch.arange(LENGTH, device=words.device))
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = layer(x)
        with annotate("stage", LAYERS - 1), annotate("part", "combine"):
            return self.head(x)


def model() -> nn.Module:
    return Moe()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that repeat three words of their own over and over; the target is the word that comes next."""
    while True:
        words = torch.randint(WORDS, (SAMPLES, 3)).repeat(1, LENGTH // 3 + 1)[:, : LENGTH + 1]
        yield words[:, :-1], words[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3, eps=1e-4)
