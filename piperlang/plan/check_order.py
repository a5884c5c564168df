"""Whether everybody comes to an end: streams as queues, run as far as they go, each woken by what it waits for.

Nothing here has a choice: what can go on can still go on after somebody else has. So if all come to an end in one order
they do in every order, and first an easy one is tried: each device does its list from top to bottom. Only if that gets
stuck do streams run side by side."""

from __future__ import annotations

from typing import Any

from piperlang.diagnostics import Diagnostic
from piperlang.ir.graph import Key
from piperlang.plan.check import COLLECTIVE, At, Checked, Stop
from piperlang.plan.check_partners import Message, messages
from piperlang.plan.instruction import Instruction

BLOCKING = {"send": "send", "recv": "recv", **dict.fromkeys(COLLECTIVE, "collective")}


def order(checked: Checked, buffered: bool = True) -> None:
    """With sends that never wait, as the runtime has them."""
    if not _Run(checked, buffered, streams=False).run():
        run = _Run(checked, buffered, streams=True)
        if not run.run():
            run.explain()


def rendezvous(checked: Checked) -> None:
    """With sends that end only once every receiver has come to take its part."""
    order(checked, buffered=False)


class _Queue:
    """One stream of one device."""

    __slots__ = ("at", "entered", "has", "list")

    def __init__(self, *has: Any) -> None:
        self.has = has
        """The device: place in the plan, number, instructions, which of them are done, and who waits for which."""
        self.list: list[int] = []
        self.at, self.entered = 0, False


class _Run:
    def __init__(self, checked: Checked, buffered: bool, streams: bool) -> None:
        self.checked, self.plan, self.buffered = checked, checked.plan, buffered
        self.numbers = [device.device for device in self.plan.devices]
        self.queues: list[dict[str, _Queue]] = []
        # From top to bottom, what is waited for has always ended.
        self.done = [bytearray(b"\0" if streams else b"\1") * len(device.instructions) for device in self.plan.devices]
        for d, device in enumerate(self.plan.devices):
            waiting: dict[int, list[_Queue]] = {}
            has = d, device.device, device.instructions, self.done[d], waiting
            queues: dict[str, _Queue] = {}
            if streams:
                for i, instruction in enumerate(device.instructions):
                    if instruction[1] not in queues:
                        queues[instruction[1]] = _Queue(*has)
                    queues[instruction[1]].list.append(i)
            else:
                queue = queues[""] = _Queue(*has)
                queue.list = [i for i, instruction in enumerate(device.instructions) if instruction[0] in BLOCKING]
            self.queues.append(queues)
        self.sent: dict[Message, tuple[Any, dict[str, Any]] | None] = {}
        """The part of a send that a message is, and all of it; None once it has been taken."""
        self.left = 0
        self.odd = False
        self.taken: set[Message] = set()
        self.receivers: dict[Message, _Queue] = {}
        self.senders: dict[Message, _Queue] = {}
        self.arrived: list[list[_Queue]] = [[] for _ in self.plan.groups]
        # Last in, first out: who was woken last runs on what is still in the cache.
        self.work = [queue for queues in self.queues for queue in queues.values()]

    def run(self) -> bool:
        """Whether all came to an end, and all messages to whom they were meant for."""
        while self.work:
            self._advance(self.work.pop())
        stuck = any(queue.at < len(queue.list) for queues in self.queues for queue in queues.values())
        return not (stuck or self.odd or self.left)

    def explain(self) -> None:
        """Partners that disagree tell more than whoever waits for them."""
        messages(self.checked)
        if self.checked.found:
            raise Stop
        self._stuck()

    def _advance(self, queue: _Queue) -> None:
        """One stream as far as it goes. All that is done for every instruction is here: it has to be quick."""
        _, me, instructions, done, waiting = queue.has
        order, start = queue.list, queue.at
        for place in range(start, len(order)):
            i = order[place]
            do, _, _, _, writes, waits, args = instructions[i]
            for earlier in waits:
                if not done[earlier]:
                    waiting.setdefault(earlier, []).append(queue)
                    break
            else:
                kind = BLOCKING.get(do)
                if kind is None or (
                    self._recv(queue, me, writes, args)
                    if kind == "recv"
                    else self._send(queue, me, args)
                    if kind == "send"
                    else self._meet(queue, args["group"])
                ):
                    done[i] = 1
                    if i in waiting:
                        self.work += waiting.pop(i)
                    continue
            queue.at = place
            self.checked.steps += place - start
            return
        queue.at = len(order)
        self.checked.steps += len(order) - start

    def _recv(self, queue: _Queue, me: int, writes: tuple[Key, ...], args: dict[str, Any]) -> bool:
        """Take what has come; whatever does not look like what was sent is looked at later, with all its partners."""
        if not self.buffered:
            self._come(queue, me, args)
        sent, parts = self.sent, args["parts"]
        for part in parts:
            if (part[0], me, part[1]) not in sent:
                self.receivers[part[0], me, part[1]] = queue
                return False
        for source, tag, _, shape in parts:
            message = source, me, tag
            other = sent[message]
            if other is None:
                self.odd = True
                continue
            given, gave = other
            if given[3] != shape or gave["dtype"] != args["dtype"] or not writes[0].startswith(gave["key"] or "now:"):
                self.odd = True
            sent[message] = None
            self.left -= 1
        queue.entered = False
        return True

    def _send(self, queue: _Queue, me: int, args: dict[str, Any]) -> bool:
        sent = self.sent
        if not queue.entered:
            for part in args["parts"]:
                message = me, part[0], part[1]
                if message in sent:
                    self.odd = True
                sent[message] = part, args
                self.left += 1
                if message in self.receivers:
                    self.work.append(self.receivers.pop(message))
        if self.buffered:
            return True
        queue.entered = not self._delivered(queue, me, args)
        return not queue.entered

    def _come(self, queue: _Queue, me: int, args: dict[str, Any]) -> None:
        """A receiver is there: whoever has been waiting to send to it may."""
        if not queue.entered:
            queue.entered = True
            for part in args["parts"]:
                message = part[0], me, part[1]
                self.taken.add(message)
                if message in self.senders:
                    self.work.append(self.senders.pop(message))

    def _delivered(self, queue: _Queue, me: int, args: dict[str, Any]) -> bool:
        for part in args["parts"]:
            message = me, part[0], part[1]
            if message not in self.taken:
                self.senders[message] = queue
                return False
        return True

    def _meet(self, queue: _Queue, group: int) -> bool:
        """The last member to come lets everybody go on."""
        arrived = self.arrived[group]
        if queue.entered:
            queue.entered = False
            return True
        arrived.append(queue)
        if len(arrived) < len(self.plan.groups[group][0]):
            return False
        self.arrived[group] = []
        for other in arrived:
            if other is not queue:
                other.entered = True
                self.work.append(other)
        return True

    # ---------------------------------------------------------------------------------------------------- stuck

    def _stuck(self) -> None:
        """Follow who waits for whom until somebody comes up again."""
        self.sender: dict[Message, At] = {
            (self.numbers[at.device], part[0], part[1]): at
            for at in self.checked.of["send"]
            for part in at.does.args["parts"]
        }
        self.receiver: dict[Message, At] = {
            (part[0], self.numbers[at.device], part[1]): at
            for at in self.checked.of["recv"]
            for part in at.does.args["parts"]
        }
        queue = next(queue for queues in self.queues for queue in queues.values() if queue.at < len(queue.list))
        path: list[_Queue] = []
        reasons: list[tuple[At, At]] = []
        while queue not in path:
            path.append(queue)
            here = self._head(queue)
            there = self._awaited(here)
            reasons.append((here, there))
            queue = self.queues[there.device][there.does.stream]
        circle = reasons[path.index(queue) :]
        notes = tuple(f"{self.checked.name(here)} waits for {self.checked.name(there)}" for here, there in circle[:12])
        lines = dict.fromkeys(line for here, _ in circle if (line := self.plan.lines[here.does.node]))
        helps = (
            (f"look at the order that {', '.join(list(lines)[:6])} ask{'s' if len(lines) == 1 else ''} for",)
            if lines
            else ("make the plan again from its script",)
        )
        devices = sorted({self.numbers[here.device] for here, _ in circle})
        who = (
            f"devices {', '.join(map(str, devices[:8]))}{' ...' if devices[8:] else ''} wait for each other"
            if len(devices) > 1
            else f"streams of device {devices[0]} wait for each other"
        )
        self.checked.found.append(Diagnostic("P0501", who, notes=notes, helps=helps))
        raise Stop

    def _head(self, queue: _Queue) -> At:
        i = queue.list[queue.at]
        return At(queue.has[0], i, queue.has[2][i])

    def _awaited(self, here: At) -> At:
        """What keeps an instruction from going on: of several, the first."""
        does: Instruction = here.does
        instructions, me = self.plan.devices[here.device].instructions, self.numbers[here.device]
        for earlier in does.waits:
            if not self.done[here.device][earlier]:
                return At(here.device, earlier, instructions[earlier])
        if does.do == "recv":
            return next(
                self.sender[part[0], me, part[1]]
                for part in does.args["parts"]
                if (part[0], me, part[1]) not in self.sent
            )
        if does.do == "send":
            return next(
                self.receiver[me, part[0], part[1]]
                for part in does.args["parts"]
                if (me, part[0], part[1]) not in self.taken
            )
        group = does.args["group"]
        here_already = {queue.has[0] for queue in self.arrived[group]}
        member = next(
            d for d, number in enumerate(self.numbers) if number in self.plan.groups[group][0] and d not in here_already
        )
        return next(
            At(member, i, x)
            for i, x in enumerate(self.plan.devices[member].instructions)
            if x.args.get("group") == group and not self.done[member][i]
        )
