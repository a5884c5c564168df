"""The workers of a job, one per device, on one machine or on several."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piperlang.capture.user.seeding import restored
from piperlang.diagnostics import PiperError, error
from piperlang.interrupts import SIGNALS, uninterrupted
from piperlang.progress import Notice, Workers, emit
from piperlang.runtime.comm import gloo
from piperlang.runtime.comm.process_group import ProcessBackend
from piperlang.runtime.driver.cluster import nodes
from piperlang.runtime.driver.cluster.machines import Machine, OtherMachine, ThisMachine, WorkerPlace
from piperlang.runtime.driver.cluster.ray_itself import RayItself, for_job
from piperlang.runtime.driver.janitor import clear, processes, start_janitor, stop_janitor
from piperlang.runtime.driver.processes import GONE, KILLED, STOPPED, state
from piperlang.runtime.driver.training import SILENT, Lost
from piperlang.runtime.driver.worker import Worker, process

ROOM = 30.0
"""Seconds to wait for a cluster to reserve resources for a job."""

CLEANUP = 30.0
"""Seconds after which the driver stops waiting for a job's processes to end. The janitor then removes them and the
folder."""

STOPPED_FOR = 3.0
"""Seconds that a worker may be stopped (SIGSTOP, a debugger) before it counts as hung."""

TOLD = 5.0
"""Seconds after which it is said what is waited for."""

HALT = 3.0
"""Seconds that workers may take to end their step, when another worker is lost."""

_open: set[Cluster] = set()
"""Clusters that are still open. An interrupt may skip the code that closes them, so they are closed at process exit."""
os.register_at_fork(after_in_child=_open.clear)


class Patience(NamedTuple):
    """How long a job waits, in seconds."""

    silent: float = 30.0
    """For an answer of another machine."""
    devices: float = 600.0
    """For devices that take the place of lost ones."""


class Call(NamedTuple):
    worker: int
    method: str
    future: Any


Enough = Callable[[Any], bool]


class Cluster:
    """The workers of a job, with detection of workers that died."""

    def __init__(
        self,
        count: int,
        address: str | None = None,
        backend: ProcessBackend | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`backend`: by default gloo, which runs everywhere."""
        self.backend = backend or gloo.BACKEND
        self.patience = patience or Patience()
        self.closing = threading.Lock()
        self.stopped = STOPPED_FOR
        self.waiting: set[Call] = set()
        """What is waited for, or was when a worker was lost."""
        self.janitor: subprocess.Popen[bytes] | None = None
        self.group: PlacementGroup | None = None
        self.bundles = list(range(count))
        """Of the group, for each worker."""
        self.workers: list[Any] = []
        self.places: list[WorkerPlace | None] = []
        self.here = process()[0]
        self.machines: dict[str, Machine] = {self.here: ThisMachine()}
        self.ray: RayItself | None = None
        try:
            with uninterrupted():
                self._open_folder()
            with restored():  # Ray draws from `random`, and `data` may, too
                self.ray = for_job(self.folder, address, self.patience.silent)
                self.ray.start(count)
                self._hire(count)
        except BaseException:
            self.close()
            raise

    @property
    def own(self) -> bool:
        """Ray was started for this job."""
        return self.ray is not None and self.ray.own

    @property
    def pids(self) -> list[int | None]:
        """Of the workers on this machine."""
        return [place.pid if place is not None and place.machine == self.here else None for place in self.places]

    def _open_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="piper-")).absolute()
        _close_at_exit()
        _open.add(self)
        self.janitor = start_janitor(self.folder)

    def _hire(self, count: int) -> None:
        """Reserves resources for all workers, all or none, and starts them."""
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = there.get("GPU", 0.0) if self.backend.device.resource == "GPU" else 0.0
        # On this machine, workers share GPUs if there are fewer than workers. In a cluster, where others may have the
        # rest, that would be half the speed without a word.
        gpus = min(1.0, gpus / count) if self.own else min(1.0, gpus)
        self.need = {"GPU": gpus} if gpus else {"CPU": 1.0}
        with uninterrupted():
            self.group = placement_group([self.need] * count, strategy="PACK")
        if not self.group.wait(ROOM):
            raise self._no_room(count)
        if not self.own:
            self._sort_bundles()
        options: dict[str, Any] = {
            "num_cpus": self.need.get("CPU", 0),
            "num_gpus": gpus,
            "concurrency_groups": {"control": 3},
        }
        self.actor: Any = ray.remote(**options)(_controlled())
        self.shares_device = gpus < 1
        self.environment = {} if self.own else nodes.shipped_environment()
        self.workers, self.places = [None] * count, [None] * count
        try:
            self._start_workers(range(count))
        except Lost as lost:
            notes = [lost.why] if lost.why else []
            raise error("P0602", f"worker {lost.worker} died while it was starting", notes=notes, help=KILLED) from None

    def _no_room(self, count: int) -> PiperError:
        (name, each), free = next(iter(self.need.items())), ray.available_resources()  # type: ignore[no-untyped-call]
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return error(
            "P0616",
            f"the Ray cluster does not have enough free resources for {count} workers",
            notes=[f"each worker needs {each:g} {name}; {free.get(name, 0):g} of {there.get(name, 0):g} are free"],
            help="use a smaller mesh, or wait until other jobs have ended",
        )

    def _sort_bundles(self) -> None:
        """Devices with consecutive numbers are on one node, the first ones on that of the driver."""
        where = placement_group_table(self.group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        self.bundles.sort(key=lambda bundle: (where[bundle] != here, where[bundle], bundle))

    def _address(self, bundle: int) -> str:
        """Of the node that has the bundle."""
        where = placement_group_table(self.group)["bundles_to_node_id"].get(bundle)
        there = ray.nodes()  # type: ignore[no-untyped-call]
        found = (node["NodeManagerAddress"] for node in there if node["NodeID"] == where)
        return next(found, "unknown address")

    def _place(self, worker: int) -> PlacementGroupSchedulingStrategy:
        assert self.group is not None
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[worker])

    def _start_workers(self, which: Sequence[int]) -> None:
        assert self.ray is not None
        self.ray.reach()
        if not self.own:
            self._check_nodes(which)
        for i in which:
            self.places[i] = None
            environment = self.environment | self.backend.environment(i, self.shares_device)
            self.workers[i] = self.actor.options(scheduling_strategy=self._place(i)).remote(environment)
        asked = {self.workers[i].where.remote(): i for i in which}
        starting, stopped = list(asked), dict[int, float]()
        while starting:
            self.check_ray()
            ready, starting = ray.wait(starting, num_returns=1, timeout=1.0)
            for future in ready:
                try:
                    self.places[asked[future]] = WorkerPlace(*ray.get(future))
                except RayActorError:
                    raise Lost(asked[future]) from None
            self._kill_stopped(stopped)
            emit(Workers(len(self.workers) - len(starting), len(self.workers)))
        self._watch(which)

    def _check_nodes(self, which: Sequence[int]) -> None:
        """Waits for nodes that have room for these workers, and checks what they have."""
        asked = nodes.ask([self._place(i) for i in which])
        limit = max(self.patience.devices, ROOM)  # the question itself may take some seconds
        began, told, pending = time.monotonic(), False, asked
        while pending:
            self.check_ray()
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
            waited = time.monotonic() - began
            if pending and waited > limit:
                raise self._no_room(len(self.workers))
            if pending and waited > TOLD and not told:
                told = True
                room = f"room for {len(pending)} workers in the cluster"
                emit(Notice(f"waiting for {room}, {limit:g} s at most", warning=True))
        nodes.check(asked)

    def _watch(self, which: Sequence[int]) -> None:
        """From now on these workers are watched, by new watchers if they are elsewhere: a node may have come back."""
        assert self.group is not None
        new = set[str]()
        for i in which:
            place = self.places[i]
            assert place is not None
            if place.machine not in new and place.machine != self.here:
                new.add(place.machine)
                if place.machine in self.machines:
                    self.machines.pop(place.machine).close()
                name = f"{place.host} ({self._address(self.bundles[i])})"
                self.machines[place.machine] = OtherMachine(self.group, self.bundles[i], name)
        for place in self.places:
            if place is not None and (place.machine in new or place.machine == self.here):
                self.machines[place.machine].watch(place.pid)

    def check_files(self, paths: Sequence[Path], meant: Path | None = None) -> None:
        """Raises P0615 if a node does not have one of them. `meant`: what they stand for."""
        if not self.local and paths:
            nodes.check(nodes.ask([self._place(i) for i in range(len(self.workers))], list(map(str, paths))), meant)

    def check_ray(self) -> None:
        """Raises a diagnostic if Ray itself is gone."""
        assert self.ray is not None
        self.ray.check()

    def _kill_stopped(self, stopped: dict[int, float]) -> None:
        """A process that is stopped before it has said who it is would never do so. `stopped`: since when they are."""
        now = time.monotonic()
        for pid in processes(self.folder, ()) if self.own else ():
            if state(pid) not in STOPPED:
                stopped.pop(pid, None)
            elif now - stopped.setdefault(pid, now) > self.stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def halt(self, within: float = HALT) -> list[int]:
        """Ends what all workers do, and kills those that are stopped or do not end it. Which ones are gone."""
        assert self.ray is not None
        self.ray.reach()
        gone = {i for i in range(len(self.workers)) if self._state(i) in GONE + STOPPED}
        for i in gone:
            self._kill(i)
        count = len(self.workers)
        calls = [self.call(i, "abort") for i in range(count)]
        calls += [one for one in self.waiting if one.method not in CONTROL]
        calls = [one for one in calls if one.worker not in gone]
        self.waiting.clear()
        futures = [one.future for one in calls]
        ready, _ = ray.wait(futures, num_returns=len(futures), timeout=within) if futures else ([], [])
        for one in calls:
            if one.future not in ready or _is_lost(one.future):
                gone.add(one.worker)
                self._kill(one.worker)
        return sorted(gone)

    def replace(self, which: Sequence[int]) -> None:
        """Starts new workers in the places of those that are gone. Raises Lost if one of them dies, too."""
        if which:
            self._start_workers(which)

    @property
    def local(self) -> bool:
        """Whether all workers run on this machine and share its file system."""
        return None not in self.pids

    def meeting(self) -> str:
        """The rendezvous of the workers: a file that all of them can access, or a port of the first one."""
        if self.local:
            return str(Path(tempfile.mkdtemp(dir=self.folder)) / "store")
        (place,) = self.wait([self.call(0, "host", ray.util.get_node_ip_address())])  # type: ignore[no-untyped-call]
        return str(place)

    def call(self, worker: int, method: str, *arguments: Any) -> Call:
        return Call(worker, method, getattr(self.workers[worker], method).remote(*arguments))

    def each(self, method: str, arguments: Sequence[Any] | None = None, count: int = 0) -> list[Any]:
        """Calls a method on the first `count` workers, each with its own argument if there are any, and returns all
        results."""
        if arguments is None:
            return self.wait([self.call(i, method) for i in range(count)])
        return self.wait([self.call(i, method, argument) for i, argument in enumerate(arguments)])

    def wait(self, calls: Sequence[Call], timeout: float | None = None, enough: Enough | None = None) -> list[Any]:
        """Results of all calls; None for those that are still waited for when a result is `enough`. Raises what a
        worker has raised, and Lost if one of them dies or does not answer, even if it has returned: others may wait for
        it."""
        results: list[Any] = [None] * len(calls)
        self.waiting.update(calls)
        for i in self._ended(calls, timeout):
            try:
                results[i] = ray.get(calls[i].future)
            except RayActorError:
                raise self._lost(calls[i].worker) from None
            except RayTaskError as problem:
                raise self.cause() or problem.cause from None
            self.waiting.discard(calls[i])
            if enough is not None and enough(results[i]):
                break
        return results

    def _ended(self, calls: Sequence[Call], timeout: float | None) -> Iterator[int]:
        """Which calls have ended, as they do, while the workers are watched."""
        pending = {call.future: i for i, call in enumerate(calls)}
        began = time.monotonic()
        stopped: dict[int, float] = {}
        workers = sorted({call.worker for call in calls})
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.1)
            for future in ready:
                yield pending.pop(future)
            now = time.monotonic()
            if pending and timeout is not None and now - began > timeout:
                raise TimeoutError
            self.check_ray()
            self._check_workers(workers, stopped, now)

    def _check_workers(self, which: Sequence[int], stopped: dict[int, float], now: float) -> None:
        """Raises Lost if a worker is gone, has been stopped for `self.stopped` seconds, or its machine does not answer.
        `stopped`: since when workers are."""
        for i in which:
            place = self.places[i]
            if place is not None:
                self.machines[place.machine].look(i, self.patience.silent)
            its = self._state(i)
            if its in GONE:
                raise self._lost(i)
            if its not in STOPPED:
                stopped.pop(i, None)
            elif now - stopped.setdefault(i, now) > self.stopped:
                raise Lost(i, SILENT)

    def _state(self, i: int) -> str:
        """What the system says of a worker's process."""
        place = self.places[i]
        return self.machines[place.machine].state(place.pid) if place is not None else "R"

    def _lost(self, i: int) -> Lost:
        place = self.places[i]
        return Lost(i, why=self.machines[place.machine].ended(place.pid) if place is not None else "")

    def cause(self) -> Lost | None:
        """Which worker is lost, if another one has failed: where two communicate, the one that is left often fails
        before the system, or another machine, says that the first is gone."""
        dead = self.dead()
        if dead or self.local:
            return self._lost(dead[0]) if dead else None
        began, stopped = time.monotonic(), dict[int, float]()
        try:
            while not all(machine.known(began) for machine in self.machines.values()):
                self.check_ray()
                self._check_workers(range(len(self.workers)), stopped, time.monotonic())
                time.sleep(0.05)
            self._check_workers(range(len(self.workers)), stopped, time.monotonic())
        except Lost as lost:
            return lost
        return None

    def ask(self, method: str, whom: Sequence[int], timeout: float = 0.5) -> dict[int, Any]:
        """Answers of workers that reply within the timeout; the others are left out."""
        futures = {i: self.call(i, method).future for i in whom}
        if not futures:
            return {}
        ready, _ = ray.wait(list(futures.values()), num_returns=len(futures), timeout=timeout)
        found = {}
        for i, future in futures.items():
            if future in ready:
                with contextlib.suppress(RayActorError, RayTaskError):
                    found[i] = ray.get(future)
        return found

    def dead(self, within: float = 0.2) -> list[int]:
        """Workers whose process has ended. Waits a moment, because a process ends shortly after its connections
        break."""
        until = time.monotonic() + within
        while True:
            found = [i for i in range(len(self.workers)) if self._state(i) in GONE]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill every worker. Workers blocked in communication cannot shut down by themselves."""
        for i in range(len(self.workers)):
            self._kill(i)

    def _kill(self, i: int) -> None:
        worker, place = self.workers[i], self.places[i]
        if place is not None:
            self.machines[place.machine].kill(place.pid)
        if worker is not None and (place is None or place.machine != self.here):
            ray.kill(worker)

    def close(self) -> None:
        """Stop the workers, and Ray if it was started for this job, and remove the folder. Ctrl-C is deferred until
        that is done."""
        with uninterrupted(), self.closing, restored():
            if self not in _open:
                return
            try:
                self._disconnect()
            finally:
                self._clean()
                _open.discard(self)

    def _disconnect(self) -> None:
        try:
            self.kill()
            for machine in self.machines.values():
                machine.close()
            if self.group is not None and self.ray is not None and not self.ray.own and not self.ray.gone:
                remove_placement_group(self.group)
        finally:
            if self.ray is not None:
                self.ray.close()

    def _clean(self) -> None:
        """Ray's processes run for a while after ray.shutdown and write into the folder, so they are ended before it is
        removed."""
        spare = {os.getpid()} if self.janitor is None else {os.getpid(), self.janitor.pid}
        done = clear(self.folder, CLEANUP, spare)
        if self.janitor is not None:
            stop_janitor(self.janitor, done)


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_exit)  # Ray registered its handler before, so Ray's runs after this one


def _exit() -> None:
    """Close all open clusters. Further signals are ignored: they would skip the rest of the exit and print a
    traceback."""
    if _open:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    for cluster in list(_open):
        cluster.close()


def _is_lost(future: Any) -> bool:
    try:
        ray.get(future, timeout=0)
    except RayActorError:
        return True
    except Exception:  # what the worker raised: it is alive
        return False
    return False


CONTROL = ("running", "written", "rest", "abort")
"""Methods that workers answer while another one runs."""


def _controlled() -> type:
    """The worker with the methods that must answer while a step runs."""
    for name in CONTROL:
        setattr(Worker, name, ray.method(concurrency_group="control")(getattr(Worker, name)))
    return Worker
