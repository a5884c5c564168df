"""Ranks as processes, connected by torch.distributed: what gloo and NCCL have in common.

torch pairs collectives by their order in a group, and notices next to nothing when partners disagree: the plan's check
is what keeps them together."""

from __future__ import annotations

import copy
import hmac
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.diagnostics import PiperError, error
from piperlang.plan.plan import Group, Pair
from piperlang.runtime.comm.backend import Backend, Comm

# torch 2.13 has new names, and warns of the old ones, which are all that 2.11 has.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Meeting(NamedTuple):
    """Where the ranks of a job meet, and what they must agree on."""

    rank: int
    ranks: dict[int, int]
    """Device of the plan -> rank."""
    store: Store
    timeout: float
    digest: str
    """Of the plan."""
    secret: str
    """What only workers of this start of the job know."""
    interface: str | None = None
    """The network interface that leads to the others; None: all are on this machine."""


class ProcessComm(Comm):
    """A backend adds send and recv. Without `connected`, it has no groups yet."""

    groups: list[dist.ProcessGroup | None]
    turned: list[list[int] | None]
    pending: list[tuple[Any, torch.Tensor]]
    """Sends of this step, with their tensors."""
    aborted: bool

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.ranks, self.secret = meeting.rank, meeting.ranks, meeting.secret
        self.limit = timedelta(seconds=meeting.timeout)

    def connected(self, groups: Sequence[Group], pairs: Sequence[Pair], streams: Mapping[str, StreamResources]) -> Self:
        """The communication of a plan: several plans share the processes. `streams`: those with resources."""
        comm = copy.copy(self)
        # Every process makes every group, in the same order: torch asks for it.
        comm.groups = [
            self._new_group(members, streams.get(stream, DEFAULT)) if len(members) > 1 else None
            for members, stream in groups
        ]
        comm.turned = [_turned([self.ranks[d] for d in members]) for members, _ in groups]
        comm.pending, comm.aborted = [], False
        return comm

    def _new_group(self, members: Sequence[int], resources: StreamResources) -> dist.ProcessGroup:
        """A group of torch's, with what the backend makes of the resources of its stream."""
        ranks = [self.ranks[d] for d in members]
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=self.limit, pg_options=self._options(resources))
        return group

    def _options(self, resources: StreamResources) -> Any:
        """Of a new group, in the form of torch's backend. None: there are none."""
        return None

    def settle(self) -> None:
        """Wait until everything sent in a step has been received."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def forget(self) -> None:
        """Sends that were captured with what is thrown away: they have no end to wait for."""
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
            all_gather(whole, mine, group=self.groups[group])
        else:
            came = torch.empty_like(whole)
            all_gather(came, mine, group=self.groups[group])
            for k, part in enumerate(whole.view(len(turned), -1)):
                part.copy_(came.view(len(turned), -1)[turned[k]])

    def scatter_into(self, group: int, mine: torch.Tensor, whole: torch.Tensor) -> None:
        turned = self.turned[group]
        if self._of(group) is None:
            mine.copy_(whole)
        elif turned is None:
            reduce_scatter(mine, whole, group=self.groups[group])
        else:
            parts = torch.empty_like(whole)
            for k, part in enumerate(whole.view(len(turned), -1)):
                parts.view(len(turned), -1)[turned[k]].copy_(part)
            reduce_scatter(mine, parts, group=self.groups[group])

    def _of(self, group: int) -> dist.ProcessGroup | None:
        """torch's group. A collective that begins after `abort` would wait for its timeout."""
        self.check_alive()
        return self.groups[group]

    def check_alive(self) -> None:
        if self.aborted:
            raise RuntimeError("communication was ended, because another worker is lost")

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
    """Environment variables that keep communication on the loopback interface, if all ranks are on one machine."""
    interface: ClassVar[str | None] = None
    """The variable that names the interface otherwise, for a backend that does not find it."""

    def environment(self, worker: int, shares_device: bool) -> dict[str, str]:
        """Environment variables of a worker, set when it starts. `shares_device`: with other workers."""
        return {}

    def join(self, meeting: Meeting) -> ProcessComm:
        """Join the other ranks of a job."""
        if meeting.interface is None:
            _choose(self.loopback)
        else:
            _choose({self.interface: meeting.interface} if self.interface and meeting.interface else {})
        world, comm = len(meeting.ranks), self.comm(meeting)
        agree(meeting.store, meeting.rank, world, meeting.digest, meeting.secret)
        dist.init_process_group(
            self.process_group, store=meeting.store, rank=meeting.rank, world_size=world, timeout=comm.limit
        )
        return comm


_chosen: set[str] = set()


def _choose(variables: Mapping[str, str]) -> None:
    """Sets variables of the environment, in place of those of the start before. The user's own values win."""
    for name in _chosen:
        os.environ.pop(name, None)
    _chosen.clear()
    for name, value in variables.items():
        if name not in os.environ:
            os.environ[name] = value
            _chosen.add(name)


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


def hidden(store: Store, secret: str) -> Store:
    """Keys that a stranger cannot guess: a TCPStore answers everybody who reaches its port."""
    return PrefixStore(proof(secret, "keys").hex(), store)
