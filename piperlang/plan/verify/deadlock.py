"""Whether every device finishes: streams as queues, run as far as they go, each woken by what it waits for.

Nothing here has a choice: what can go on can still go on after somebody else has. So if all come to an end in one order
they do in every order, and first an easy one is tried: each device does its list from top to bottom. Only if that gets
stuck do streams run side by side."""

from __future__ import annotations

from typing import Any

from piperlang.diagnostics import Diagnostic
from piperlang.plan.instructions import COLLECTIVES, Collective, Receive, Send, Shape
from piperlang.plan.verify.messages import MessageId, carries, messages
from piperlang.plan.verify.report import At, Checked, Stop

BLOCKING = frozenset(("send", "recv", *COLLECTIVES))


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
                    if instruction.stream not in queues:
                        queues[instruction.stream] = _Queue(*has)
                    queues[instruction.stream].list.append(i)
            else:
                queue = queues[""] = _Queue(*has)
                queue.list = [i for i, instruction in enumerate(device.instructions) if instruction.op in BLOCKING]
            self.queues.append(queues)
        self.sent: dict[MessageId, tuple[Shape, Send] | None] = {}
        """The shape of a message, and the send it is a part of; None once it has been received."""
        self.left = 0
        self.odd = False
        self.taken: set[MessageId] = set()
        self.receivers: dict[MessageId, _Queue] = {}
        self.senders: dict[MessageId, _Queue] = {}
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
            x = instructions[i]
            for earlier in x.waits:
                if not done[earlier]:
                    waiting.setdefault(earlier, []).append(queue)
                    break
            else:
                cls = type(x)
                if cls is Send:
                    ends = self._send(queue, me, x)
                elif cls is Receive:
                    ends = self._recv(queue, me, x)
                else:
                    ends = self._meet(queue, x.group) if isinstance(x, Collective) else True
                if ends:
                    done[i] = 1
                    if i in waiting:
                        self.work += waiting.pop(i)
                    continue
            queue.at = place
            self.checked.steps += place - start
            return
        queue.at = len(order)
        self.checked.steps += len(order) - start

    def _recv(self, queue: _Queue, me: int, x: Receive) -> bool:
        """Take what has come; whatever does not look like what was sent is looked at later, with all its partners."""
        if not self.buffered:
            self._come(queue, me, x)
        sent, messages = self.sent, x.messages
        for one in messages:
            if (one.peer, me, one.tag) not in sent:
                self.receivers[one.peer, me, one.tag] = queue
                return False
        for source, tag, _, shape in messages:
            message = source, me, tag
            other = sent[message]
            if other is None:
                self.odd = True
                continue
            given, send = other
            if given != shape or send.dtype != x.dtype or not carries(send.value, x.target):
                self.odd = True
            sent[message] = None
            self.left -= 1
        queue.entered = False
        return True

    def _send(self, queue: _Queue, me: int, x: Send) -> bool:
        sent = self.sent
        if not queue.entered:
            for one in x.messages:
                message = me, one.peer, one.tag
                if message in sent:
                    self.odd = True
                sent[message] = one.shape, x
                self.left += 1
                if message in self.receivers:
                    self.work.append(self.receivers.pop(message))
        if self.buffered:
            return True
        queue.entered = not self._delivered(queue, me, x)
        return not queue.entered

    def _come(self, queue: _Queue, me: int, x: Receive) -> None:
        """A receiver is there: whoever has been waiting to send to it may."""
        if not queue.entered:
            queue.entered = True
            for one in x.messages:
                message = one.peer, me, one.tag
                self.taken.add(message)
                if message in self.senders:
                    self.work.append(self.senders.pop(message))

    def _delivered(self, queue: _Queue, me: int, x: Send) -> bool:
        for one in x.messages:
            message = me, one.peer, one.tag
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
        self.sender = {
            (self.numbers[at.device], one.peer, one.tag): at
            for at, send in self.checked.each(Send)
            for one in send.messages
        }
        self.receiver = {
            (one.peer, self.numbers[at.device], one.tag): at
            for at, receive in self.checked.each(Receive)
            for one in receive.messages
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
        cycle = reasons[path.index(queue) :]
        notes = tuple(f"{self.checked.name(here)} waits for {self.checked.name(there)}" for here, there in cycle[:12])
        lines = dict.fromkeys(line for here, _ in cycle if (line := self.plan.nodes[here.does.node].line))
        helps = (
            (f"look at the order that {', '.join(list(lines)[:6])} ask{'s' if len(lines) == 1 else ''} for",)
            if lines
            else ("make the plan again from its script",)
        )
        devices = sorted({self.numbers[here.device] for here, _ in cycle})
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
        x = here.does
        instructions, me = self.plan.devices[here.device].instructions, self.numbers[here.device]
        for earlier in x.waits:
            if not self.done[here.device][earlier]:
                return At(here.device, earlier, instructions[earlier])
        if isinstance(x, Receive):
            awaited = [(one.peer, me, one.tag) for one in x.messages]
            return next(self.sender[message] for message in awaited if message not in self.sent)
        if isinstance(x, Send):
            awaited = [(me, one.peer, one.tag) for one in x.messages]
            return next(self.receiver[message] for message in awaited if message not in self.taken)
        assert isinstance(x, Collective)
        here_already = {queue.has[0] for queue in self.arrived[x.group]}
        members = self.plan.groups[x.group].members
        member = next(d for d, number in enumerate(self.numbers) if number in members and d not in here_already)
        return next(
            At(member, i, other)
            for i, other in enumerate(self.plan.devices[member].instructions)
            if isinstance(other, Collective) and other.group == x.group and not self.done[member][i]
        )
