"""Ray: started for one job, or joined by address. Its private API was tried with Ray 2.60."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from piperlang.diagnostics import error
from piperlang.interrupts import abandon, uninterrupted
from piperlang.runtime.driver.janitor import MARK, clear
from piperlang.runtime.driver.processes import GONE, KILLED, STOPPED, state

START_ATTEMPTS = 4
"""Ray gives its processes 30 s to start, which a busy machine may exceed."""
STOPPED_FOR = 10.0
"""Seconds that a process of Ray may be stopped: a step does not need them."""
REACH = 10.0
"""Seconds to reach a Ray cluster."""
CLOSE = 30.0
"""Seconds to leave a cluster."""
REFUSED_FOR = 5.0
"""Seconds after which a control store that refuses connections is gone."""


class OwnRay:
    """Started for one job, on this machine, for this user only."""

    own, gone = True, False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = False
        """ray.init was called."""
        self.before: dict[str, str | None] = {}
        """What the environment has said about authentication."""
        self.processes: dict[str, int] = {}
        """Those that the job cannot do without."""
        self.stopped: dict[int, float] = {}
        """Since when those that are stopped are."""

    def start(self, count: int) -> None:
        self.before = _use_token(_new_token(self.folder / "token"))
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # if several workers fail, one diagnostic is enough
        # Memory that torch's allocator on ARM has freed goes back at once: a step would seem to need twice as much.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
        _loopback()
        _hush()
        self.begun = True
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
                self.processes = _processes_of_ray()
                return
            except Exception as problem:  # Ray raises plain exceptions
                ray.shutdown()
                if attempt < START_ATTEMPTS:
                    clear(temporary, 10.0, (os.getpid(),))
                    continue
                reason = str(problem).partition("\n")[0]
                help = "the usual reason is an overloaded machine: check its load and memory, and try again"
                raise error("P0605", "cannot start Ray on this machine", notes=[reason], help=help) from None

    def check(self) -> None:
        """Ray itself would notice after a minute, or never."""
        now = time.monotonic()
        for name, pid in self.processes.items():
            its = state(pid)
            if its in GONE:
                raise error(
                    "P0602", f"{name} of Ray died (process {pid}), which starts and watches the workers", help=KILLED
                )
            if its not in STOPPED:
                self.stopped.pop(pid, None)
            elif now - self.stopped.setdefault(pid, now) > STOPPED_FOR:
                raise error(
                    "P0603",
                    f"{name} of Ray is stopped (process {pid}), which starts and watches the workers",
                    help=f"something has stopped the process, such as a debugger; `kill -CONT {pid}` lets it go on",
                )

    def reach(self) -> None:
        self.check()

    def close(self) -> None:
        if self.begun:
            self.begun = False
            ray.shutdown()
        if self.before:
            _set_authentication(self.before)


class JoinedRay:
    """A cluster that is there. Its control store may be on another machine: a thread connects to it again and again,
    because Ray ends this process without a word when it has not reached it for a minute."""

    own = False

    def __init__(self, address: str, silent: float) -> None:
        """`silent`: seconds that the control store may not answer."""
        self.address, self.silent = address, silent
        self.begun = False
        self.closed = threading.Event()
        self.reached, self.refused = time.monotonic(), False
        self.control = ("", 0)

    def start(self, _: int) -> None:
        if self.address.startswith("ray://"):
            raise error(
                "P0605",
                f"cannot join a Ray cluster at {self.address}: that is the port of Ray Client",
                help="run piperc on a node of the cluster, and name its control store: HOST:6379, or `auto`",
            )
        _hush()
        try:
            _check_reachable(self.address)
            self.begun = True
            with _own_signals():
                ray.init(address=self.address, logging_level=logging.ERROR, log_to_driver=False)
            host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        except (OSError, ValueError, RuntimeError) as problem:
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            help = "`ray start --head` prints the address of the cluster it starts"
            raise error("P0605", f"cannot join a Ray cluster at {self.address}", notes=[reason], help=help) from None
        self.control = host.strip("[]"), int(port)
        threading.Thread(target=self._watch, name="piperlang-control-store", daemon=True).start()

    def _watch(self) -> None:
        while not self.closed.wait(1.0):
            self._answers()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self.control, timeout=REACH):
                self.reached = time.monotonic()
                return True
        except OSError as problem:
            self.refused = isinstance(problem, ConnectionRefusedError)
            return False

    def reach(self) -> None:
        """Waits for the control store. Whatever asks it for something when it is not there waits for a minute, and then
        Ray ends the process."""
        while not self._answers():
            self.check()
            time.sleep(0.2)

    @property
    def gone(self) -> bool:
        """The control store does not answer: what asks it for something waits for it."""
        return time.monotonic() - self.reached > (REFUSED_FOR if self.refused else self.silent)

    def check(self) -> None:
        silent = time.monotonic() - self.reached
        if self.gone:
            what = "refuses connections" if self.refused else "cannot be reached"
            place = f"{self.control[0]}:{self.control[1]}"
            raise error(
                "P0603",
                f"the control store (GCS) of Ray at {place} {what}, for {silent:.0f} s now",
                help="look at the head node of the cluster, and at the network between it and this machine",
            )

    def close(self) -> None:
        self.closed.set()
        if self.begun:
            self.begun = False
            # Without the control store this waits for a minute, and then once more when the process exits.
            ending = threading.Thread(target=ray.shutdown, daemon=True)
            ending.start()
            ending.join(1.0 if self.gone else CLOSE)
            if ending.is_alive():
                atexit.unregister(ray._private.worker.shutdown)
                abandon()


class OthersRay:
    """Of a program that has called ray.init itself, and goes on with it after the job."""

    own, gone = False, False

    def start(self, _: int) -> None:
        pass

    def check(self) -> None:
        pass

    def reach(self) -> None:
        pass

    def close(self) -> None:
        pass


RayItself = OwnRay | JoinedRay | OthersRay


def for_job(folder: Path, address: str | None, silent: float) -> RayItself:
    if ray.is_initialized():
        return OthersRay()
    return OwnRay(folder) if address is None else JoinedRay(address, silent)


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
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH):
            pass


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM while it starts, by several that end the process each in its own way."""
    from ray._private import utils

    replaces = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = replaces


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
