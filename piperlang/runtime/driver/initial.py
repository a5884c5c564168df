"""Initial weights of a large model: the whole model exists once per node, in a file that its workers map.

One worker per node builds the model with its parameters in the file. The others build it without storage for
parameters, and map the file. Each copies its own part; the rest never becomes memory of a process: what is mapped and
was read or written is dropped from its memory again and again, and stays in the file.

The file has no name: others open it through the builder's process, and nothing is left behind however a job ends."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from piperlang.capture.trace.build import build, exchange, on_registration
from piperlang.capture.user.seeding import GeneratorStates, generator_states, seed_all, set_generator_states
from piperlang.capture.user.tensors import named_tensors
from piperlang.diagnostics import error

LARGE = 128 * 2**20
"""Models with more bytes of weights are built this way. Smaller ones are built by every worker, and compared."""
_PAUSE = 0.005
"""Seconds between two times that a worker drops what it has mapped."""


class FilePart(NamedTuple):
    """Where a tensor is in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Created:
    """What a builder tells the other workers of its node."""

    path: str
    places: Mapping[str, FilePart]
    generators: GeneratorStates
    fingerprint: str


@dataclass
class WeightFile:
    """A file of tensors, each at the start of a page."""

    descriptor: int
    end: int = 0
    maps: list[mmap.mmap] = field(default_factory=list)
    known: dict[int, FilePart] = field(default_factory=dict)
    """Places by the address at which this process has mapped them."""

    @classmethod
    def new(cls) -> WeightFile:
        with tempfile.TemporaryFile(prefix="piper-weights-") as file:
            return cls(os.dup(file.fileno()))

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def add(self, tensor: torch.Tensor) -> FilePart:
        """Writes a tensor to the end of the file."""
        place = FilePart(self.end, tuple(tensor.shape), tensor.dtype)
        size = _pages(tensor.numel() * tensor.element_size())
        try:
            os.posix_fallocate(self.descriptor, self.end, size)  # without space, a write to the mapping kills a process
        except OSError as problem:
            raise error(
                "P0605",
                f"there is no space for the initial weights in {tempfile.gettempdir()}: {problem.strerror}",
                notes=[f"{self.end / 2**30:.1f} GiB are written, and the model is larger"],
                help="set TMPDIR to a folder with more space on every node",
            ) from None
        self.end += size
        self.tensor(place).copy_(tensor.detach())
        return place

    def tensor(self, place: FilePart) -> torch.Tensor:
        """A tensor that is a part of the file."""
        count = prod(place.shape) * place.dtype.itemsize
        mapped = mmap.mmap(self.descriptor, _pages(count), offset=place.offset)
        self.maps.append(mapped)
        found = torch.frombuffer(mapped, dtype=torch.uint8)[:count].view(place.dtype).view(place.shape)
        self.known[found.data_ptr()] = place
        return found

    def place_of(self, tensor: torch.Tensor) -> FilePart:
        """Where a tensor is. What has moved since it was registered is written anew."""
        place = self.known.get(tensor.data_ptr())
        fits = place is not None and place[1:] == (tuple(tensor.shape), tensor.dtype) and tensor.is_contiguous()
        return place if place is not None and fits else self.add(tensor)

    def drop(self) -> None:
        for mapped in list(self.maps):
            mapped.madvise(mmap.MADV_DONTNEED)

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """Inside, pages of the file do not stay in the memory of this process."""
        done = threading.Event()

        def drop() -> None:
            while not done.wait(_PAUSE):
                self.drop()

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def close(self) -> None:
        """Tensors that are a part of the file stay valid."""
        self.maps.clear()
        os.close(self.descriptor)


def create(
    file: WeightFile, make_model: Callable[[], Any], seed: int, fingerprint: Callable[[Any], str]
) -> tuple[Any, Created]:
    """The model with its parameters in the file, and what others need to know."""

    def moved(parameter: nn.Parameter) -> torch.Tensor:
        return _like(parameter, file.tensor(file.add(parameter)))

    seed_all(seed)
    with file.dropped(), on_registration(moved):
        model = make_model()
        after = generator_states()
        places = {name: file.place_of(tensor) for name, tensor in named_tensors(model).items()}
        return model, Created(file.path, places, after, fingerprint(model))


def mapped(created: Created, file: WeightFile, make_model: Callable[[], Any], seed: int) -> Any:
    """The model that another worker of this node has created."""
    model = build(make_model, seed).model
    tensors = named_tensors(model)
    other = next((name for name in {**tensors, **created.places} if not _agree(name, tensors, created)), None)
    if other is not None:
        raise error(
            "P0607",
            f"`model` builds different models in different processes: they differ in {other}",
            help="draw random numbers in `model()` only from the generators of torch, `random` and NumPy",
        )
    done: dict[int, torch.Tensor] = {}  # tied weights have several names
    for name, tensor in tensors.items():
        if id(tensor) not in done:
            done[id(tensor)] = tensor
            _replace(tensor, file.tensor(created.places[name]))
    set_generator_states(created.generators)
    return model


class Dropped(Mapping[str, torch.Tensor]):
    """Tensors of a file, to be read one after the other: what was read before is dropped."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], file: WeightFile) -> None:
        self.tensors, self.file = tensors, file

    def __getitem__(self, name: str) -> torch.Tensor:
        self.file.drop()
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _agree(name: str, tensors: Mapping[str, torch.Tensor], created: Created) -> bool:
    mine, theirs = tensors.get(name), created.places.get(name)
    return mine is not None and theirs is not None and (tuple(mine.shape), mine.dtype) == theirs[1:]


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not exchange(tensor, _like(tensor, value)):
        tensor.data = value  # something else has a reference to it


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Another value with the class and the attributes of a tensor."""
    made = torch.Tensor._make_subclass(type(tensor), value, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def _pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
