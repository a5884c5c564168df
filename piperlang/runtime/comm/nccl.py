"""NCCL, on CUDA. It has no tags, and its sends wait for their receives, on the device: each direction of each pair has
a communicator of its own, because messages of one communicator wait for each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Self

import torch
import torch.distributed as dist

from piperlang.plan.plan import Group
from piperlang.runtime.comm.process_group import ProcessBackend, ProcessComm
from piperlang.runtime.hardware.cuda import Cuda

VARIABLES = {"TORCH_NCCL_HIGH_PRIORITY": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
"""Of a worker's environment, where the user has not set them. NCCL's kernels go before those of passes: otherwise a
message waits until a pass leaves room for it, and the next device waits for the message. And the GPU has queues for
all streams: where streams share one, what is behind a receive that waits does so, too. There may be 32; with so many
for each of four workers that share a GPU under MPS, CUDA refused them."""


class NcclComm(ProcessComm):
    pairs: dict[tuple[int, int], dist.ProcessGroup]

    def connected(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> Self:
        comm = super().connected(groups, pairs)
        comm.pairs = {pair: dist.new_group([self.ranks[d] for d in pair], timeout=self.limit) for pair in pairs}
        comm._meet(groups)
        return comm

    def _meet(self, groups: Sequence[Group]) -> None:
        """NCCL connects at first use, and waits for all members: so the first use is here, in one order for
        everybody."""
        token = torch.zeros(1, device="cuda")
        for (members, _), group in zip(groups, self.groups, strict=True):
            if group is not None and self.rank in [self.ranks[d] for d in members]:
                dist.all_reduce(token, group=group)
        for (source, target), group in self.pairs.items():
            if self.rank in (self.ranks[source], self.ranks[target]):
                dist.all_reduce(token, group=group)
        torch.cuda.synchronize()

    def abort(self) -> None:
        super().abort()
        for group in (dist.group.WORLD, *self.groups, *self.pairs.values()):
            if isinstance(group, dist.ProcessGroup):  # torch has a number for groups of others
                with suppress(RuntimeError):
                    group._get_backend(torch.device("cuda")).abort()

    def _here(self) -> int:
        return next(device for device, rank in self.ranks.items() if rank == self.rank)

    def send(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, self.ranks[device], group=self.pairs[self._here(), device])
        # One thread issues everything, so the list can be replaced. A capture sends nothing yet.
        if not torch.cuda.is_current_stream_capturing():
            self.pending = [(sent, kept) for sent, kept in self.pending if not sent.is_completed()]
        self.pending.append((work, tensor))

    def recv(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        """Makes the current stream wait, not the host."""
        work = dist.irecv(tensor, self.ranks[device], group=self.pairs[device, self._here()])
        assert work is not None
        work.wait()


class Nccl(ProcessBackend):
    name = process_group = "nccl"
    device = Cuda()
    buffered = False
    comm = NcclComm
    loopback: ClassVar = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

    def environment(self, worker: int, shares_device: bool) -> dict[str, str]:
        """NCCL refuses two ranks on one GPU of one host, so workers that share a GPU pretend to be on different
        hosts."""
        host = {"NCCL_HOSTID": f"piper-{worker}"} if shares_device else {}
        return host | {name: os.environ.get(name, value) for name, value in VARIABLES.items()}


BACKEND = Nccl()
