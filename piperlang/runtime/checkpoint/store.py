"""The checkpoints of a run: a folder for each, which has its name when it is whole and on the disk."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from piperlang.runtime.checkpoint.files import flush, verify, write_whole
from piperlang.runtime.checkpoint.manifest import MANIFEST, Damaged, Manifest, dump

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED, _OLD = ".saving-", ".removing-"


class Found(NamedTuple):
    """A checkpoint that is whole."""

    folder: Path
    manifest: Manifest


class Store:
    """`RUN/checkpoints`."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def names(self) -> list[Path]:
        """The folders of checkpoints, the newest first. They may be damaged."""
        try:
            found = [(match, entry.path) for entry in os.scandir(self.folder) if (match := _NAME.fullmatch(entry.name))]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found.sort(key=lambda one: (int(one[0][1]), int(one[0][2] or 0)), reverse=True)
        return [Path(path) for _, path in found]

    def all(self) -> Iterator[tuple[Path, Manifest | Damaged]]:
        """The newest first, each checked."""
        for folder in self.names():
            try:
                yield folder, verify(folder)
            except Damaged as problem:
                yield folder, problem

    # --------------------------------------------------------------------------------------------------------- writing

    def begin(self) -> Path:
        """A folder for the files of a checkpoint, which is none yet."""
        folder = self.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        folder.mkdir(parents=True)
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        """Makes it a checkpoint, when all its files are written: either all of it is there after this, or nothing."""
        write_whole(folder / MANIFEST, dump(manifest))
        flush(folder)
        name = f"step-{manifest.step:08}"
        number = 0
        while True:
            target = self.folder / (f"{name}.{number}" if number else name)
            if not target.exists():  # one driver writes into a run
                folder.rename(target)
                break
            number += 1
        flush(self.folder)
        return target

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Removes all but the newest checkpoints. A folder loses its name first: half of a checkpoint is none."""
        for folder in self.names()[keep:]:
            old = self.folder / f"{_OLD}{secrets.token_hex(8)}"
            folder.rename(old)
            self.discard(old)

    def tidy(self) -> None:
        """Removes what a driver that was killed has left."""
        if self.folder.is_dir():
            for entry in list(os.scandir(self.folder)):
                if entry.name.startswith((_UNFINISHED, _OLD)):
                    self.discard(Path(entry.path))
