"""Mixtures of experts of transformers, traced with `routed_linear`.

Their default implementation sorts the tokens of the whole batch by expert, which no part of a batch can do alone, and
whose experts cannot be divided over devices. It computes the same as one routed product per projection.

transformers' API, kept in this file: `ALL_EXPERTS_FUNCTIONS`, and the attributes that its decorator of expert modules
sets (tried on transformers 5.17 and 5.22)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from piperlang.capture.annotate import of_caller
from piperlang.capture.trace.routed import routed_linear

_REPLACED = ("grouped_mm", "batched_mm")


@contextmanager
def routed_experts() -> Iterator[None]:
    """While a model is traced. Nothing is imported: a model of transformers has imported it."""
    library = sys.modules.get("transformers.integrations.moe")
    table = getattr(library, "ALL_EXPERTS_FUNCTIONS", None)
    if table is None:
        yield
        return
    for name in _REPLACED:
        table[name] = _forward
    try:
        yield
    finally:
        for name in _REPLACED:
            del table[name]


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Like `grouped_mm_experts_forward`: `self` is a module of experts, the others have one row per token. The path of
    the module means the experts alone, which can be divided over devices, without the distribution of tokens."""
    tokens, choices = top_k_index.shape
    with of_caller():
        chosen = top_k_index.reshape(-1)
        rows = hidden_states.unsqueeze(1).expand(-1, choices, -1).reshape(tokens * choices, -1)
    up = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, chosen)
    done = _linear(self, "down_proj", self._apply_gate(up) if self.has_gate else self.act_fn(up), chosen)
    if getattr(self, "has_post_expert_norm", False):
        done = self.post_expert_norm(done)
    with of_caller():
        weighted = done * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def _linear(self: Any, name: str, rows: Tensor, chosen: Tensor) -> Tensor:
    weight = getattr(self, name)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    return routed_linear(rows, chosen, weight if self.is_transposed else weight.transpose(-2, -1), bias)
