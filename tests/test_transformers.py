"""Unmodified Hugging Face models, made from tiny configurations, cut by module path: alone and under schedules they
equal eager training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.cut import cut
from piperlang.capture.differentiate import differentiate
from piperlang.capture.program import capture
from piperlang.capture.trace import trace
from tests.equivalence import SAMPLES, assert_same
from tests.models import Case
from tests.test_capture import relative, run, tag

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


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(WORDS, (2, 6)), torch.randint(WORDS, (2, 6))


FAMILIES = pytest.mark.parametrize(
    ("model", "first", "layers", "last"),
    [
        (
            gpt2,
            [("transformer", "wte"), ("transformer", "wpe")],
            ("transformer", "h"),
            [("transformer", "ln_f"), ("lm_head",)],
        ),
        (llama, [("model", "embed_tokens")], ("model", "layers"), [("model", "norm"), ("lm_head",)]),
        (qwen_moe, [("model", "embed_tokens")], ("model", "layers"), [("model", "norm"), ("lm_head",)]),
    ],
    ids=["gpt2", "llama", "qwen3-moe"],
)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
@FAMILIES
def test_captured_by_module_path(
    model: Callable[[], nn.Module], first: list[Any], layers: tuple[str, ...], last: list[Any], stages: int
) -> None:
    per = LAYERS // stages
    tags = [tag("stage", s, (*layers, (s * per, (s + 1) * per))) for s in range(stages)]
    tags += [tag("stage", 0, *first), tag("stage", stages - 1, *last)]
    traced = trace(model, loss, batch())
    chunks = cut(traced, tags)
    assert {dict(c.tags)["stage"] for c in chunks} == set(range(stages))
    torch.manual_seed(1)
    real = model()
    expected = loss(real(batch()[0]), batch()[1])
    expected.backward()
    got, grads = run(traced, chunks, differentiate(traced, chunks), real, batch(), halves=True)
    assert got == pytest.approx(expected.item(), rel=1e-5)
    trained = {n: p.grad for n, p in real.named_parameters() if p.grad is not None}
    assert set(grads) == set(trained)
    assert max(relative(grads[n], g) for n, g in trained.items()) < 1e-5


SCHEDULE = """
from std.pipeline import {schedule}, loop
mesh gpu = pp: {stages}, dp: 2
loop(gpu, {stages})
split batch into 4 as mb
replicate [pass=*] over gpu.dp with {level}=sharded
{schedule}(gpu, {stages}, 4)
"""


@pytest.mark.parametrize(
    ("stages", "schedule", "level"),
    [(2, "one_f_one_b", "params"), pytest.param(4, "zero_bubble", "grads", marks=pytest.mark.slow)],
)
@FAMILIES
def test_scheduled_by_module_path(
    model: Callable[[], nn.Module],
    first: list[Any],
    layers: tuple[str, ...],
    last: list[Any],
    stages: int,
    schedule: str,
    level: str,
) -> None:
    per = LAYERS // stages
    tags = [f"tag stage={s} at {'.'.join(layers)}[{s * per}:{(s + 1) * per}]" for s in range(stages)]
    tags += [f"tag stage=0 at {'.'.join(path)}" for path in first] + [
        f"tag stage={stages - 1} at {'.'.join(path)}" for path in last
    ]
    case = Case("transformers", model, lambda output, target: loss(output, target), words, stages)
    assert_same(
        case,
        capture(case.model, case.loss, words(SAMPLES)),
        "\n".join(tags) + SCHEDULE.format(schedule=schedule, stages=stages, level=level),
    )


def words(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (samples, 6)), torch.randint(WORDS, (samples, 6))
