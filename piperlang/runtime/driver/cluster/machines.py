"""The machines of a job: this one, and others of a Ray cluster, where a process of ours watches the workers."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piperlang.runtime.driver.processes import Processes
from piperlang.runtime.driver.training import SILENT, Lost
from piperlang.runtime.driver.watcher import Watcher

BEAT = 1.0
"""Seconds between two questions to a machine."""


class WorkerPlace(NamedTuple):
    """Where a worker runs."""

    machine: str
    """Its system, and the namespaces of processes and of the network there."""
    pid: int
    host: str


class ThisMachine:
    """This machine."""

    name = "this machine"

    def __init__(self) -> None:
        self.processes = Processes()

    def watch(self, pid: int) -> None:
        self.processes.watch(pid)

    def look(self, worker: int, limit: float) -> None:
        """Raises Lost if the machine, where this worker is, has not answered for so many seconds."""

    def known(self, since: float) -> bool:
        """Whether the states of its processes are known as they were then, or later."""
        return True

    def state(self, pid: int) -> str:
        return self.processes.state(pid)

    def ended(self, pid: int) -> str:
        return self.processes.ended(pid)

    def kill(self, pid: int) -> None:
        self.processes.kill(pid)

    def close(self) -> None:
        self.processes.close()


class OtherMachine:
    """Another machine."""

    def __init__(self, group: PlacementGroup, bundle: int, name: str) -> None:
        """The machine that has this bundle of resources."""
        self.name = name
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor: Any = ray.remote(num_cpus=0)(Watcher)
        self.watcher = actor.options(scheduling_strategy=place).remote()
        self.seen: dict[int, tuple[str, str]] = {}
        self.asked: Any = self.watcher.look.remote()
        self.since = math.inf
        """When it was asked, or has answered last. The first answer comes when the watcher has started, however long
        that takes: until then nothing counts as silence, and Ray notices a node that is lost."""
        self.seen_at = self.asked_at = 0.0
        """When it was asked for what is seen, and when last."""

    def watch(self, pid: int) -> None:
        self.watcher.watch.remote(pid)

    def look(self, worker: int, limit: float) -> None:
        now = time.monotonic()
        if self.asked is None:
            if now - self.since >= BEAT:
                self.asked, self.since, self.asked_at = self.watcher.look.remote(), now, now
        elif ray.wait([self.asked], timeout=0)[0]:
            try:
                self.seen, self.seen_at = ray.get(self.asked), self.asked_at
            except RayActorError:
                raise Lost(worker, why=f"its machine, {self.name}, has left the cluster", machine=self.name) from None
            finally:
                self.asked, self.since = None, now
        elif now - self.since > limit:
            why = f"its machine, {self.name}, has not answered for {limit:g} s"
            raise Lost(worker, SILENT, why, self.name)

    def known(self, since: float) -> bool:
        return self.seen_at > since

    def state(self, pid: int) -> str:
        return self.seen.get(pid, ("R", ""))[0]

    def ended(self, pid: int) -> str:
        with suppress(RayError):  # it may know more by now
            self.seen = ray.get(self.watcher.look.remote(), timeout=BEAT)
        return self.seen.get(pid, ("R", ""))[1]

    def kill(self, pid: int) -> None:
        self.watcher.kill.remote(pid)

    def close(self) -> None:
        ray.kill(self.watcher)


Machine = ThisMachine | OtherMachine
