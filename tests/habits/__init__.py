"""Habits of training code that real users have, each trained under several schedules beside plain PyTorch.

    python -m tests.habits [--only NAME] [--executor threads|ray] [--write]

A schedule must never change the mathematics: every habit either trains as plain PyTorch does, or is refused with a
diagnostic. One file for each category; `run.py` has the schedules and the comparison, `plain.py` the reference.
"""

from __future__ import annotations

from tests.habits.autograd import AUTOGRAD
from tests.habits.buffers import BUFFERS
from tests.habits.crossing import CROSSING
from tests.habits.habit import Category, Habit
from tests.habits.hidden import HIDDEN
from tests.habits.hooks import HOOKS
from tests.habits.inplace import INPLACE
from tests.habits.inputs import INPUTS
from tests.habits.late import LATE
from tests.habits.losses import LOSSES
from tests.habits.modes import MODES
from tests.habits.operators import OPERATORS
from tests.habits.optimizers import OPTIMIZERS
from tests.habits.state import STATE
from tests.habits.weights import WEIGHTS

CATEGORIES: list[Category] = [
    AUTOGRAD,
    HOOKS,
    WEIGHTS,
    BUFFERS,
    STATE,
    OPTIMIZERS,
    LOSSES,
    MODES,
    INPLACE,
    INPUTS,
    LATE,
    HIDDEN,
    OPERATORS,
    CROSSING,
]
HABITS: dict[str, Habit] = {habit.name: habit for category in CATEGORIES for habit in category.habits}
assert len(HABITS) == sum(len(category.habits) for category in CATEGORIES), "two habits have one name"
