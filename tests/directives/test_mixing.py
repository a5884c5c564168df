"""Models that mix samples in some chunks: those have the whole batch, and others may divide it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.diagnostics import PiperError
from tests.support.equivalence import SAMPLES, assert_same, compiled
from tests.support.models import WIDTH, Case
from tests.support.often import one_in


class Encoders(nn.Module):
    """Two encoders, and a temperature that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 8))
        self.text = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, pair: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with annotate("stage", 0):
            images = self.image(pair[:, 0])
        with annotate("stage", 1):
            texts = self.text(pair[:, 1])
        return images, texts, self.scale


def pairs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 2, WIDTH), torch.rand(samples)


def contrastive(output: Any, target: torch.Tensor) -> torch.Tensor:
    images, texts, scale = output
    with annotate("stage", 2):
        scores = scale.exp() * f.normalize(images, dim=-1) @ f.normalize(texts, dim=-1).T
        places = torch.arange(len(scores))
        return (f.cross_entropy(scores, places) + f.cross_entropy(scores.T, places)) / 2


def triplets(output: Any, target: torch.Tensor) -> torch.Tensor:
    images, texts, scale = output
    with annotate("stage", 2):
        return f.triplet_margin_loss(images, texts, images.roll(1, 0)) * scale


def root(output: Any, target: torch.Tensor) -> torch.Tensor:
    images, texts, scale = output
    with annotate("stage", 2):
        return ((images - texts).square().mean(-1) * target).mean().sqrt() * scale


def normed(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Statistics of the batch in one chunk, and a chunk after it."""
    images, texts, scale = output
    with annotate("stage", 2):
        images = images / (images.square().mean(0) + 0.1).sqrt()
    with annotate("stage", 3):
        return ((images - texts).square().mean(-1) * target).mean() * scale


LOSSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "contrastive": contrastive,
    "triplets": triplets,
    "root of the mean": root,
    "statistics of the batch": normed,
}
SCRIPTS = {
    "replicas": (
        "mesh gpu = dp: 2\nplace [stage=0:2] on gpu\nplace [stage=2:] on gpu[dp=0]\nreplicate [stage=0:2] over gpu.dp\n"
    ),
    "a pipeline with ZeRO-3 and microbatches": (
        "mesh gpu = pp: 2, dp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"
        "place [stage=2:] on gpu[pp=1, dp=1]\nreplicate [stage=0:2] over gpu.dp with params=sharded\n"
        "split [stage=0:2] into 2 as mb\n"
    ),
    "one encoder only": "mesh gpu = pp: 1\nplace [stage=*] on gpu\nsplit [stage=1] into 4 as mb\n",
}


@cache
def traced(loss: str) -> tuple[Case, Program]:
    torch.manual_seed(0)
    case = Case(loss, Encoders, LOSSES[loss], pairs, 3)
    return case, capture(case.model, case.loss, case.batch(SAMPLES))


@pytest.mark.parametrize("case", one_in(2, [(loss, script) for loss in LOSSES for script in SCRIPTS]), ids=" ".join)
def test_the_same_as_plain(case: tuple[str, str]) -> None:
    loss, script = case
    assert_same(*traced(loss), SCRIPTS[script])


SUMMED = ("root of the mean", "statistics of the batch")
"""Losses that compute with sums over the samples: devices can add them up."""


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (loss, line)
        for line in ("split batch into 2 as mb", "split [stage=2] into 2 as mb", "replicate [stage=2] over gpu.dp")
        for loss in LOSSES
        if loss not in SUMMED or line.startswith("split")
    ],
)
def test_a_chunk_that_mixes_samples_is_not_divided(loss: str, line: str) -> None:
    script = "mesh gpu = dp: 2\nplace [stage=*] on gpu\n"
    with pytest.raises(PiperError) as found:
        compiled(traced(loss)[1], script + line)
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0805"
    assert diagnostic.label == "divides the batch of stage=2 here"
    assert "or divide the batch of the other chunks only: [stage=0], ..." in diagnostic.helps


# --------------------------------------------------------------- values that every part of the batch has for its own


class Handed(nn.Module):
    """One chunk makes a value that the next one uses."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make = make
        self.layer, self.scale = nn.Linear(WIDTH, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with annotate("stage", 0):
            hidden = self.layer(x)
            made = self.make(hidden)
        with annotate("stage", 1):
            return hidden * self.scale, made


def added(output: Any, target: torch.Tensor) -> torch.Tensor:
    hidden, made = output
    with annotate("stage", 1):
        each = hidden.sum(-1, keepdim=True) * target[:, None]
        return each.mean() + (made * each).sum()


def picked(output: Any, target: torch.Tensor) -> torch.Tensor:
    hidden, places = output
    with annotate("stage", 1):
        return (hidden[places, torch.zeros_like(places)] * target).mean()


OWN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "divided by the number of samples": (lambda hidden: hidden / len(hidden), added),
    "one over the number of samples": (lambda hidden: torch.full((len(hidden), 1), 1 / len(hidden)), added),
    "positions of samples": (lambda hidden: torch.arange(len(hidden)), picked),
}


@pytest.mark.parametrize("name", OWN)
def test_a_value_of_a_part_is_read_by_the_same_part(name: str) -> None:
    """A chunk that divides the batch otherwise would read other numbers: of a part as if they were of the batch."""
    make, loss = OWN[name]
    torch.manual_seed(0)
    case = Case(name, lambda: Handed(make), loss, lambda n: (torch.randn(n, WIDTH), torch.rand(n)), 2)
    program = capture(case.model, case.loss, case.batch(SAMPLES))
    assert_same(case, program, "mesh gpu = dp: 1\nplace [stage=*] on gpu\nsplit batch into 2 as mb\n")
    assert_same(case, program, "mesh gpu = dp: 2\nplace [stage=*] on gpu\nreplicate [stage=*] over gpu.dp\n")
    for script in (
        "mesh gpu = dp: 2\nplace [stage=0] on gpu\nplace [stage=1] on gpu[dp=0]\nreplicate [stage=0] over gpu.dp\n",
        "mesh gpu = dp: 1\nplace [stage=*] on gpu\nsplit [stage=0] into 2 as mb\n",
    ):
        with pytest.raises(PiperError) as found:
            compiled(program, script)
        assert found.value.diagnostics[0].code == "P0411"
