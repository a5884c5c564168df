"""The models of one_gpu.py, in bfloat16: a GPT with a stage for every block, and models of transformers as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (t.view(samples, length, self.heads, -1).transpose(1, 2) for t in parts)
        attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(f.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, width: int = 2048, heads: int = 16, layers: int = 16, length: int = 2048) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for i, block in enumerate(self.blocks):
            with annotate("stage", i + 1):
                x = block(x)
        with annotate("stage", len(self.blocks) + 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]


WORDS = 32_000


def llama() -> nn.Module:
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    made: nn.Module = library.LlamaForCausalLM(config)
    return made


def moe() -> nn.Module:
    import transformers

    library: Any = transformers
    config = library.Qwen3MoeConfig(
        vocab_size=WORDS,
        hidden_size=1024,
        intermediate_size=2816,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        use_cache=False,
    )
    made: nn.Module = library.Qwen3MoeForCausalLM(config)
    return made


def gpt2() -> nn.Module:
    import transformers

    library: Any = transformers
    config = library.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    made: nn.Module = library.GPT2LMHeadModel(config)
    return made


@dataclass(frozen=True)
class Model:
    """The model of a benchmark, made the same by everybody."""

    make: Callable[[], nn.Module]
    batch: int
    length: int

    def __call__(self) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return self.make()
        finally:
            torch.set_default_dtype(before)

    def inputs(self, step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(step)
        ids = torch.randint(WORDS, (self.batch, self.length + 1))
        return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


MODELS = {
    "gpt": Model(Gpt, 8, 2048),
    "llama": Model(llama, 8, 2048),
    "moe": Model(moe, 4, 1024),
    "gpt2": Model(gpt2, 4, 512),
}


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return f.cross_entropy(logits.flatten(0, 1), target.flatten())
