"""Ranks as processes, connected by torch.distributed: what gloo and NCCL have in common.

torch pairs collectives by their order in a group, and notices next to nothing when partners disagree: the plan's check
is what keeps them together."""

from __future__ import annotations

import copy
import hmac
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from piperlang.diagnostics import PiperError, error
from piperlang.plan.plan import Group
from piperlang.runtime.comm.backend import Backend, Comm


class ProcessComm(Comm):
    """A backend adds send and recv. Without `connected`, it has no groups yet."""

    groups: list[dist.ProcessGroup | None]
    turned: list[list[int] | None]
    pending: list[tuple[Any, torch.Tensor]]
    """Sends of this step, with their tensors."""
    aborted: bool

    def __init__(self, rank: int, ranks: dict[int, int], limit: timedelta, secret: str) -> None:
        """`ranks`: device of the plan -> rank. `secret`: what only workers of this start of the job know."""
        self.rank, self.ranks, self.limit, self.secret = rank, ranks, limit, secret

    def connected(self, groups: Sequence[Group], pairs: Sequence[tuple[int, int]]) -> Self:
        """The communication of a plan: several plans share the processes. `pairs`: who sends to whom."""
        comm = copy.copy(self)
        ranks = self.ranks
        # Every process makes every group, in the same order: torch asks for it.
        comm.groups = [
            dist.new_group([ranks[d] for d in members], timeout=self.limit) if len(members) > 1 else None
            for members, _ in groups
        ]
        comm.turned = [_turned([ranks[d] for d in members]) for members, _ in groups]
        comm.pending, comm.aborted = [], False
        return comm

    def settle(self) -> None:
        """Wait until everything sent in a step has been received."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def all_reduce(self, group: int, tensor: torch.Tensor) -> None:
        if self._of(group) is not None:
            dist.all_reduce(tensor, group=self.groups[group])

    def reduce(self, group: int, tensor: torch.Tensor, member: int) -> None:
        if self._of(group) is not None:
            dist.reduce(tensor, group=self.groups[group], group_dst=self._rank(group, member))

    def broadcast(self, group: int, tensor: torch.Tensor, member: int) -> None:
        if self._of(group) is not None:
            dist.broadcast(tensor, group=self.groups[group], group_src=self._rank(group, member))

    def _rank(self, group: int, member: int) -> int:
        """In torch's group."""
        turned = self.turned[group]
        return member if turned is None else turned[member]

    def exchange(
        self, group: int, give: torch.Tensor, give_sizes: list[int], take: torch.Tensor, take_sizes: list[int]
    ) -> None:
        turned = self.turned[group]
        if self._of(group) is None:
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
        turned = self.turned[group]
        if self._of(group) is None:
            whole.copy_(mine)
        elif turned is None:
            dist.all_gather_into_tensor(whole, mine, group=self.groups[group])
        else:
            came = torch.empty_like(whole)
            dist.all_gather_into_tensor(came, mine, group=self.groups[group])
            whole.view(len(turned), -1).copy_(came.view(len(turned), -1)[turned])

    def scatter_into(self, group: int, mine: torch.Tensor, whole: torch.Tensor) -> None:
        turned = self.turned[group]
        if self._of(group) is None:
            mine.copy_(whole)
        elif turned is None:
            dist.reduce_scatter_tensor(mine, whole, group=self.groups[group])
        else:
            parts = torch.empty_like(whole)
            parts.view(len(turned), -1)[turned] = whole.view(len(turned), -1)
            dist.reduce_scatter_tensor(mine, parts, group=self.groups[group])

    def _of(self, group: int) -> dist.ProcessGroup | None:
        """torch's group. A collective that begins after `abort` would wait for its timeout."""
        if self.aborted:
            raise RuntimeError("communication was ended, because another worker is lost")
        return self.groups[group]

    def abort(self) -> None:
        """Ends what waits in a call, which raises then. Called by another thread."""
        self.aborted = True

    def close(self) -> None:
        dist.destroy_process_group()


class ProcessBackend(Backend):
    process_group: ClassVar[str]
    """The backend of torch.distributed."""
    comm: ClassVar[type[ProcessComm]]
    loopback: ClassVar[Mapping[str, str]]
    """Environment variables that keep communication on the loopback interface, if all ranks are on one machine. The
    user's own values win."""

    def environment(self, worker: int, shares_device: bool) -> dict[str, str]:
        """Environment variables of a worker, set when it starts. `shares_device`: with other workers."""
        return {}

    def join(
        self,
        rank: int,
        ranks: dict[int, int],
        meeting: Store,
        timeout: float,
        digest: str,
        one_machine: bool,
        secret: str,
    ) -> ProcessComm:
        """Join the other ranks of a job. `ranks`: device of the plan -> rank. `secret`: of this start of the job."""
        if one_machine:
            for name, value in self.loopback.items():
                os.environ.setdefault(name, value)
        limit = timedelta(seconds=timeout)
        agree(meeting, rank, len(ranks), digest, secret)
        dist.init_process_group(self.process_group, store=meeting, rank=rank, world_size=len(ranks), timeout=limit)
        return self.comm(rank, ranks, limit, secret)


def proof(secret: str, *what: object) -> bytes:
    """What only those can say who know the secret."""
    return hmac.digest(bytes.fromhex(secret), " ".join(map(str, what)).encode(), "sha256")


def agree(store: Store, rank: int, world: int, digest: str, secret: str) -> None:
    """Everybody who joins belongs to this start of the job, and has the same plan: nothing later would notice that
    somebody has another."""
    digest = digest or "none"
    store.set(f"digest-{rank}", f"{digest} {proof(secret, digest, rank).hex()}")
    for other in range(world):
        theirs, _, proved = store.get(f"digest-{other}").decode(errors="replace").rpartition(" ")
        if not hmac.compare_digest(proved, proof(secret, theirs, other).hex()):
            raise stranger(f"who says to be rank {other} in the rendezvous of the job")
        if theirs != digest:
            raise error(
                "P0503",
                f"workers {rank} and {other} have different plans",
                notes=[f"{digest[:12]} and {theirs[:12]}"],
                help="start the job again: these workers are of two jobs",
            )


def stranger(who: str) -> PiperError:
    return error(
        "P0614",
        f"a stranger takes part in the job, {who}",
        notes=["it does not know the secret that the driver gave to the workers for this start"],
        help="start the job again; if this happens again, look who connects to the ports of its workers",
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


def hidden(store: Store, secret: str) -> Store:
    """Keys that a stranger cannot guess: a TCPStore answers everybody who reaches its port."""
    return PrefixStore(proof(secret, "keys").hex(), store)
