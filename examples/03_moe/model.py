"""A mixture of experts in four stages: every sequence sends each of its letters to one of four experts, as long as that
one has room."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

LAYERS, EXPERTS, WIDTH, WORDS, LENGTH, SAMPLES = 4, 4, 32, 16, 16, 32
ROOM = LENGTH // 2
"""How many letters of one sequence an expert takes; what is too much goes past it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Three chunks: the way to the experts, the experts, and the way back."""
        before = f.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.tanh(self.mix(torch.cat([self.norm(x), before], -1)))
        gates = torch.softmax(self.gate(x), -1)
        weight, chosen = gates.max(-1)
        routed = f.one_hot(chosen, EXPERTS)
        slot = (routed.cumsum(1) - 1) * routed  # counted within a sequence: samples stay independent of each other
        kept = routed * (slot < ROOM)
        dispatch = (kept.unsqueeze(-1) * f.one_hot(slot.clamp(max=ROOM - 1), ROOM)).to(x.dtype)
        packed = torch.einsum("stec,std->secd", dispatch, x)
        with annotate("expert", "all"):
            hidden = torch.relu(torch.einsum("secd,edh->sech", packed, self.up))
            done = torch.einsum("sech,ehd->secd", hidden, self.down)
        return x + torch.einsum("stec,secd->std", dispatch * weight[..., None, None], done)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = layer(x)
        with annotate("stage", LAYERS - 1):
            return self.head(x)


def model() -> nn.Module:
    return Moe()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that go on by the rule: each word is the sum of the two before it, modulo the number of words."""
    while True:
        words = torch.randint(WORDS, (SAMPLES, 2))
        while words.shape[1] <= LENGTH:
            words = torch.cat([words, words[:, -2:].sum(1, keepdim=True) % WORDS], 1)
        yield words[:, :-1], words[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3, eps=1e-4)
