"""The page with timelines, in a real browser: what it draws, says and does, and that it needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

from piperlang.simulate.execute import SimulatedStep
from piperlang.simulate.result import segments, summed
from piperlang.simulate.timeline import Activity, Ran, Timeline
from piperlang.simulate.unit import simulate
from piperlang.view.page import page
from tests.support.browser import CHROMIUM, DRIVER, FLAGS
from tests.support.schedules import SCHEDULES

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs the system packages chromium and chromium-driver"),
    pytest.mark.xdist_group("browser"),  # one is enough
]

SCRIPT = "<script>top.document.title = 1</script>"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--"


class Browser:
    """One page at a time."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, text: str, width: int = 1280, dark: bool = False) -> None:
        size = {"width": width, "height": 720, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        self.driver.get(path.as_uri())

    def ask(self, expression: str, *values: object) -> Any:
        return self.driver.execute_script(f"const view = window.timelineView; return {expression}", *values)

    def text(self, selector: str) -> str:
        return str(self.ask("document.querySelector(arguments[0]).innerText", selector))

    def shown(self, selector: str) -> bool:
        return bool(self.ask("document.querySelector(arguments[0]).checkVisibility()", selector))

    def middle(self, timeline: int, bar: int) -> tuple[int, int]:
        box = self.ask("view.box(arguments[0], arguments[1])", timeline, bar)
        return int(box["x"] + box["width"] / 2), int(box["y"] + box["height"] / 2)

    def point(self, x: int, y: int) -> None:
        action = ActionBuilder(self.driver)
        action.pointer_action.move_to_location(x, y)  # type: ignore[no-untyped-call]
        action.perform()

    def click(self, x: int, y: int, times: int = 1) -> None:
        action = ActionBuilder(self.driver)
        action.pointer_action.move_to_location(x, y)  # type: ignore[no-untyped-call]
        for _ in range(times):
            action.pointer_action.click()
        action.perform()

    def drag(self, x: int, y: int, to_x: int, to_y: int) -> None:
        action = ActionBuilder(self.driver)
        action.pointer_action.move_to_location(x, y).pointer_down().move_to_location(to_x, to_y).pointer_up()  # type: ignore[no-untyped-call]
        action.perform()

    def keys(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def wheel(self, x: int, y: int, amount: int) -> None:
        ActionChains(self.driver).scroll_from_origin(ScrollOrigin.from_viewport(x, y), 0, amount).perform()

    def colours(self, x: float, y: float, width: int = 1, height: int = 1) -> list[str]:
        found = self.ask("view.redraw() < 1e9 && view.pixels(...arguments)", x, y, width, height)
        return [str(one) for one in found]

    def colour(self, x: float, y: float) -> str:
        return self.colours(x, y)[0]

    def at(self, x: float, y: float) -> dict[str, Any]:
        """The bar there."""
        return dict(self.ask("view.at(arguments[0], arguments[1])", x, y))

    def range(self) -> tuple[float, float]:
        start, end = self.ask("view.range()")
        return start, end

    def errors(self) -> list[dict[str, Any]]:
        return list(self.driver.get_log("browser"))  # type: ignore[no-untyped-call]

    def requests(self) -> list[str]:
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        # The browser's own first tab asks for things, too.
        return [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield Browser(driver, tmp_path_factory.mktemp("page"))
    driver.quit()


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """No page may complain or ask for anything."""
    yield started
    assert started.errors() == []
    requests = started.requests()
    assert requests
    assert all(url.startswith(("file:", "data:")) for url in requests)


@cache
def unit(name: str) -> Timeline:
    return replace(simulate(SCHEDULES[name].lanes(4, 8)), title=name)


def small() -> Timeline:
    """Two devices, in seconds: passes, a message that waits, an update, memory."""
    forward = Activity("F", "F[stage=0, mb=0]", {"stage": 0, "pass": "F", "mb": 0}, "my.piper:3")
    again = Activity("R", "R[stage=1, mb=0]", {"stage": 1, "pass": "R", "mb": 0})
    backward = Activity("B", "B[stage=1, mb=0]", {"stage": 1, "pass": "B", "mb": 0})
    send = Activity("send", "send.F[stage=0, mb=0]", {"stage": 0, "mb": 0}, "my.piper:4", 3 * 1024**2)
    receive = Activity("recv", "recv.F[stage=1, mb=0]", {"stage": 1, "mb": 0})
    update = Activity("update", "update", {})
    sent = Ran(0, "comm>", send, 0.002, 0.005, 0.001)
    received = Ran(1, "comm<0", receive, 0.0, 0.005, 0.003)
    ran = [
        Ran(0, "compute", forward, 0.0, 0.002),
        Ran(0, "compute", update, 0.008, 0.010),
        Ran(1, "compute", again, 0.005, 0.007),
        Ran(1, "compute", backward, 0.007, 0.010),
        sent,
        received,
    ]
    memory = {0: [(0.0, 1024.0), (0.002, 5 * 1024.0)]}
    return Timeline([(0, 1, 2, 8), (3,)], ran, 0.010, messages=[(sent, received)], memory=memory, title="small")


SMALL = {"F": 0, "update": 1, "send": 2, "R": 3, "B": 4, "recv": 5}
"""Numbers of its bars: by row, lane and time."""


def many(events: int) -> Timeline:
    """64 devices with 4 streams each."""
    passes = [Activity(op, f"{op}{mb}", {"stage": mb % 8, "mb": mb}) for op in "FB" for mb in range(64)]
    sends = [Activity("send", f"send{mb}", {"mb": mb}, bytes=1e6) for mb in range(64)]
    each = events // 256
    ran = [
        Ran(row, stream, (sends if stream != "compute" else passes)[(7 * k + row) % 64], k * 1e-4, k * 1e-4 + 9e-5)
        for row in range(64)
        for stream in ("compute", "first", "second", "third")
        for k in range(each)
    ]
    return Timeline([(row,) for row in range(64)], ran, each * 1e-4, title="many")


# ------------------------------------------------------------------------------------------------------------ drawing


def test_bars_are_drawn_where_they_ran(browser: Browser) -> None:
    timeline = unit("one_f_one_b")
    browser.open(page([timeline]))
    for bar in (0, 5, 40, len(timeline.ran) - 1):
        box = browser.ask("view.box(0, arguments[0])", bar)
        found = browser.at(box["x"] + 3, box["y"] + 3)
        assert found["index"] == bar
        assert browser.colour(box["x"] + 3, box["y"] + 3) == found["colour"]
    start, end = browser.range()
    assert start == pytest.approx(0, abs=0.3)
    assert end == pytest.approx(timeline.length, abs=0.3)


def test_passes_and_stages_have_colours_of_their_own(browser: Browser) -> None:
    browser.open(page([unit("zero_bubble")]))
    bars = range(len(unit("zero_bubble").ran))
    seen: dict[tuple[str, str], str] = {}
    for bar in bars:
        x, y = browser.middle(0, bar)
        found = browser.at(x, y)
        pairs = dict(found["pairs"])
        colour = seen.setdefault((pairs["stage"], pairs["pass"]), found["colour"])
        assert colour == found["colour"]
    assert len(seen) == len(set(seen.values())) == 4 * 3


def test_communication_has_the_same_colour_on_every_page(browser: Browser) -> None:
    seen = {}
    for names in (("send", "recv"), ("norm", "recv", "send"), ("recv",)):
        ran = [Ran(0, name, Activity(name, name, {}), k, k + 1) for k, name in enumerate(names)]
        browser.open(page([Timeline([(0,)], ran, 4.0)]))
        for k, name in enumerate(names):
            colour = browser.at(*browser.middle(0, sorted(names).index(name)))["colour"]
            assert seen.setdefault(name, colour) == colour, (names, k)
    assert len(set(seen.values())) == 3


def test_where_times_are_from_is_said_once(browser: Browser) -> None:
    browser.open(page([replace(unit(name), source="simulated on a cpu") for name in ("zbv", "one_f_one_b")]))
    assert browser.text("#source") == "simulated on a cpu"


def test_header_labels_legend_and_summary(browser: Browser) -> None:
    timeline = small()
    browser.open(page([timeline]))
    assert browser.text("h1") == browser.driver.title == "small"
    facts = browser.text("#facts")
    assert "5 devices" in facts
    assert "step 10 ms" in re.sub(r"\s+", " ", facts)
    assert f"{timeline.idle_share():.1%}" in facts
    assert "comm 2 ms" in facts
    assert "5.0 KiB" in facts
    labels = browser.text("#labels")
    assert "0-2, 8" in labels
    assert "80.0%" in labels
    assert "memory" in labels
    legend = browser.text("#legend")
    for word in ("F forward", "R forward again", "B backward", "send", "recv", "waiting", "idle"):
        assert word in legend
    summary = browser.ask("document.getElementById('summary').textContent")
    assert "A step takes 10.0 ms on 5 devices." in summary
    assert "Device 3: 50.0% idle" in summary


def test_waiting_and_recomputation_are_hatched(browser: Browser) -> None:
    browser.open(page([small()]))

    def colours(bar: str, share: float) -> set[str]:
        """Of a few pixels, after a share of the bar."""
        box = browser.ask("view.box(0, arguments[0])", SMALL[bar])
        return set(browser.colours(box["x"] + share * box["width"], box["y"] + 3, 20, 4))

    assert len(colours("recv", 0.1)) > 1
    assert len(colours("recv", 0.65)) == 1
    assert len(colours("R", 0.1)) > 1
    assert len(colours("B", 0.1)) == 1


def test_two_timelines_share_a_time_axis(browser: Browser) -> None:
    browser.open(page([unit("one_f_one_b"), unit("zero_bubble")]))
    first, second = (browser.ask("view.box(arguments[0], 0)", k) for k in (0, 1))
    assert first["x"] == second["x"]
    assert first["width"] == second["width"]
    assert second["y"] > first["y"] + 100
    facts = re.sub(r"\s+", " ", browser.text("#facts"))
    assert "33 units" in facts
    assert "27 units (81.8% of the first)" in facts
    x, y = browser.middle(1, 3)
    assert browser.at(x, y)["timeline"] == 1


def test_the_estimate_is_drawn_behind(browser: Browser) -> None:
    estimated = small()
    late = [replace(one, start=one.start + 0.001, end=one.end + 0.001) for one in estimated.ran]
    recorded = replace(estimated, ran=late, length=0.011, messages=())
    browser.open(page([recorded]))
    box = browser.ask("view.box(0, 0)")
    idle = browser.colour(box["x"] - 20, box["y"] + 20)
    browser.open(page([recorded], estimated))
    box = browser.ask("view.box(0, 0)")
    assert browser.colour(box["x"] - 20, box["y"] + 20) != idle  # it began earlier
    assert browser.colour(box["x"] + 8, box["y"] + 8) == browser.at(box["x"] + 8, box["y"] + 8)["colour"]
    assert "estimated" in browser.text("#legend")
    assert "110.0% of the estimate" in browser.text("#facts")


@pytest.mark.parametrize("timelines", [[], [Timeline([], [], 0.0)], [Timeline([(0,)], [], 0.0, "units")]])
def test_nothing_to_show(browser: Browser, timelines: Sequence[Timeline]) -> None:
    browser.open(page(timelines))
    browser.keys("+", "0", Keys.TAB)
    assert browser.ask("view.at(600, 200)") is None


def test_the_graph_is_a_second_tab(browser: Browser) -> None:
    browser.open(page([small()]))
    assert not browser.shown("#tabs")
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" width="300" height="100">{SCRIPT}</svg>'
    browser.open(page([small()], graph=picture))
    browser.driver.find_element("id", "tab-graph").click()
    assert not browser.shown("#time")
    assert (
        browser.driver.execute_async_script(
            "const done = arguments[0], image = document.querySelector('#graph img');"
            "image.decode().then(() => done(image.naturalWidth))"
        )
        == 300
    )
    assert browser.driver.title == "small"
    browser.driver.find_element("id", "tab-time").click()
    assert browser.shown("#plot")


def test_units_of_time_do_not_mix() -> None:
    with pytest.raises(ValueError, match="same unit of time"):
        page([small(), unit("gpipe")])


@pytest.mark.parametrize("name", ["estimate is shorter", "estimate is longer"])
def test_the_estimate_is_scaled_to_the_measured_step(browser: Browser, name: str) -> None:
    recorded, shape = small(), small()
    times = 0.5 if name == "estimate is shorter" else 2.0
    ran = [replace(one, start=times * one.start, end=times * one.end, waited=0.0) for one in shape.ran]
    estimated = replace(shape, ran=ran, length=times * shape.length, messages=(), memory={})
    browser.open(page([recorded], estimated))
    box = browser.ask("view.box(0, arguments[0])", SMALL["B"])

    def outlined() -> bool:
        """Whether the estimate has its last pass where the measured step has it."""
        edge, inside = browser.colour(box["x"], box["y"] - 3), browser.colour(box["x"] + box["width"] / 2, box["y"] - 1)
        return edge == "#59636e" and inside not in ("#eef0f3", "#ffffff")

    facts = re.sub(r"\s+", " ", browser.text("#facts"))
    assert "step 10 ms" in facts
    assert f"of the estimate, {10 * times:g} ms)" in facts
    assert not outlined()
    browser.keys("s")
    assert f"of the estimate, {10 * times:g} ms, scaled by {1 / times:g})" in browser.text("#facts")
    assert outlined()
    browser.driver.find_element("id", "stretch").click()
    assert not outlined()
    browser.open(page([recorded]))
    assert not browser.shown("#stretch")
    browser.keys("s")
    assert "scaled" not in browser.text("#facts")


def test_several_timelines_share_a_time_axis(browser: Browser) -> None:
    names = ["one_f_one_b", "zero_bubble", "gpipe", "zbv"]
    shown = [replace(simulate(SCHEDULES[name].lanes(4, 8)), title=name) for name in names]
    browser.open(page(shown, paths=[()] * 4))
    assert browser.text("h1") == "Four schedules"
    assert browser.driver.title == "one_f_one_b, zero_bubble, gpipe and zbv"
    boxes = [browser.ask("view.box(arguments[0], 0)", k) for k in range(4)]
    assert len({box["x"] for box in boxes}) == 1
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)
    labels = browser.text("#labels")
    for one in shown:
        assert f"{one.length:g} units, {one.idle_share():.1%} idle" in labels
    assert not browser.shown("#show-path")
    assert browser.range()[1] >= max(one.length for one in shown)
    browser.keys("/")
    browser.keys("pass=F", Keys.ENTER)
    assert browser.text("#found").startswith("160 of")  # of all of them: zbv has two stages per rank


def test_many_rows_begin_collapsed(browser: Browser) -> None:
    browser.open(page([small()] * 8))
    assert browser.text("h1") == "Eight schedules"
    assert browser.ask("document.getElementById('collapse').getAttribute('aria-pressed')") == "true"
    browser.keys("c")
    assert browser.ask("view.box(0, arguments[0]).height", SMALL["recv"]) > 10


# ------------------------------------------------------------------------------------------------------ critical path


def critical(timeline: Timeline) -> list[Ran]:
    """F of one device, its message, what the other makes of it, and after some time of the host the update."""
    return [timeline.ran[k] for k in (0, 4, 5, 2, 3)]


def test_the_critical_path(browser: Browser) -> None:
    timeline = small()
    browser.open(page([timeline], paths=[critical(timeline)]))
    update = browser.ask("view.box(0, arguments[0])", SMALL["update"])
    forward = browser.ask("view.box(0, arguments[0])", SMALL["F"])
    receive = browser.ask("view.box(0, arguments[0])", SMALL["recv"])
    before = browser.colour(update["x"] + 4, update["y"] + 4)
    assert not browser.shown("#path")
    assert "on the critical path" in details(browser, "F")
    assert "on the critical path" not in details(browser, "update")
    browser.keys("p")
    assert browser.shown("#path")
    update, forward, receive = (browser.ask("view.box(0, arguments[0])", SMALL[one]) for one in ("update", "F", "recv"))
    assert browser.colour(update["x"] + 4, update["y"] + 4) != before  # dimmed
    middle = forward["x"] + forward["width"] / 2
    assert browser.colour(middle, forward["y"]) == "#c2255c"
    assert browser.colour(middle, forward["y"] + 5) == browser.at(middle, forward["y"] + 5)["colour"]
    assert browser.colour(receive["x"] + 9, receive["y"]) != "#c2255c"  # it waits
    # Down from the end of what is received to the pass that it was for, and on the way there.
    below = browser.colours(receive["x"] + receive["width"] - 3, receive["y"] - 12, 6, 8)
    assert "#c2255c" in below
    assert "critical path" in browser.ask("document.getElementById('summary').textContent")
    browser.driver.find_element("id", "show-path").click()
    assert not browser.shown("#path")
    update = browser.ask("view.box(0, arguments[0])", SMALL["update"])
    assert browser.colour(update["x"] + 4, update["y"] + 4) == before


def details(browser: Browser, bar: str) -> str:
    browser.point(*browser.middle(0, SMALL[bar]))
    return browser.text("#tooltip")


def test_parts_of_the_critical_path_are_those_of_simulate(browser: Browser) -> None:
    timeline = small()
    path = critical(timeline)
    browser.open(page([timeline], paths=[path]))
    browser.keys("p")
    rows = browser.ask("[...document.querySelectorAll('.part')].map((one) => one.innerText.split(/\\s*\\n\\s*/))")
    expected = summed(segments(SimulatedStep(timeline, tuple(path))))
    assert [" ".join(row[-2:]) if one.line else row[-1] for row, one in zip(rows, expected, strict=True)] == [
        f"{one.what} on device {one.device}{f' {one.line}' if one.line else ''}" for one in expected
    ]
    assert rows[0][:2] == ["3 ms", "30.0%"]


def test_a_part_of_the_critical_path_shows_its_bars(browser: Browser) -> None:
    timeline = unit("zero_bubble")
    path = sorted((one for one in timeline.ran if one.row == 0), key=lambda one: one.start)
    browser.open(page([timeline], paths=[path]))
    browser.keys("p")
    browser.ask("view.setRange(20, 24)")
    button = "[...document.querySelectorAll('.part')].find((one) => one.innerText.includes('F stage=0'))"
    for mb in (0, 1, 2):
        browser.ask(f"{button}.click()")
        assert f"mb\n{mb}" in browser.text("#selected")
        assert "on the critical path" in browser.text("#selected")
    start, end = browser.range()
    assert start < 2.5 < end  # it is in sight
    assert browser.ask(f"{button}.getAttribute('aria-pressed')") == "true"
    box = browser.ask("view.box(0, 0)")
    browser.keys("0")
    box = browser.ask("view.box(0, 0)")
    assert browser.colour(box["x"] + box["width"] / 2, box["y"] + 3) == "#c2255c"  # a thicker line
    browser.driver.find_element("id", "plot").send_keys(Keys.ESCAPE)
    assert browser.ask(f"{button}.getAttribute('aria-pressed')") == "false"
    assert browser.colour(box["x"] + box["width"] / 2, box["y"] + 3) != "#c2255c"


def test_time_of_the_host_is_a_part_of_the_critical_path(browser: Browser) -> None:
    timeline = replace(small(), messages=())
    browser.open(page([timeline], paths=[[timeline.ran[1]]]))  # nothing but the update, after 8 ms
    browser.keys("p")
    assert "80.0%" in browser.text("#path")
    assert "host on device 0" in browser.text("#path")
    update = browser.ask("view.box(0, arguments[0])", SMALL["update"])
    forward = browser.ask("view.box(0, arguments[0])", SMALL["F"])
    y = update["y"] + update["height"] / 2 - 2
    for x in (forward["x"] + 9, update["x"] - 9):
        assert "#c2255c" in browser.colours(x, y, 1, 5)
    browser.driver.find_element("class name", "part").click()
    assert "update" in browser.text("#selected")


# -------------------------------------------------------------------------------------------------------- interaction


def test_hovering_and_selecting_show_everything_about_a_bar(browser: Browser) -> None:
    browser.open(page([small()]))
    browser.point(*browser.middle(0, SMALL["send"]))
    said = browser.text("#tooltip").replace("\n", " ")
    assert said.startswith("send.F[stage=0, mb=0]")
    for part in ("stage 0", "mb 0", "devices 0-2, 8", "stream comm", "start 2 ms", "duration 3 ms"):
        assert part in said
    for part in ("waited 1 ms", "sends 3.0 MiB", "line my.piper:4"):
        assert part in said
    browser.click(*browser.middle(0, SMALL["F"]))
    browser.point(640, 60)
    assert not browser.shown("#tooltip")
    assert "F[stage=0, mb=0]" in browser.text("#selected")
    assert "my.piper:3" in browser.ask("document.getElementById('live').textContent")
    browser.keys(Keys.ESCAPE)
    assert not browser.shown("#selected")


def test_memory_is_told_where_the_pointer_is(browser: Browser) -> None:
    browser.open(page([small()]))
    label = browser.ask("document.querySelector('.lane-label:last-child').getBoundingClientRect().y")
    browser.point(900, int(label) + 8)
    assert "memory 5.0 KiB" in browser.text("#tooltip")


def test_zoom_pan_and_fit(browser: Browser) -> None:
    browser.open(page([unit("one_f_one_b")]))
    whole = browser.range()
    x, y = browser.middle(0, 20)
    browser.wheel(x, y, -400)
    start, end = browser.range()
    assert end - start < 0.7 * (whole[1] - whole[0])
    assert abs(browser.middle(0, 20)[0] - x) <= 2  # what is under the pointer stays there
    browser.drag(700, 400, 500, 400)
    moved = browser.range()
    assert moved[0] > start
    assert moved[1] - moved[0] == pytest.approx(end - start)
    browser.click(700, 600, times=2)
    assert browser.range() == pytest.approx(whole)
    steps: list[tuple[str, Callable[[float, float], bool]]] = [
        ("+", lambda before, after: after < before),
        ("-", lambda before, after: after > before),
    ]
    for key, holds in steps:
        before = browser.range()
        browser.keys(key)
        after = browser.range()
        assert holds(before[1] - before[0], after[1] - after[0])
    browser.keys("+", "+", Keys.ARROW_RIGHT)
    right = browser.range()
    browser.keys(Keys.ARROW_LEFT)
    assert browser.range()[0] < right[0]
    browser.keys("0")
    assert browser.range() == pytest.approx(whole)
    browser.keys("+", Keys.HOME)
    assert browser.range() == pytest.approx(whole)


def test_tab_goes_from_bar_to_bar(browser: Browser) -> None:
    browser.open(page([unit("one_f_one_b")]))

    def said() -> str:
        return str(browser.ask("document.getElementById('live').textContent"))

    browser.ask("document.getElementById('plot').focus()")
    browser.keys(Keys.TAB)
    assert "pass F, mb 0" in said()
    browser.keys(Keys.TAB)
    assert "pass F, mb 1" in said()
    assert "mb" in browser.text("#tooltip")
    box = browser.ask("view.box(0, 1)")
    assert "#0b5fd6" in browser.colours(box["x"] - 3, box["y"] + 12, 6)  # the ring
    browser.keys(Keys.ARROW_DOWN)
    assert "device 1" in said()
    browser.keys(Keys.ARROW_UP)
    browser.ask("view.setRange(20, 30)")
    browser.ask("document.getElementById('plot').focus()")
    browser.keys(Keys.SHIFT + Keys.TAB + Keys.SHIFT)
    assert browser.range()[0] < 2  # it is in sight
    browser.keys(Keys.ENTER)
    assert browser.shown("#selected")
    browser.keys(Keys.ESCAPE, Keys.TAB)
    assert browser.ask("document.activeElement.id") != "plot"


def test_light_and_dark(browser: Browser) -> None:
    style = "getComputedStyle(document.body).backgroundColor"
    browser.open(page([unit("one_f_one_b")]), dark=True)
    assert browser.ask(style) == "rgb(20, 23, 28)"
    assert browser.colour(1270, 660) == "#14171c"
    browser.keys("t")
    assert browser.ask(style) == "rgb(255, 255, 255)"
    assert browser.colour(1270, 660) == "#ffffff"
    browser.driver.find_element("id", "theme").click()
    assert browser.ask(style) == "rgb(20, 23, 28)"


def test_search_dims_what_does_not_match(browser: Browser) -> None:
    browser.open(page([unit("one_f_one_b")]))
    box = browser.ask("view.box(0, 0)")
    before = browser.colour(box["x"] + 3, box["y"] + 3)
    browser.keys("/")
    browser.keys("stage=1 pass=F")
    assert browser.text("#found") == "8 of 64"
    assert browser.colour(box["x"] + 3, box["y"] + 3) != before
    browser.keys(Keys.ENTER, Keys.ENTER)
    said = browser.text("#selected").replace("\n", " ")
    assert "stage 1" in said
    assert "mb 1" in said
    browser.keys(Keys.ESCAPE)
    assert browser.colour(box["x"] + 3, box["y"] + 3) == before
    assert browser.ask("view.find('device=3 pass=b')") == 8
    assert browser.ask("view.find('stage=1 nothing')") == 0


def test_communication_collapses(browser: Browser) -> None:
    browser.open(page([small()]))
    height = browser.ask("view.box(0, arguments[0]).height", SMALL["send"])
    browser.driver.find_element("css selector", ".device button").click()
    assert browser.ask("view.box(0, arguments[0]).height", SMALL["send"]) < height / 2
    assert browser.ask("view.box(0, arguments[0]).height", SMALL["recv"]) > 10
    assert browser.ask("document.activeElement.getAttribute('aria-expanded')") == "false"
    browser.keys("c")
    assert browser.ask("view.box(0, arguments[0]).height", SMALL["recv"]) < 10
    box = browser.ask("view.box(0, arguments[0])", SMALL["recv"])
    moving = browser.at(box["x"] + 0.9 * box["width"], box["y"] + 2)
    assert moving["index"] == SMALL["recv"]
    assert browser.colour(box["x"] + 0.8 * box["width"], box["y"] + 2) == moving["colour"]
    assert browser.ask("view.at(arguments[0], arguments[1])", box["x"] + 9, box["y"] + 2) is None  # it waits


def test_messages_are_arrows(browser: Browser) -> None:
    shown = []
    for timeline in (small(), replace(small(), messages=())):
        browser.open(page([timeline]))
        sender, receiver = (browser.ask("view.box(0, arguments[0])", SMALL[name]) for name in ("send", "recv"))
        top = int(sender["y"] + sender["height"])
        shown.append(browser.colours(sender["x"], top, int(sender["width"]), int(receiver["y"]) - top))
    assert shown[0] != shown[1]


def test_help(browser: Browser) -> None:
    browser.open(page([small()]))
    browser.keys("?")
    assert "Keyboard and mouse" in browser.text("#help")
    browser.keys(Keys.ESCAPE)
    assert not browser.shown("#help")


# ------------------------------------------------------------------------------------------------------------- limits


def test_hostile_names_are_text(browser: Browser) -> None:
    what = Activity("F", HOSTILE, {"stage": HOSTILE, HOSTILE: 3}, HOSTILE)
    send = Activity(HOSTILE, HOSTILE, {}, HOSTILE, 5.0)
    ran = [Ran(0, "compute", what, 0, 1), Ran(0, HOSTILE, send, 0, 1)]
    browser.open(page([Timeline([(0,)], ran, 1, title=HOSTILE)], graph=HOSTILE, paths=[ran]))
    browser.keys("p")
    assert HOSTILE in browser.text("#path")
    browser.point(*browser.middle(0, 0))
    assert HOSTILE in browser.text("#tooltip")
    assert browser.text("h1") == HOSTILE
    assert browser.driver.title == HOSTILE
    assert browser.ask("document.querySelectorAll('img').length") == 0


def test_the_page_fits_narrow_windows(browser: Browser) -> None:
    timeline = small()
    browser.open(page([timeline], small(), "<svg/>", [critical(timeline)]), width=800)
    assert browser.ask("document.documentElement.scrollWidth") == 800
    overlap = """(() => {
      const parts = [...document.querySelectorAll('.bar > *')].map((one) => one.getBoundingClientRect());
      return parts.some((one, k) => k && one.left < parts[k - 1].right - 1);
    })()"""
    assert not browser.ask(overlap)
    assert browser.ask("document.getElementById('show-help').getBoundingClientRect().right") <= 800


def test_100_000_events(browser: Browser) -> None:
    timeline = many(100_000)
    # From device to device, at every time.
    path = [timeline.ran[(k % 64) * 1560 + k] for k in range(390)]
    text = page([timeline], paths=[path])
    assert len(text) < 4_000_000
    browser.open(text)
    assert browser.ask("view.firstPaint()") < 2_000
    assert browser.ask("performance.getEntriesByName('first paint of the timeline').length") == 1
    times = []
    for _ in range(12):
        browser.ask("view.zoom(1.6, 300)")
        times.append(browser.ask("view.redraw()"))
    assert sorted(times)[6] < 100
    browser.keys("p", "0")
    assert browser.ask("view.redraw()") < 200
    assert browser.ask("document.querySelectorAll('.part').length") == 100
    assert "more parts" in browser.text("#path")
    browser.keys("p", "0", "c")
    browser.ask("document.getElementById('scroll').scrollTo(0, 1e6)")
    assert "device 63" in browser.text("#labels")
    x, y = browser.middle(0, 99_000)
    browser.ask("view.redraw()")
    assert dict(browser.at(x, y)["pairs"])["device"] == "63"
