"""Initial weights from files: `initial_weights = "checkpoint"` in a model file, a file or a folder of safetensors.

Every parameter of the model has its value from the tensor of its name. A model that is built without storage stays so:
workers of a large model read their own parts from the files, and nobody has all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from piperlang.capture.user.tensors import named_tensors
from piperlang.capture.user.user_code import Wrong
from piperlang.diagnostics import error, listed

SUFFIX = ".safetensors"
_NAMED = 3
"""How many names a message lists."""
_SAMPLED = 256
"""How many values at each end of a tensor tell one checkpoint from another."""


def wrong_weights(value: object, folder: Path = Path()) -> Wrong | None:
    if value is None:
        return None
    if not isinstance(value, str | Path):
        return Wrong(
            f"`initial_weights` is of type {type(value).__name__}, not a path",
            f'set it to a file or a folder of {SUFFIX} files, such as `initial_weights = "checkpoint"`',
        )
    path = folder / value
    if not StoredWeights(path).files:
        what = "does not exist" if not path.exists() else f"has no {SUFFIX} files"
        return Wrong(f"`initial_weights`: {path} {what}", f"name a {SUFFIX} file, or a folder of them")
    return None


class Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredWeights:
    """Tensors by name, in one or several files."""

    path: Path

    @property
    def files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(self.path.glob(f"*{SUFFIX}"))
        return [self.path] if self.path.suffix == SUFFIX and self.path.is_file() else []

    @cached_property
    def places(self) -> Mapping[str, Stored]:
        """By the names of the tensors."""
        found: dict[str, Stored] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    names: list[str] = opened.keys()
                    here = {name: Stored(file, tuple(opened.get_slice(name).get_shape())) for name in names}
            except (OSError, SafetensorError) as problem:
                raise error(
                    "P0801",
                    f"{file} cannot be read: {problem}",
                    help="download or save it again; a file that was cut off cannot be used",
                ) from None
            twice = next((name for name in here if name in found), None)
            if twice is not None:
                raise error(
                    "P0801",
                    f"{twice} is in {found[twice].file.name} and in {file.name}",
                    help="keep the files of one checkpoint in a folder",
                )
            found |= here
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """Mapped from the file: only what is read becomes memory, until the tensor is deleted."""
        with safe_open(self.places[name].file, framework="pt") as opened:
            return opened.get_tensor(name)  # type: ignore[no-any-return]

    @cached_property
    def digest(self) -> str:
        """Equal for processes that see the same tensors: names, shapes, and the first and last values of each. To read
        all values would take every worker as long as reading the whole model."""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.places):
            values = self.tensor(name).flatten()
            found.update(f"{name} {values.dtype} {self.places[name].shape}".encode())
            for part in (values[:_SAMPLED], values[-_SAMPLED:]):
                found.update(part.contiguous().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def names(self, model: nn.Module) -> dict[int, str]:
        """For each parameter, and each buffer that is stored, by id, the name that it is stored under. A tied weight
        is stored under one of its names."""
        tensors = named_tensors(model)
        found = {id(tensor): name for name, tensor in reversed(tensors.items()) if name in self.places}
        missing = [name for name, tensor in model.named_parameters() if id(tensor) not in found]
        if missing:
            what = f"the parameter{'s' if missing[1:] else ''} {listed(missing[:_NAMED], 'and')}"
            more = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
            raise error(
                "P0801",
                f"{self.path} has no tensor for {what}{more}",
                notes=[f"it has {listed(list(self.places)[:_NAMED], 'and')}, ..."] if self.places else [],
                help="save the state dict of this model; for parts of a model, call `load_state_dict` in `model`",
            )
        shapes = {id(tensor): tuple(tensor.shape) for tensor in tensors.values()}
        for key, name in found.items():
            stored = self.places[name]
            if stored.shape != shapes[key]:
                raise error(
                    "P0801",
                    f"{name} has shape {list(stored.shape)} in {stored.file.name}, and {list(shapes[key])} in `model`",
                    help="build the model with the sizes that it was saved with",
                )
        return found


@dataclass(frozen=True)
class FromFiles:
    """Makes the model with its weights from files."""

    make: Callable[[], Any]
    weights: StoredWeights

    @property
    def __wrapped__(self) -> Callable[[], Any]:
        """For inspect: the line is that of the function itself."""
        return self.make

    def __call__(self) -> Any:
        model = self.make()
        if isinstance(model, nn.Module):  # anything else is refused
            names = self.weights.names(model)
            with torch.no_grad():
                for tensor in {id(one): one for one in named_tensors(model).values()}.values():
                    if id(tensor) in names and not tensor.is_meta:
                        tensor.copy_(self.weights.tensor(names[id(tensor)]))
        return model


class InFiles(Mapping[str, torch.Tensor]):
    """The tensors of a model that was built without storage, with values from files where it has none, and others."""

    def __init__(self, model: nn.Module, weights: StoredWeights, others: Mapping[str, torch.Tensor]) -> None:
        self.tensors, self.weights = {**named_tensors(model), **others}, weights
        self.names = weights.names(model)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        return self.weights.tensor(self.names[id(tensor)]).to(tensor.dtype) if tensor.is_meta else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
