"""Ray: started here for one job, or joined by address. The only file that imports it; its private parts were tried with
Ray 2.60."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piperlang.diagnostics import error
from piperlang.interrupts import uninterrupted
from piperlang.progress import Workers, emit
from piperlang.runtime.janitor import MARK, clear, start_janitor, stop_janitor
from piperlang.runtime.worker import Worker, process

ROOM = 30.0
"""Seconds that a cluster has to find room for a job."""

CLEANUP = 30.0
"""Seconds after which the driver stops waiting for the end of a job's processes. The janitor then removes them and the
folder."""

_open: set[Cluster] = set()
"""Clusters that are not closed yet. An interrupt may skip the code that closes them, so they are closed when the
process exits."""
os.register_at_fork(after_in_child=_open.clear)


def pack(value: object) -> bytes:
    """For another process, functions that it cannot import included."""
    packed: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return packed


class Lost(Exception):
    """A worker that died."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"worker {worker} died")
        self.worker = worker


class Cluster:
    """Workers, one per device, and what it takes to notice that one of them is gone."""

    def __init__(self, count: int, address: str | None = None, cuda: bool = False) -> None:
        self.own = address is None and not ray.is_initialized()
        self.connected = False
        """This object has called ray.init and not yet ray.shutdown."""
        self.closing = threading.Lock()
        self.janitor: subprocess.Popen[bytes] | None = None
        self.group: PlacementGroup | None = None
        self.workers: list[Any] = []
        self.pids: list[int | None] = []
        try:
            with uninterrupted():
                self._open_folder()
            if self.own:
                self._start(count)
            elif not ray.is_initialized():
                self._join(address)
            self._hire(count, cuda)
        except BaseException:
            self.close()
            raise

    def _open_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="piper-")).absolute()
        _close_at_exit()
        _open.add(self)
        self.janitor = start_janitor(self.folder)

    def _start(self, count: int) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on loopback, for this user, for one job
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # one diagnostic is enough where several workers fail
        _loopback()
        _hush()
        self.connected = True
        try:
            with _marked(self.folder), _unbroken_process_starts():
                ray.init(
                    num_cpus=max(count, 1),
                    object_store_memory=200 * 2**20,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(self.folder / "ray"),
                    _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
                )
        except Exception as problem:  # Ray raises bare ones
            reason = str(problem).partition("\n")[0]
            help = "a machine with too much to do is the usual reason: look at its load and memory, and try again"
            raise error("P0605", "Ray does not start on this machine", notes=[reason], help=help) from None

    def _join(self, address: str | None) -> None:
        _hush()
        self.connected = True
        try:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as problem:
            reason = str(problem).splitlines()[0]
            help = "`ray start --head` prints the address of the cluster it starts"
            raise error("P0605", f"cannot join a Ray cluster at {address}", notes=[reason], help=help) from None

    def _hire(self, count: int, cuda: bool) -> None:
        """A place for every worker, all or none, and then the workers."""
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = min(1.0, there.get("GPU", 0.0) / count) if cuda else 0.0  # workers share GPUs where there are fewer
        need = {"GPU": gpus} if gpus else {"CPU": 1.0}
        with uninterrupted():
            self.group = placement_group([need] * count, strategy="PACK")
        if not self.group.wait(ROOM):
            (name, each), free = next(iter(need.items())), ray.available_resources()  # type: ignore[no-untyped-call]
            note = f"each wants {each:g} {name}; {free.get(name, 0):g} of {there.get(name, 0):g} are free"
            help = "use a smaller mesh, or wait until other jobs have ended"
            raise error("P0605", f"the Ray cluster has no room for {count} workers", notes=[note], help=help)
        options: dict[str, Any] = {
            "num_cpus": need.get("CPU", 0),
            "num_gpus": gpus,
            "concurrency_groups": {"control": 2},
        }
        actor: Any = ray.remote(**options)(_controlled())
        for i in range(count):
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i)
            self.workers.append(
                actor.options(scheduling_strategy=place).remote(_environment(i) if cuda and gpus < 1 else {})
            )
        here, asked = process()[0], [worker.where.remote() for worker in self.workers]
        starting = asked
        while starting:
            _, starting = ray.wait(starting, num_returns=1)
            emit(Workers(count - len(starting), count))
        for system, pid in ray.get(asked):
            self.pids.append(
                pid if system == here else None
            )  # a process that we cannot see must be asked for through Ray

    @property
    def local(self) -> bool:
        """All workers share this machine, its files above all."""
        return None not in self.pids

    def meeting(self) -> str:
        """Where workers can meet: a file that all of them see, or a port of the first one."""
        if self.local:
            return str(Path(tempfile.mkdtemp(dir=self.folder)) / "store")
        (place,) = self.wait([self.call(0, "host", ray.util.get_node_ip_address())])  # type: ignore[no-untyped-call]
        return str(place)

    def call(self, worker: int, method: str, *arguments: Any) -> Any:
        return getattr(self.workers[worker], method).remote(*arguments)

    def each(self, method: str, arguments: Sequence[Any] | None = None, count: int = 0) -> list[Any]:
        """A method of the first workers, each with its own argument if there are any, and the results when all have
        ended."""
        if arguments is None:
            return self.wait([self.call(i, method) for i in range(count)])
        return self.wait([self.call(i, method, argument) for i, argument in enumerate(arguments)])

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> list[Any]:
        results = []
        for i, future in enumerate(futures):
            try:
                results.append(ray.get(future, timeout=timeout))
            except RayActorError:
                raise Lost(i) from None
            except RayTaskError as problem:
                raise problem.cause from None
        return results

    def watch(self, futures: Sequence[Any], beat: float = 1.0, limit: float = 3.0) -> tuple[list[Any], int | None]:
        """Results of all workers; or none, and the worker that has not answered for `limit` seconds.

        A worker that dies raises Lost; one that ends early with a failure ends the wait."""
        pending = {future: i for i, future in enumerate(futures)}
        results: list[Any] = [None] * len(futures)
        pings: dict[int, tuple[Any, float]] = {}
        last = time.monotonic()
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.1)
            for future in ready:
                i = pending.pop(future)
                try:
                    results[i] = ray.get(future)
                except RayActorError:
                    raise Lost(i) from None
                if getattr(results[i], "failed", None) is not None:
                    return results, None
            now = time.monotonic()
            if now - last >= beat:
                last = now
                for i in set(pending.values()) - pings.keys():
                    pings[i] = (self.call(i, "ping"), now)
            for i, (ping, sent) in list(pings.items()):
                if ray.wait([ping], timeout=0)[0]:
                    try:
                        ray.get(ping)
                    except RayActorError:
                        raise Lost(i) from None
                    del pings[i]
                elif now - sent > limit:
                    return results, i
        return results, None

    def ask(self, method: str, whom: Sequence[int], timeout: float = 0.5) -> dict[int, Any]:
        """What workers answer at once; those that do not are left out."""
        futures = {i: self.call(i, method) for i in whom}
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
        """Workers whose process has ended, looked for a moment: the end of a process shows a little after its
        connections break."""
        until = time.monotonic() + within
        while True:
            found = [i for i, pid in enumerate(self.pids) if pid is not None and not _alive(pid)]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def kill(self) -> None:
        """End every worker now; those blocked in communication cannot be asked to."""
        for worker, pid in zip(self.workers, self.pids, strict=False):
            if pid is None:
                ray.kill(worker)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the workers, and Ray if it was started for this job, and remove the folder. Ctrl-C is postponed until
        that is done."""
        with uninterrupted(), self.closing:
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
            if self.group is not None and not self.own:
                remove_placement_group(self.group)
        finally:
            if self.connected:
                self.connected = False
                ray.shutdown()

    def _clean(self) -> None:
        """Ray's processes run for a while after ray.shutdown and write into the folder, so they are ended before it is
        removed."""
        spare = {os.getpid()} if self.janitor is None else {os.getpid(), self.janitor.pid}
        done = clear(self.folder, CLEANUP, spare)
        if self.janitor is not None:
            stop_janitor(self.janitor, done)


@contextlib.contextmanager
def _unbroken_process_starts() -> Iterator[None]:
    """Postpone Ctrl-C while a process is being started, but not all the time that Ray takes to start, which can be a
    minute.

    Python discards a KeyboardInterrupt that is raised by the functions it calls after fork(), and a process has no mark
    until exec()."""
    original = subprocess.Popen.__init__

    def start(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        with uninterrupted():
            original(self, *arguments, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_exit)  # Ray has registered its own before, and so runs it after


def _exit() -> None:
    """Close what is still open. A further Ctrl-C is ignored: it would skip the rest of the exit and print a
    traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for cluster in list(_open):
        cluster.close()


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Mark all processes started in this block, and their children, as processes of the job."""
    # Some Ray processes overwrite their environment, as /proc shows it, with a title. SPT_NOENV disables that.
    names = {MARK: str(folder), "SPT_NOENV": "1"}
    previous = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _environment(worker: int) -> dict[str, str]:
    """Of workers that share a GPU: NCCL refuses two ranks on one GPU of one host, so it must take them for different
    hosts."""
    return {"NCCL_HOSTID": f"piper-{worker}"}


def _loopback() -> None:
    """Ray takes 127.0.0.1 for `any address` unless told, by this variable, that clusters are not wanted; its children
    inherit that."""
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _hush() -> None:
    """Ray prints to standard output that a worker died, which is the place of data; that it died is our own
    diagnostic's to say."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _controlled() -> type:
    """The worker with the methods that must answer while a step runs."""
    for name in ("ping", "running"):
        setattr(Worker, name, ray.method(concurrency_group="control")(getattr(Worker, name)))
    return Worker
