"""Routed products as they are compiled for a GPU: one sort for each choice, the same numbers as the operators. Here on
CPU, whose grouped product computes the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from piperlang.capture.trace.routed import routed_linear
from piperlang.runtime.device import grouped
from piperlang.runtime.device.compiled import _by_inductor
from piperlang.runtime.device.grouped import with_groups

COUNT, EXPERTS = 48, 4
NEAR = {"rtol": 2e-2, "atol": 2e-2}
"""For bfloat16."""


@pytest.fixture(autouse=True)
def also_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "grouped", lambda first, second: True)


def experts(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Sequence[Tensor]:
    """What two projections of all experts compute, and all gradients."""
    leaves = [one.detach().requires_grad_() for one in (x, up, down)]
    rows, *weights = leaves
    done = routed_linear(torch.relu(routed_linear(rows, chosen, weights[0])), chosen, weights[1].transpose(1, 2))
    return done.detach(), *torch.autograd.grad((done * done).sum(), leaves)


def given(chosen: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rows, up, down = torch.randn(COUNT, 8), torch.randn(EXPERTS, 8, 16) / 4, torch.randn(EXPERTS, 8, 16) / 4
    return rows.bfloat16(), chosen, up.bfloat16(), down.bfloat16()


def sorts(module: fx.GraphModule, taken: Sequence[Tensor]) -> int:
    traced = make_fx(module)(*taken)
    return sum(node.target is torch.ops.aten.sort.stable for node in traced.graph.nodes)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_same_numbers_from_one_sort(compiles: bool) -> None:
    taken = given(torch.randint(EXPERTS, (COUNT,), generator=torch.Generator().manual_seed(1)))
    module = make_fx(experts)(*taken)
    changed = with_groups(module)
    assert "piper.routed" in module.code
    assert "piper.routed" not in make_fx(changed)(*taken).code
    assert sorts(changed, taken) == 1
    found = _by_inductor(changed, list(taken))(list(taken)) if compiles else changed(*taken)
    for got, expected in zip(found, experts(*taken), strict=True):
        torch.testing.assert_close(got, expected, **NEAR)


def test_an_expert_without_rows() -> None:
    taken = given(torch.full((COUNT,), 2))
    for got, expected in zip(with_groups(make_fx(experts)(*taken))(*taken), experts(*taken), strict=True):
        torch.testing.assert_close(got, expected, **NEAR)


def test_two_choices_are_sorted_apart() -> None:
    def both(x: Tensor, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
        return routed_linear(x, first, weight) + routed_linear(x, second, weight)

    torch.manual_seed(0)
    rows, weight = torch.randn(COUNT, 8).bfloat16(), torch.randn(EXPERTS, 8, 8).bfloat16()
    taken = rows, torch.arange(COUNT) % EXPERTS, torch.arange(COUNT) % 3, weight
    changed = with_groups(make_fx(both)(*taken))
    assert sorts(changed, taken) == 2
    torch.testing.assert_close(changed(*taken), both(*taken), **NEAR)


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 1 << 16])
def test_a_row_without_an_expert_is_not_a_number(wrong: int) -> None:
    chosen = torch.arange(COUNT) % EXPERTS
    taken = given(chosen)
    module = with_groups(make_fx(lambda x, chosen, up, down: routed_linear(x, chosen, up))(*taken))
    chosen[5] = wrong
    found = module(*taken)
    assert found[5].isnan().all()
    assert found.isnan().any(1).sum() == 1


def test_a_graph_without_routed_products_stays() -> None:
    module = make_fx(torch.relu)(torch.ones(2))
    assert with_groups(module) is module
