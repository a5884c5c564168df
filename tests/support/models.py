"""Models that exercise capture: each a (model, loss, batch) as a model.py would give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.trace.routed import routed_linear

WIDTH, WORDS, LENGTH = 16, 40, 6


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batch: Callable[[int], tuple[Any, Any]]
    stages: int


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target)


def words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def vectors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)


def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (samples, LENGTH)), torch.randint(WORDS, (samples, LENGTH))


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0, stages: int = 4) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i * self.stages // len(self.layers)):
                x = self.dropout(torch.tanh(layer(x)))
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, 2, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = f.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))
        output: torch.Tensor = x + self.down(f.gelu(self.up(self.second(x))))
        return output


class Gpt(nn.Module):
    """Tied embeddings; a mask that every stage reads: a window, which `is_causal` does not say."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.stages = stages
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril().triu(-4)
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for i, block in enumerate(self.blocks):
            with annotate("stage", i * self.stages // len(self.blocks)):
                x = block(x, mask)
        with annotate("stage", self.stages - 1):
            output: torch.Tensor = self.head(x)
            return output


class Unet(nn.Module):
    """Skip connections across stages, several tensors on an edge, a layer used twice, a frozen layer, a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            a = torch.relu(self.down[0](x)) * self.scale
        with annotate("stage", 1):
            b = torch.relu(self.down[1](self.down[1](a)))
        with annotate("stage", 2):
            c = torch.tanh(self.up[0](torch.cat([self.frozen(b), a], -1)))
        with annotate("stage", 3):
            output: torch.Tensor = self.up[1](torch.cat([c, b + a], -1))
            return output


class Moe(nn.Module):
    """Mixture of experts with a capacity: tokens past it are dropped, so routing is by batch position within a
    sample."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
            gates = torch.softmax(self.gate(x), -1)
            weight, chosen = gates.max(-1)
            routed = f.one_hot(chosen, gates.shape[-1])
            slot = (routed.cumsum(1) - 1) * routed
            capacity = ids.shape[1] // 2
            kept = routed * (slot < capacity)
            dispatch = kept.unsqueeze(-1) * f.one_hot(slot.clamp(max=capacity - 1), capacity)
            packed = torch.einsum("stec,std->secd", dispatch.to(x.dtype), x)
        with annotate("stage", 1), annotate("expert", 0):
            hidden = torch.relu(torch.einsum("secd,edh->sech", packed, self.up))
            done = torch.einsum("sech,ehd->secd", hidden, self.down)
        with annotate("stage", 1):
            y = torch.einsum("stec,secd->std", dispatch.to(x.dtype) * weight[..., None, None], done)
            output: torch.Tensor = self.head(x + y)
            return output


class Experts(nn.Module):
    """A layer with a norm, a gate and four experts, as three chunks: the way to the experts, the experts, and the way
    back."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        gates = torch.softmax(self.gate(y), -1)
        weight, chosen = gates.max(-1)
        routed = f.one_hot(chosen, gates.shape[-1])
        slot, capacity = (routed.cumsum(1) - 1) * routed, x.shape[1] // 2
        dispatch = ((routed * (slot < capacity)).unsqueeze(-1) * f.one_hot(slot.clamp(max=capacity - 1), capacity)).to(
            x.dtype
        )
        packed = torch.einsum("stec,std->secd", dispatch, y)
        with annotate("expert", "all"):
            hidden = torch.relu(torch.einsum("secd,edh->sech", packed, self.up))
            done = torch.einsum("sech,ehd->secd", hidden, self.down)
        return x + torch.einsum("stec,secd->std", dispatch * weight[..., None, None], done)


class Chosen(nn.Module):
    """A layer in which every token goes to two of the experts, however many go there, and to one that all share."""

    def __init__(self, experts: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(experts, 2 * WIDTH) / 4) if bias else None
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """And how unevenly the tokens of every sequence choose."""
        y = self.norm(x)
        gates = torch.softmax(self.gate(y), -1)
        weight, picked = gates.topk(2, -1)
        often = f.one_hot(picked, gates.shape[-1]).sum(2).to(x.dtype).mean(1)
        uneven = (often * gates.mean(1)).sum(-1) * gates.shape[-1]
        rows, chosen = y.unsqueeze(2).expand(-1, -1, 2, -1).flatten(0, 2), picked.flatten()
        with annotate("expert", "all"):
            done = routed_linear(torch.relu(routed_linear(rows, chosen, self.up, self.bias)), chosen, self.down)
        return x + torch.tanh(self.shared(y)) + (done.view(*picked.shape, -1) * weight.unsqueeze(-1)).sum(2), uneven


class Dropless(nn.Module):
    """Experts without a limit in every one of four layers, and a loss for choosing unevenly."""

    def __init__(self, stages: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.stages = stages
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Chosen(bias=bias) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        uneven: list[torch.Tensor] = []
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            with annotate("stage", i * self.stages // 4):
                x, one = layer(x)
                uneven.append(one)
        with annotate("stage", self.stages - 1):
            return self.head(x), torch.stack(uneven, -1).mean(-1)


def balanced(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    logits, uneven = output
    return (
        f.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / target.numel() + 0.1 * uneven.mean()
    )


class Mixture(nn.Module):
    """A mixture of experts in every one of four layers."""

    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.stages = stages
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            with annotate("stage", i * self.stages // len(self.layers)):
                x = layer(x)
        with annotate("stage", self.stages - 1):
            output: torch.Tensor = self.head(x)
            return output


CASES = {
    case.name: case
    for case in (
        Case("mlp", Mlp, square, vectors, 4),
        Case("gpt", Gpt, words, tokens, 4),
        Case("unet", Unet, square, vectors, 4),
        Case("moe", Moe, words, tokens, 2),
        Case("dropout", lambda: Mlp(0.25), square, vectors, 4),
        Case("dropless", Dropless, balanced, tokens, 4),
    )
}
