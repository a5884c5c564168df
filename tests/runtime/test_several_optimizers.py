"""Several optimizers, and optimizers that need whole matrices, under ZeRO."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from piperlang.diagnostics import PiperError
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.reference.shards import ShardedWeights
from tests.support.equivalence import compiled
from tests.support.often import one_in
from tests.support.optimizer_jobs import (
    OWNED,
    REPLICAS,
    assert_equal,
    assert_same,
    plain,
    program,
    scheduled,
    threads,
    workers,
)


class Orthogonal(optim.Optimizer):
    """What Muon does, exactly: the singular values of a matrix's gradient become 1."""

    per_parameter = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.ndim == 2
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.mul_(0.9).add_(parameter.grad)
                    u, _, v = torch.linalg.svd(average, full_matrices=False)
                    parameter.sub_(group["lr"] * u @ v)


def matrices_and_rest(kind: Any, params: Any) -> list[optim.Optimizer]:
    params = list(params.parameters() if isinstance(params, nn.Module) else params)
    learning = [p for p in params if p.requires_grad]
    return [
        kind([p for p in learning if p.ndim == 2], lr=0.02),
        optim.AdamW([p for p in learning if p.ndim != 2], lr=0.01),
    ]


def slower(optimizers: list[optim.Optimizer]) -> list[Any]:
    return [lr_scheduler.ExponentialLR(one, 0.5**i) for i, one in enumerate(optimizers, 1)]


both = partial(matrices_and_rest, Orthogonal)


@pytest.mark.parametrize("script", one_in(3, [name for name in OWNED if name != "columns"]))
def test_whole_matrices_under_zero(script: str) -> None:
    assert_same(f"owned {script}", both, both, slower)


def test_whole_matrices_on_workers(cluster: Cluster) -> None:
    assert_equal(workers(cluster, "owned pp weights", both, slower), plain(both, slower))


def test_muon() -> None:
    """It computes in bfloat16, in which rounding differs."""
    made = partial(matrices_and_rest, optim.Muon)
    found = threads("owned gradients", made)
    for name, value in plain(made).items():
        assert torch.allclose(found[name], value, rtol=0, atol=2e-3), name


def test_two_elementwise_optimizers_under_zero() -> None:
    made = partial(matrices_and_rest, partial(optim.SGD, momentum=0.9))
    for script in ("zero3", "pp zero1"):
        assert_same(script, made, made, slower)


def test_every_device_has_some_of_the_weights() -> None:
    """By bytes, as even as whole weights allow: the states of an optimizer are what ZeRO-1 saves."""
    graph, _, _ = scheduled("owned states")
    zeros = {name: torch.zeros(weight.shape) for name, weight in graph.model.weights.items()}
    sizes: dict[int, int] = {}
    for update in ShardedWeights(graph, zeros).updates():
        sizes[update.device] = sizes.get(update.device, 0) + sum(part.now.numel() for part in update.parts)
    assert len(sizes) == 3
    assert max(sizes.values()) <= 1.5 * sum(sizes.values()) / 3


def test_whole_matrices_need_whole_weights() -> None:
    with pytest.raises(PiperError) as raised:
        threads("zero1", both)
    (problem,) = raised.value.diagnostics
    assert problem.code == "P0601"
    assert "partition=weights" in problem.helps[0]
    with pytest.raises(PiperError, match="needs unsharded weights"):
        threads("owned columns", both)


class Counting(optim.SGD):
    """Slower from step to step, by a count that all instances share."""

    elementwise, steps = True, 0

    def step(self, closure: Any = None) -> None:
        Counting.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / Counting.steps
        super().step()


def counting(params: Any) -> optim.Optimizer:
    return Counting(params, lr=0.1)


def test_a_count_that_copies_share(cluster: Cluster) -> None:
    """Also where a device has a process of its own: it has a copy for each of its buckets."""
    for train in (threads, partial(workers, cluster)):
        with pytest.raises(PiperError, match="class `Counting` changes in every step of the optimizer"):
            train("owned gradients", counting)


def test_partition_without_zero() -> None:
    with pytest.raises(PiperError, match="`partition=weights` requires sharded states"):
        compiled(program(), f"{REPLICAS} with partition=weights\n")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[]", "`optimizer` returns list"),
        ("[torch.optim.SGD(params, lr=0.1), None]", "`optimizer` returns a list with a NoneType"),
        ("[torch.optim.SGD(params, lr=0.1)] * 2", "two optimizers train"),
    ],
)
def test_lists_that_cannot_be_used(returned: str, message: str) -> None:
    def make(params: Any) -> Any:
        return eval(returned, {"torch": torch, "params": params})

    with pytest.raises(PiperError, match=message):
        threads("ddp", make)
