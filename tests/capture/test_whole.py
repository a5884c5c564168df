"""Losses that are exact only if something is known of the whole batch: counts of targets, sums of means and sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang import annotate
from piperlang.capture.program import capture
from piperlang.diagnostics import PiperError
from tests.support.equivalence import LIMIT, compiled, differences
from tests.support.models import Case
from tests.support.often import one_in

CLASSES, WIDE = 5, 6
SCRIPT = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nsplit batch into 2 as mb\nreplicate [pass=*] over gpu.dp\n"
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, CLASSES)
        self.register_buffer("importance", WEIGHTS.clone())

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(x))), self.importance, self.first.weight


def words(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first samples have more targets that are ignored than the last ones."""
    target = torch.randint(CLASSES, (samples, 4))
    target[torch.rand(samples, 4) > torch.linspace(0.3, 0.9, samples)[:, None]] = -100
    return torch.randn(samples, 4, WIDE), target


def scores(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output[0].flatten(0, 1), target.flatten()


def entropy(output: Any, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return f.cross_entropy(*scores(output, target), **options)


def z_loss(output: Any) -> torch.Tensor:
    return output[0].logsumexp(-1).square().mean()  # type: ignore[no-any-return]


def slots() -> torch.Tensor:
    """Zeros that are written are no zeros."""
    made = torch.zeros(2)
    made[0] = 1
    return made


def one_hot(target: torch.Tensor) -> torch.Tensor:
    return (target[..., None] == torch.arange(CLASSES)).float()


def normalized(target: torch.Tensor) -> torch.Tensor:
    """One value of the whole batch depends on another."""
    kept = target.clamp(min=0).float()
    return (kept - kept.mean()) / (kept - kept.mean()).square().mean().sqrt()


def counts(target: torch.Tensor) -> torch.Tensor:
    made = torch.ones(2)
    made[0] = (target == -100).sum()
    made[1] += (target != -100).sum()
    return made


def masked(output: Any, target: torch.Tensor) -> torch.Tensor:
    mask = target != -100
    return (output[0].square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def centred(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Targets are compared with their mean over the batch."""
    kept = target.clamp(min=0).float()
    return (output[0].sum(-1) * (kept - kept.mean())).mean()


LOSSES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "cross entropy": entropy,
    "scaled": lambda o, t: 2 * entropy(o, t),
    "label smoothing": lambda o, t: entropy(o, t, label_smoothing=0.1),
    "class weights of the file": lambda o, t: entropy(o, t, weight=WEIGHTS),
    "class weights of the model": lambda o, t: entropy(o, t, weight=o[1]),
    "weights and smoothing": lambda o, t: entropy(o, t, weight=o[1], label_smoothing=0.2),
    "another ignored index": lambda o, t: entropy(o, t.clamp(min=0), ignore_index=0),
    "negative log likelihood": lambda o, t: f.nll_loss(o[0].log_softmax(-1).flatten(0, 1), t.flatten()),
    "classes second": lambda o, t: f.cross_entropy(o[0].transpose(1, 2), t),
    "two cross entropies": lambda o, t: entropy(o, t) + 0.1 * entropy(o, t.clamp(min=0), ignore_index=0),
    "z loss": lambda o, t: entropy(o, t) + 0.1 * z_loss(o),
    "z loss first": lambda o, t: 0.1 * z_loss(o) + entropy(o, t),
    "z loss of bfloat16": lambda o, t: entropy(o, t) + (0.1 * z_loss(o)).bfloat16(),
    "L2 of a weight": lambda o, t: entropy(o, t) + 0.1 * o[2].square().sum(),
    "four terms": lambda o, t: entropy(o, t) + z_loss(o) + masked(o, t) + 0.1 * o[2].abs().sum(),
    "a dict of terms": lambda o, t: {"entropy": entropy(o, t), "z": 0.1 * z_loss(o)},
    "stacked terms": lambda o, t: torch.stack([entropy(o, t), z_loss(o)]).sum(),
    "masked mean": masked,
    "masked mean of masked means": lambda o, t: masked(o, t) + 0.5 * z_loss(o),
    "a mask divides every loss": lambda o, t: (o[0].square().sum(-1) * (t != -100) / (t != -100).sum()).sum(),
    "centred targets": centred,
    "sum and mean": lambda o, t: o[0].sum() + z_loss(o),
    "sum and count": lambda o, t: (entropy(o, t, reduction="sum"), (t != -100).sum()),
    "root of the number of samples": lambda o, t: o[0].square().sum() / torch.tensor(math.sqrt(len(t))),
    "constants written into zeros": lambda o, t: (slots() + o[0].square().sum()).sum(),
    "counts written into zeros": lambda o, t: (o[0].square().sum() / counts(t)).sum(),
    "class weights from counts": lambda o, t: entropy(o, t, weight=1 / (one_hot(t).sum((0, 1)) + 1)),
    "targets of unit variance": lambda o, t: (o[0].square().sum(-1) * normalized(t)).mean(),
    "number of samples": lambda o, t: (o[0].square().sum(), torch.tensor(float(len(t)))),
}


def value_of(result: Any) -> torch.Tensor:
    if isinstance(result, tuple):
        return result[0] / result[1]  # type: ignore[no-any-return]
    return sum(result.values()) if isinstance(result, dict) else result  # type: ignore[return-value]


@pytest.mark.parametrize("name", one_in(8, LOSSES))
def test_divided_and_whole_batches_give_the_same(name: str) -> None:
    traced = capture(Layers, LOSSES[name], words(8))
    graph, captured = compiled(traced, SCRIPT)
    assert all(chunk.mixing is None for chunk in graph.model.chunks)
    case = Case(name, Layers, lambda o, t: value_of(LOSSES[name](o, t)), words, 1)
    limit = 1e-2 if "bfloat16" in name else LIMIT
    assert max(differences(case, traced, graph, captured)) < limit


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: (entropy(o, t), z_loss(o)), "the count of the loss depends on the model"),
        (lambda o, t: {"loss": entropy(o, t), "z": z_loss(o)}, "a dict that has `loss` and other entries"),
        (lambda o, t: {"entropy": entropy(o, t), "logits": o[0]}, "the entry 'logits'"),
        (lambda o, t: {"entropy": entropy(o, t), "z": 0.0}, "the entry 'z'"),
        (lambda o, t: (entropy(o, t), z_loss(o), z_loss(o)), "returned a tuple"),
    ],
)
def test_results_of_a_loss_that_mean_nothing_certain(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(PiperError, match=message) as refused:
        capture(Layers, loss, words(8))
    assert refused.value.diagnostics[0].code == "P0807"
    assert refused.value.diagnostics[0].helps


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: entropy(o, o[0].argmax(-1)), "a mean over targets, some of which may be ignored"),
        (lambda o, t: (o[0] * (o[0] > 0)).sum() / (o[0] > 0).sum(), "divides by a sum over the samples"),
        (lambda o, t: entropy(o, t).sqrt(), "sqrt is applied to a sum over the samples"),
        (lambda o, t: o[0].mean() * o[0].square().mean(), "multiplies a mean over the samples"),
    ],
)
def test_what_depends_on_the_model_stays_refused(loss: Callable[..., Any], message: str) -> None:
    traced = capture(Layers, loss, words(8))
    with pytest.raises(PiperError, match=message):
        compiled(traced, SCRIPT)


def test_a_batch_without_targets_that_count() -> None:
    x, target = words(8)
    captured = capture(Layers, entropy, (x, target)).cut()
    with pytest.raises(PiperError, match="count of the loss is 0"):
        captured.layout.flatten((x, torch.full_like(target, -100)))


class Auxiliary(nn.Module):
    """A term of the loss from an early stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        with annotate("stage", 0):
            h = torch.tanh(self.first(x))
            term, penalty = h.square().mean(), self.first.weight.square().sum()
        with annotate("stage", 1):
            return self.last(h), term, penalty


PIPELINE = (
    "from std.pipeline import one_f_one_b, loop\nmesh gpu = pp: 2\nloop(gpu, 2)\nsplit batch into 2 as mb\n"
    "one_f_one_b(gpu, 2, 2)\n"
)
PLACES = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"
TERMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "after": lambda o, t: entropy(o, t) + o[1],
    "scaled, after": lambda o, t: entropy(o, t) + 0.1 * o[1],
    "before": lambda o, t: 0.1 * o[1] + entropy(o, t),
    "penalty": lambda o, t: entropy(o, t) + 0.1 * o[2],
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_an_early_stage(name: str) -> None:
    traced = capture(Auxiliary, TERMS[name], words(8))
    graph, captured = compiled(traced, PIPELINE)
    assert max(differences(Case(name, Auxiliary, TERMS[name], words, 2), traced, graph, captured)) < LIMIT


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", TERMS)
def test_stages_that_have_different_parts_of_the_batch(name: str, stage: int) -> None:
    """What depends on all samples of a part cannot be passed to a chunk with other parts."""
    traced = capture(Auxiliary, TERMS[name], words(8))
    with pytest.raises(PiperError, match="cannot be redistributed") as refused:
        compiled(traced, f"{PLACES}split [stage={stage}] into 2 as mb\n")
    assert "depends on which samples are in a part of the batch" in refused.value.diagnostics[0].notes[0]
