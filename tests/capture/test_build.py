"""How a model is built to be traced: without storage for its parameters where that is possible."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.autodiff.cut import cut
from piperlang.capture.trace.build import build
from piperlang.capture.trace.rewritten import attention
from piperlang.capture.trace.trace import trace
from piperlang.diagnostics import PiperError
from tests.support.chunks import tag

WIDTH = 4


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_only_parameters_are_without_storage() -> None:
    built = build(Plain, seed=0)
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert torch.equal(built.model.scale, torch.linspace(0, 1, WIDTH))  # type: ignore[arg-type]
    assert not built.differs


class ReadsWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = float(self.layer.weight.norm())


class ReadsDraw(Plain):
    """Draws after the weight, and decides by what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = torch.rand(3).tolist()


@pytest.mark.parametrize("model", [ReadsWeight, ReadsDraw])
def test_a_constructor_that_reads_values_builds_for_real(model: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    expected = model()
    found = build(model, seed=5).model
    assert torch.equal(found.layer.weight, expected.layer.weight)  # type: ignore[union-attr, arg-type]
    assert getattr(found, "norm", None) == getattr(expected, "norm", None)
    assert getattr(found, "choice", None) == getattr(expected, "choice", None)


def test_the_generators_are_left_as_they_were() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build(ReadsDraw, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_of_the_file_keeps_its_tensors() -> None:
    kept = Plain()
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    traced = trace(lambda: kept, square, batch())
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    assert traced.constants.keys() == {"layer.weight", "layer.bias", "scale"}


def test_a_parameter_and_a_buffer_of_the_file_keep_their_values() -> None:
    weight, table = nn.Parameter(torch.arange(4.0)), torch.arange(4.0)

    class Uses(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight
            self.register_buffer("table", copy.deepcopy(table))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight + self.table

    traced = trace(Uses, square, batch())
    assert torch.equal(weight, torch.arange(4.0))
    assert {name: value.tolist() for name, value in traced.constants.items()} == {
        "weight": [0, 1, 2, 3],
        "table": [0, 1, 2, 3],
    }
    assert nn.Parameter(torch.ones(1)).device.type == "cpu"  # nothing is left behind


def test_a_cached_model_is_refused() -> None:
    cached = functools.cache(Plain)
    trace(cached, square, batch())
    with pytest.raises(PiperError, match="earlier call") as refused:
        trace(cached, square, batch())
    assert refused.value.diagnostics[0].code == "P0801"


class Shared(nn.Module):
    """One embedding under three names, called by encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.Sequential(self.shared, nn.Tanh())
        self.decoder = nn.Sequential(self.shared, nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("tags", "stages"),
    [
        (
            [tag("stage", 0, ("encoder",)), tag("stage", 1, ("decoder",))],
            [[0, "linear", "tanh"], [1, "linear", "sigmoid"]],
        ),
        ([tag("stage", 0, ("shared",))], [[0, "linear", "tanh", "linear", "sigmoid"]]),
        (
            [tag("stage", 0, ("encoder",)), tag("stage", 1, ("decoder",)), tag("stage", 2, ("decoder", 0))],
            [[2, "linear"], [0, "tanh"], [2, "linear"], [1, "sigmoid"]],
        ),
    ],
)
def test_a_module_answers_to_all_its_paths(tags: list[Any], stages: list[list[Any]]) -> None:
    found = [
        [dict(chunk.tags)["stage"], *(node.name.rstrip("_1") for node in chunk.nodes)]
        for chunk in cut(trace(Shared, square, batch()), tags)
    ]
    assert [one[: len(wanted)] for one, wanted in zip(found, stages, strict=True)] == stages


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention_written_out(causal: bool, mask: str) -> None:
    """With so little dropout that nothing is dropped."""
    if causal and mask != "none":
        pytest.skip("torch allows one of them")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    allowed = torch.rand(5, 5) > 0.4
    allowed[2] = False  # attends to nothing
    given = {"none": None, "bool": allowed, "float": torch.zeros(5, 5).masked_fill(~allowed, -torch.inf)}[mask]
    results = []
    for function, p in ((nn.functional.scaled_dot_product_attention, 0.0), (attention, 1e-12)):
        done = function(q, k, v, given, p, causal, enable_gqa=True)
        results.append((done, *torch.autograd.grad(done.square().sum(), (q, k, v))))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)
