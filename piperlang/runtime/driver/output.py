"""What workers print, each into a file of its own: `print` of the user's functions, warnings, and what native code says
before it ends the process."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "output"
"""Of a run folder."""
_LINES, _LENGTH, _TAIL = 6, 300, 64 * 1024
_STARTED, _CRASH = "--- started ", "Fatal Python error"


def output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.log"


def print_to(path: str) -> None:
    """From now on, this process prints into the file, if this machine has its folder."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(file, f"{_STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n".encode())
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)
        sys.stdout, sys.stderr = _Printed(1), _Printed(2)
        faulthandler.enable(file=2)


class _Printed(io.TextIOBase):
    """Text that is lost if it cannot be written: a full disk must not end what prints."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(self.descriptor, text.encode(errors="backslashreplace"))
        return len(text)


def last_lines(path: Path) -> list[str]:
    """The last lines since the last start."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.startswith(_STARTED)]
    found = [line for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()]
    # Python's own report of a crash begins with what matters most, and is long.
    crash = max((i for i, line in enumerate(found) if line.startswith(_CRASH)), default=None)
    shown = found[-_LINES:] if crash is None else found[crash : crash + _LINES]
    return [line if len(line) <= _LENGTH else f"{line[:_LENGTH]}..." for line in shown]
