"""Executes a plan in simulated time: the same instructions, streams, waits and communicators as on devices.

A stream runs its instructions in order, each when those that it waits for have ended. A collective begins when its last
member is there. A message begins when it is sent or, on machines with rendezvous, when its receiver is ready, too. What
uses the same link of a device, or computes on the same device, shares it: a fluid model, in which every rate changes
whenever something begins or ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import NamedTuple, TypeAlias

from piperlang.plan.estimate.summary import SentBytes
from piperlang.plan.instructions import Collective, GatherParameters, Instruction, Receive, Send, item_bytes
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.simulate.costs import COMPUTE, CostModel, InstructionCost
from piperlang.simulate.timeline import Activity, Place, Ran, Timeline

MessageKey: TypeAlias = tuple[int, int, int]
"""The rows that send and receive a message, and its tag."""
Shared: TypeAlias = tuple[str, int]
"""Something that several may use at once: a link, or what computes, of a row."""


class SimulatedStep(NamedTuple):
    timeline: Timeline
    path: tuple[Ran, ...]
    """The critical path: each begins when the one before it ends, and none can be shorter without the step being
    shorter, too."""
    lengths: tuple[float, ...] = ()
    """Of all steps, if it is one of several: the one that is nearest to their mean."""

    @property
    def seconds(self) -> float:
        """That a step takes."""
        return fmean(self.lengths) if self.lengths else self.timeline.length


def execute(
    plan: Plan, costs: CostModel, alike: Sequence[tuple[int, ...]] | None = None, title: str = ""
) -> SimulatedStep:
    """`alike`: for every device of the plan, all devices that do the same as it, itself among them; the plan may have
    only one of them."""
    return _Execution(plan, costs, alike or [(device.device,) for device in plan.devices]).run(title)


@dataclass(slots=True, eq=False)
class _Flow:
    """Something that shares what it uses."""

    left: float
    uses: tuple[Shared, ...]
    then: Callable[[float], None]
    rate: float = 1.0
    since: float = 0.0
    version: int = 0


@dataclass(slots=True, eq=False)
class _Message:
    target: int
    """The row that it goes to."""
    cost: InstructionCost | None = None
    sender: Place | None = None
    receiver: Place | None = None
    begun: float | None = None
    arrived: bool = False


class _Execution:
    def __init__(self, plan: Plan, costs: CostModel, alike: Sequence[tuple[int, ...]]) -> None:
        self.plan, self.costs, self.alike = plan, costs, alike
        self.row = {device: row for row, devices in enumerate(alike) for device in devices}
        self.rows_of = [tuple(sorted({self.row[device] for device in group.members})) for group in plan.groups]
        """By communicator."""
        self.lists = [device.instructions for device in plan.devices]
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[float], None] | _Flow, int]] = []
        self.order = 0
        self.users: dict[Shared, list[_Flow]] = {}
        self.begun = [[0.0] * len(its) for its in self.lists]
        self.moved = [[0.0] * len(its) for its in self.lists]
        """When it is past its waiting for other devices."""
        self.ended = [[-1.0] * len(its) for its in self.lists]
        self.cause: dict[Place, Place] = {}
        """What an instruction waited for last."""
        self.held_up: dict[Place, Place] = {}
        """Which instruction of another device it waited for after it had begun."""
        self.meetings: dict[tuple[object, ...], list[Place]] = {}
        """Members of collectives that have come, until all have."""
        self.seen: list[dict[tuple[int, str], int]] = [{} for _ in self.lists]
        self.messages: dict[MessageKey, _Message] = {}
        self.sizes: dict[MessageKey, list[int]] = {}
        """Bytes that one sends, and that one receives: not the same where a row stands for several devices, and each
        receives from two of another row."""
        self.open: dict[Place, int] = {}
        """Messages that an instruction still waits for."""
        self._link_up()

    def _link_up(self) -> None:
        """What every instruction waits for: the one before it on its stream, those of other streams, the host."""
        self.after: list[list[list[int]]] = [[[] for _ in its] for its in self.lists]
        self.left = [[0] * len(its) for its in self.lists]
        self.issues = any(self.costs.host(x) for its in self.lists for x in its)
        self.host_waits: dict[Place, int] = {}
        for row, its in enumerate(self.lists):
            last: dict[str, int] = {}
            after, left = self.after[row], self.left[row]
            for i, x in enumerate(its):
                before = last.get(x.stream)
                if before is not None:
                    after[before].append(i)
                    left[i] += 1
                last[x.stream] = i
                for earlier in x.waits:
                    after[earlier].append(i)
                left[i] += len(x.waits) + self.issues
                if isinstance(x, Send | Receive):
                    for one in x.messages:
                        peer, sends = self.row[one.peer], isinstance(x, Send)
                        key = (row, peer, one.tag) if sends else (peer, row, one.tag)
                        size = self.sizes.setdefault(key, [0, 0])
                        size[not sends] += prod(one.shape) * item_bytes(x.dtype)

    # ---------------------------------------------------------------------------------------------------- events

    def run(self, title: str) -> SimulatedStep:
        begin = self.costs.before
        for row, its in enumerate(self.lists):
            if self.issues:
                self._issue(row, 0, begin)
            else:
                for i in [i for i in range(len(its)) if not self.left[row][i]]:
                    self._at(begin, lambda now, row=row, i=i: self._ready(row, i, now))  # type: ignore[misc]
        while self.events:
            self.now, _, what, version = heapq.heappop(self.events)
            if isinstance(what, _Flow):
                if what.version == version:
                    self._close(what, self.now)
            else:
                what(self.now)
        unended = [(row, i) for row, its in enumerate(self.ended) for i, end in enumerate(its) if end < 0]
        assert not unended, f"the simulation is stuck at {self._named(unended[0])}"
        return self._result(title)

    def _named(self, place: Place) -> str:
        x = self._instruction(place)
        return f"{x.op} of {self.plan.nodes[x.node].name}, device {self.plan.devices[place[0]].device}"

    def _instruction(self, place: Place) -> Instruction:
        return self.lists[place[0]][place[1]]

    def _at(self, time: float, then: Callable[[float], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, then, 0))

    def _issue(self, row: int, i: int, now: float) -> None:
        """The host issues instructions one after the other. It waits for those that limit how many gathers there are:
        memory is allocated when an instruction is issued."""
        its = self.lists[row]
        if i == len(its):
            return
        x = its[i]
        if isinstance(x, GatherParameters):
            waits = [earlier for earlier in x.waits if self.ended[row][earlier] < 0]
            if waits:
                self.host_waits[row, waits[-1]] = i
                return

        def issued(then: float) -> None:
            self._release(row, i, then, None)
            self._issue(row, i + 1, then)

        self._at(now + self.costs.host(x), issued)

    def _release(self, row: int, i: int, now: float, cause: Place | None) -> None:
        left = self.left[row]
        left[i] -= 1
        if cause is not None:
            self.cause[row, i] = cause
        else:
            self.cause.pop((row, i), None)
        if not left[i]:
            self._ready(row, i, now)

    # ---------------------------------------------------------------------------------------------- instructions

    def _ready(self, row: int, i: int, now: float) -> None:
        x = self.lists[row][i]
        self.begun[row][i] = self.moved[row][i] = now
        match x:
            case Send():
                self._send(row, i, x, now)
            case Receive():
                self._receive(row, i, x, now)
            case Collective():
                self._join(row, i, x, now)
            case _:
                cost = self.costs.cost(self.plan.devices[row], x)
                self._start(cost, self._computing_on(row), lambda then: self._end(row, i, then), now)

    def _computing_on(self, row: int) -> tuple[Shared, ...]:
        """The device of a row, or those of all ranks that it stands for."""
        devices = self.costs.machine.shared_devices
        return tuple((COMPUTE, rank % devices) for rank in self.alike[row]) if devices else ((COMPUTE, row),)

    def _start(
        self, cost: InstructionCost, uses: tuple[Shared, ...], then: Callable[[float], None], now: float
    ) -> None:
        if not cost.shared:
            self._at(now + cost.alone, then)
            return
        flow = _Flow(cost.shared, uses, then)
        if cost.alone:
            self._at(now + cost.alone, lambda later: self._open(flow, later))
        else:
            self._open(flow, now)

    def _end(self, row: int, i: int, now: float) -> None:
        self.ended[row][i] = now
        for later in self.after[row][i]:
            self._release(row, later, now, (row, i))
        waiting = self.host_waits.pop((row, i), None)
        if waiting is not None:
            self._issue(row, waiting, now)

    # ------------------------------------------------------------------------------------------------- communication

    def _join(self, row: int, i: int, x: Collective, now: float) -> None:
        """A member of a group has come. Rows whose devices are in groups with each other begin together."""
        known = self.seen[row]
        number = known[x.node, x.op] = known.get((x.node, x.op), -1) + 1
        rows = self.rows_of[x.group]
        key = (x.node, x.op, number, rows)
        places = self.meetings.setdefault(key, [])
        places.append((row, i))
        if len(places) < len(rows):
            return
        del self.meetings[key]
        for other in places[:-1]:
            self.moved[other[0]][other[1]] = now
            self.held_up[other] = row, i

        def ended(then: float) -> None:
            for one in places:
                self._end(*one, then)

        # Members of an all-to-all may give and take different amounts: it ends when the last of them has all of its.
        costs = [self.costs.cost(self.plan.devices[r], self.lists[r][k]) for r, k in places]
        cost = max(costs, key=lambda one: one.alone + one.shared)
        uses = tuple((f"{cost.of} {way}", member) for member in rows for way in ("out", "in"))
        self._start(cost, uses, ended, now)

    def _send(self, row: int, i: int, x: Send, now: float) -> None:
        peers = {(row, self.row[one.peer], one.tag): one.peer for one in x.messages}
        self.open[row, i] = len(peers)
        for key, peer in peers.items():
            message = self._message(key)
            message.sender = row, i
            message.cost = self.costs.message(self.plan.devices[row].device, peer, max(self.sizes[key]))
            self._carry(message, now)
        if not peers:
            self._end(row, i, now)
        elif not self.costs.machine.rendezvous:
            taken = self.costs.sending(self.plan.devices[row], x)
            self._at(now + taken, lambda then: self._end(row, i, then))

    def _receive(self, row: int, i: int, x: Receive, now: float) -> None:
        keys = dict.fromkeys((self.row[one.peer], row, one.tag) for one in x.messages)
        self.open[row, i] = len(keys)
        if not keys:
            self._end(row, i, now)
        for key in keys:
            message = self._message(key)
            message.receiver = row, i
            if message.arrived:
                self._took(message.receiver, now)
            else:
                self._carry(message, now)

    def _message(self, key: MessageKey) -> _Message:
        return self.messages.setdefault(key, _Message(key[1]))

    def _carry(self, message: _Message, now: float) -> None:
        """Begins to, if all that must be there is."""
        rendezvous = self.costs.machine.rendezvous
        if message.begun is not None:
            return
        if message.sender is None or (rendezvous and message.receiver is None):
            return
        assert message.cost is not None
        message.begun = now
        for row, i in (message.sender, message.receiver or message.sender):
            self.moved[row][i] = now

        def arrived(then: float) -> None:
            message.arrived = True
            assert message.sender is not None
            if rendezvous:
                self._took(message.sender, then)
            if message.receiver is not None:
                if self.begun[message.receiver[0]][message.receiver[1]] < (now if rendezvous else then):
                    self.held_up[message.receiver] = message.sender
                elif rendezvous:
                    self.held_up[message.sender] = message.receiver
                self._took(message.receiver, then)

        out, into = (f"{message.cost.of} out", message.sender[0]), (f"{message.cost.of} in", message.target)
        self._start(message.cost, (out, into), arrived, now)

    def _took(self, place: Place, now: float) -> None:
        self.open[place] -= 1
        if not self.open[place]:
            self._end(*place, now)

    # -------------------------------------------------------------------------------------------------------- sharing

    def _open(self, flow: _Flow, now: float) -> None:
        flow.since = now
        for use in flow.uses:
            self.users.setdefault(use, []).append(flow)
        self._settle(flow, now)

    def _close(self, flow: _Flow, now: float) -> None:
        for use in flow.uses:
            self.users[use].remove(flow)
        flow.version += 1
        self._settle(flow, now)
        flow.then(now)

    def _settle(self, changed: _Flow, now: float) -> None:
        """New rates for all that share something with a flow that begins or ends."""
        for flow in dict.fromkeys(flow for use in changed.uses for flow in self.users[use]):
            rate = min(min(1.0, self._capacity(use) / len(self.users[use])) for use in flow.uses)
            if rate == flow.rate and flow is not changed:
                continue
            flow.left -= (now - flow.since) * flow.rate
            flow.rate, flow.since = rate, now
            flow.version += 1
            self.order += 1
            heapq.heappush(self.events, (now + max(0.0, flow.left) / rate, self.order, flow, flow.version))

    def _capacity(self, use: Shared) -> int:
        return self.costs.machine.side_by_side if use[0] == COMPUTE else 1

    # --------------------------------------------------------------------------------------------------------- result

    def _result(self, title: str) -> SimulatedStep:
        activities = Activities(self.plan)
        ran: dict[Place, Ran] = {}
        for row, (device, its) in enumerate(zip(self.plan.devices, self.lists, strict=True)):
            for i, x in enumerate(its):
                begun = self.begun[row][i]
                what = activities.of(device, x)
                ran[row, i] = Ran(row, x.stream, what, begun, self.ended[row][i], self.moved[row][i] - begun)
        pairs = [
            (ran[one.sender], ran[one.receiver])
            for one in self.messages.values()
            if one.sender is not None and one.receiver is not None
        ]
        length = max((one.end for one in ran.values()), default=0.0) + self.costs.after
        timeline = Timeline(self.alike, list(ran.values()), length, messages=pairs, title=title)
        return SimulatedStep(timeline, tuple(ran[place] for place in self._path()))

    def _path(self) -> list[Place]:
        """From the instruction that ends last back to the first: what each waited for last."""
        every = [(end, row, i) for row, its in enumerate(self.ended) for i, end in enumerate(its)]
        if not every:
            return []
        _, row, i = max(every)
        at: Place | None = (row, i)
        found = []
        while at is not None:
            found.append(at)
            at = self.held_up.pop(at, None) or self.cause.get(at)
        return found[::-1]


class Activities:
    """What the instructions of a plan do, for a timeline."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.sent = plan, SentBytes(plan)
        self.known: dict[tuple[object, ...], Activity] = {}

    def of(self, device: DevicePlan, x: Instruction) -> Activity:
        size = self.sent.of(device, x)
        key = (x.op, x.node, size)
        found = self.known.get(key)
        if found is None:
            node = self.plan.nodes[x.node]
            found = self.known[key] = Activity(x.op, node.name, dict(node.tags), node.line, size)
        return found
