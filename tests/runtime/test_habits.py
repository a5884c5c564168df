"""Habits of training code train as plain PyTorch does, or are refused.

Every run of the tests has some habits of each category, each under one schedule, in threads. `pytest
tests/runtime/test_habits.py -m slow` has all of them under all schedules, in threads and on Ray workers. What
docs/habits.md records as a bug may fail; what it records as the same must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.habits import CATEGORIES, HABITS
from tests.habits.habit import REFUSED, SAME
from tests.habits.isolated import Isolated
from tests.habits.page import PAGE, listed
from tests.habits.plain import plain
from tests.habits.run import CAUGHT, clean, schedules

OFTEN = 1
"""Of every category, those that run every time, evenly spread over it."""
RECORDED = listed(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}


def _often() -> list[tuple[str, str]]:
    found = []
    for category in CATEGORIES:
        for k in range(OFTEN):
            habit = category.habits[k * len(category.habits) // OFTEN]
            tried = schedules(habit)
            found.append((habit.name, tried[len(found) % len(tried)]))
    return found


@pytest.fixture(scope="module")
def threads() -> Iterator[Isolated]:
    runner = Isolated("threads")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[Isolated]:
    runner = Isolated("ray")
    yield runner
    runner.close()


def check(runner: Isolated, name: str, schedule: str) -> None:
    """Nothing is wrong, and what has been the same stays so."""
    found = runner.run(HABITS[name], schedule)
    assert found.kind in (SAME, REFUSED, CAUGHT), f"{found.cell}: {found.reason}"
    assert found.kind == SAME or RECORDED.get(name, {}).get(schedule) != SAME, f"{found.cell}: {found.reason}"


@pytest.mark.parametrize(("name", "schedule"), _often())
def test_a_habit_is_the_same_or_refused(name: str, schedule: str, threads: Isolated) -> None:
    check(threads, name, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", HABITS)
def test_every_habit_in_threads(name: str, threads: Isolated) -> None:
    for schedule in schedules(HABITS[name]):
        check(threads, name, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", HABITS)
def test_every_habit_on_workers(name: str, workers: Isolated, alone: None) -> None:
    for schedule in schedules(HABITS[name]):
        check(workers, name, schedule)


@pytest.mark.slow
def test_habits_train_in_plain_pytorch() -> None:
    for habit in HABITS.values():
        with clean():
            reference = plain(habit)
        assert all(loss == loss and abs(loss) != float("inf") for loss in reference.losses), habit.name
        gradients = [value for step in reference.gradients for value in step.values() if value.numel()]
        assert any(value.abs().max() > 0 for value in gradients), habit.name


def test_the_page_lists_all_habits() -> None:
    assert {name: set(cells) for name, cells in RECORDED.items()} == {
        name: set(schedules(habit)) for name, habit in HABITS.items()
    }
