"""A small transformer that learns to sort digits. Every part is here to be replaced by your own."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from piperlang import annotate

STAGES = 2  # parts that a schedule can put on different devices
BLOCKS = 2  # transformer blocks in each of them
WIDTH, HEADS, LENGTH, BATCH = 32, 4, 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Sorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digits, self.positions = nn.Embedding(10, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES * BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, digits: Tensor) -> Tensor:
        # What runs under one tag is one chunk; the schedule says where `[stage=0]` goes.
        with annotate("stage", 0):
            x = self.digits(digits) + self.positions.weight
        for number, block in enumerate(self.blocks):
            with annotate("stage", number // BLOCKS):
                x = block(x)
        with annotate("stage", STAGES - 1):
            return self.head(self.norm(x))


def model() -> nn.Module:
    return Sorter()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for all devices together."""
    while True:
        digits = torch.randint(10, (BATCH, LENGTH))
        yield digits, digits.sort(dim=1).values


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)
