"""Checkpoints in an object store, or wherever else fsspec reaches: `s3://bucket/run`, `gs://`, `abfs://`, `sftp://`.

Objects appear whole, and cannot be renamed: a checkpoint is there when its manifest is. Files are written on the local
disk and sent, and fetched before they are read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from piperlang.diagnostics import error

SEPARATOR = "://"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Remote:
    """A folder or a file, by its URL. It has what a checkpoint needs of a Path."""

    url: str

    @cached_property
    def _files(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        import fsspec  # type: ignore[import-untyped]

        protocol = self.url.partition(SEPARATOR)[0]
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as problem:
            raise error(
                "P0902",
                f"cannot use {self.url}: {problem}",
                help=f"install the package of fsspec for `{protocol}`, on every node: for `s3` that is s3fs",
            ) from None
        return found

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}  # every process connects for itself

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "url", state["url"])

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rstrip("/").rpartition("/")[0])

    def absolute(self) -> Remote:
        return self

    def _call(self, what: Callable[[Any, str], _T]) -> _T:
        """Everything that goes wrong is an OSError: libraries of object stores raise their own."""
        files, path = self._files
        try:
            return what(files, path)
        except OSError:
            raise
        except Exception as problem:
            raise OSError(f"{self.url}: {problem or type(problem).__name__}") from problem

    def exists(self) -> bool:
        return self._call(lambda files, path: bool(files.exists(path)))

    def size(self) -> int:
        return self._call(lambda files, path: int(files.info(path)["size"]))

    def entries(self) -> dict[str, bool]:
        """The names in a folder, and whether each is a folder."""

        def listed(files: Any, path: str) -> dict[str, bool]:
            files.invalidate_cache(path)  # other processes write here
            try:
                found = files.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            own = path.rstrip("/").rpartition("/")[2]
            names = {
                str(one["name"]).rstrip("/").rpartition("/")[2]: one["type"] == "directory"
                for one in found
                if str(one["name"]).strip("/") != path.strip("/")
            }
            return {name: folder for name, folder in names.items() if name and (name != own or folder)}

        return self._call(listed)

    def read(self) -> bytes:
        return self._call(lambda files, path: bytes(files.cat_file(path)))

    def write(self, data: bytes) -> None:
        self._call(lambda files, path: files.pipe_file(path, data))

    def make(self) -> None:
        """Only file systems have folders without files."""
        self._call(lambda files, path: files.makedirs(path, exist_ok=True))

    def send(self, local: Path) -> None:
        self._call(lambda files, path: files.put_file(str(local), path))
        if self.size() != local.stat().st_size:
            raise OSError(f"{self.url} was not written whole")

    def fetch(self, local: Path) -> None:
        self._call(lambda files, path: files.get_file(path, str(local)))

    def remove(self) -> None:
        """With all that is in it."""

        def gone(files: Any, path: str) -> None:
            if files.exists(path):
                files.rm(path, recursive=True)

        self._call(gone)

    def sha256(self) -> str:
        def digest(files: Any, path: str) -> str:
            with files.open(path, "rb") as file:
                return _digest(file)

        return self._call(digest)


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while block := file.read(2**20):
        found.update(block)
    return found.hexdigest()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the local disk. That of a job is removed with the job, however this process ends."""
    job = os.environ.get("PIPER_JOB", "")
    with tempfile.TemporaryDirectory(prefix="piper-", dir=job if os.path.isdir(job) else None) as folder:
        yield Path(folder)
