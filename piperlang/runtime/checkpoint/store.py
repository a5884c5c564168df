"""The checkpoints of a run: a folder for each, which has its name when it is whole and on the disk; in an object store,
where nothing can be renamed, one that has its manifest is whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from piperlang.runtime.checkpoint.files import Folder, flush, verify, write_whole
from piperlang.runtime.checkpoint.manifest import MANIFEST, Damaged, Manifest, dump
from piperlang.runtime.checkpoint.remote import Remote

FOLDER = "checkpoints"
ELSEWHERE = "checkpoints.url"
"""A file of the run folder: where its checkpoints are, if they are not in it."""
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED, _OLD = ".saving-", ".removing-"
_OWNER = ".owner"

F = TypeVar("F", Path, Remote)


def store_of(run: Folder) -> Store[Any]:
    """The checkpoints of a run folder, or those at a URL."""
    if isinstance(run, Remote):
        return ObjectStore(run)
    try:
        return ObjectStore(Remote((run / ELSEWHERE).read_text(encoding="utf-8").strip()))
    except OSError:
        return FolderStore(run / FOLDER)


def keep_elsewhere(run: Path, url: str | None) -> None:
    """Says where the checkpoints of a run that begins are."""
    if url is not None:
        (run / ELSEWHERE).write_text(f"{url}\n", encoding="utf-8")
    else:
        (run / ELSEWHERE).unlink(missing_ok=True)


class Store(ABC, Generic[F]):
    def __init__(self, folder: F) -> None:
        self.folder: F = folder

    def names(self) -> list[F]:
        """The folders of checkpoints, the newest first. They may be damaged."""
        found = [(match, name) for name in self._entries() if (match := _NAME.fullmatch(name))]
        found.sort(key=lambda one: (int(one[0][1]), int(one[0][2] or 0)), reverse=True)
        return [self.folder / name for _, name in found]

    def all(self) -> Iterator[tuple[F, Manifest | Damaged]]:
        """The newest first, each checked."""
        for folder in self.names():
            try:
                yield folder, verify(folder, whole=False)
            except Damaged as problem:
                yield folder, problem

    def _unused(self, step: int) -> F:
        """A name for a checkpoint that is not taken. One driver writes into a run."""
        taken, name, number = set(self._entries()), f"step-{step:08}", 0
        while (found := f"{name}.{number}" if number else name) in taken:
            number += 1
        unused: F = self.folder / found
        return unused

    @abstractmethod
    def _entries(self) -> list[str]:
        """The names of all folders."""

    @abstractmethod
    def begin(self, step: int) -> F:
        """A folder for the files of a checkpoint, which is none yet."""

    @abstractmethod
    def commit(self, folder: F, manifest: Manifest) -> F:
        """Makes it a checkpoint, when all its files are written: either all of it is there after this, or nothing."""

    @abstractmethod
    def discard(self, folder: F) -> None: ...

    @abstractmethod
    def prune(self, keep: int) -> None:
        """Removes all but the newest checkpoints. First they stop to be some: half of a checkpoint is none."""

    @abstractmethod
    def tidy(self) -> None:
        """Begins to write: removes what a driver that was killed has left."""


class FolderStore(Store[Path]):
    def _entries(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def begin(self, step: int) -> Path:
        folder = self.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        write_whole(folder / MANIFEST, dump(manifest))
        flush(folder)
        target = self._unused(manifest.step)
        folder.rename(target)
        flush(self.folder)
        return target

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def prune(self, keep: int) -> None:
        for folder in self.names()[keep:]:
            old = folder.with_name(f"{_OLD}{secrets.token_hex(8)}")
            folder.rename(old)
            self.discard(old)

    def tidy(self) -> None:
        for name in self._entries():
            if name.startswith((_UNFINISHED, _OLD)):
                self.discard(self.folder / name)


class ObjectStore(Store[Remote]):
    """Wherever fsspec reaches."""

    token = ""

    def _entries(self) -> list[str]:
        return [name for name, is_folder in self.folder.entries().items() if is_folder]

    def names(self) -> list[Remote]:
        return [folder for folder in super().names() if (folder / MANIFEST).exists()]

    def claim(self) -> None:
        """From now on this job writes here, and no other: who claimed it before is told when it tries."""
        self.token = secrets.token_hex(16)
        self.folder.make()
        (self.folder / _OWNER).write(f"{self.token} {socket.gethostname()} {os.getpid()}\n".encode())

    def begin(self, step: int) -> Remote:
        owner = (self.folder / _OWNER).read().decode(errors="replace").split()
        if owner[:1] != [self.token]:
            who = " ".join(owner[1:]) or "somebody"
            raise OSError(f"another job writes there now (machine and process: {who})")
        folder = self._unused(step)
        folder.make()
        return folder

    def commit(self, folder: Remote, manifest: Manifest) -> Remote:
        (folder / MANIFEST).write(dump(manifest))
        return folder

    def discard(self, folder: Remote) -> None:
        with suppress(OSError):  # it is tried again when the run is
            folder.remove()

    def prune(self, keep: int) -> None:
        for folder in self.names()[keep:]:
            self.discard(folder / MANIFEST)
            self.discard(folder)

    def tidy(self) -> None:
        self.claim()
        whole = {folder.name for folder in self.names()}
        for name in self._entries():
            if _NAME.fullmatch(name) and name not in whole:
                self.discard(self.folder / name)
