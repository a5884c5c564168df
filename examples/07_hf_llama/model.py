"""A Llama from the transformers library as it is there: a tiny configuration, random weights, and no line in it about
schedules."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS, WORDS, LENGTH, SAMPLES = 4, 16, 12, 32


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss(output: Any, target: Tensor) -> Tensor:
    return f.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count up by a step of their own, modulo the number of words; the target is the word that comes
    next."""
    while True:
        start, step = torch.randint(WORDS, (SAMPLES, 1)), torch.randint(1, WORDS // 2, (SAMPLES, 1))
        words = (start + step * torch.arange(LENGTH + 1)) % WORDS
        yield words[:, :-1], words[:, 1:]


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)
