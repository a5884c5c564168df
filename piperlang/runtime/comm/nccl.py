"""NCCL, on CUDA. It has no tags, and its sends wait for their receives, on the device: each direction of each pair has
a communicator of its own, because messages of one communicator wait for each other.

What torch may change is kept in this file: `ProcessGroupNCCL.Options` with `config.max_ctas` (torch has it since 2.1;
read in the sources of 2.13), its private `_timeout`, and that TORCH_NCCL_HIGH_PRIORITY goes before
`is_high_priority_stream`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist

from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.plan.plan import Group, Pair
from piperlang.runtime.comm.process_group import ProcessBackend, ProcessComm
from piperlang.runtime.hardware.cuda import Cuda

VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}
"""Of a worker's environment, where the user has not set them. The GPU has queues for all streams: where streams share
one, what is behind a receive that waits does so, too. There may be 32; with so many for each of four workers that share
a GPU under MPS, CUDA refused them."""
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""The user's variable: true gives all communicators high priority, whatever the script says, and false those that the
script says nothing of normal priority."""


class Limits(NamedTuple):
    """What a communicator may use of a GPU."""

    high_priority: bool
    """Of the stream on which NCCL runs its kernels."""
    ctas: int | None
    """`maxCTAs` of ncclConfig_t; None: NCCL chooses."""


def limits(resources: StreamResources, environment: Mapping[str, str]) -> Limits:
    """Unless somebody says otherwise, NCCL's kernels go before those of passes: otherwise a message waits until a pass
    leaves room for it, and the next device waits for the message."""
    said = environment.get(PRIORITY, "").upper()
    high = resources.high_priority
    if said in ("1", "Y", "YES", "T", "TRUE"):
        high = True
    elif high is None:
        high = said not in ("0", "N", "NO", "F", "FALSE")
    return Limits(high, resources.ctas)


class NcclComm(ProcessComm):
    pairs: dict[Pair, dist.ProcessGroup]
    streams: Mapping[str, StreamResources]

    def connected(self, groups: Sequence[Group], pairs: Sequence[Pair], streams: Mapping[str, StreamResources]) -> Self:
        comm = super().connected(groups, pairs, streams)
        comm.pairs = {pair: self._new_group((pair.source, pair.target), pair.resources) for pair in pairs}
        comm.streams = streams
        comm._meet(groups)
        return comm

    def _options(self, resources: StreamResources) -> Any:
        given = limits(resources, os.environ)
        # Of each group its own: torch writes the group's name into it. A build of torch without NCCL lacks the class.
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.high_priority)
        if given.ctas is not None:
            options.config.max_ctas = given.ctas
        options._timeout = self.limit  # as for `new_group`, which warns otherwise
        return options

    def _meet(self, groups: Sequence[Group]) -> None:
        """NCCL connects at first use, and waits for all members: so the first use is here, in one order for
        everybody."""
        token = torch.zeros(1, device="cuda")
        for (members, _), group in zip(groups, self.groups, strict=True):
            if group is not None and self.rank in [self.ranks[d] for d in members]:
                dist.all_reduce(token, group=group)
        for pair, group in self.pairs.items():  # messages have a communicator of their own, and it is all that is used
            if self.rank == self.ranks[pair.source]:
                dist.send(token, self.ranks[pair.target], group=group)
            elif self.rank == self.ranks[pair.target]:
                dist.recv(token, self.ranks[pair.source], group=group)
        torch.cuda.synchronize()

    def abort(self) -> None:
        super().abort()
        for group in (dist.group.WORLD, *self.groups, *self.pairs.values()):
            if isinstance(group, dist.ProcessGroup):  # torch has a number for groups of others
                with suppress(RuntimeError):
                    group._get_backend(torch.device("cuda")).abort()

    def _here(self) -> int:
        return next(device for device, rank in self.ranks.items() if rank == self.rank)

    def _pair(self, source: int, target: int, stream: str) -> dist.ProcessGroup:
        return self.pairs[Pair(source, target, self.streams.get(stream, DEFAULT))]

    def send(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        work = dist.isend(tensor, self.ranks[device], group=self._pair(self._here(), device, stream))
        # One thread issues everything, so the list can be replaced. A capture sends nothing yet.
        if not torch.cuda.is_current_stream_capturing():
            self.pending = [(sent, kept) for sent, kept in self.pending if not sent.is_completed()]
        self.pending.append((work, tensor))

    def recv(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        """Makes the current stream wait, not the host."""
        work = dist.irecv(tensor, self.ranks[device], group=self._pair(device, self._here(), stream))
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
        said = {name: os.environ[name] for name in (PRIORITY,) if name in os.environ}
        return host | said | {name: os.environ.get(name, value) for name, value in VARIABLES.items()}


BACKEND = Nccl()
