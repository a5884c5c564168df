"""Timelines as SVG pictures and as traces for Perfetto."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from piperlang.cli.main import main
from piperlang.simulate.timeline import Activity, Ran, Timeline, minus, numbers, union
from piperlang.simulate.unit import simulate
from piperlang.view.axis import mark
from piperlang.view.gantt import gantt, stacked
from piperlang.view.names import columns
from piperlang.view.trace import trace
from tests.support import ROOT
from tests.support.schedules import SCHEDULES
from tests.support.traced import traced_once

MLP = ROOT / "examples" / "01_mlp"
SVG = "{http://www.w3.org/2000/svg}"


def two() -> Timeline:
    """A pass and a message on each of two devices."""
    forward = Activity("F", "F[stage=0]", {"stage": 0, "pass": "F", "mb": 0}, "a.piper:3")
    backward = Activity("B", "<script>&", {"stage": 1, "pass": "B", "mb": 0})
    sent, received = Activity("send", "send", {"stage": 0}, bytes=100.0), Activity("recv", "recv", {"stage": 0})
    ran = (
        Ran(0, "compute", forward, 0.0, 2.0),
        Ran(0, "comm>", sent, 2.0, 3.0),
        Ran(1, "comm<0", received, 0.0, 3.0, waited=2.0),
        Ran(1, "compute", backward, 3.0, 4.0),
    )
    return Timeline([(0,), (1,)], ran, 4.0, messages=[(ran[1], ran[2])], memory={0: [(0.0, 10.0), (2.0, 5.0)]})


def test_idle_and_exposed() -> None:
    found = two()
    assert found.idle() == [0.5, 0.75]
    assert found.idle_share() == 0.625
    assert found.exposed() == {"comm": 1.0}  # waiting is no communication
    assert numbers([4, 0, 1, 2]) == "0-2, 4"
    assert list(minus([(0, 10)], union([(2, 3), (2.5, 5), (9, 12)]))) == [(0, 2), (5, 9)]


def test_streams_that_are_exposed_at_once_count_once() -> None:
    compute, reduce = Activity("F", "F", {"stage": 0}), Activity("all_reduce", "all_reduce", {})
    ran = [
        Ran(0, "compute", compute, 0.0, 2.0),
        Ran(0, "r0", reduce, 1.0, 4.0),
        Ran(0, "r1", reduce, 1.0, 5.0),
        Ran(1, "compute", compute, 0.0, 5.0),
        Ran(1, "r2", reduce, 3.0, 6.0),
    ]
    found = Timeline([(0,), (1,)], ran, 6.0)
    assert found.exposed() == {"r0": 2.0, "r1": 3.0, "r2": 1.0}
    assert found.exposed_at_most() == 3.0
    assert found.exposed_at_most() <= max(found.idle()) * found.length


def test_what_is_left_of_rounding_is_nothing() -> None:
    compute, reduce = Activity("F", "F", {"stage": 0}), Activity("all_reduce", "all_reduce", {})
    end = 0.1 + 0.2  # a little more than 0.3
    found = Timeline([(0,)], [Ran(0, "compute", compute, 0.0, 0.3), Ran(0, "r", reduce, 0.1, end)], end)
    assert found.exposed() == {"r": 0.0}
    assert (found.exposed_at_most(), found.idle()) == (0.0, [0.0])


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe", "zbv"])
def test_widths_are_durations(name: str) -> None:
    timeline = simulate(SCHEDULES[name].lanes(4, 8))
    root = ElementTree.fromstring(gantt(timeline, name))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == len(timeline.ran)
    units = {
        round(float(bar.get("width", 0)) + 0.6, 1) / (one.end - one.start)
        for bar, one in zip(bars, _drawn(timeline), strict=True)
    }
    assert max(units) - min(units) < 0.2
    text = "".join(root.itertext())
    assert f"{timeline.length:g} units" in text
    assert f"{timeline.idle_share():.1%} idle" in text
    right = max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars)
    assert right <= float(root.get("width", 0))


def _drawn(timeline: Timeline) -> list[Ran]:
    return [one for row in timeline.of_row() for one in row]


def test_charts_of_one_picture_have_one_scale() -> None:
    names = ["one_f_one_b", "zbv", "dualpipe"]
    timelines = [replace(simulate(SCHEDULES[name].lanes(4, 8)), title=name) for name in names]
    root = ElementTree.fromstring(stacked(timelines))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    ran = [one for timeline in timelines for one in _drawn(timeline)]
    pairs = list(zip(bars, ran, strict=True))
    scales = {round((float(bar.get("x", 0)) - 110) / one.start) for bar, one in pairs if one.start > 10}
    assert len(scales) == 1
    stages: dict[tuple[object, str], set[str | None]] = {}
    for bar, one in pairs:
        stages.setdefault((one.what.tags["stage"], one.what.op), set()).add(bar.get("fill"))
    assert all(len(colours) == 1 for colours in stages.values())
    words = [str(one.text) for one in root.iter(f"{SVG}text")]
    for timeline in timelines:
        assert timeline.title in words
        assert f"4 devices, {timeline.length:g} units, {timeline.idle_share():.1%} idle" in words
    assert words.count("F forward") == words.count("stage 0") == words.count("0") == 1  # one legend and one axis
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_charts_do_not_overlap() -> None:
    timelines = [replace(simulate(SCHEDULES["one_f_one_b"].lanes(16, 16)), title=str(k)) for k in range(8)]
    root = ElementTree.fromstring(stacked(timelines))
    lines = [(float(one.get("y", 0)), one.text) for one in root.iter(f"{SVG}text") if one.get("x") in ("20.0", "110.0")]
    assert lines == sorted(lines, key=lambda line: line[0])
    assert [text for _, text in lines if text == "and 8 more rows"] == ["and 8 more rows"] * 8
    assert all(after - before >= 12 for (before, _), (after, _) in pairwise(lines))


def test_a_legend_takes_as_many_lines_as_it_needs() -> None:
    root = ElementTree.fromstring(gantt(simulate(SCHEDULES["zbv"].lanes(4, 8))))
    words = {str(one.text): one for one in root.iter(f"{SVG}text")}
    assert {"stage 7", "idle", "W weight gradient"} <= set(words)
    assert all(float(words[text].get("x", 0)) + 7 * len(text) < 1290 for text in ("stage 7", "idle"))


def test_a_legend_says_how_many_stages_it_leaves_out() -> None:
    for ranks, last in ((8, "stage 7"), (64, "and 56 more")):
        picture = gantt(simulate(SCHEDULES["one_f_one_b"].lanes(ranks, ranks)))
        assert last in picture
        assert (" more<" in picture) == (ranks == 64)


def test_updates_are_drawn() -> None:
    """What runs between passes is no idle time of the picture. Copies on other streams run beside passes."""
    update, copy = (Activity(op, f"a {op}", {}) for op in ("update", "copy"))
    found = two()
    ran = [*found.ran, Ran(0, "compute", update, 3.0, 4.0), Ran(0, "own", copy, 0.0, 2.0)]
    root = ElementTree.fromstring(gantt(replace(found, ran=ran)))
    drawn = {str(bar.findtext(f"{SVG}title")): bar for bar in root.iter(f"{SVG}rect")}
    assert "a copy" not in drawn
    bar = drawn["a update"]
    assert float(bar.get("width", 0)) == pytest.approx((1280 - 110 - 24) / 4 - 0.6, abs=0.1)
    assert "update" in {one.text for one in root.iter(f"{SVG}text")}
    legend = [one.get("fill") for one in root.iter(f"{SVG}rect") if one.get("width") == "12.40"]
    assert bar.get("fill") in legend


def test_the_source_of_times_is_said_once() -> None:
    one, other = (replace(two(), title=name, source="simulated on \x1b a cpu") for name in "ab")
    picture = stacked([one, other])
    ElementTree.fromstring(picture)
    assert picture.count("simulated on \\x1b a cpu") == 1
    assert stacked([one, replace(other, source="simulated on an h100")]).count("simulated on") == 2


@pytest.mark.parametrize("name", ["v" * 200 + "end.piper", "日本" * 100 + "end.piper", "short.piper"])
def test_titles_leave_room_for_figures(name: str) -> None:
    root = ElementTree.fromstring(gantt(replace(two(), title=name)))
    (title,) = (str(one.text) for one in root.iter(f"{SVG}text") if one.get("font-size") == "20")
    assert name.endswith(title.removeprefix("…"))
    assert title.endswith("t.piper" if name[0] == "s" else "end.piper")
    assert columns(title) <= 80


@pytest.mark.parametrize(
    ("length", "step", "shown"),
    [
        (0.0025, 0.0005, ["0", "0.5 ms", "1.0 ms"]),
        (60e-6, 20e-6, ["0", "20 us", "40 us"]),
        (3.0, 1.0, ["0", "1 s", "2 s"]),
    ],
)
def test_marks_of_an_axis_have_one_unit(length: float, step: float, shown: list[str]) -> None:
    assert [mark(k * step, step, length, "s") for k in range(3)] == shown
    assert mark(5, 5, 100, "units") == "5"


def test_compare_draws_every_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, script = str(MLP / "model.py"), MLP / "pipeline.piper"
    (tmp_path / "other").mkdir()
    copies = [tmp_path / "pipeline.piper", tmp_path / "other" / "pipeline.piper"]
    for one in copies:
        one.write_text(script.read_text())
    scripts = [str(MLP / "both.piper"), str(script), *map(str, copies)]
    for kind in ("svg", "html", "SVG"):
        with traced_once():
            words = ["--model", model, "--machine", "cpu", "-o", str(tmp_path / f"all.{kind}")]
            assert main(["compare", *scripts, *words]) == 0
    # As many folders as tell them apart.
    named = ["01_mlp/both.piper", "01_mlp/pipeline.piper", f"{tmp_path.name}/pipeline.piper", "other/pipeline.piper"]
    root = ElementTree.parse(tmp_path / "all.svg").getroot()
    assert [one.text for one in root.iter(f"{SVG}text") if one.get("font-size") == "20"] == named
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', (tmp_path / "all.html").read_text(), re.S)
    assert data is not None
    found = json.loads(data[1])
    assert [one["title"] for one in found["timelines"]] == named
    assert all(one["path"]["bars"] and one["path"]["parts"] for one in found["timelines"])
    assert capsys.readouterr().out.count("pipeline.piper") == 9
    assert (tmp_path / "all.SVG").read_text() == (tmp_path / "all.svg").read_text()


@pytest.mark.parametrize(
    ("names", "output", "said"),
    [(["x.piper"] * 9, "all.html", "draws at most 8 schedules"), (["x.piper"] * 2, "all.json", "unknown kind of file")],
)
def test_compare_refuses(names: list[str], output: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *names, "--model", "model.py", "-o", output]) == 2
    problem = capsys.readouterr().err
    assert "error[P0902]" in problem
    assert said in problem


def test_many_devices_and_long_steps_stay_small() -> None:
    timeline = simulate(SCHEDULES["one_f_one_b"].lanes(64, 256))
    picture = gantt(timeline)
    assert "and 32 more rows" in picture
    assert len(picture) < 3_000_000


def test_names_are_no_markup() -> None:
    picture = gantt(replace(two(), title="</svg><script>"))
    ElementTree.fromstring(picture)
    assert "<script" not in picture


def test_a_trace() -> None:
    events = json.loads(trace(two()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"device 0", "device 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in slices] == [(0, 2e6), (2e6, 1e6), (0, 3e6), (3e6, 1e6)]
    assert slices[0]["args"] == {"stage": 0, "pass": "F", "mb": 0, "bytes": 0, "waited_us": 0, "line": "a.piper:3"}
    start, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"]
    assert (start["tid"], end["tid"]) == (slices[1]["tid"], slices[2]["tid"])
    assert slices[1]["ts"] <= start["ts"] <= slices[1]["ts"] + slices[1]["dur"]
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [10, 5]
    assert len({(event["pid"], event["tid"]) for event in slices}) == 4
    assert not re.search("NaN|Infinity", trace(two()))
