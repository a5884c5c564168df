"""The order of passes as a grid in the terminal: a row per device, a column per unit of time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from piperlang.core.selector import TagValue
from piperlang.diagnostics.render import Paint
from piperlang.directives.order import Order
from piperlang.elaborate.lanes import Item, Lane
from piperlang.simulate.timeline import Ran, Timeline
from piperlang.simulate.unit import UNIT, UnitCosts, computes

COLOURS = {"F": "34", "B": "32", "I": "36", "W": "33"}
IDLE = "."
MARK = "*"
MOST_ROWS = 64


def grid(lanes: Sequence[Lane], timeline: Timeline, width: int, paint: Paint, marked: Collection[Ran] = ()) -> str:
    """The timeline as text no wider than `width`, in as many panels as needed. Cells in `marked` have a `*`."""
    several = _several_stages(lanes)
    labels = {run: _label(run.what.tags, several) + (MARK if run in marked else "") for run in timeline.ran}
    cell = max(map(len, labels.values()), default=1)
    names = [_devices(lane) for lane in lanes[:MOST_ROWS]]
    margin = max(len(name) for name in names) + 1
    per_panel = max(4, (width - margin - 1) // (cell + 1))
    length = int(timeline.length)
    rows = _rows(len(names), timeline, labels)
    panels = range(0, length, per_panel)
    lines: list[str] = []
    for start in panels:
        end = min(start + per_panel, length)
        lines.append(f"{'':{margin}}|{_ruler(start, end, cell)}")
        lines += [
            f"{name:>{margin - 1}} |{_cells(row, start, end, cell, paint)}"
            for name, row in zip(names, rows, strict=True)
        ]
        lines.append("")
    if len(lanes) > MOST_ROWS:
        lines[-1] = f"... and {len(lanes) - MOST_ROWS:,} more rows; --json and --csv have them all\n"
    return "\n".join(lines[:-1] if len(lanes) <= MOST_ROWS else lines)


def chain_text(chain: Order) -> str:
    """An `order A -> B`, which the grid cannot show."""
    return " -> ".join(" & ".join(str(item) for item in step.items) for step in chain.steps)


def summary(lanes: Sequence[Lane], timeline: Timeline, cost: UnitCosts = UNIT, unordered: int = 0) -> str:
    """One line with the length and the idle share. `unordered`: number of passes without an order. If there are any, or
    devices without an order, the grid is not the whole step, and no idle share is shown."""
    devices = sum(len(lane.devices) for lane in lanes)
    left = sum(len(lane.devices) for lane in lanes if not lane.steps)
    if left:
        share = f"{left} of {devices} devices {'have' if left > 1 else 'has'} no order"
    elif unordered:
        share = f"{unordered} pass{'es are' if unordered > 1 else ' is'} not ordered"
    else:
        share = f"{100 * timeline.idle_share():.0f}% idle"
    return f"{timeline.length} units, {share} ({cost}, communication free, stages in a chain)"


def changed(before: tuple[Sequence[Lane], Timeline], after: tuple[Sequence[Lane], Timeline]) -> set[Ran]:
    """Items that run at another time, or on other devices, than before."""
    known = {
        (lanes[run.row].devices, tuple(run.what.tags.items()), run.start, run.end)
        for lanes, timeline in (before,)
        for run in timeline.ran
    }
    lanes, timeline = after
    return {
        run
        for run in timeline.ran
        if (lanes[run.row].devices, tuple(run.what.tags.items()), run.start, run.end) not in known
    }


def _several_stages(lanes: Sequence[Lane]) -> bool:
    return any(
        len({item.get("stage") for work in lane.steps for item in work.items if computes(item)}) > 1 for lane in lanes
    )


def _label(item: Mapping[str, TagValue], several: bool) -> str:
    stage = f"{item['stage']}" if several and "stage" in item else ""
    return f"{stage}{item['pass']}{item.get('mb', '')}"


def _devices(lane: Lane) -> str:
    """`device 3`, or `devices 0-3` / `devices 0,2,5` for a lane of several."""
    numbers = sorted(lane.devices)
    if len(numbers) == 1:
        return f"device {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"devices {numbers[0]}-{numbers[-1]}"
    more = ",..." if len(numbers) > 4 else ""
    return f"devices {','.join(map(str, numbers[:4]))}{more}"


def _rows(count: int, timeline: Timeline, labels: Mapping[Ran, str]) -> list[list[tuple[Ran | None, str]]]:
    """For each lane, per unit of time: the running item, and the text that starts there."""
    rows: list[list[tuple[Ran | None, str]]] = [[(None, IDLE)] * int(timeline.length) for _ in range(count)]
    for run in timeline.ran:
        if run.row < count:
            rows[run.row][int(run.start)] = (run, labels[run])
            for at in range(int(run.start) + 1, int(run.end)):
                rows[run.row][at] = (run, "")
    return rows


def _cells(row: list[tuple[Ran | None, str]], start: int, end: int, cell: int, paint: Paint) -> str:
    parts: list[str] = []
    for at in range(start, end):
        run, text = row[at]
        joined = at > 0 and run is not None and _same_step(row[at - 1][0], run)
        gap = "&" if joined and text else "-" if run is not None and not text else " "
        body = f"{text:<{cell}}" if text else "-" * cell
        if run is None:
            parts.append(f"{gap}{text:<{cell}}")
        else:
            parts.append(gap + paint(body, COLOURS[run.what.op]) if text else paint(gap + body, COLOURS[run.what.op]))
    return "".join(parts).rstrip()


def _same_step(before: Ran | None, run: Ran) -> bool:
    return before is not None and before is not run and before.step == run.step


def _ruler(start: int, end: int, cell: int) -> str:
    every = 5
    return "".join(
        f" {at:<{cell}}" if at % every == 0 and len(str(at)) <= cell + 1 else " " * (cell + 1)
        for at in range(start, end)
    ).rstrip()


def plain(lanes: Sequence[Lane]) -> Iterator[tuple[int, list[list[Item]]]]:
    """Per device, in device order: the steps as plain lists of items that may overlap."""
    rows = {device: [list(work.items) for work in lane.steps] for lane in lanes for device in lane.devices}
    for device in sorted(rows):
        yield device, rows[device]
