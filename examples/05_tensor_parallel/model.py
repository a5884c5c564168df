"""A transformer whose blocks are tagged for tensor parallelism: `in` makes heads and hidden features, `out` adds them
up, `between` is the rest."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

LAYERS, WIDTH, HEADS, WORDS, LENGTH, SAMPLES = 2, 32, 4, 16, 12, 32


class Attention(nn.Module):
    """Three layers for queries, keys and values, so that a device that has some columns of each has whole heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        with annotate("part", "in"):
            q, k, v = (
                layer(x).view(samples, length, HEADS, WIDTH // HEADS).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            seen = (
                f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(samples, length, WIDTH)
            )
        with annotate("part", "out"):
            return self.out(seen)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("part", "in"):
            hidden = f.gelu(self.up(x))
        with annotate("part", "out"):
            return self.down(hidden)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Whatever is not in attention or MLP is `between`: norms and sums."""
        with annotate("part", "between"):
            x = x + self.attention(self.before_attention(x))
            return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        with annotate("stage", 0), annotate("part", "ends"):
            x = self.embed(words) + self.position(torch.arange(LENGTH, device=words.device))
        for i, block in enumerate(self.blocks):
            with annotate("stage", i):
                x = block(x)
        with annotate("stage", LAYERS - 1), annotate("part", "ends"):
            return self.head(self.norm(x))


def model() -> nn.Module:
    return Transformer()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that go up and down again between two words of their own; the target is the word that comes next."""
    while True:
        low, high = torch.randint(WORDS // 2, (SAMPLES, 1)), torch.randint(WORDS // 2, WORDS, (SAMPLES, 1))
        length = high - low
        words = high - (torch.arange(LENGTH + 1) % (2 * length) - length).abs()
        yield words[:, :-1], words[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)
