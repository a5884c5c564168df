"""Ray: started for one job, or joined by address. The only file that imports Ray; its private API was tried with Ray
2.60."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piperlang.capture.user.model_file import model_modules
from piperlang.capture.user.seeding import restored
from piperlang.diagnostics import error
from piperlang.interrupts import SIGNALS, uninterrupted
from piperlang.progress import Workers, emit
from piperlang.runtime.comm import gloo
from piperlang.runtime.comm.process_group import ProcessBackend
from piperlang.runtime.driver.janitor import MARK, clear, processes, start_janitor, stop_janitor
from piperlang.runtime.driver.training import Lost
from piperlang.runtime.driver.worker import Worker, process

ROOM = 30.0
"""Seconds to wait for a cluster to reserve resources for a job."""

CLEANUP = 30.0
"""Seconds after which the driver stops waiting for a job's processes to end. The janitor then removes them and the
folder."""

STOPPED_FOR = 3.0
"""Seconds that a worker may be stopped (SIGSTOP, a debugger) before it counts as hung."""
RAY_STOPPED_FOR = 10.0
"""The same for processes of Ray: a step does not need them."""
SILENT_FOR = 60.0
"""Seconds that a worker of another machine may not answer: it cannot while it is in C code that keeps the GIL."""

REACH = 10.0
"""Seconds to reach a Ray cluster."""

HALT = 3.0
"""Seconds that workers may take to end their step, when another worker is lost."""

_open: set[Cluster] = set()
"""Clusters that are still open. An interrupt may skip the code that closes them, so they are closed at process exit."""
os.register_at_fork(after_in_child=_open.clear)


def pack(value: object) -> bytes:
    """Pickles a value for another process, including functions that it cannot import."""
    for module in model_modules():
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    packed: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return packed


START_ATTEMPTS = 4
"""Ray gives its processes 30 s to start, which a busy machine may exceed."""


class Call(NamedTuple):
    worker: int
    method: str
    future: Any


Enough = Callable[[Any], bool]


class Cluster:
    """The workers of a job, one per device, with detection of workers that died."""

    def __init__(self, count: int, address: str | None = None, backend: ProcessBackend | None = None) -> None:
        """`backend`: by default gloo, which runs everywhere."""
        self.backend = backend or gloo.BACKEND
        self.own = address is None and not ray.is_initialized()
        self.connected = False
        """This object has called ray.init and not yet ray.shutdown."""
        self.closing = threading.Lock()
        self.stopped, self.silent = STOPPED_FOR, SILENT_FOR
        self.ray: dict[str, int] = {}
        """Processes of Ray that the job cannot do without, if it was started for this job."""
        self.ray_stopped: dict[int, float] = {}
        """Since when those that are stopped are."""
        self.waiting: set[Call] = set()
        """What is waited for, or was when a worker was lost."""
        self.before: dict[str, str | None] = {}
        """What the environment has said about Ray's authentication."""
        self.janitor: subprocess.Popen[bytes] | None = None
        self.group: PlacementGroup | None = None
        self.workers: list[Any] = []
        self.pids: list[int | None] = []
        try:
            with uninterrupted():
                self._open_folder()
            with restored():  # Ray draws from `random`, and `data` may, too
                if self.own:
                    self._start(count)
                elif not ray.is_initialized():
                    self._join(address)
                self._hire(count)
        except BaseException:
            self.close()
            raise

    def _open_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="piper-")).absolute()
        _close_at_exit()
        _open.add(self)
        self.janitor = start_janitor(self.folder)

    def _start(self, count: int) -> None:
        self.before = _use_token(_new_token(self.folder / "token"))
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # if several workers fail, one diagnostic is enough
        # Memory that torch's allocator on ARM has freed goes back at once: a step would seem to need twice as much.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
        _loopback()
        _hush()
        self.connected = True
        for attempt in range(1, START_ATTEMPTS + 1):
            temporary = self.folder / f"ray{attempt}"
            try:
                with _marked(self.folder), _unbroken_process_starts(), _own_signals():
                    ray.init(
                        num_cpus=max(count, 1),
                        object_store_memory=200 * 2**20,
                        include_dashboard=False,
                        logging_level=logging.ERROR,
                        log_to_driver=False,
                        configure_logging=False,
                        _node_ip_address="127.0.0.1",
                        _temp_dir=str(temporary),
                        _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
                    )
                self.ray = _processes_of_ray()
                return
            except Exception as problem:  # Ray raises plain exceptions
                ray.shutdown()
                if attempt < START_ATTEMPTS:
                    clear(temporary, 10.0, (os.getpid(),))
                    continue
                reason = str(problem).partition("\n")[0]
                help = "the usual reason is an overloaded machine: check its load and memory, and try again"
                raise error("P0605", "cannot start Ray on this machine", notes=[reason], help=help) from None

    def _join(self, address: str | None) -> None:
        _hush()
        try:
            _check_reachable(address or "")
            self.connected = True
            with _own_signals():
                ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as problem:
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            help = "`ray start --head` prints the address of the cluster it starts"
            raise error("P0605", f"cannot join a Ray cluster at {address}", notes=[reason], help=help) from None

    def _hire(self, count: int) -> None:
        """Reserves resources for all workers, all or none, and starts them."""
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        # Workers share GPUs if there are fewer than workers.
        gpus = min(1.0, there.get("GPU", 0.0) / count) if self.backend.device.resource == "GPU" else 0.0
        need = {"GPU": gpus} if gpus else {"CPU": 1.0}
        with uninterrupted():
            self.group = placement_group([need] * count, strategy="PACK")
        if not self.group.wait(ROOM):
            (name, each), free = next(iter(need.items())), ray.available_resources()  # type: ignore[no-untyped-call]
            note = f"each worker needs {each:g} {name}; {free.get(name, 0):g} of {there.get(name, 0):g} are free"
            help = "use a smaller mesh, or wait until other jobs have ended"
            raise error(
                "P0605",
                f"the Ray cluster does not have enough free resources for {count} workers",
                notes=[note],
                help=help,
            )
        options: dict[str, Any] = {
            "num_cpus": need.get("CPU", 0),
            "num_gpus": gpus,
            "concurrency_groups": {"control": 3},
        }
        self.actor: Any = ray.remote(**options)(_controlled())
        self.shares_device = gpus < 1
        self.workers, self.pids = [None] * count, [None] * count
        try:
            self._start_workers(range(count))
        except Lost as lost:
            raise error(
                "P0602",
                f"worker {lost.worker} died while it was starting",
                help="check dmesg for an out-of-memory kill, and whether the process was killed otherwise",
            ) from None

    def _start_workers(self, which: Sequence[int]) -> None:
        assert self.group is not None
        for i in which:
            self.pids[i] = None
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=i)
            environment = self.backend.environment(i, self.shares_device)
            self.workers[i] = self.actor.options(scheduling_strategy=place).remote(environment)
        here, asked = process()[0], {self.workers[i].where.remote(): i for i in which}
        starting, stopped = list(asked), dict[int, float]()
        while starting:
            self._check_ray()
            ready, starting = ray.wait(starting, num_returns=1, timeout=1.0)
            for future in ready:
                try:
                    system, pid = ray.get(future)
                except RayActorError:
                    raise Lost(asked[future]) from None
                # A process outside of this system can only be checked through Ray.
                self.pids[asked[future]] = pid if system == here else None
            self._kill_stopped(stopped)
            emit(Workers(len(self.workers) - len(starting), len(self.workers)))

    def _kill_stopped(self, stopped: dict[int, float]) -> None:
        """A process that is stopped before it has said who it is would never do so. `stopped`: since when they are."""
        now = time.monotonic()
        for pid in processes(self.folder, ()) if self.own else ():
            if _state(pid) not in STOPPED:
                stopped.pop(pid, None)
            elif now - stopped.setdefault(pid, now) > self.stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _check_ray(self) -> None:
        """Ray itself would notice after a minute, or never."""
        now = time.monotonic()
        for name, pid in self.ray.items():
            state = _state(pid)
            if state in GONE:
                raise error(
                    "P0602",
                    f"{name} of Ray died (process {pid}), which starts and watches the workers",
                    help="check dmesg for an out-of-memory kill, and whether the process was killed otherwise",
                )
            if state not in STOPPED:
                self.ray_stopped.pop(pid, None)
            elif now - self.ray_stopped.setdefault(pid, now) > RAY_STOPPED_FOR:
                raise error(
                    "P0603",
                    f"{name} of Ray is stopped (process {pid}), which starts and watches the workers",
                    help=f"something has stopped the process, such as a debugger; `kill -CONT {pid}` lets it go on",
                )

    def halt(self, within: float = HALT) -> list[int]:
        """Ends what all workers do, and kills those that are stopped or do not end it. Which ones are gone."""
        gone = {i for i, pid in enumerate(self.pids) if pid is not None and _state(pid) in GONE + STOPPED}
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
        worker has raised, and Lost if one of them dies or hangs, even if it has returned: others may wait for it."""
        results: list[Any] = [None] * len(calls)
        self.waiting.update(calls)
        for i in self._ended(calls, timeout):
            try:
                results[i] = ray.get(calls[i].future)
            except RayActorError:
                raise Lost(calls[i].worker) from None
            except RayTaskError as problem:
                # A worker that communicates with a dead worker often fails first: its connection breaks.
                dead = self.dead()
                raise Lost(dead[0]) if dead else problem.cause from None
            self.waiting.discard(calls[i])
            if enough is not None and enough(results[i]):
                break
        return results

    def _ended(self, calls: Sequence[Call], timeout: float | None, beat: float = 1.0) -> Iterator[int]:
        """Which calls have ended, as they do, while the workers are watched. A worker of this machine hangs if it has
        been stopped for `self.stopped` seconds, as the system says, so that one that is in C code for minutes counts as
        alive; one of another machine if it has not answered for `self.silent` seconds."""
        pending = {call.future: i for i, call in enumerate(calls)}
        pings: dict[int, tuple[Any, float]] = {}
        began = last = time.monotonic()
        stopped: dict[int, float] = {}
        workers = sorted({call.worker for call in calls})
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.1)
            for future in ready:
                yield pending.pop(future)
            now = time.monotonic()
            if pending and timeout is not None and now - began > timeout:
                raise TimeoutError
            self._check_ray()
            self._check_workers(workers, stopped, now)
            if now - last >= beat:
                last = now
                for i in {calls[i].worker for i in pending.values()} - pings.keys():
                    if self.pids[i] is None:
                        pings[i] = (self.call(i, "ping").future, now)
            for i, (ping, sent) in list(pings.items()):
                if ray.wait([ping], timeout=0)[0]:
                    if _is_lost(ping):
                        raise Lost(i)
                    del pings[i]
                elif now - sent > self.silent:
                    raise Lost(i, hangs=True)

    def _check_workers(self, which: Sequence[int], stopped: dict[int, float], now: float) -> None:
        """`stopped`: since when workers are."""
        for i in which:
            pid = self.pids[i]
            state = _state(pid) if pid is not None else ""
            if state and state in GONE:
                raise Lost(i)
            if not state or state not in STOPPED:
                stopped.pop(i, None)
            elif now - stopped.setdefault(i, now) > self.stopped:
                raise Lost(i, hangs=True)

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
            found = [i for i, pid in enumerate(self.pids) if pid is not None and _state(pid) in GONE]
            if found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill every worker. Workers blocked in communication cannot shut down by themselves."""
        for i in range(len(self.workers)):
            self._kill(i)

    def _kill(self, i: int) -> None:
        worker, pid = self.workers[i], self.pids[i]
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif worker is not None:
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
            if self.group is not None and not self.own:
                remove_placement_group(self.group)
        finally:
            if self.connected:
                self.connected = False
                ray.shutdown()
            if self.before:
                _set_authentication(self.before)

    def _clean(self) -> None:
        """Ray's processes run for a while after ray.shutdown and write into the folder, so they are ended before it is
        removed."""
        spare = {os.getpid()} if self.janitor is None else {os.getpid(), self.janitor.pid}
        done = clear(self.folder, CLEANUP, spare)
        if self.janitor is not None:
            stop_janitor(self.janitor, done)


@contextlib.contextmanager
def _unbroken_process_starts() -> Iterator[None]:
    """Defer Ctrl-C while a process is being started, but not for the whole start of Ray, which can take a minute.

    Python discards a KeyboardInterrupt raised by functions that it calls after fork(), and a process is not marked
    before exec()."""
    original = subprocess.Popen.__init__

    def start(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        with uninterrupted():
            original(self, *arguments, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]


def _check_reachable(address: str) -> None:
    """Ray tries for minutes to reach somebody who is not there. OSError if nobody listens at HOST:PORT."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH):
            pass


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, and its own ends the process with a trace of C++."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


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


def _new_token(path: Path) -> Path:
    """Whoever cannot read this file can neither read nor write Ray's control store, nor start anything."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _use_token(path: Path) -> dict[str, str | None]:
    """For this process and those that it starts. What was in the environment before."""
    return _set_authentication({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None})


def _set_authentication(names: Mapping[str, str | None]) -> dict[str, str | None]:
    before = {name: os.environ.get(name) for name in names}
    for name, value in names.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    # Ray has read both already, when it was imported or used before.
    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
    return before


def _loopback() -> None:
    """Makes Ray listen on 127.0.0.1: without this variable, which disables clusters and is inherited by its children,
    Ray replaces that address by all addresses."""
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _processes_of_ray() -> dict[str, int]:
    node = ray._private.worker._global_node
    found: dict[str, Any] = node.all_processes if node is not None else {}
    names = {"gcs_server": "the control store (GCS)", "raylet": "the raylet"}
    return {names[kind]: processes[0].process.pid for kind, processes in found.items() if kind in names and processes}


def _hush() -> None:
    """Keeps Ray from printing to standard output, which is for data, that a worker died. piperlang reports that with
    its own diagnostic."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


GONE, STOPPED = "XZ", "Tt"
"""States of a process, as /proc has them."""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _is_lost(future: Any) -> bool:
    try:
        ray.get(future, timeout=0)
    except RayActorError:
        return True
    except Exception:  # what the worker raised: it is alive
        return False
    return False


CONTROL = ("ping", "running", "written", "rest", "abort")
"""Methods that workers answer while another one runs."""


def _controlled() -> type:
    """The worker with the methods that must answer while a step runs."""
    for name in CONTROL:
        setattr(Worker, name, ray.method(concurrency_group="control")(getattr(Worker, name)))
    return Worker
