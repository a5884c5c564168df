"""The processes of a job, found from outside."""

from __future__ import annotations

import os
from pathlib import Path


def processes(folder: Path) -> list[int]:
    """Processes of a job: those that it started name its folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if str(folder).encode() in text and int(pid) != os.getpid() and stat.rpartition(")")[2].split()[0] != "Z":
            found.append(int(pid))
    return found
