"""A small GPT that learns a short text, character by character. Its first and last stage share one weight."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

TEXT = """
A ship of four holds lies in the harbour. The grain comes down one chute and goes from hold to hold, and in every hold a hand is waiting.
If all the grain came at once, the first hand would shovel while three looked on. So the grain comes in sacks. The first hand empties the first sack
and passes it on; the second hand takes it, and the first takes the next. Soon all four hands are busy, each with a sack of its own.
At the end the sacks come back, the last one first, and every hand counts what has passed. Four counts must agree with the count at the gate.
Whoever changes the order of the sacks may do so, for the harbour is long and the day is short. Nobody may change the count.
"""  # noqa: E501
LETTERS = sorted(set(TEXT))
LAYERS, WIDTH, HEADS, LENGTH, SAMPLES = 4, 32, 2, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            t.view(samples, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(f.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        nn.init.normal_(self.position.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, letters: Tensor) -> Tensor:
        with annotate("stage", 0):
            x = self.embed(letters) + self.position(torch.arange(letters.shape[1], device=letters.device))
        for i, block in enumerate(self.blocks):
            with annotate("stage", i):
                x = block(x)
        with annotate("stage", LAYERS - 1):
            return self.head(self.norm(x))


def model() -> nn.Module:
    return Gpt()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the text from anywhere in it, and the same pieces one letter further on."""
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    while True:
        starts = torch.randint(len(text) - LENGTH, (SAMPLES, 1))
        pieces = text[starts + torch.arange(LENGTH + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def lr_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Ten steps of warming up."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
