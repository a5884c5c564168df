"""The files of a checkpoint: safetensors, whole on the disk before the manifest names them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from piperlang.diagnostics import error
from piperlang.runtime.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    TensorId,
    load,
)
from piperlang.runtime.checkpoint.ranges import IndexRange, needed, read
from piperlang.runtime.checkpoint.remote import Remote, scratch
from piperlang.runtime.checkpoint.tree import DTYPES

_NATIVE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
"""Other types are stored as bytes."""
Folder = Path | Remote
"""Or a file in one."""
_LARGEST = 2**30
"""Bytes of a manifest."""
READERS = 4
"""Threads that compute digests: SHA-256 of a file takes about as long as reading it."""


def write_part(path: Folder, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Writes a file of tensors, which is on the disk, or in the object store, when this returns."""
    if isinstance(path, Remote):
        with scratch() as folder:
            stored = write_part(folder / path.name, tensors)
            path.send(folder / path.name)
            return stored
    save_file({key: _stored(tensor) for key, tensor in tensors.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read it
    flush(path)
    return StoredFile(path.stat().st_size, sha256(path))


def write_whole(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
    flush(path)


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Folder) -> str:
    if isinstance(path, Remote):
        return path.sha256()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _NATIVE else _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read_manifest(folder: Folder) -> Manifest:
    path = folder / MANIFEST
    try:
        size = _plain(path)
        if size > _LARGEST:
            raise Damaged(MANIFEST, f"it has {size:,} bytes")
        return load(path.read() if isinstance(path, Remote) else path.read_bytes())
    except OSError as problem:
        raise Damaged(MANIFEST, _reason(problem)) from None


def verify(folder: Folder, whole: bool = True) -> Manifest:
    """The manifest of a checkpoint, all files of which are as they were written. Raises Damaged. `whole`: files of an
    object store are read, too, which a `Reader` does otherwise, for those that it needs."""
    manifest = read_manifest(folder)
    try:
        there = set(folder.entries()) if isinstance(folder, Remote) else {entry.name for entry in os.scandir(folder)}
    except OSError as problem:
        raise Damaged(MANIFEST, _reason(problem)) from None
    more = sorted(there - manifest.files.keys() - {MANIFEST})
    if more:
        raise Damaged(more[0], "it does not belong to the checkpoint")
    with ThreadPoolExecutor(READERS) as threads:
        for wrong in threads.map(lambda item: _wrong(folder, item[0], item[1], whole), manifest.files.items()):
            if wrong is not None:
                raise wrong
    if not isinstance(folder, Remote):
        _check_tensors(folder, manifest)
    return manifest


def _wrong(folder: Folder, name: str, stored: StoredFile, whole: bool) -> Damaged | None:
    try:
        path = folder / name
        size = _plain(path)
        if size != stored.bytes:
            return Damaged(name, f"it has {size:,} bytes instead of {stored.bytes:,}")
        if (whole or isinstance(path, Path)) and sha256(path) != stored.sha256:
            return Damaged(name, OTHER)
    except Damaged as problem:
        return problem
    except OSError as problem:
        return Damaged(name, _reason(problem))
    return None


OTHER = "its SHA-256 is not the one in the manifest"


def _plain(path: Folder) -> int:
    """The size of a file. What is no plain file could lead anywhere."""
    if isinstance(path, Remote):
        return path.size()
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(path.name, "it is no plain file")
    return found.st_size


def _reason(problem: OSError) -> str:
    return "it is missing" if isinstance(problem, FileNotFoundError) else problem.strerror or str(problem)


def _check_tensors(folder: Path, manifest: Manifest) -> None:
    """The files have what the manifest says, before memory is allocated for it."""
    for file, its in _by_file(manifest).items():
        _check_file(folder / file, file, its)


def _check_file(path: Path, file: str, its: Sequence[tuple[TensorId, StoredTensor, Piece]]) -> None:
    try:
        with safe_open(path, framework="pt") as opened:
            if set(opened.keys()) != {piece.key for _, _, piece in its}:
                raise Damaged(file, "it has other tensors than the manifest says")
            for name, stored, piece in its:
                shape = tuple(opened.get_slice(piece.key).get_shape())
                if shape != _shape(stored, piece.range):
                    raise Damaged(file, f"{name} has shape {list(shape)}, and the manifest says {piece.range}")
    except (OSError, SafetensorError) as problem:
        raise Damaged(file, str(problem)) from None


def _by_file(manifest: Manifest) -> dict[str, list[tuple[TensorId, StoredTensor, Piece]]]:
    found: dict[str, list[tuple[TensorId, StoredTensor, Piece]]] = {name: [] for name in manifest.files}
    for name, stored in manifest.tensors.items():
        for piece in stored.pieces:
            found[piece.file].append((name, stored, piece))
    return found


def _shape(stored: StoredTensor, where: IndexRange) -> tuple[int, ...]:
    dtype = DTYPES[stored.dtype]
    return where.shape if dtype in _NATIVE else (where.numel * dtype.itemsize,)


class Reader:
    """Tensors of a checkpoint, whole or in part. It is closed when it is deleted."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.opened: dict[str, Any] = {}

    def __contains__(self, name: TensorId) -> bool:
        return name in self.manifest.tensors

    def dtype(self, name: TensorId) -> torch.dtype:
        found: torch.dtype = DTYPES[self.manifest.tensors[name].dtype]
        return found

    def tensor(self, name: TensorId, wanted: IndexRange | None = None) -> torch.Tensor:
        """A range of a tensor; all of it by default. Nothing else has its memory."""
        stored = self.manifest.tensors[name]
        wanted = wanted or IndexRange.whole(stored.shape)
        ranges = [piece.range for piece in stored.pieces]
        if not wanted.numel:
            return torch.empty(wanted.shape, dtype=DTYPES[stored.dtype])
        found = read(wanted, ranges, self._pieces(stored, needed(wanted, ranges)))
        return found.clone(memory_format=torch.contiguous_format)

    def _pieces(self, stored: StoredTensor, ranges: Sequence[IndexRange]) -> Iterator[torch.Tensor]:
        """Mapped from the files: only what is read becomes memory."""
        pieces = {piece.range: piece for piece in stored.pieces}
        for one in ranges:
            piece = pieces[one]
            if piece.file not in self.opened:
                self.opened[piece.file] = self._open(piece.file)
            tensor: torch.Tensor = self.opened[piece.file].get_tensor(piece.key)
            dtype = DTYPES[stored.dtype]
            yield tensor if dtype in _NATIVE else tensor.view(dtype).view(one.shape)

    def _open(self, file: str) -> Any:
        where = self.folder / file
        if isinstance(where, Path):
            return safe_open(where, framework="pt")
        with scratch() as folder:  # what is mapped stays when its name is gone
            local = folder / file
            try:
                where.fetch(local)
                if sha256(local) != self.manifest.files[file].sha256:
                    raise Damaged(file, OTHER)
                _check_file(local, file, _by_file(self.manifest)[file])
                return safe_open(local, framework="pt")
            except (Damaged, OSError, SafetensorError) as problem:
                raise error(
                    "P0611",
                    f"the checkpoint {self.folder} cannot be used: {problem}",
                    help="use an older one, or copy it again from where it was saved",
                ) from None
