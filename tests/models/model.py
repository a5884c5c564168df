"""What a library model is: how to build it small, what it trains on, and how a script divides it into two stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from tests.habits.habit import SAME, SAMPLES, Habit

WORDS, LENGTH, CLASSES, PIXELS = 64, 8, 5, 32
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Names that most configurations share. Everything else has its default."""


def tokens(step: int) -> tuple[Any, Any]:
    return torch.randint(3, WORDS, (SAMPLES, LENGTH)), torch.randint(3, WORDS, (SAMPLES, LENGTH))


def sentences(step: int) -> tuple[Any, Any]:
    """For classification of whole texts."""
    return torch.randint(3, WORDS, (SAMPLES, LENGTH)), torch.randint(CLASSES, (SAMPLES,))


def pairs(step: int) -> tuple[Any, Any]:
    """For an encoder and a decoder."""
    source, target = torch.randint(3, WORDS, (SAMPLES, LENGTH)), torch.randint(3, WORDS, (SAMPLES, LENGTH - 2))
    return {"input_ids": source, "decoder_input_ids": target}, torch.randint(3, WORDS, (SAMPLES, LENGTH - 2))


def pictures(step: int) -> tuple[Any, Any]:
    return torch.randn(SAMPLES, 3, PIXELS, PIXELS), torch.randint(CLASSES, (SAMPLES,))


def words(output: Any, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def classes(output: Any, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output if isinstance(output, torch.Tensor) else output.logits, target)


@dataclass(frozen=True)
class LibraryModel:
    habit: Habit
    stages: tuple[str, str]
    """Module paths of the two stages, as a script writes them."""
    experts: str = ""
    """Module paths of its experts."""


MODELS: dict[str, LibraryModel] = {}


def add(
    name: str,
    make: Callable[[], nn.Module],
    first: str,
    last: str,
    expected: str = SAME,
    batch: Callable[[int], tuple[Any, Any]] = tokens,
    loss: Callable[[Any, Any], Any] = words,
    limit: float = 1e-4,
    experts: str = "",
    **others: Any,
) -> None:
    assert name not in MODELS, name
    habit = Habit(
        name, "models", make, expected, batch=batch, loss=loss, dropout=True, limit=limit, floor=1e-4, **others
    )
    MODELS[name] = LibraryModel(habit, (first, last), experts)


def named(library: Any, config: str, model: str, sizes: dict[str, Any] | None = None, **changed: Any) -> Any:
    """A model of transformers, built from its configuration."""

    def make() -> nn.Module:
        options = {**(SIZES if sizes is None else sizes), **changed}
        made: nn.Module = getattr(library, model)(getattr(library, config)(**options))
        return made

    return make
