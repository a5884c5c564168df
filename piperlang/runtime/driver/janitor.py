"""Clean up after a job: end its processes, then remove its folder.

The driver does that when a job ends. It also starts this file as a separate process, the janitor, which does the same
if the driver is killed or cannot finish. Only the standard library is imported, so that the janitor starts fast."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

MARK = "PIPER_JOB"
"""The environment variable with the folder of a job, set in all processes of the job except the driver."""

PATIENCE = 600.0
"""Seconds after which the janitor gives up on a folder that cannot be removed."""


def clear(folder: Path, within: float, spare: Collection[int]) -> bool:
    """End all processes of a job except `spare`, then remove its folder. False if that is not done in `within`
    seconds."""
    deadline = time.monotonic() + within
    pause = 0.01
    while True:
        running = processes(folder, spare)
        for pid in running:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not running:  # no process can write into the folder any more
            shutil.rmtree(folder, ignore_errors=True)
            # Check again: a process that was just starting could not be recognized by its command line.
            if not folder.exists() and not processes(folder, spare):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def processes(folder: Path, spare: Collection[int]) -> list[int]:
    """Processes of this user that have the job's environment variable, or its folder in their command line. Ended
    processes have neither."""
    name = os.fsencode(folder)
    mark = MARK.encode() + b"=" + name
    found = []
    for pid in _pids():
        if pid in spare or not _ours(pid):
            continue
        if name in _read(pid, "cmdline") or mark in _read(pid, "environ").split(b"\0"):
            found.append(pid)
    return found


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # macOS has no /proc; there only Ray ends its processes
        return []


def _ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def _read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process has ended or is not accessible."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def start_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Start the janitor of a job, as a child of the driver. It cleans up when its standard input is closed or the
    driver has ended."""
    # In a separate session, because Ctrl-C goes to all processes of the driver's group. Without output, so that it does
    # not keep a pipe of the driver open.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    environment = {"PATH": os.environ.get("PATH", "")}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def stop_janitor(janitor: subprocess.Popen[bytes], done: bool) -> None:
    """End the janitor if there is nothing left to do. Otherwise let it start; it ends when it has finished."""
    assert janitor.stdin is not None
    if done:
        janitor.kill()
        janitor.wait()
    janitor.stdin.close()


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended, and nobody has asked for its status."""
    return _read(pid, "stat").rpartition(b")")[2].split()[:1] == [b"Z"]


def main() -> None:
    driver, folder = int(sys.argv[1]), Path(sys.argv[2])
    told = False
    # The parent process changes when the driver ends and somebody has asked for its status. Processes forked by the
    # driver may keep this standard input open.
    while not told and os.getppid() == driver and not _is_zombie(driver):
        if not folder.exists():
            return
        told = bool(select.select([sys.stdin], [], [], 0.5)[0])
    clear(folder, PATIENCE, {driver, os.getpid()})


if __name__ == "__main__":
    main()
