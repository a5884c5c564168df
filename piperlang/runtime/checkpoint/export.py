"""Weights of a checkpoint as plain safetensors under the names of the model's state dict, as others read them: one
file, or several with an index, as transformers writes them; and the configuration of a transformers model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from piperlang.runtime.checkpoint.files import Reader, flush
from piperlang.runtime.checkpoint.manifest import TensorId

LARGEST = 5 * 10**9
"""Bytes of a file, as transformers divides weights."""
CONFIG = "config.json"


@dataclass(frozen=True)
class Exported:
    tensors: int
    elements: int
    left_out: tuple[str, ...]
    """Entries of the state dict that are no tensors."""


def entries(reader: Reader, module: str, averaged: bool) -> dict[str, TensorId | None]:
    """What is exported: by the name in the state dict of the module, the tensor."""
    found: dict[str, TensorId | None] = {}
    prefix = f"{module}." if module else ""
    for entry, weight in reader.manifest.entries.items():
        if entry.startswith(prefix):
            names = [TensorId("average", weight)] if averaged else []
            names += [TensorId("weight", weight), TensorId("rest", entry)]
            found[entry.removeprefix(prefix)] = next((name for name in names if name in reader), None)
    return found


def export(reader: Reader, folder: Path, module: str = "", averaged: bool = False, largest: int = LARGEST) -> Exported:
    """Writes into a folder that is empty."""
    wanted = entries(reader, module, averaged)
    tensors = {name: found for name, found in wanted.items() if found is not None}
    shards = list(_shards(reader, tensors, largest))
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    elements = 0
    for name, shard in zip(names, shards, strict=True):
        loaded = {entry: reader.tensor(tensors[entry]) for entry in shard}
        elements += sum(tensor.numel() for tensor in loaded.values())
        _save(folder / name, loaded)
    if len(shards) > 1:
        places = {entry: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        size = sum(_bytes(reader, found) for found in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        _write(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    config = reader.manifest.about.get("configs", {}).get(module)
    if config is not None:
        _write(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    left_out = tuple(name for name, found in wanted.items() if found is None)
    return Exported(len(tensors), elements, left_out)


def _shards(reader: Reader, tensors: dict[str, TensorId], largest: int) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for entry, name in tensors.items():
        here = _bytes(reader, name)
        if shard and size + here > largest:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += here
    yield shard


def _bytes(reader: Reader, name: TensorId) -> int:
    stored = reader.manifest.tensors[name]
    return torch.Size(stored.shape).numel() * reader.dtype(name).itemsize


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The file has its name when it is whole."""
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(path.parent.stat().st_mode & 0o666)
    flush(part)
    part.rename(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
