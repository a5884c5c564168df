"""One order for the whole graph: what the script leaves open is filled by critical-path list scheduling.

All devices take their instructions from this one sequence, so what two of them do together they do in the same order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf, nextafter

from piperlang.core.mesh import Submesh
from piperlang.ir.graph import Graph
from piperlang.ir.layout import devices_of
from piperlang.ir.sort import edges, topological
from piperlang.plan.estimate.cost import Costs


@dataclass(frozen=True)
class Sequence:
    order: list[int]
    start: dict[int, float]
    end: dict[int, float]

    @property
    def seconds(self) -> float:
        return max(self.end.values(), default=0.0)


def linearize(graph: Graph, costs: Costs) -> Sequence:
    """Every node as early as it can, the one with the longest way to the end first. A cycle is reported by
    `topological`."""
    users, waits = known = edges(graph)
    tops = topological(graph, known)
    urgency = _urgency(graph, users, tops, costs)
    _hurry_reductions(graph, users, urgency)
    lanes = _lanes(graph)
    places: dict[tuple[int, str], list[tuple[int, str]]] = {}
    """By template and stream: the streams of lanes that a node keeps busy."""
    free: dict[tuple[int, str], float] = {}
    ready = [0.0] * len(users)
    heap: list[tuple[float, float, int]] = []
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    order: list[int] = []

    def release(item: int, at: float) -> None:
        for user in users[item]:
            ready[user] = max(ready[user], at)
            waits[user] -= 1
            if not waits[user]:
                if user < len(graph.nodes):
                    heapq.heappush(heap, (ready[user], -urgency[user], user))
                else:
                    release(user, ready[user])

    for item in [i for i, left in enumerate(waits) if not left]:
        if item < len(graph.nodes):
            heapq.heappush(heap, (0.0, -urgency[item], item))
        else:
            release(item, 0.0)
    while heap:
        at, urgent, i = heapq.heappop(heap)
        node = graph.nodes[i]
        template, stream = node.template, node.stream
        busy = places.get((id(template), stream))
        if busy is None:
            wheres = (template.where, *template.beyond)
            busy = places[id(template), stream] = [(lane, stream) for where in wheres for lane in lanes[where]]
        can = max([at, *(free.get(place, 0.0) for place in busy)])
        if can > at:
            heapq.heappush(heap, (can, urgent, i))
            continue
        start[i], end[i] = at, at + costs.seconds(node)
        for place in busy:
            free[place] = end[i]
        order.append(i)
        release(i, end[i])
    return Sequence(order, start, end)


def _urgency(graph: Graph, users: list[list[int]], tops: list[int], costs: Costs) -> list[float]:
    """The longest way from a node to the end of the step."""
    longest = [0.0] * len(users)

    def beyond(item: int) -> float:
        return max((longest[user] if user < len(graph.nodes) else beyond(user) for user in users[item]), default=0.0)

    for i in reversed(tops):
        longest[i] = costs.seconds(graph.nodes[i]) + beyond(i)
    return longest


def _hurry_reductions(graph: Graph, users: list[list[int]], urgency: list[float]) -> None:
    """A reduce-scatter of gradients is a little more urgent than the gathers that wait for the same backward. They
    would go before it, and where communication is the bottleneck, whole gradients of all layers would wait for the last
    of them."""
    for i, node in enumerate(graph.nodes):
        if node.op != "reduce_scatter" or node.writes[0] not in graph.held:
            continue
        makers = {graph.made[key] for keys in node.reads for key in keys if key in graph.made}
        gathers = [
            urgency[user]
            for maker in makers
            for user in users[maker]
            if user < len(graph.nodes) and graph.nodes[user].op == "all_gather"
        ]
        urgency[i] = max([urgency[i], *(nextafter(found, inf) for found in gathers)])


def _lanes(graph: Graph) -> dict[Submesh, list[int]]:
    """For every submesh, the lanes of its devices: one for all that do the same."""
    lane = {device: number for number, devices in enumerate(alike(graph)) for device in devices}
    return {where: list(dict.fromkeys(lane[device] for device in devices_of(where))) for where in _wheres(graph)}


def alike(graph: Graph) -> list[tuple[int, ...]]:
    """Devices that are in the same submeshes do the same."""
    member: dict[int, list[int]] = {}
    for number, where in enumerate(_wheres(graph)):
        for device in devices_of(where):
            member.setdefault(device, []).append(number)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for device, numbers in sorted(member.items()):
        kinds.setdefault(tuple(numbers), []).append(device)
    return [tuple(devices) for devices in kinds.values()]


def _wheres(graph: Graph) -> list[Submesh]:
    return list(dict.fromkeys(where for template in graph.templates for where in (template.where, *template.beyond)))
