"""Two Ray nodes in two network namespaces of this machine, with a link between them that can be cut. Needs root."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support import ROOT

POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None
HEAD, NODE, PORT = "10.77.0.1", "10.77.0.2", 6379
RAY = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=2", "--object-store-memory=100000000"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Command:
    """A command that runs beside the test, which reads its lines."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def until(self, pattern: str, within: float = 120.0) -> str:
        """Waits for a line."""
        deadline = time.monotonic() + within
        while True:
            found = next((line for line in self.lines if re.search(pattern, line)), None)
            if found is not None:
                return found
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.05)

    def ended(self, within: float = 180.0) -> int:
        code = self.process.wait(within)
        self.reader.join(10)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class TwoNodes:
    """`head` and `node`, with two CPUs each. Ray on the node is started again when it ends, as the systems that run
    clusters do."""

    def __init__(self, wrapped: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """`wrapped`: a command that runs Ray's on the node. `environment`: more variables there."""
        mark = secrets.token_hex(3)
        self.spaces = {HEAD: f"piper-a-{mark}", NODE: f"piper-b-{mark}"}
        self.temporary = Path(tempfile.mkdtemp(prefix="pn-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PIPER_TEST_NODES": mark,
            "PYTHONPATH": str(ROOT),
        }
        self.wrapped, self.more = list(wrapped), environment or {}
        self.commands: list[Command] = []
        self.serving = True

    def __enter__(self) -> TwoNodes:
        try:
            for space in self.spaces.values():
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            ends = [("v0", "netns", space) for space in self.spaces.values()]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for address, space in self.spaces.items():
                ip("-n", space, "addr", "add", f"{address}/24", "dev", "v0")
                ip("-n", space, "link", "set", "v0", "up")
            head = ["--head", f"--port={PORT}", f"--temp-dir={self.temporary}", "--include-dashboard=false", "--block"]
            self.run(HEAD, [*RAY, f"--node-ip-address={HEAD}", *head]).until("Ray runtime started")
            self.keeper = threading.Thread(target=self._keep, daemon=True)
            self.keeper.start()
            self._await_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _keep(self) -> None:
        """The node joins, and joins again."""
        command = [*self.wrapped, *RAY, f"--node-ip-address={NODE}", f"--address={HEAD}:{PORT}", "--block"]
        while self.serving:
            self.ray = self.run(NODE, command, self.more)
            self.ray.process.wait()
            time.sleep(0.5)

    def _await_node(self) -> None:
        code = f"import ray; ray.init(address='{HEAD}:{PORT}', logging_level='error'); print(ray.cluster_resources())"
        deadline = time.monotonic() + 60
        while True:
            asked = self.run(HEAD, [sys.executable, "-c", code])
            asked.ended(60)
            if "'CPU': 4.0" in asked.text:
                return
            assert time.monotonic() < deadline, asked.text
            time.sleep(1)

    def run(self, where: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> Command:
        full = ["ip", "netns", "exec", self.spaces[where], *command]
        found = Command(full, {**self.environment, **(more or {})}, self.temporary)
        self.commands.append(found)
        return found

    def piperc(self, where: str, *arguments: object) -> Command:
        command = [sys.executable, "-m", "piperlang", *map(str, arguments), "--address", f"{HEAD}:{PORT}"]
        return self.run(where, command)

    def cut(self) -> None:
        ip("-n", self.spaces[NODE], "link", "set", "v0", "down")

    def mend(self) -> None:
        ip("-n", self.spaces[NODE], "link", "set", "v0", "up")

    def reset(self) -> None:
        """Connections between workers break; the link stays. As a router does that has lost its tables."""
        listed = self._inside(HEAD, "ss", "-tnpH", "state", "established", "dst", NODE)
        ports = [line.split()[2].rpartition(":")[2] for line in listed.splitlines() if '"ray::Worker' in line]
        assert ports, listed
        for port in ports:
            self._inside(HEAD, "ss", "-K", "-t", "dst", NODE, "sport", "=", f":{port}")

    def kill_worker(self, where: str) -> None:
        for pid in self._pids(where):
            with suppress(FileNotFoundError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Worker"):
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError(f"no worker at {where}")

    def lose(self) -> None:
        """The node is gone for good."""
        self.serving = False
        self._kill(NODE)

    def _kill(self, where: str) -> None:
        for pid in self._pids(where):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pids(self, where: str) -> list[int]:
        command = ["ip", "netns", "pids", self.spaces[where]]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]

    def _inside(self, where: str, *command: str) -> str:
        full = ["ip", "netns", "exec", self.spaces[where], *command]
        return subprocess.run(full, capture_output=True, text=True, check=True).stdout

    def __exit__(self, *_: object) -> None:
        self.serving = False
        for where in (NODE, HEAD):
            self._kill(where)
        for command in self.commands:
            command.kill()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(self.temporary, ignore_errors=True)
