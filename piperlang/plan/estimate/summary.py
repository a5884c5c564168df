"""A plan on one screen: devices and nodes, estimated step time, memory, bytes that move, and what each line of the
script added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from decimal import ROUND_HALF_UP, Decimal
from math import prod
from typing import Any

from piperlang.ir.graph import COMPUTE, Graph
from piperlang.plan.estimate.cost import Costs
from piperlang.plan.estimate.memory import OPTIMIZER, peaks
from piperlang.plan.instructions import AllToAll, Collective, Instruction, item_bytes
from piperlang.plan.plan import DevicePlan, Plan

LINES = 12
"""Lines of a script that are shown: those that added most."""


def summary(plan: Plan, graph: Graph, states: float | None = None) -> str:
    found = as_json(plan, graph, states)
    devices, nodes, memory = found["devices"], found["nodes"], found["memory"]
    rows: list[tuple[str, str]] = [
        (
            "devices",
            (
                f"{devices['count']:,}, {_range(devices['instructions'], str)} instructions each, {len(plan.programs)}"
                " kinds of compute"
            ),
        ),
        ("nodes", f"{nodes['count']:,}: " + ", ".join(f"{count} {name}" for name, count in nodes["by_kind"].items())),
        (
            "step",
            (
                f"{time_text(found['step']['seconds'])} on the target machine of the compiler, which is"
                f" {found['step']['machine']}; {_range(found['step']['idle'], lambda x: f'{100 * x:.0f}%')} idle"
            ),
        ),
        ("", "  a rough estimate, to order instructions by; `piperc simulate` has the step on a machine that you name"),
        ("memory", f"{_range(memory['bytes'], bytes_text)} at most; on device {memory['device']}:"),
        *(("", f"  {bytes_text(size):>10}  {_part(name, states)}") for name, size in memory["by"].items()),
        *([("", f"  at {memory['at']}")] if memory["at"] else []),
    ]
    for k, (stream, moved) in enumerate(found["communication"].items()):
        rows.append(
            (
                "sent" if not k else "",
                (
                    f"{stream:<12} {bytes_text(moved['bytes']):>10} in all, {_range(moved['of_a_device'], bytes_text)}"
                    f" from a device in {moved['messages']:,} operations"
                ),
            )
        )
    for k, (stream, resources) in enumerate(graph.streams.items()):
        rows.append(("streams" if not k else "", f"{stream:<12} {resources}"))
    for k, line in enumerate(found["added"][:LINES]):
        rows.append(
            (
                "added" if not k else "",
                f"{line['line']:<16} {', '.join(f'{count} {name}' for name, count in line['nodes'].items())}",
            )
        )
    if found["added"][LINES:]:
        rows.append(("", f"and {len(found['added']) - LINES} more lines"))
    return "\n".join(f"{name:<9}{text}".rstrip() for name, text in rows) + "\n"


def as_json(plan: Plan, graph: Graph, states: float | None = None) -> dict[str, Any]:
    found, costs = peaks(plan, graph, states), Costs(graph)
    worst = max(range(len(found)), key=lambda d: (found[d].bytes, -plan.devices[d].device))
    at = plan.devices[worst].instructions[found[worst].at] if found and found[worst].at >= 0 else None
    return {
        "devices": {
            "count": len(plan.devices),
            "instructions": _ends(len(device.instructions) for device in plan.devices),
        },
        "nodes": {"count": len(graph.nodes), "by_kind": _counted(node.op for node in graph.nodes)},
        "step": {"seconds": plan.seconds, "idle": _ends(idle(plan, graph, costs)), "machine": costs.machine.name},
        "memory": {
            "bytes": _ends(one.bytes for one in found),
            "device": plan.devices[worst].device,
            "by": dict(found[worst].by),
            "at": f"{at.op} of {plan.nodes[at.node].name}" if at else "",
        },
        "communication": _communication(plan),
        "streams": {stream: asdict(resources) for stream, resources in graph.streams.items()},
        "added": _added(plan, graph),
    }


def _ends(values: Iterable[Any]) -> dict[str, Any]:
    every = list(values)
    return {"min": min(every, default=0), "max": max(every, default=0)}


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def idle(plan: Plan, graph: Graph, costs: Costs) -> list[float]:
    """By device, the part of the estimated step in which it computes nothing."""
    if not plan.seconds:
        return [0.0]
    busy = [
        sum(costs.seconds(graph.nodes[x.node]) for x in device.instructions if x.op in COMPUTE)
        for device in plan.devices
    ]
    return [max(0.0, 1 - seconds / plan.seconds) for seconds in busy]


# -------------------------------------------------------------------------------------------------- communication


class SentBytes:
    """What instructions of a plan send."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.known: dict[tuple[int, int], float] = {}

    def of(self, device: DevicePlan, x: Instruction) -> float:
        """Bytes that a device gives to others."""
        if not isinstance(x, AllToAll):
            return x.sent_bytes(len(self.plan.groups[x.group].members) if isinstance(x, Collective) else 1)
        key = (id(x.give), device.device)  # microbatches share the same blocks
        found = self.known.get(key)
        if found is None:
            elements = sum(prod(one.shape) for one in x.give if one.peer != device.device)
            found = self.known[key] = float(elements) * item_bytes(x.dtype)
        return found


def _communication(plan: Plan) -> dict[str, dict[str, Any]]:
    """By stream; a stream for every sender counts as one."""
    by: dict[str, list[float]] = {}
    messages: Counter[str] = Counter()
    sent = SentBytes(plan)
    for d, device in enumerate(plan.devices):
        for x in device.instructions:
            moved = sent.of(device, x)
            if moved:
                stream = x.stream.rstrip(">")
                by.setdefault(stream, [0.0] * len(plan.devices))[d] += moved
                messages[stream] += 1
    return {
        stream: {"bytes": round(sum(moved)), "of_a_device": _ends(map(round, moved)), "messages": messages[stream]}
        for stream, moved in sorted(by.items())
    }


# ------------------------------------------------------------------------------------------------------- the script


def _part(name: str, states: float | None) -> str:
    """Which optimizer a model has is known when it trains."""
    return f"{name} (of Adam, for example)" if name == OPTIMIZER and states is None else name


def _added(plan: Plan, graph: Graph) -> list[dict[str, Any]]:
    """What each directive added: nodes by kind, the line that added most first. Lines of orders add no passes."""
    by: dict[str, list[str]] = {}
    for node in graph.nodes:
        line = plan.nodes[node.id].line
        if line and node.template.by is not None:
            by.setdefault(line, []).append(node.op)
    return [{"line": line, "nodes": _counted(ops)} for line, ops in sorted(by.items(), key=lambda item: -len(item[1]))]


def _range(ends: Mapping[str, Any], show: Any) -> str:
    low, high = show(ends["min"]), show(ends["max"])
    return str(low) if low == high else f"{low} to {high}"


def bytes_text(count: float) -> str:
    return _scaled(count, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def time_text(seconds: float) -> str:
    return _scaled(seconds * 1e6, ("us", "ms", "s"), 1000)


def _scaled(value: float, units: Sequence[str], step: int) -> str:
    unit = 0
    while value >= step and unit + 1 < len(units):
        value /= step
        unit += 1
    whole = value >= 100 or (unit == 0 and value == int(value))
    # As JavaScript does on a page; format() rounds halves to even.
    return f"{Decimal(value).quantize(Decimal(1 if whole else '0.1'), ROUND_HALF_UP)} {units[unit]}"
