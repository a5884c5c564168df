"""gloo, on CPU. It pairs messages by (source, destination, tag), and never says that a send is done: sends are waited
for at the end of a step."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Self

import torch
import torch.distributed as dist

from piperlang.core.streams import StreamResources
from piperlang.plan.plan import Group, Pair
from piperlang.runtime.comm.process_group import Meeting, ProcessBackend, ProcessComm, proof, stranger
from piperlang.runtime.hardware.cpu import Cpu


class GlooComm(ProcessComm):
    sockets: frozenset[int]
    """Inodes of its connections. gloo has no way to end a call that waits for a peer, other than a connection that
    breaks: its `abort` does not end receives (tried on torch 2.13)."""

    def connected(self, groups: Sequence[Group], pairs: Sequence[Pair], streams: Mapping[str, StreamResources]) -> Self:
        before = _sockets()
        comm = super().connected(groups, pairs, streams)
        for number, ((members, _), group) in enumerate(zip(groups, comm.groups, strict=True)):
            if group is not None and self.rank in [self.ranks[d] for d in members]:
                comm.check(group, f"group {number}")
        comm.sockets = self.sockets | (_sockets().keys() - before.keys())
        return comm

    def check(self, group: dist.ProcessGroup, name: str) -> None:
        """Over every connection of a group both ends prove who they are: gloo itself takes anybody who connects to its
        port in time."""
        me, count = dist.get_rank(group), dist.get_world_size(group)
        mine = b"".join(proof(self.secret, name, me, other) for other in range(count))
        give, take = torch.frombuffer(bytearray(mine), dtype=torch.uint8), torch.empty(len(mine), dtype=torch.uint8)
        dist.all_to_all_single(take, give, group=group)
        for other, part in enumerate(take.view(count, -1)):
            if not hmac.compare_digest(bytes(part.tolist()), proof(self.secret, name, other, me)):
                raise stranger(f"at the connection to rank {other}")

    def abort(self) -> None:
        super().abort()
        for inode, descriptor in _sockets().items():
            if inode in self.sockets:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.getpeername()  # raises for a listener, which gloo must keep
                    copy.shutdown(socket.SHUT_RDWR)

    def send(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        work = dist.isend(tensor, self.ranks[device], tag=tag)
        self.pending.append((work, tensor))  # called by several threads, which only add to the list

    def recv(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        work = dist.irecv(tensor, self.ranks[device], tag=tag)
        assert work is not None
        work.wait()


class Gloo(ProcessBackend):
    name = process_group = "gloo"
    device = Cpu()
    comm = GlooComm
    loopback: ClassVar = {"GLOO_SOCKET_IFNAME": "lo"}
    interface = "GLOO_SOCKET_IFNAME"

    def join(self, meeting: Meeting) -> ProcessComm:
        before = _sockets()
        comm = super().join(meeting)
        assert isinstance(comm, GlooComm)
        world = dist.group.WORLD
        if world is not None and len(meeting.ranks) > 1:
            comm.check(world, "all")
        comm.sockets = frozenset(_sockets().keys() - before.keys())
        return comm


def _sockets() -> dict[int, int]:
    """The sockets of this process: their descriptors, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


BACKEND = Gloo()
