"""Random models under random legal schedules: verified, and the same as the plain model.

`pytest tests/test_random_schedules.py -m slow` runs five hundred more.
"""

from __future__ import annotations

from functools import cache

import pytest

from piperlang.capture.program import capture
from piperlang.fuzz.traits import Traits
from piperlang.fuzz.write import write
from tests.equivalence import SAMPLES, assert_same
from tests.models import Case
from tests.random_models import case

EACH = 5
"""Schedules for one model: capturing it is what takes time."""


@cache
def model(seed: int) -> tuple[Case, Traits]:
    found = case(seed)
    return found, Traits(capture(found.model, found.loss, found.batch(SAMPLES)))


def check(seed: int) -> None:
    found, traits = model(seed // EACH)
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
