"""The library's orders equal the published ones, are complete at every size, and take no longer than they should."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from piperlang.diagnostics import PiperError
from piperlang.simulate.unit import UNIT, UnitCosts, simulate
from tests.support.often import one_in
from tests.support.published import NAMES, deepseek_dualpipe, torch_order
from tests.support.schedules import SCHEDULES, Schedule

SIZES = [(pp, micro) for pp in (2, 4, 8) for micro in range(4, 17)]


@pytest.mark.parametrize("name", one_in(5, NAMES))
def test_equals_what_torch_issues(name: str) -> None:
    compared = 0
    for pp, micro in SIZES:
        for chunks in (2, 3, 4) if SCHEDULES[name].stages == 0 else (2,):
            expected = torch_order(name, pp, micro, chunks)
            if expected is not None:
                compared += 1
                assert SCHEDULES[name].order(pp, micro, chunks) == expected, (pp, micro, chunks)
    assert compared >= {"dualpipev": 22, "one_f_one_b": 30}.get(name, 20)


def test_equals_deepseeks_eight_phases() -> None:
    compared = 0
    for pp in (2, 4, 6, 8):
        for micro in range(4, 33):
            expected = deepseek_dualpipe(pp, micro)
            if expected is not None:
                compared += 1
                assert SCHEDULES["dualpipe"].order(pp, micro) == expected, (pp, micro)
    assert compared > 40


def check_complete(schedule: Schedule, ranks: int, micro: int, chunks: int = 2) -> None:
    """Every stage and microbatch has one F, and one B or one I and one W; and the order runs to its end."""
    lanes = schedule.lanes(ranks, micro, chunks)
    counts = Counter(
        (item["stage"], item["mb"], item["pass"]) for lane in lanes for work in lane.steps for item in work.items
    )
    for stage in range(schedule.stage_count(ranks, chunks)):
        for mb in range(micro):
            have = tuple(counts.pop((stage, mb, phase), 0) for phase in "FBIW")
            assert have in ((1, 1, 0, 0), (1, 0, 1, 1)), (schedule.name, ranks, micro, stage, mb, have)
    assert not counts, (schedule.name, ranks, micro)
    assert simulate(lanes).length > 0


def sensible(schedule: Schedule, ranks: int, micro: int) -> bool:
    return schedule.name != "dualpipe" or (ranks % 2 == 0 and micro >= 2)


SMALL = [(ranks, micro) for ranks in range(1, 6) for micro in range(1, 10)]
EVERY = [(ranks, micro) for ranks in range(1, 17) for micro in range(1, 65)]


@pytest.mark.parametrize("name", one_in(5, SCHEDULES))
def test_complete_at_small_and_at_random_sizes(name: str) -> None:
    for ranks, micro in [*SMALL, *random.Random(name).sample(EVERY, 12)]:
        if sensible(SCHEDULES[name], ranks, micro):
            check_complete(SCHEDULES[name], ranks, micro)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_complete_at_every_size(name: str) -> None:
    for ranks, micro in EVERY:
        if sensible(SCHEDULES[name], ranks, micro):
            check_complete(SCHEDULES[name], ranks, micro)


@pytest.mark.parametrize("chunks", [1, 3, 4])
@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.stages == 0])
def test_any_number_of_chunks(name: str, chunks: int) -> None:
    for ranks, micro in [(1, 3), (2, 1), (2, 5), (3, 7), (4, 9), (4, 2)]:
        check_complete(SCHEDULES[name], ranks, micro, chunks)


@pytest.mark.parametrize(
    ("name", "at_most"),
    [
        ("gpipe", 66),
        ("one_f_one_b", 66),
        ("zero_bubble", 54),
        ("interleaved", 57),
        ("interleaved_zero_bubble", 51),
        ("zbv", 51),
        ("dualpipev", 54),
    ],
)
def test_makespan_over_the_same_chunks(name: str, at_most: int) -> None:
    """pp=4, eight microbatches, two chunks a rank: a stage of a one-stage schedule holds two chunks, so it costs
    double."""
    scale = 2 if SCHEDULES[name].stages == 1 else 1
    timeline = simulate(
        SCHEDULES[name].lanes(4, 8), UnitCosts({phase: scale * cost for phase, cost in UNIT.passes.items()})
    )
    assert timeline.length <= at_most


def test_one_f_one_b_keeps_few_microbatches_alive() -> None:
    for stage, lane in enumerate(SCHEDULES["one_f_one_b"].lanes(4, 12)):
        alive = peak = 0
        for work in lane.steps:
            alive += 1 if work.items[0]["pass"] == "F" else -1
            peak = max(peak, alive)
        assert peak == 4 - stage


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "from std.pipeline import dualpipe\nmesh gpu = pp: 3\nsplit batch into 8 as mb\ndualpipe(gpu, 3, 8)\n",
            "must be even",
        ),
        (
            "from std.pipeline import gpipe\nmesh gpu = pp: 2\nsplit batch into 8 as mb\ngpipe(gpu, 4, 8)\n",
            "fewer ranks along pp",
        ),
        (
            "from std.pipeline import gpipe\nmesh gpu = pp: 2\nsplit batch into 8 as mb\ngpipe(gpu, 2, 0)\n",
            "at least one microbatch",
        ),
        (
            (
                "from std.pipeline import interleaved\nmesh gpu = pp: 2\nsplit batch into 8 as mb\ninterleaved(gpu, 2,"
                " 8, chunks=0)\n"
            ),
            "at least one chunk",
        ),
    ],
)
def test_senseless_sizes_are_refused_with_the_reason(script: str, reason: str) -> None:
    from tests.support.schedules import lanes

    with pytest.raises(PiperError) as refused:
        lanes(script)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "P0207"
    assert reason in diagnostic.message


def test_a_wrong_order_is_found_with_both_lines() -> None:
    from tests.support.schedules import lanes

    script = (
        "mesh gpu = pp: 2\nsplit batch into 2 as mb\n"
        "place [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"
        "order on gpu[pp=0]:\n    [stage=0, pass=B, mb=0], [stage=0, pass=F, mb=0]\n"
        "order on gpu[pp=1]:\n    [stage=1, pass=F, mb=0], [stage=1, pass=B, mb=0]\n"
    )
    with pytest.raises(PiperError) as found:
        simulate(lanes(script))
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0501"
    lines = {diagnostic.span.first.line} | {label.span.first.line for label in diagnostic.also}  # type: ignore[union-attr]
    assert lines == {6, 8}
