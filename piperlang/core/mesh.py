"""Meshes of devices, and their submeshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

from piperlang.core.hashed import Hashed
from piperlang.source import Span


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices as a named grid; device numbers count with the last axis fastest, from 0."""

    name: str
    axes: tuple[tuple[str, int], ...]
    span: Span = field(compare=False, repr=False)
    shape: Mapping[str, int] = field(init=False, compare=False, repr=False)
    """The length of each axis."""
    places: Mapping[str, int] = field(init=False, compare=False, repr=False)
    """Where each axis stands among them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", dict(self.axes))
        object.__setattr__(self, "places", {axis: place for place, (axis, _) in enumerate(self.axes)})

    @property
    def size(self) -> int:
        return prod(length for _, length in self.axes)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{axis}: {length}' for axis, length in self.axes)})"


@dataclass(frozen=True, slots=True)
class Submesh(Hashed):
    """A submesh: selected coordinates for some axes, all coordinates for the others."""

    mesh: Mesh
    picks: tuple[tuple[str, tuple[int, ...]], ...] = ()

    __hash__ = Hashed.__hash__

    def size(self) -> int:
        chosen = dict(self.picks)
        return prod(len(chosen[axis]) if axis in chosen else length for axis, length in self.mesh.axes)

    def devices(self) -> Iterator[int]:
        chosen = dict(self.picks)
        coordinates = [chosen[axis] if axis in chosen else range(length) for axis, length in self.mesh.axes]
        for point in product(*coordinates):
            number = 0
            for (_, length), at in zip(self.mesh.axes, point, strict=True):
                number = number * length + at
            yield number

    def __str__(self) -> str:
        if not self.picks:
            return self.mesh.name
        parts = [f"{axis}={at[0] if len(at) == 1 else '{' + ', '.join(map(str, at)) + '}'}" for axis, at in self.picks]
        return f"{self.mesh.name}[{', '.join(parts)}]"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, as in `over gpu.dp`."""

    mesh: Mesh
    name: str

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]

    def __str__(self) -> str:
        return f"{self.mesh.name}.{self.name}"
