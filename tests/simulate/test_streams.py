"""Four ways to communicate, one model: on one stream, on two, with gradients in buckets, and behind the compute of
another microbatch. Each has a timeline of its own, as links that are shared say."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from piperlang.capture.program import Program, capture
from piperlang.pipeline import planned, schedule
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.execute import execute
from piperlang.simulate.machine_files import load
from piperlang.simulate.timeline import Ran, Timeline
from piperlang.source import Source
from piperlang.view.gantt import gantt
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("streams")  # the model is captured once
EXAMPLE = ROOT / "examples" / "06_dualpipev"
WAYS = ("one_stream", "two_streams", "bucketed", "overlapped")


@cache
def program() -> Program:
    spec = importlib.util.spec_from_file_location("dualpipev_example", EXAMPLE / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return capture(module.model, module.loss, next(iter(module.data())))


def script(name: str) -> Path:
    return EXAMPLE / "streams" / f"{name}.piper"


@cache
def drawn(name: str) -> Timeline:
    path = script(name)
    found = schedule(program(), Source(str(path), path.read_text()), path)
    assert not found.problems, found.problems
    graph = found.graph()
    plan = planned(graph)
    return execute(plan, MachineCosts(plan, graph, load(str(EXAMPLE / "streams" / "slow_links.toml")))).timeline


def of(name: str, op: str) -> list[Ran]:
    return [one for one in drawn(name).of_row()[0] if one.what.op == op]


def took(ran: list[Ran]) -> list[float]:
    return [one.end - one.start - one.waited for one in ran]


def overlaps(ran: list[Ran], others: list[Ran]) -> list[Ran]:
    return [one for one in ran if any(one.start < other.end and other.start < one.end for other in others)]


def test_each_way_is_shorter_than_the_one_before() -> None:
    lengths = [drawn(name).length for name in WAYS]
    assert all(after < 0.97 * before for before, after in pairwise(lengths)), lengths


def test_one_stream_is_one_after_the_other() -> None:
    ran = sorted((*of("one_stream", "all_to_all"), *of("one_stream", "reduce")), key=lambda one: one.start)
    assert all(before.end <= after.start for before, after in pairwise(ran))


def test_two_streams_share_the_link() -> None:
    alone = max(took(of("one_stream", "all_to_all")))
    exchanges = of("two_streams", "all_to_all")
    shared = overlaps(exchanges, of("two_streams", "reduce"))
    assert all(seconds > 1.001 * alone for seconds in took(shared))
    assert max(took(shared)) > 1.4 * alone
    assert took([one for one in exchanges if one not in shared]) == pytest.approx([alone] * (32 - len(shared)))


def test_buckets_are_fewer_and_send_the_same() -> None:
    few, many = of("bucketed", "reduce"), of("two_streams", "reduce")
    assert (len(few), len(many)) == (1, 21)
    assert sum(one.what.bytes for one in few) == pytest.approx(sum(one.what.bytes for one in many))


def test_exchanges_run_behind_compute() -> None:
    behind = {
        name: len(overlaps(of(name, "all_to_all"), [one for one in drawn(name).of_row()[0] if one.what.computes]))
        for name in ("bucketed", "overlapped")
    }
    assert behind == {"bucketed": 0, "overlapped": 16}


def test_all_do_the_same_work() -> None:
    busy = [
        sum(one.end - one.start for one in drawn(name).of_row()[0] if one.what.computes and one.what.op != "update")
        for name in WAYS
    ]
    assert busy == pytest.approx([busy[0]] * 4)


@pytest.mark.parametrize(("name", "lines"), [("one_stream", 1), ("two_streams", 2)])
def test_a_picture_has_a_line_for_each_stream_that_runs_beside_another(name: str, lines: int) -> None:
    heights = set(re.findall(r'y="([\d.]+)" width="[\d.]+" height="6.0"', gantt(drawn(name))))
    assert len(heights) == lines * len(drawn(name).rows)
