"""Unmodified Hugging Face models, made from tiny configurations. Without the package, a test that imports
this is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

LAYERS, WORDS = 4, 64


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=LAYERS,
        n_head=2,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def qwen_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="batched_mm",
    )
    return transformers.Qwen3MoeForCausalLM(config)


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
