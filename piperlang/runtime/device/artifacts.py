"""What has been compiled, kept on disk: a later start, or another worker, loads it.

A file is named by a key of everything that it depends on, begins with a digest of the key and its content, and is
written under another name first. Whatever cannot be read, or is not what was written, counts as not there. Loading a
file executes it, so the folder must belong to this user and be writable for nobody else."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

PLACE = "PIPER_CACHE"
"""The variable of the environment with the folder; without it nothing is kept."""
MOST = 4 * 2**30
"""Bytes that the folder may have. What was used longest ago is removed."""


def place() -> Path | None:
    """The folder, or None if nothing is kept."""
    given = os.environ.get(PLACE)
    return Path(given).absolute() if given else None


def read(key: str) -> bytes | None:
    folder = place()
    if folder is None:
        return None
    try:
        if not _only_ours(folder):
            return None
        found = (folder / key).read_bytes()
    except OSError:
        return None
    digest, content = found[:32], found[32:]
    if digest != _digest(key, content):
        return None
    with suppress(OSError):
        os.utime(folder / key)
    return content


def write(key: str, content: bytes) -> None:
    """Nothing is kept where it cannot be written."""
    folder = place()
    if folder is None or len(content) > MOST:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _only_ours(folder):
            return
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(name, folder / key)
        except BaseException:
            os.unlink(name)
            raise
        _shrink(folder)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _only_ours(folder: Path) -> bool:
    found = folder.stat()
    ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not ours:
        warnings.warn(f"{PLACE} is not used: others may write to {folder}; make it yours alone", stacklevel=2)
    return ours


def _shrink(folder: Path) -> None:
    """Also removes what a process that was killed has not finished."""
    files = []
    for path in folder.iterdir():
        with suppress(OSError):  # another process removes, too
            found = path.stat()
            files.append((found.st_mtime, found.st_size, path))
    there = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if there <= MOST:
            break
        with suppress(OSError):
            path.unlink()
        there -= size
