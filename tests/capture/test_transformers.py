"""Unmodified Hugging Face models, made from tiny configurations, cut by module path: alone and under schedules they
equal eager training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.autodiff.cut import cut
from piperlang.capture.autodiff.differentiate import differentiate
from piperlang.capture.program import capture
from piperlang.capture.trace.trace import trace
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.chunks import run, tag
from tests.support.equivalence import SAMPLES, assert_same, compiled, optimizer, relative
from tests.support.models import Case
from tests.support.transformers_models import LAYERS, WORDS, gpt2, llama, loss, qwen_moe


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(WORDS, (2, 6)), torch.randint(WORDS, (2, 6))


GPT2 = (
    gpt2,
    [("transformer", "wte"), ("transformer", "wpe")],
    ("transformer", "h"),
    [("transformer", "ln_f"), ("lm_head",)],
)
LLAMA = (llama, [("model", "embed_tokens")], ("model", "layers"), [("model", "norm"), ("lm_head",)])
QWEN = (qwen_moe, [("model", "embed_tokens")], ("model", "layers"), [("model", "norm"), ("lm_head",)])


def templates(*often: str) -> pytest.MarkDecorator:
    """The others are slow."""
    named = {"gpt2": GPT2, "llama": LLAMA, "qwen3-moe": QWEN}
    return pytest.mark.parametrize(
        ("model", "first", "layers", "last"),
        [pytest.param(*of, id=name, marks=() if name in often else pytest.mark.slow) for name, of in named.items()],
    )


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
@templates("gpt2")  # schedules of all of them are tried below, and in examples/07_hf_llama
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
    ("stages", "schedule", "level"), [pytest.param(2, "one_f_one_b", "params"), pytest.param(4, "zero_bubble", "grads")]
)
@pytest.mark.slow  # examples/07_hf_llama has Llama
@templates("gpt2")
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


EXPERTS = """
from std.data import ddp
from std.expert import ep
mesh gpu = dp: 2
tag stage=0 at model, lm_head
tag expert="all" at model.layers[*].mlp.experts
place [stage=*] on gpu
ddp(gpu.dp, [!expert])
ep(gpu.dp)
"""


@pytest.mark.slow
def test_experts_divided_by_module_path() -> None:
    ids = torch.randint(WORDS, (4, 6))
    graph, captured = compiled(capture(qwen_moe, loss, ({"input_ids": ids}, ids)), EXPERTS)
    model = qwen_moe()
    found = GraphInterpreter(graph, captured, model, optimizer).step(({"input_ids": ids}, ids))
    value = loss(model(input_ids=ids), ids)
    value.backward()  # type: ignore[no-untyped-call]
    assert found.loss == pytest.approx(value.item(), rel=1e-6)
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert max(relative(found.gradients[name], grad) for name, grad in trained.items()) < 1e-4
