"""Random models under random legal schedules: verified, and the same as the plain model.

`pytest tests/directives/test_random_schedules.py -m slow` runs five hundred more.
"""

from __future__ import annotations

import pytest

from piperlang.fuzz.write import write
from tests.support.equivalence import assert_same
from tests.support.random_models import case_and_traits

EACH = 5
"""Schedules for one model: capturing it is what takes time."""


def check(seed: int) -> None:
    found, traits = case_and_traits(seed // EACH)
    script = write(traits, seed)
    try:
        assert_same(found, traits.program, script)
    except BaseException:
        print(script)
        raise


@pytest.mark.parametrize("seed", range(25))
def test_the_same_as_the_plain_model(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25, 550))
def test_five_hundred_more(seed: int) -> None:
    check(seed)
