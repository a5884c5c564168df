"""Random models under random legal schedules: verified, the same as the plain model, and with plans that are right.

`pytest tests/directives/test_random_schedules.py -m slow` runs five hundred more.
"""

from __future__ import annotations

import pytest

from piperlang.fuzz.write import write
from piperlang.plan.estimate.memory import peaks
from tests.support.equivalence import assert_same
from tests.support.plan_runs import right_plan
from tests.support.random_models import case_and_traits

EACH = 5
"""Schedules for one model: capturing it is what takes time."""


def check(seed: int) -> None:
    found, traits = case_and_traits(seed // EACH)
    script = write(traits, seed)
    try:
        graph = assert_same(found, traits.program, script)
        assert all(one.bytes == sum(one.by.values()) > 0 for one in peaks(right_plan(graph), graph))
    except BaseException:
        print(script)
        raise


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.xdist_group(f"random model {seed // EACH}")) for seed in range(15)]
)
def test_the_same_as_the_plain_model(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15, 550))
def test_five_hundred_more(seed: int) -> None:
    check(seed)
