"""Threads of one process that exchange tensors in memory: for `--executor inline`, which needs no workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from piperlang.plan.plan import Group
from piperlang.runtime.comm.backend import Backend, Comm
from piperlang.runtime.hardware.cpu import Cpu


class Switchboard:
    """State shared by the devices of one process."""

    def __init__(self, groups: Sequence[Group], timeout: float = 60.0) -> None:
        self.groups, self.timeout = groups, timeout
        self.mail: dict[tuple[int, int, int], torch.Tensor] = {}
        self.arrived = threading.Condition()
        self.barriers = [threading.Barrier(len(members)) for members, _ in groups]
        self.aborted = False
        self.tables: list[dict[int, torch.Tensor | list[torch.Tensor]]] = [{} for _ in groups]

    def abort(self) -> None:
        """One device has failed: stop all waits for it."""
        with self.arrived:
            self.aborted = True
            self.arrived.notify_all()
        for barrier in self.barriers:
            barrier.abort()

    def join(self, device: int) -> ThreadComm:
        return ThreadComm(device, self)


class ThreadComm(Comm):
    def __init__(self, device: int, board: Switchboard) -> None:
        self.device, self.board = device, board

    def send(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        with self.board.arrived:
            self.board.mail[self.device, device, tag] = tensor.clone()
            self.board.arrived.notify_all()

    def recv(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        with self.board.arrived:
            mail = self.board.mail
            came = self.board.arrived.wait_for(
                lambda: self.board.aborted or (device, self.device, tag) in mail, self.board.timeout
            )
            if not came or (device, self.device, tag) not in mail:
                raise TimeoutError(f"timed out waiting for a message from device {device}")
            tensor.copy_(self.board.mail.pop((device, self.device, tag)))

    def _share(self, group: int, mine: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor | list[torch.Tensor]]:
        """The contributions of all members, in the order of the group."""
        table, barrier = self.board.tables[group], self.board.barriers[group]
        table[self.device] = mine
        barrier.wait(self.board.timeout)
        found = [table[device] for device in self.board.groups[group][0]]
        barrier.wait(self.board.timeout)
        return found

    def all_reduce(self, group: int, tensor: torch.Tensor) -> None:
        parts = self._share(group, tensor.clone())
        tensor.copy_(torch.stack([part for part in parts if isinstance(part, torch.Tensor)]).sum(0))

    def reduce(self, group: int, tensor: torch.Tensor, member: int) -> None:
        parts = self._share(group, tensor.clone())
        if self.board.groups[group][0][member] == self.device:
            tensor.copy_(torch.stack([part for part in parts if isinstance(part, torch.Tensor)]).sum(0))

    def broadcast(self, group: int, tensor: torch.Tensor, member: int) -> None:
        found = self._share(group, tensor.clone())[member]
        assert isinstance(found, torch.Tensor)
        tensor.copy_(found)

    def exchange(
        self, group: int, give: torch.Tensor, give_sizes: list[int], take: torch.Tensor, take_sizes: list[int]
    ) -> None:
        me = self.board.groups[group][0].index(self.device)
        everyone = self._share(group, list(torch.split(give, give_sizes)))
        take.copy_(torch.cat([theirs[me] for theirs in everyone]))

    def gather_into(self, group: int, whole: torch.Tensor, mine: torch.Tensor) -> None:
        whole.copy_(torch.cat([part for part in self._share(group, mine.clone()) if isinstance(part, torch.Tensor)]))

    def scatter_into(self, group: int, mine: torch.Tensor, whole: torch.Tensor) -> None:
        me = self.board.groups[group][0].index(self.device)
        everyone = self._share(group, list(torch.split(whole.clone(), mine.numel())))
        mine.copy_(torch.stack([theirs[me] for theirs in everyone]).sum(0))


class Threads(Backend):
    name, device = "threads", Cpu()

    def switchboard(self, groups: Sequence[Group], timeout: float) -> Switchboard:
        return Switchboard(groups, timeout)


BACKEND = Threads()
