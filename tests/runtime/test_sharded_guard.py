"""The guard of sharded chunks: with a rule that is wrong for an operator, no job starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn
from torch.distributed.tensor import DTensor

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.capture.spmd import localize
from piperlang.core.placement import REPLICATE
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard.program import Verified, verify
from piperlang.runtime.guard.sharded import ShardedDifference, _Chunk, _together, differences
from tests import matrix
from tests.support.equivalence import compiled
from tests.support.often import one_in

SAMPLES, WIDTH = 4, 8
SCRIPT = """mesh gpu = tp: 2
place [part=*] on gpu
replicate [part!="sum"] over gpu.tp
shard [part="sum"] over gpu.tp with style=sequence
"""


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("part", "first"):
            x = self.first(x)
        with annotate("part", "sum"):
            x = self.middle(x).cumsum(1)
        with annotate("part", "last"):
            return self.last(x)  # type: ignore[no-any-return]


def verified(script: str) -> Verified:
    given = torch.randn(SAMPLES, 6, WIDTH), torch.randn(SAMPLES, 6, WIDTH)
    graph, captured = compiled(capture(Summed, f.mse_loss, given), script)
    return verify(captured, lower(graph), given, Training(Summed, lambda params: torch.optim.SGD(params, lr=0.1)))


def by_parts(self: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum over positions, as if each were apart from the others."""
    if target is not torch.ops.aten.cumsum.default and target is not torch.ops.aten.flip.default:
        return RULES(self, target, args, kwargs)
    part = target(args[0].to_local(), *args[1:])
    return DTensor.from_local(part, self.mesh, args[0].placements, run_check=False)


RULES = localize._Runner.call_function


@pytest.mark.parametrize("order", ["", "order [pass=I] -> [pass=W]\n"], ids=["B", "I and W"])
def test_a_wrong_rule_stops_the_job(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PiperError, match="cumsum"):
        verified(SCRIPT + order)
    monkeypatch.setattr(localize._Runner, "call_function", by_parts)
    with pytest.raises(PiperError, match="does not compute the same when it is sharded with `style=sequence`") as found:
        verified(SCRIPT + order)
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0608"
    assert diagnostic.span is not None
    assert "self.middle(x).cumsum(1)" in diagnostic.span.text
    assert " differs by " in diagnostic.notes[0]


class Masked(Summed):
    """Its chunk gives infinite values."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.summed = summed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("part", "first"):
            x = self.first(x)
        with annotate("part", "sum"):
            x = self.middle(x)
            x = x.cumsum(1) if self.summed else x
            scores = x.masked_fill(x < x.mean(-1, keepdim=True), -torch.inf)
        with annotate("part", "last"):
            return self.last(scores.softmax(-1))  # type: ignore[no-any-return]


def outputs_apart(summed: bool) -> float:
    """Of the sharded chunk; gradients are not looked at."""
    given = torch.randn(SAMPLES, 6, WIDTH), torch.randn(SAMPLES, 6, WIDTH)
    graph, captured = compiled(capture(lambda: Masked(summed), f.mse_loss, given), SCRIPT)
    program = next(one for one in lower(graph).programs if one.sharding[0])
    chunk = _Chunk(captured, program, captured.divided(program.chunk, program.samples, program.sharding), {}, False)
    return max(one.error for one in chunk.differences() if one.slot[0] == "output")


def test_values_beside_infinite_ones_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outputs_apart(summed=False) < 1e-5
    monkeypatch.setattr(localize._Runner, "call_function", by_parts)
    assert outputs_apart(summed=True) > 0.1


def test_devices_that_disagree_about_what_all_have() -> None:
    here, there = torch.ones(3), torch.tensor([1.0, 1.0, 3.0])
    assert _together({(0,): here, (1,): there}, (REPLICATE,)).tolist() == [1, 1, 3]
    assert _together({(0,): there, (1,): here}, (REPLICATE,)).tolist() == [1, 1, 5]


SHARDED = [each for each in matrix.ALL.values() if each.script and each.inside != "none" and not each.refused]


def found_in(program: Program, script: str) -> list[ShardedDifference]:
    graph, captured = compiled(program, script)
    return list(differences(captured, lower(graph), {}, 2e-4, torch.finfo(torch.float32).eps / 2))


@pytest.mark.parametrize("each", one_in(16, SHARDED), ids=lambda each: each.name)
def test_right_rules_pass(each: matrix.Combination) -> None:
    try:
        found = found_in(matrix.program(each.model), each.script)
    except PiperError:
        assert matrix.refused(each)
        return
    assert found or "dropless" in each.model
    assert max((one.error for one in found), default=0.0) < 1e-5
