"""Communication between workers: gloo on CPU, NCCL on CUDA, behind the few operations that plans use.

gloo pairs messages by (source, destination, tag), collectives by their order in a group, and notices next to nothing
when partners disagree: the plan's check is what keeps them together. Sends are never waited for while a step runs, so
that no order of large messages can lock up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from piperlang.diagnostics import error


def agree(store: Store, rank: int, world: int, digest: str) -> None:
    """Everybody who joins has the same plan: nothing later would notice that somebody has another."""
    store.set(f"digest-{rank}", digest or "none")
    for other in range(world):
        theirs = store.get(f"digest-{other}").decode()
        if theirs != (digest or "none"):
            raise error(
                "P0503",
                f"workers {rank} and {other} have different plans",
                notes=[f"{digest[:12]} and {theirs[:12]}"],
                help="start the job again: these workers are of two jobs",
            )


def _turned(ranks: Sequence[int]) -> list[int] | None:
    """torch sorts the ranks of a group, whatever order they are given in: where each member of ours stands there, if
    that is elsewhere."""
    places = sorted(ranks)
    found = [places.index(rank) for rank in ranks]
    return found if found != list(range(len(ranks))) else None


def opened(place: str, world: int) -> Store:
    """A meeting place: a file, or a port of the worker that opened it."""
    if place.startswith("tcp:"):
        host, _, port = place.removeprefix("tcp://").rpartition(":")
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    return FileStore(place, world)


class Comm:
    def __init__(
        self,
        rank: int,
        world: int,
        meeting: Store,
        groups: Sequence[tuple[tuple[int, ...], str]],
        ranks: dict[int, int],
        timeout: float,
        digest: str = "",
        pairs: Sequence[tuple[int, int]] = (),
        cuda: bool = False,
        loopback: bool = True,
    ) -> None:
        """`ranks`: device of the plan -> rank; `groups`: members as devices, in the order of the plan; `pairs`: who
        sends to whom."""
        if loopback:  # all on one machine: nobody else need hear
            for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")):
                os.environ.setdefault(name, value)
        self.limit = timedelta(seconds=timeout)
        self.rank, self.ranks, self.cuda = rank, ranks, cuda
        agree(meeting, rank, world, digest)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=meeting, rank=rank, world_size=world, timeout=self.limit
        )
        self.connect(groups, pairs)

    def connect(self, groups: Sequence[tuple[tuple[int, ...], str]], pairs: Sequence[tuple[int, int]]) -> None:
        """The groups of a plan. A copy of this object can have those of another one."""
        # Every process makes every group, in the same order: torch asks for it.
        ranks, cuda = self.ranks, self.cuda
        self.groups = [
            dist.new_group([ranks[d] for d in members], timeout=self.limit) if len(members) > 1 else None
            for members, _ in groups
        ]
        self.turned = [_turned([ranks[d] for d in members]) for members, _ in groups]
        # On NCCL each direction of each pair has a communicator of its own: messages of one communicator wait for each
        # other.
        self.pairs = (
            {pair: dist.new_group([ranks[d] for d in pair], timeout=self.limit) for pair in pairs} if cuda else {}
        )
        self.pending: list[tuple[Any, torch.Tensor]] = []
        if cuda:
            self._meet(groups)

    def _meet(self, groups: Sequence[tuple[tuple[int, ...], str]]) -> None:
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

    def device_of(self, rank: int) -> int:
        return next(device for device, number in self.ranks.items() if number == rank)

    def send(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        if self.cuda:
            work = dist.isend(tensor, self.ranks[device], group=self.pairs[self.device_of(self.rank), device])
        else:
            work = dist.isend(tensor, self.ranks[device], tag=tag)
        # one thread issues everything there; gloo's threads only add to the list, and gloo never says that a send is
        # done
        if self.cuda:
            self.pending = [(sent, kept) for sent, kept in self.pending if not sent.is_completed()]
        self.pending.append((work, tensor))

    def recv(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        """On CUDA this makes the current stream wait, not the host."""
        if self.cuda:
            work = dist.irecv(tensor, self.ranks[device], group=self.pairs[device, self.device_of(self.rank)])
        else:
            work = dist.irecv(tensor, self.ranks[device], tag=tag)
        assert work is not None
        work.wait()

    def settle(self) -> None:
        """Wait until everything sent in a step has been taken."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def all_reduce(self, group: int, tensor: torch.Tensor) -> None:
        if self.groups[group] is not None:
            dist.all_reduce(tensor, group=self.groups[group])

    def exchange(
        self, group: int, give: torch.Tensor, give_sizes: list[int], take: torch.Tensor, take_sizes: list[int]
    ) -> None:
        turned = self.turned[group]
        if self.groups[group] is None:
            take.copy_(give)
        elif turned is None:
            dist.all_to_all_single(take, give, take_sizes, give_sizes, group=self.groups[group])
        else:
            here = [turned.index(k) for k in range(len(turned))]
            parts = torch.split(give, give_sizes)
            arrived = torch.empty_like(take)
            dist.all_to_all_single(
                arrived,
                torch.cat([parts[k] for k in here]),
                [take_sizes[k] for k in here],
                [give_sizes[k] for k in here],
                group=self.groups[group],
            )
            came = torch.split(arrived, [take_sizes[k] for k in here])
            torch.cat([came[k] for k in turned], out=take)

    def gather_into(self, group: int, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Equal parts of all members, in the order of the group, one after the other."""
        turned = self.turned[group]
        if self.groups[group] is None:
            whole.copy_(mine)
        elif turned is None:
            dist.all_gather_into_tensor(whole, mine, group=self.groups[group])
        else:
            came = torch.empty_like(whole)
            dist.all_gather_into_tensor(came, mine, group=self.groups[group])
            whole.view(len(turned), -1).copy_(came.view(len(turned), -1)[turned])

    def scatter_into(self, group: int, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """The sum of everybody's part with our number."""
        turned = self.turned[group]
        if self.groups[group] is None:
            mine.copy_(whole)
        elif turned is None:
            dist.reduce_scatter_tensor(mine, whole, group=self.groups[group])
        else:
            parts = torch.empty_like(whole)
            parts.view(len(turned), -1)[turned] = whole.view(len(turned), -1)
            dist.reduce_scatter_tensor(mine, parts, group=self.groups[group])

    def close(self) -> None:
        dist.destroy_process_group()
