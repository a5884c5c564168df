"""What the first batch does not show is refused, or found by the comparison with other numbers; models that need their
own numbers still train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as f

from piperlang.capture.program import capture
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard.program import verify
from piperlang.runtime.guard.varied import varied
from tests.habits.habit import EITHER, REFUSED, SAME, SAMPLES, WIDTH, Habit, Layers
from tests.habits.hidden import HIDDEN
from tests.habits.plain import plain
from tests.habits.run import CAUGHT, Outcome, Runner, clean
from tests.support.equivalence import compiled

SCHEDULES = ("ddp", "zero1", "zero3", "pp")
NUMBERED = [
    pytest.param(number, habit, id=habit.name, marks=pytest.mark.slow if number % 5 else ())
    for number, habit in enumerate(HIDDEN.habits)
]
"""Four of five are run by hand: `pytest tests/runtime/test_varied.py -m slow`."""


def outcome(habit: Habit, schedule: str) -> Outcome:
    with clean():
        reference = plain(habit)
    runner = Runner("threads")
    try:
        return runner.run(habit, schedule, reference)
    finally:
        runner.close()


@pytest.mark.parametrize(("number", "habit"), NUMBERED)
def test_what_the_first_batch_does_not_show(number: int, habit: Habit) -> None:
    found = outcome(habit, SCHEDULES[number % len(SCHEDULES)])
    allowed = {SAME: {SAME}, REFUSED: {REFUSED, CAUGHT}, EITHER: {SAME, REFUSED, CAUGHT}}[habit.expected]
    assert found.kind in allowed, f"{found.cell}: {found.reason}"


def test_the_error_says_that_the_numbers_are_others() -> None:
    habit = next(habit for habit in HIDDEN.habits if habit.name == "late: written in place without gradients")
    graph, captured = compiled(capture(habit.model, habit.loss, habit.batch(0)), "")
    with pytest.raises(PiperError) as raised:
        verify(captured, lower(graph), habit.batch(0), Training(habit.model, habit.optimizer))
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.code == "P0608"
    assert "not on other numbers of the same shapes" in " ".join(diagnostic.notes)


def positive(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(SAMPLES, WIDTH) + 0.1, torch.rand(SAMPLES, WIDTH)


class Logarithm(Layers):
    """NaN for anything negative."""

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x.log() if i == 0 else x)


class Probabilities(Layers):
    """binary_cross_entropy raises for what is no probability."""

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(super().stage(i, x)) if i == 3 else super().stage(i, x)


@pytest.mark.parametrize(
    "habit",
    [
        Habit("logarithms", "numbers", Logarithm, batch=positive),
        Habit(
            "one class",
            "numbers",
            Layers,
            loss=f.cross_entropy,
            batch=lambda step: (torch.randn(SAMPLES, WIDTH), torch.full((SAMPLES,), WIDTH - 1)),
        ),
        Habit(
            "inputs as probabilities",
            "numbers",
            Probabilities,
            loss=lambda o, t: f.binary_cross_entropy(t, o.detach()) * 0 + f.binary_cross_entropy(o, t),
            batch=positive,
        ),
    ],
    ids=lambda habit: habit.name,
)
def test_models_that_need_their_own_numbers(habit: Habit) -> None:
    assert outcome(habit, "pp").kind == SAME


def test_other_numbers_of_the_same_kind() -> None:
    columns = torch.stack([torch.arange(8), torch.arange(8) + 100, torch.zeros(8, dtype=torch.long)], 1)
    inputs, mask = torch.zeros(8, 3), torch.ones(8, 2, dtype=torch.bool)
    first, ids, flags = next(varied((inputs, columns, mask), 0))  # type: ignore[arg-type, misc]
    assert bool((first != 0).all())  # a flag that was never set is
    assert ids[:, 0].max() < 8
    assert ids[:, 1].min() >= 100
    assert len(set(ids[:, 0].tolist())) < 8
    assert set(ids[:, 2].tolist()) == {0, 1}
    assert set(flags.flatten().tolist()) == {True, False}
    kept, ids, flags = next(varied((inputs, columns, mask), 0, noise=False, more=False))  # type: ignore[arg-type, misc]
    assert torch.equal(kept, inputs)
    assert not torch.equal(ids, columns)
    assert torch.equal(ids[:, 2], columns[:, 2])
    assert torch.equal(flags, mask)
    *_, last = varied((inputs, columns, mask), 0)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(last, (inputs, columns, mask), strict=True))
