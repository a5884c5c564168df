"""The gradient of a cross entropy is computed in the forward, in the place of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.autodiff.cross_entropy import linear_cross_entropy
from piperlang.capture.program import Program, capture
from tests.support.equivalence import SAMPLES, assert_same
from tests.support.models import Case

LENGTH, WIDTH, WORDS = 6, 8, 50
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Words(nn.Module):
    def __init__(self, bias: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.head.weight.requires_grad_(not frozen)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))  # type: ignore[no-any-return]


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(WORDS, (samples, LENGTH))
    return torch.randint(WORDS, (samples, LENGTH)), torch.where(torch.rand(target.shape) < 0.2, -100, target)


def mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(logits.flatten(0, 1), target.flatten())


def in_float32(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As libraries do it."""
    return f.cross_entropy(logits.view(-1, WORDS).float(), target.view(-1))


def summed(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return f.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def another_number_ignored(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(logits.flatten(0, 1), target.clamp(min=0).flatten(), ignore_index=0)


def shifted(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def smoothed(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def with_weights(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, WORDS)
    return f.cross_entropy(logits.flatten(0, 1), target.flatten(), weight)


def with_z_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mean(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def by_hand(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1))
    return -chosen.mean()


def reads_logits(passes: Any) -> bool:
    """Whether the backward computes the gradient of the logits, from them or their logarithm."""
    return any(node.target is torch.ops.aten._log_softmax_backward_data.default for node in passes.B.module.graph.nodes)


def last_passes(program: Program) -> Any:
    cut = program.cut()
    return cut.pass_graphs(len(cut.chunks) - 1, SAMPLES)


@pytest.mark.parametrize("loss", [mean, in_float32, summed, another_number_ignored], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}, {"frozen": True}], ids=str)
def test_the_backward_reads_neither_logits_nor_targets(options: dict[str, bool], loss: Loss) -> None:
    case = Case("words", lambda: Words(**options), loss, batch, 2)
    program = capture(case.model, case.loss, batch(SAMPLES))
    passes = last_passes(program)
    assert not reads_logits(passes)
    given = program.cut().chunks[-1].batch
    assert "flat_1" not in [given[i] for kind, i in passes.B.inputs if kind == "batch"]
    assert_same_sum(case, program)


def assert_same_sum(case: Case, program: Program) -> None:
    """A loss of a sum and a count is their quotient in plain training."""

    def quotient(output: Any, target: torch.Tensor) -> torch.Tensor:
        found: Any = case.loss(output, target)
        return found[0] / found[1] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    assert_same(Case(case.name, case.model, quotient, case.batch, case.stages), program, "")


def through_bfloat16(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The rounding is a part of the model."""
    return f.cross_entropy(logits.bfloat16().double().flatten(0, 1), target.flatten())


OTHERS = (shifted, smoothed, with_weights, with_z_loss, by_hand, through_bfloat16)


@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: loss.__name__)
def test_other_losses_stay_as_they_are(loss: Loss) -> None:
    case = Case("words", Words, loss, batch, 2)
    program = capture(case.model, case.loss, batch(SAMPLES))
    assert reads_logits(last_passes(program))
    assert_same(case, program, "")


def test_it_is_divided_as_ever() -> None:
    case = Case("words", Words, mean, batch, 2)
    program = capture(case.model, case.loss, batch(SAMPLES))
    data = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"
    for script in (
        "split batch into 4 as mb\n",
        data,
        "recompute [pass=*] with policy=cheap\n",
        "recompute [pass=*]\n",
    ):
        assert_same(case, program, script)


@pytest.mark.parametrize("loss", [mean, in_float32], ids=lambda loss: loss.__name__)
def test_half_precision_as_plain(loss: Loss) -> None:
    """The loss is bitwise that of plain bfloat16, and gradients are as near to float32's as its are."""

    def model() -> nn.Module:
        return Words().to(torch.bfloat16)

    torch.manual_seed(0)
    ids, target = torch.randint(WORDS, (SAMPLES, 255)), torch.randint(WORDS, (SAMPLES, 255))
    program = capture(model, loss, (ids, target))
    passes = last_passes(program)
    assert not reads_logits(passes)
    plain = model()
    exact = Words()
    exact.load_state_dict({name: value.float() for name, value in plain.state_dict().items()})
    for one in (plain, exact):
        loss(one(ids), target).backward()
    chunk = program.cut().chunks[-1]
    names = [program.sizes.small.weights[place].name for place in chunk.weights]
    weights = dict(plain.named_parameters())
    whole = torch.tensor(target.numel())
    values: dict[Any, Any] = {("weight", i): weights[name].detach() for i, name in enumerate(names)}
    for i, place in enumerate(chunk.batch):
        values["batch", i] = {"flat_0": ids, "flat_1": target}.get(place, whole)
    made = passes.F.run({slot: values[slot] for slot in passes.F.inputs})
    assert torch.equal(made["output", 0], loss(plain(ids), target).detach())
    values.update(made)
    values["grad_output", 0] = torch.ones_like(made["output", 0])
    grads = passes.B.run({slot: values[slot] for slot in passes.B.inputs})
    for i, name in enumerate(names):
        reference = dict(exact.named_parameters())[name].grad
        theirs = weights[name].grad
        assert reference is not None
        assert theirs is not None
        error, usual = ((one.float() - reference).norm() for one in (grads["grad_weight", i], theirs))
        assert error <= 1.5 * usual + 1e-6, name


def test_a_mean_over_many_targets_is_not_rounded_first() -> None:
    """In bfloat16, 1 / 1,020 is 0.4% more, and would make all gradients too long."""
    torch.manual_seed(0)
    x, weight = (torch.randn(size, WIDTH).to(torch.bfloat16).requires_grad_() for size in (1_020, WORDS))
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    target = torch.randint(WORDS, (1_020,))
    total = linear_cross_entropy(x, weight, None, target, -100, torch.float32)
    found = torch.autograd.grad(total / 1_020, (x, weight))
    for mine, theirs in zip(found, torch.autograd.grad(f.cross_entropy(f.linear(*exact), target), exact), strict=True):
        assert abs(float((mine.double() * theirs).sum() / theirs.square().sum()) - 1) < 1e-3


def pads(passes: Any) -> list[bool]:
    pad = torch.ops.aten.constant_pad_nd.default
    return [any(node.target is pad for node in one.module.graph.nodes) for one in (passes.F, passes.B)]


@pytest.mark.parametrize(("words", "padded"), [(1_031, True), (1_024, False), (WORDS, False)])
def test_rows_of_many_words_are_aligned(words: int, padded: bool) -> None:
    """Products of matrices are slow on a GPU if rows begin anywhere, and what one stage program gives to another is as
    the trace has it. Also where the backward recomputes what is cheap, the forward does this."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words))

    def pairs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(words, (samples, LENGTH)), torch.randint(words, (samples, LENGTH))

    cheap = "recompute [pass=*] with policy=cheap\n"
    program = capture(model, mean, pairs(SAMPLES))
    cut = program.cut()
    assert pads(cut.pass_graphs(0, SAMPLES)) == [padded, False]
    assert pads(cut.recomputing(frozenset([0])).pass_graphs(0, SAMPLES)) == [padded, False]
    case = Case("many words", model, mean, pairs, 1)
    for script in ("", cheap):
        assert_same(case, program, script)
