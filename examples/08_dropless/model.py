"""A mixture of experts that drops nothing: every word goes to two of eight experts, however many go there, and to one
that all share."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate, routed_linear

LAYERS, EXPERTS, CHOICES, WIDTH, WORDS, LENGTH, SAMPLES = 4, 8, 2, 32, 16, 16, 32
BALANCE = 0.01
"""What choosing unevenly costs."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Three chunks: the choice of experts, the experts, and the way back. Also how unevenly each sequence has
        chosen."""
        before = f.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.tanh(self.mix(torch.cat([self.norm(x), before], -1)))
        gates = torch.softmax(self.gate(x), -1)
        weight, picked = gates.topk(CHOICES, -1)
        # Within a sequence, never over the batch: samples stay independent of each other, and a schedule may divide
        # them.
        often = f.one_hot(picked, EXPERTS).sum(2).to(x.dtype).mean(1) / CHOICES
        uneven = EXPERTS * (often * gates.mean(1)).sum(-1)
        rows, chosen = x.unsqueeze(2).expand(-1, -1, CHOICES, -1).flatten(0, 2), picked.flatten()
        with annotate("expert", "all"):
            done = routed_linear(torch.relu(routed_linear(rows, chosen, self.up)), chosen, self.down)
        routed = (done.view(*picked.shape, WIDTH) * weight.unsqueeze(-1)).sum(2)
        return x + self.shared(x) + routed, uneven


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with annotate("stage", 0):
            x = self.embed(ids)
            uneven = x.new_zeros(x.shape[0])
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x, one = layer(x)
                uneven = uneven + one / LAYERS
        with annotate("stage", LAYERS - 1):
            return self.head(x), uneven


def model() -> nn.Module:
    return Moe()


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, uneven = output
    wrong = f.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / target.numel()
    return wrong + BALANCE * uneven.mean()


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that go on by the rule: each word is the sum of the two before it, modulo the number of words."""
    while True:
        words = torch.randint(WORDS, (SAMPLES, 2))
        while words.shape[1] <= LENGTH:
            words = torch.cat([words, words[:, -2:].sum(1, keepdim=True) % WORDS], 1)
        yield words[:, :-1], words[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3, eps=1e-4)
