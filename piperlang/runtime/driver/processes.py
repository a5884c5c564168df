"""What the system says of processes: whether they are there or stopped, and how they ended. It says so from outside the
interpreter, so that a worker that is in C code for minutes counts as alive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
from pathlib import Path

GONE, STOPPED = "XZ", "Tt"
"""States of a process, as /proc has them."""

KILLED = "check dmesg for an out-of-memory kill, and whether the process was killed otherwise"
"""What to do when a process has died."""

# The first version of the kernel's `struct pidfd_info`: a mask, then what the mask says is there, the status last.
# Since Linux 6.15 it is there for processes that have ended.
_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11
_EXIT = 8


def state(pid: int) -> str:
    found = _stat(pid)
    return found[0] if found else "X"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Processes:
    """Processes of this machine that are watched."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        """Descriptors of processes: a PID may be used again."""
        self.said: dict[int, str] = {}
        self.killed = _killed_for_memory()

    def watch(self, pid: int) -> None:
        """Also a process that is watched already, or another one with a number that was used before."""
        self.said.pop(pid, None)
        if pid in self.opened:
            os.close(self.opened.pop(pid))
        with contextlib.suppress(OSError, AttributeError):  # no such process any more, or a system without pidfds
            self.opened[pid] = os.pidfd_open(pid)

    def state(self, pid: int) -> str:
        found = state(pid)
        if found in GONE and pid not in self.said:
            self.said[pid] = self._ended(pid)
        return found

    def ended(self, pid: int) -> str:
        """How a process that is gone has ended, or nothing if the system does not say so."""
        self.state(pid)
        return self.said.get(pid, "")

    def _ended(self, pid: int) -> str:
        status = None
        if pid in self.opened:
            room = bytearray(_INFO.size)
            _INFO.pack_into(room, 0, _EXIT, *[0] * 13)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.opened[pid], _GET_INFO, room)
                mask, *_, status = _INFO.unpack(room)
                status = status if mask & _EXIT else None
            os.close(self.opened.pop(pid))
        fields = _stat(pid)
        if status is None and fields and fields[0] == "Z":  # nobody has asked for its status yet
            status = int(fields[-1])
        if status == signal.SIGKILL and _killed_for_memory() > self.killed:
            return "it was ended by SIGKILL, and the kernel has killed a process, because memory was exhausted"
        return "" if status is None else _told(status)

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        while self.opened:
            os.close(self.opened.popitem()[1])


def _told(status: int) -> str:
    """The status of a process in words."""
    number = os.waitstatus_to_exitcode(status)
    if number >= 0:
        return f"it ended with status {number}"
    try:
        name = signal.Signals(-number).name
    except ValueError:
        name = f"signal {-number}"
    return f"it was ended by {name}{_WHO.get(-number, '')}"


_WHO: dict[int, str] = {
    signal.SIGKILL: ", as `kill -9`, a batch system, and the kernel when memory is exhausted do",
    signal.SIGSEGV: ": native code has used memory that is not its own",
    signal.SIGBUS: ": memory could not be read; /dev/shm or a file that is mapped may be full or truncated",
    signal.SIGABRT: ": native code has given up",
}


def _killed_for_memory() -> int:
    """How many processes the kernel has killed since it started, because memory was exhausted."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
