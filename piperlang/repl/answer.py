"""The answer to a directive: how the graph after it differs from the graph before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from piperlang.core.mesh import Mesh
from piperlang.diagnostics import Diagnostic
from piperlang.diagnostics.render import Paint
from piperlang.directives.mesh import UseMesh
from piperlang.directives.order import Order
from piperlang.directives.split import Split
from piperlang.directives.tag import Tag
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.resolved import resolved
from piperlang.elaborate.values import Function, Value, brief
from piperlang.ir.graph import Graph
from piperlang.ir.layout import devices_of
from piperlang.plan.estimate.cost import Costs
from piperlang.plan.estimate.summary import bytes_text, time_text
from piperlang.repl.show import Rows, Shown
from piperlang.repl.state import UNPLACED, UNUSED, Estimate, State, axis_of
from piperlang.simulate.timeline import Timeline
from piperlang.view.grid import chain_text, changed, grid, summary

MOST = 6
"""Maximum number of rows per label."""
CHANGE = 0.005
"""Smaller relative changes of an estimate are not shown."""


def answer(before: State, after: State, known: Estimate | None, width: int, paint: Paint) -> Shown:
    """`known`: the latest estimate before, where `before` itself has none."""
    rows = Rows()
    new = list(after.directives)[len(before.directives) :]
    _bound(rows, before, after)
    if not new:
        return Shown(tuple(rows.found))
    if after.scheduler is None:
        shown = (
            x for x in new if not isinstance(x, UseMesh | Order) or x in after.chains
        )  # the grid does not show `order A -> B`
        rows.all("applied", resolved(shown).splitlines(), MOST)
    else:
        _matched(rows, after, new)
    if after.scheduler is not None and after.settled:
        _communication(rows, before, after)
        _estimates(rows, known, after.estimate)
    _missing(rows, after)
    ordered = any(isinstance(x, Order) for x in new)
    return Shown(tuple(rows.found), orders(after, width, paint, before) if ordered else "")


def difference(before: State, after: State) -> Shown:
    """The difference between two states of a session, in either order."""
    rows = Rows()
    if after.scheduler is not None and not (before.trouble or after.trouble):
        _communication(rows, before, after)
        _estimates(rows, before.estimate, after.estimate)
    return Shown(tuple(rows.found))


def status(state: State) -> Shown:
    """The summary of one state."""
    rows = Rows()
    if state.scheduler is not None and state.settled and not state.trouble:
        counts = Counter(node.op for node in state.graph.nodes)
        rows.add("nodes", f"{len(state.graph.nodes):,}: " + ", ".join(f"{n} {op}" for op, n in counts.most_common()))
        found = state.estimate
        if found is not None:
            rows.add("memory", f"at most {_peak(found)}")
            rows.add("step", f"{time_text(found.seconds)} estimated, {found.mean_idle:.0%} idle")
    _missing(rows, state)
    return Shown(tuple(rows.found))


# ------------------------------------------------------------------------------------------------------------- names


def _bound(rows: Rows, before: State, after: State) -> None:
    """Names that the statements bind; not shown for a loaded script with several."""
    new = {name: value for name, value in after.names.items() if name not in before.names and not name.startswith("_")}
    if len(new) > MOST:
        return
    for name, value in new.items():
        rows.add("name" if not isinstance(value, Function) else "function", described(name, value))


def described(name: str, value: Value) -> str:
    if isinstance(value, Function):
        doc = (value.define.doc or "").strip().partition("\n")[0]
        return f"{signature(value, name)}" + (f"  {doc}" if doc else "")
    if isinstance(value, Mesh):
        return f"{name}: {' x '.join(f'{axis} {size}' for axis, size in value.axes)}, {_devices_text(value.size)}"
    return f"{name} = {brief(value)}"


def signature(function: Function, name: str | None = None) -> str:
    parameters = [
        p.name.text + (f"={p.default.span.text}" if p.default is not None else "") for p in function.define.parameters
    ]
    return f"{name or function.name}({', '.join(parameters)})"


# ------------------------------------------------------------------------------------------------------------- nodes


def _matched(rows: Rows, after: State, new: Sequence[Directive]) -> None:
    selectors = [s for x in new for s in x.selectors()]
    tags = [x for x in new if isinstance(x, Tag)]
    if tags:
        paths = ", ".join(str(path) for tag in tags for path in tag.paths)
        rows.add(
            "matched",
            f"modules {paths}" + ("" if after.settled else ": the model is cut into chunks when a directive uses them"),
        )
    if after.scheduler is not None and after.settled and not after.trouble and selectors:
        nodes = {node.id: node.op for selector in selectors for node in after.graph.select(selector)}
        if nodes:
            ops = ", ".join(f"{n} {op}" for op, n in Counter(nodes.values()).most_common())
            many = f" by {len(new)} directives" if len(new) > 1 else ""
            rows.add("matched", f"{len(nodes):,} node{'s' if len(nodes) != 1 else ''}{many}: {ops}")
    for chain in (x for x in new if isinstance(x, Order) and x.where is None):
        rows.add("order", chain_text(chain))
    for split in new:
        if isinstance(split, Split):
            rows.add("split", f"{_samples(after, split)} into {split.count} as {split.name}")


def _samples(after: State, split: Split) -> str:
    what = "the batch" if split.selector is None else str(split.selector)
    return (
        f"{after.scheduler.schedule.model.samples} samples of {what}"
        if after.scheduler is not None and after.settled
        else what
    )


# ----------------------------------------------------------------------------------------------------- communication


class Traffic(NamedTuple):
    kind: str
    over: str
    stream: str


def traffic(graph: Graph) -> dict[Traffic, tuple[int, float]]:
    """The number of operations of each kind, and their total size in bytes. A send and its receive count as
    one."""
    costs = Costs(graph)
    found: dict[Traffic, tuple[int, float]] = {}
    for node in graph.nodes:
        if not node.template.communicates or node.op == "recv":
            continue
        kind = Traffic("send/recv" if node.op == "send" else node.op, ", ".join(node.template.axes), node.stream)
        count, carried = found.get(kind, (0, 0.0))
        wheres = (node.template.where, *node.template.beyond)
        devices = len({device for where in wheres for device in devices_of(where)})
        found[kind] = count + 1, carried + costs.moved(node) * devices
    return found


def _communication(rows: Rows, before: State, after: State) -> None:
    if after.trouble:
        return
    old = {} if before.trouble or not before.settled else traffic(before.graph)
    new = traffic(after.graph)
    lines: dict[str, list[str]] = {"add": [], "gone": [], "": []}
    for what in dict.fromkeys((*new, *old)):
        (had, carried_then), (count, carried) = old.get(what, (0, 0.0)), new.get(what, (0, 0.0))
        kind = "add" if count > had else "gone" if count < had else ""
        if not kind and not _differs(carried_then, carried):
            continue
        sign, number = {"add": "+", "gone": "-", "": "="}[kind], abs(count - had) or count
        both = f" ({had} -> {count})" if had and count and had != count else ""
        size = bytes_text(carried or carried_then)
        if had and count and _differs(carried_then, carried):
            size = f"{bytes_text(carried_then)} -> {size}"
        over = f" over {what.over}" if what.over else ""
        lines[kind].append(f"{sign} {number} {what.kind}{over}{both}, {size}, stream {what.stream}")
    for kind, texts in lines.items():
        rows.all("comm", texts, MOST, kind, "; `:plan` shows all")


# --------------------------------------------------------------------------------------------------------- estimates


def _estimates(rows: Rows, old: Estimate | None, new: Estimate | None) -> None:
    if new is None:
        return
    if old is None:
        rows.add("memory", f"at most {_peak(new)}")
        rows.add("step", f"{time_text(new.seconds)} estimated, {new.mean_idle:.0%} idle")
        return
    _memory(rows, old, new)
    parts = []
    if time_text(old.seconds) != time_text(new.seconds):
        parts.append(f"{time_text(old.seconds)} -> {time_text(new.seconds)} estimated")
    if abs(old.mean_idle - new.mean_idle) >= CHANGE:
        parts.append(f"idle {old.mean_idle:.0%} -> {new.mean_idle:.0%}")
    if parts:
        rows.add("step", ", ".join(parts))


def _memory(rows: Rows, old: Estimate, new: Estimate) -> None:
    if old.memory.keys() != new.memory.keys():
        rows.add("memory", f"at most {_peak(old)} -> {_peak(new)}")
        return
    alike: dict[tuple[str, str], list[int]] = {}
    for device, size in new.memory.items():
        then, now = bytes_text(old.memory[device]), bytes_text(size)
        if then != now:
            alike.setdefault((then, now), []).append(device)
    lines = [f"{_numbers(devices)}: {then} -> {now} peak" for (then, now), devices in alike.items()]
    rows.all("memory", lines, MOST, more="; `:memory` shows all")


def _peak(found: Estimate) -> str:
    most = bytes_text(max(found.memory.values(), default=0))
    return f"{most} on {'each of ' if len(found.memory) > 1 else ''}{_devices_text(len(found.memory))}"


def _differs(old: float, new: float) -> bool:
    return abs(old - new) > CHANGE * max(abs(old), 1e-12)


def _devices_text(count: int) -> str:
    return f"{count:,} device{'s' if count != 1 else ''}"


def _numbers(devices: Sequence[int]) -> str:
    """`device 3`, `devices 0-3`, `devices 0, 2, 5`"""
    if len(devices) == 1:
        return f"device {devices[0]}"
    if list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"devices {devices[0]}-{devices[-1]}"
    return f"devices {', '.join(map(str, devices[:6]))}{', ...' if len(devices) > 6 else ''}"


# ----------------------------------------------------------------------------------------------------------- missing


def _missing(rows: Rows, state: State) -> None:
    unplaced = [
        x.message.removesuffix(" is not placed")
        for x in state.missing
        if x.code == UNPLACED and x.message.endswith(" is not placed")
    ]
    if unplaced:
        what = ", ".join(f"[{one}]" for one in unplaced[:MOST]) + (
            f" and {len(unplaced) - MOST} more" if len(unplaced) > MOST else ""
        )
        later = "; estimates follow" if state.scheduler is not None else ""
        rows.add("missing", f"{what} {'are' if len(unplaced) > 1 else 'is'} not placed{later}", "todo")
    unused = [axis for x in state.missing if (axis := axis_of(x)) is not None]
    if unused:
        what = ", ".join(unused[:MOST]) + (f" and {len(unused) - MOST} more" if len(unused) > MOST else "")
        one = len(unused) == 1
        rows.add("missing", f"{'axis' if one else 'axes'} {what} {'is' if one else 'are'} not used [{UNUSED}]", "todo")
    others = [
        _short(x)
        for x in state.missing
        if not (x.code == UNPLACED and x.message.endswith(" is not placed")) and axis_of(x) is None
    ]
    rows.all("missing", dict.fromkeys(others), 3, "todo")
    for problem in state.trouble[:1]:  # a later directive may still fix it, so the statement is not rejected
        for text in (f"no graph: {_short(problem)}", *problem.notes, *problem.helps):
            rows.add("trouble", text, "gone")
    left, passes = state.unordered
    if left:
        rows.add("open", f"{left} of {passes} passes are not ordered: the compiler schedules them", "todo")


def _short(problem: Diagnostic) -> str:
    return f"{problem.message} [{problem.code}]"


# ------------------------------------------------------------------------------------------------------------ orders


def orders(state: State, width: int, paint: Paint, before: State | None = None) -> str:
    """The grid of all orders. Cells that moved since `before` have a `*`."""
    timeline = state.timeline
    if timeline is None:
        return ""
    if isinstance(timeline, Diagnostic):
        return f"no grid with unit costs: {timeline.message} [{timeline.code}]"
    lanes = state.lanes
    earlier = before.timeline if before is not None else None
    marked = (
        changed((before.lanes, earlier), (lanes, timeline))
        if before is not None and isinstance(earlier, Timeline)
        else set()
    )
    legend = "; * changed" if marked else ""
    figures = summary(lanes, timeline, state.costs, state.unordered[0])
    return f"{grid(lanes, timeline, width, paint, marked)}\n{figures}{legend}"
