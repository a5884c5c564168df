"""The manifest of a checkpoint: which tensors it has, in which files, and where training was.

It is JSON with its own SHA-256 in front, so that every byte of it counts, and it is believed only after all of it was
checked: a checkpoint may come from anywhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.runtime.checkpoint import tree
from piperlang.runtime.checkpoint.ranges import IndexRange, tiles
from piperlang.runtime.checkpoint.tree import DTYPES

VERSION = 1
MANIFEST = "manifest.json"
_HEAD = b'{"sha256": "'
_BODY = b'", "checkpoint":\n'
_END = b"\n}\n"
_DIGEST = 64
KINDS = ("weight", "master", "average", "state", "rest")
FILE = re.compile(r"part-\d{1,6}\.safetensors")


class TensorId(NamedTuple):
    """What a stored tensor is: `kind` is one of KINDS, `path` the entry of the state that an optimizer keeps for the
    weight."""

    kind: str
    name: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((f"{self.kind} {self.name}", *self.path))


class Piece(NamedTuple):
    """A part of a tensor in a file."""

    range: IndexRange
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class StoredFile(NamedTuple):
    bytes: int
    sha256: str


class DataPosition(NamedTuple):
    """How much of the global stream of samples has been read: no rank, no world size."""

    batches: int = 0
    """That `data` has yielded, the one that is read ahead included."""
    samples: int = 0
    """That have been trained with."""
    digest: str = ""
    """Of all of these batches."""
    mode: str = "driver"
    """Where batches were loaded."""
    validated: tuple[int, ...] = ()
    """Steps after which `validation` was called: it may draw random numbers, as `data` does."""
    skipped: int = 0
    """Batches that were not trained with, because the loss or the gradients were not finite."""


@dataclass(frozen=True)
class Manifest:
    step: int
    """The number of steps that have been trained."""
    seed: int
    data: DataPosition
    tensors: Mapping[TensorId, StoredTensor]
    files: Mapping[str, StoredFile]
    entries: Mapping[str, str] = field(default_factory=dict)
    """Names in the model's state dict, in order, with the weight that each is; empty for what is no weight."""
    trees: Mapping[str, Any] = field(default_factory=dict)
    """Containers (tree.py) by name: the state of each weight, options, states of generators."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """For people: script, model file, plan, versions, time."""

    @property
    def weights(self) -> dict[str, StoredTensor]:
        return {name.name: stored for name, stored in self.tensors.items() if name.kind == "weight"}

    def state(self, weight: str) -> Any:
        return self.trees.get(f"state {weight}")


class Damaged(PiperError):
    """A checkpoint that cannot be used, and the file that shows it. Most who read one say which it is; where nobody
    does, as in a worker whose checkpoint was removed after it was verified, this is the diagnostic."""

    def __init__(self, file: str, why: str) -> None:
        message, help = f"the checkpoint cannot be used: {file}: {why}", "`piperc ckpt verify` checks all of a run"
        super().__init__(Diagnostic("P0611", message, helps=(help,)))
        self.file, self.why = file, why

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"

    def __reduce__(self) -> tuple[type[Damaged], tuple[str, str]]:  # type: ignore[override]
        return Damaged, (self.file, self.why)


def dump(manifest: Manifest) -> bytes:
    tensors = [
        {
            "kind": name.kind,
            "name": name.name,
            "path": list(name.path),
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "pieces": [
                {"box": one.range.box, "interval": one.range.interval, "file": one.file, "key": one.key}
                for one in stored.pieces
            ],
        }
        for name, stored in manifest.tensors.items()
    ]
    body = {
        "version": VERSION,
        "step": manifest.step,
        "seed": manifest.seed,
        "data": manifest.data._asdict(),
        "about": manifest.about,
        "files": {name: one._asdict() for name, one in manifest.files.items()},
        "entries": manifest.entries,
        "trees": manifest.trees,
        "tensors": tensors,
    }
    text = json.dumps(body, indent=1, allow_nan=False).encode()
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + _BODY + text + _END


def load(data: bytes) -> Manifest:
    """Raises Damaged."""
    start = len(_HEAD) + _DIGEST + len(_BODY)
    digest, text = data[len(_HEAD) : len(_HEAD) + _DIGEST], data[start : -len(_END)]
    framed = data.startswith(_HEAD) and data[start - len(_BODY) : start] == _BODY and data.endswith(_END)
    if not framed or hashlib.sha256(text).hexdigest().encode() != digest:
        raise Damaged(MANIFEST, "its SHA-256 is not the one that it states")
    try:
        body = json.loads(text)
        if body["version"] != VERSION:
            raise Damaged(MANIFEST, f"it has version {body['version']}, and this piperc reads version {VERSION}")
        return _checked(_manifest(body))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise Damaged(MANIFEST, f"it is no manifest of a checkpoint ({type(problem).__name__}: {problem})") from None


def _manifest(body: Any) -> Manifest:
    tensors: dict[TensorId, StoredTensor] = {}
    for one in body["tensors"]:
        name = TensorId(_text(one["kind"]), _text(one["name"]), tuple(map(_text, one["path"])))
        if name in tensors:
            raise ValueError(f"{name} is there twice")
        pieces = [
            Piece(IndexRange(_box(p["box"]), _interval(p["interval"])), _text(p["file"]), _text(p["key"]))
            for p in one["pieces"]
        ]
        tensors[name] = StoredTensor(_text(one["dtype"]), tuple(map(_count, one["shape"])), tuple(pieces))
    files = {name: StoredFile(_count(one["bytes"]), _text(one["sha256"])) for name, one in body["files"].items()}
    data = body["data"]
    return Manifest(
        _count(body["step"]),
        _whole(body["seed"]),
        DataPosition(
            _count(data["batches"]),
            _count(data["samples"]),
            _text(data["digest"]),
            _text(data["mode"]),
            tuple(map(_count, data["validated"])),
            _count(data.get("skipped", 0)),  # the first checkpoints do not say so
        ),
        tensors,
        files,
        {_text(name): _text(weight) for name, weight in body["entries"].items()},
        dict(body["trees"]),
        dict(body["about"]),
    )


def _checked(found: Manifest) -> Manifest:
    for file in found.files:
        if FILE.fullmatch(file) is None:
            raise ValueError(f"{file!r} is no name of a file of a checkpoint")
    used: set[tuple[str, str]] = set()
    for name, stored in found.tensors.items():
        if name.kind not in KINDS:
            raise ValueError(f"{name} is of no known kind")
        if stored.dtype not in DTYPES:
            raise ValueError(f"{name} is of type {stored.dtype}")
        if not tiles([one.range for one in stored.pieces], stored.shape):
            raise ValueError(f"the parts of {name} are not all of it, or overlap")
        for one in stored.pieces:
            if one.file not in found.files or (one.file, one.key) in used:
                raise ValueError(f"{name} is in {one.file!r} as {one.key!r}, which is missing or taken")
            used.add((one.file, one.key))
    for holder, value in found.trees.items():
        tree.read(value, partial(_leaf, found, holder))
    return found


def _leaf(found: Manifest, holder: str, leaf: Any) -> torch.Tensor:
    """A tensor in a container: small, or one of the stored ones."""
    if "hex" in leaf:
        return tree.from_inline(leaf)
    kind, _, name = holder.partition(" ")
    (path,) = (leaf[key] for key in ("like", "whole") if key in leaf)
    if TensorId(kind, name, tuple(path)) not in found.tensors:
        raise ValueError(f"{holder} refers to {path}, which is not there")
    return torch.empty(0)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


def _interval(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    low, high = value
    return _count(low), _count(high)


def _box(value: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_count(low), _count(high)) for low, high in value)
