"""Lengths of orders with unit costs (F=I=W=1, B=2) are those of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piperlang.pipeline import outline
from piperlang.simulate.unit import UNIT, live, parse_costs, simulate
from piperlang.source import Source
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


def test_live_activations() -> None:
    """1F1B keeps as many as there are ranks below it, GPipe all, and ZB-H1 no more than 1F1B."""
    assert live(simulate(SCHEDULES["one_f_one_b"].lanes(4, 8))) == [4, 3, 2, 1]
    assert live(simulate(SCHEDULES["gpipe"].lanes(4, 8))) == [8, 8, 8, 8]
    assert live(simulate(SCHEDULES["zero_bubble"].lanes(4, 8))) == [4, 4, 4, 4]


def test_costs() -> None:
    costs = parse_costs(["F=2", "stage3=4", "kind=expert:3"])
    assert (costs.passes["F"], costs.passes["B"]) == (2, 2)
    assert costs.factors == {("stage", 3): 4, ("kind", "expert"): 3}
    assert parse_costs(["I=2", "W=3"]).passes["B"] == 5
    assert parse_costs([]) == UNIT
    longer = simulate(SCHEDULES["one_f_one_b"].lanes(4, 8), parse_costs(["stage3=2"]))
    assert longer.length > simulate(SCHEDULES["one_f_one_b"].lanes(4, 8)).length
    for wrong in ("F=0", "F=101", "X=1", "F", "=3", "F=-1", "F=1.5"):
        with pytest.raises(ValueError, match="not a"):
            parse_costs([wrong])
    with pytest.raises(ValueError, match=r"`F=1.5` is not a cost; expected a whole number from 1 to 100"):
        parse_costs(["F=1.5"])
    for twice, said in ((["F=1", "F=2"], "the cost of F"), (["stage3=2", "stage=3:3"], "the cost of stage=3")):
        with pytest.raises(ValueError, match=f"{said} is given twice"):
            parse_costs(twice)


def test_what_is_recomputed_takes_its_forward_again() -> None:
    """1F1B: every backward takes 3 instead of 2; with one stage recomputed of two, it is the slower one."""
    script = "from std.pipeline import loop, one_f_one_b\nmesh gpu = pp: 2\nsplit batch into 4 as mb\nloop(gpu, 2)\n"
    lengths = {}
    taken_back = "recompute [stage=*]\nrecompute [stage=*] with policy=cheap\n"
    for recomputed in ("", "recompute [stage=*]\n", "recompute [stage=1]\n", "recompute [stage=7]\n", taken_back):
        found = outline(Source("s.piper", f"{script}{recomputed}one_f_one_b(gpu, 2, 4)\n"))
        assert not found.problems
        costs = replace(UNIT, recomputed=found.outline.recomputed)
        lengths[recomputed] = simulate(found.outline.orders(), costs).length
    whole, one = lengths["recompute [stage=*]\n"], lengths["recompute [stage=1]\n"]
    assert lengths[""] == (4 + 1) * 3 == lengths["recompute [stage=7]\n"] == lengths[taken_back]
    assert whole == (4 + 1) * 4
    assert lengths[""] < one < whole
    assert "F again" in str(replace(UNIT, recomputed=found.outline.recomputed))
