"""Masks that mean `is_causal` are written so; all others stay, and either way the model computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.program import capture
from tests.support.equivalence import SAMPLES, assert_same
from tests.support.models import Case

LENGTH, WIDTH, HEADS = 6, 8, 2
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of queries [samples, heads, length, width] and token ids."""


class Attention(nn.Module):
    seen: torch.Tensor

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 11)
        self.mask = mask
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.embed(ids)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mask = self.seen if self.mask is buffer else self.mask(q, ids)
        found = f.scaled_dot_product_attention(q, k[..., : mask.shape[-1], :], v[..., : mask.shape[-1], :], mask)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def lower_triangle(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def added(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), float("-inf")).triu(1)


def the_lowest_number(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)


def of_positions(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As libraries write it."""
    at = torch.arange(ids.shape[1], device=ids.device)
    return (at[:, None] >= at[None, :]).expand(ids.shape[0], 1, -1, -1)


def filled(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(LENGTH, LENGTH).masked_fill_(lower_triangle(q, ids).logical_not(), float("-inf"))


def window(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return lower_triangle(q, ids).triu(-2)


def before_the_first(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One element differs."""
    mask = lower_triangle(q, ids)
    return mask.logical_or(torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) == 1)


def slopes(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    at = torch.arange(LENGTH)
    return added(q, ids) - 0.5 * (at[:, None] - at[None, :])


def of_heads(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([lower_triangle(q, ids), torch.ones(LENGTH, LENGTH, dtype=torch.bool)])


def without_padding(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return lower_triangle(q, ids) & (ids != 10)[:, None, None, :] | torch.eye(LENGTH, dtype=torch.bool)


def changed_through_a_view(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    mask = lower_triangle(q, ids)
    mask[2:, 0] = False
    return mask


def fewer_keys(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH - 2, dtype=torch.bool).tril()


def buffer(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A checkpoint may have another one."""
    raise AssertionError


CAUSAL = (lower_triangle, added, the_lowest_number, of_positions, filled)
OTHERS = (window, before_the_first, slopes, of_heads, without_padding, changed_through_a_view, fewer_keys, buffer)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (samples, LENGTH)), torch.randint(11, (samples, LENGTH))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("mask", [*CAUSAL, *OTHERS], ids=lambda mask: mask.__name__)
def test_a_mask_that_is_computed_is_causal_or_stays(mask: Mask) -> None:
    case = Case("attention", lambda: Attention(mask), loss, batch, 3)
    traced = capture(case.model, case.loss, batch(SAMPLES))
    (node,) = (n for n in traced.sizes.small.graph.nodes if "scaled_dot_product_attention" in str(n.target))
    assert node.args[3:] == (None, 0.0, True) if mask in CAUSAL else node.args[3] is not None
    assert_same(case, traced, "split batch into 2 as mb\n")


def test_a_mask_that_makes_the_result_larger_stays() -> None:
    """PyTorch refuses it, on CPU at least."""

    def expanded(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return lower_triangle(q, ids).expand(3, 1, LENGTH, LENGTH)

    class Single(Attention):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
            return self.out(f.scaled_dot_product_attention(q, k, v, self.mask(q, ids)).sum(0))  # type: ignore[no-any-return]

    traced = capture(
        lambda: Single(expanded), lambda output, target: output.square().mean() + 0 * target.sum(), batch(4)
    )
    (node,) = (n for n in traced.sizes.small.graph.nodes if "scaled_dot_product_attention" in str(n.target))
    assert node.args[3] is not None


def test_scale_and_groups_of_heads_stay() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q(x), self.k(x)))
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            return f.scaled_dot_product_attention(q, k, k, mask, scale=0.3, enable_gqa=True)

    def numbers(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, LENGTH, WIDTH), torch.randn(samples, 2, LENGTH, 4)

    case = Case("groups", Grouped, f.mse_loss, numbers, 3)
    traced = capture(Grouped, f.mse_loss, numbers(SAMPLES))
    (node,) = (n for n in traced.sizes.small.graph.nodes if "scaled_dot_product_attention" in str(n.target))
    assert node.args[3:] == (None, 0.0, True)
    assert node.kwargs == {"scale": 0.3, "enable_gqa": True}
    assert_same(case, traced, "split batch into 2 as mb\n")


def test_a_model_of_transformers_gets_no_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )

    def of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss(output.logits, target)

    graph = capture(lambda: transformers.LlamaForCausalLM(config), of_logits, batch(4)).sizes.small.graph
    found = [n.args[3:] for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert found == [(None, 0.0, True)] * 2
