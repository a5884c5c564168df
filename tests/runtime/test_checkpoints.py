"""A checkpoint has the state of training by weight and index range: any schedule continues from it, and the same
schedule continues bit by bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from piperlang.diagnostics import PiperError
from piperlang.runtime.driver.restoring import Restore
from tests.support.checkpoints import assert_same, contents, job, save, steps
from tests.support.often import one_in
from tests.support.optimizer_jobs import OWNED, SCRIPTS

LAYOUTS = [*SCRIPTS, *(f"owned {name}" for name in OWNED)]


def adam(params: Any) -> optim.Optimizer:
    weights = [p for p in params if p.dim() > 1]
    others = [p for p in params if p.dim() <= 1]
    return optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=0.01)


def warm(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints after two steps under every layout."""

    @cache
    def of(layout: str) -> Path:
        with job(layout, adam, warm) as running:
            steps(running, 0, 2)
            return save(running, tmp_path_factory.mktemp("run"), 2)

    return of


@pytest.mark.parametrize("old", one_in(4, LAYOUTS))
def test_every_layout_reads_what_every_layout_wrote(old: str, saved: Any, tmp_path: Path) -> None:
    """Weights and optimizer state are the same, bit by bit, after they were sharded anew."""
    for new in LAYOUTS:
        if new != old:
            with job(new, adam, warm, restore=Restore(saved(old), 2)) as running:
                assert_same(saved(old), save(running, tmp_path / new, 2))


@pytest.mark.parametrize("layout", ["one", "pp zero3", "columns zero1"])
def test_a_resumed_run_is_the_same_bit_by_bit(layout: str, saved: Any, tmp_path: Path) -> None:
    with job(layout, adam, warm) as running:
        expected = steps(running, 0, 5)
        end = save(running, tmp_path / "whole", 5)
    with job(layout, adam, warm, restore=Restore(saved(layout), 2)) as running:
        assert steps(running, 2, 5) == expected[2:]
        assert_same(save(running, tmp_path / "resumed", 5), end)


def test_it_has_what_the_model_has(saved: Any) -> None:
    tensors, trees = contents(saved("pp zero3"))
    assert "weight first.weight" in tensors
    assert "state first.weight.exp_avg" in tensors
    assert tensors["weight scale"].shape == torch.Size([])
    assert "rest spare" in tensors
    assert trees["state first.bias"]["dict"][0][0] == "step"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "ddp", "zero1", "pp", "pp zero3", "columns zero1"])
def test_a_run_resumed_at_any_step_ends_the_same(layout: str, tmp_path: Path) -> None:
    with job(layout, adam, warm) as running:
        saved_at = []
        for step in range(20):
            saved_at.append(save(running, tmp_path / "whole", step))
            steps(running, step, step + 1)
        end = save(running, tmp_path / "whole", 20)
    for step, folder in enumerate(saved_at):
        with job(layout, adam, warm, restore=Restore(folder, step)) as running:
            steps(running, step, 20)
            assert_same(save(running, tmp_path / str(step), 20), end)


class Counting(optim.SGD):
    """Torch's SGD with a rate that depends on what an optimizer may keep anywhere."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1)
        self.kind, self.count = kind, 0
        cells = [0]

        def counted() -> int:
            cells[0] += 1
            return cells[0]

        self.counted = counted

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += self.kind == "on the instance"
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                if self.kind == "as aliases" and "b" not in state:
                    state["a"] = state["b"] = torch.zeros_like(p)
                if self.kind == "by weights":
                    self.of = {**getattr(self, "of", {}), p: state["seen"]}
                if self.kind == "beside the state":
                    self.first = state.setdefault("momentum", torch.zeros(2))
                    self.first += 1
                if self.kind == "on a parameter":
                    p.seen = getattr(p, "seen", 0) + 1
                if self.kind == "in a set":
                    state["set"] = {1}
                by = {"on the instance": self.count, "in a group": group["steps"], "in the state": state["seen"]}
                p.add_(p.grad, alpha=-0.1 / by.get(self.kind, self.counted() if self.kind == "in a closure" else 1))


def counting(kind: str) -> Any:
    return lambda params: Counting(params, kind)


@pytest.mark.parametrize("kind", ["on the instance", "in a group", "in the state"])
def test_an_optimizer_of_ones_own_goes_on(kind: str, tmp_path: Path) -> None:
    with job("one", counting(kind)) as running:
        expected = steps(running, 0, 4)
    with job("one", counting(kind)) as running:
        steps(running, 0, 2)
        folder = save(running, tmp_path, 2)
    with job("one", counting(kind), restore=Restore(folder, 2)) as running:
        assert steps(running, 2, 4) == expected[2:]


@pytest.mark.parametrize(
    "kind", ["in a closure", "as aliases", "on a parameter", "in a set", "by weights", "beside the state"]
)
def test_what_a_checkpoint_cannot_have_is_refused(kind: str, tmp_path: Path) -> None:
    with job("one", counting(kind)) as running:
        steps(running, 0, 2)
        with pytest.raises(PiperError) as found:
            save(running, tmp_path, 2)
    assert found.value.diagnostics[0].code == "P0610"
    assert not list((tmp_path / "checkpoints").iterdir())
