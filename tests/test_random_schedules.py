"""Random models under random legal schedules: verified, and the same as the plain model.

`pytest tests/test_random_schedules.py -m slow` runs five hundred more.
"""

from __future__ import annotations

from functools import cache

import pytest

from piperlang.capture.program import Program, capture
from tests.equivalence import SAMPLES, assert_same
from tests.models import Case
from tests.random_models import case, plan
from tests.random_schedules import write

EACH = 5
"""Schedules for one model: capturing it is what takes time."""


@cache
def model(seed: int) -> tuple[Case, Program]:
    found = case(seed)
    return found, capture(found.model, found.loss, found.batch(SAMPLES))


def check(seed: int) -> None:
    found, program = model(seed // EACH)
    tied = any(stage.tied is not None for stage in plan(seed // EACH))
    script = write(program, seed, found.stages, tied)
    try:
        assert_same(found, program, script)
    except BaseException:
        print(script)
        raise


@pytest.mark.parametrize("seed", range(50))
def test_the_same_as_the_plain_model(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50, 550))
def test_five_hundred_more(seed: int) -> None:
    check(seed)
