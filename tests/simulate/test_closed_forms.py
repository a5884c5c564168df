"""Lengths of orders with unit costs (F=I=W=1, B=2) are those of the papers."""

from __future__ import annotations

import pytest

from piperlang.simulate.unit import simulate
from tests.support.schedules import SCHEDULES

F, I, W = 1, 1, 1
B = I + W
BUBBLES = {
    "gpipe": lambda ranks: (ranks - 1) * (F + B),
    "one_f_one_b": lambda ranks: (ranks - 1) * (F + B),
    "interleaved": lambda ranks: (ranks - 1) * (F + B),  # in units of chunks, of which there are twice as many
    "zero_bubble": lambda ranks: (ranks - 1) * (F + I - W),  # ZB-H1
    "zbv": lambda ranks: (ranks - 1) * F,  # only the way to the last rank is left
    "dualpipev": lambda ranks: (ranks - 1) * F,
    "dualpipe": lambda ranks: (ranks // 2 - 1) * F,
}
"""Time in which a device computes nothing."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", BUBBLES)
def test_lengths(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name]
    chunks = 1 if schedule.stages == 1 else 2
    for micro in (2 * ranks, 3 * ranks, 4 * ranks):
        found = simulate(schedule.lanes(ranks, micro))
        assert found.length == micro * chunks * (F + B) + BUBBLES[name](ranks)
        assert found.idle_share() == pytest.approx(BUBBLES[name](ranks) / found.length)
