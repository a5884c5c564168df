"""What watches the workers of another machine there. The file imports neither torch nor Ray: a watcher is to start in
less time than the workers, and to take no memory from them."""

from __future__ import annotations

from piperlang.runtime.driver.processes import Processes


class Watcher:
    """A small process on another machine: it answers when a worker, in C code that keeps the GIL, cannot."""

    def __init__(self) -> None:
        self.processes = Processes()
        self.pids: set[int] = set()

    def watch(self, pid: int) -> None:
        self.pids.add(pid)
        self.processes.watch(pid)

    def look(self) -> dict[int, tuple[str, str]]:
        """The state of every worker, and how it has ended."""
        return {pid: (self.processes.state(pid), self.processes.said.get(pid, "")) for pid in self.pids}

    def kill(self, pid: int) -> None:
        self.processes.kill(pid)
