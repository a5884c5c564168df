"""The types of values in the language, and their names in messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from piperlang.elaborate.selector import Selector
from piperlang.source import Span
from piperlang.syntax.tree import Define, Size

if TYPE_CHECKING:
    from piperlang.elaborate.modules import Module


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices as a named grid; device numbers count with the last axis fastest, from 0."""

    name: str
    axes: tuple[tuple[str, int], ...]
    span: Span = field(compare=False, repr=False)

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def size(self) -> int:
        return prod(length for _, length in self.axes)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{axis}: {length}' for axis, length in self.axes)})"


@dataclass(frozen=True, slots=True)
class Slice:
    """A submesh: selected coordinates for some axes, all coordinates for the others."""

    mesh: Mesh
    picks: tuple[tuple[str, tuple[int, ...]], ...] = ()

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


@dataclass(frozen=True, slots=True)
class StepsValue:
    """The value of a one-line function with several steps: a sequence of groups whose members may overlap."""

    groups: tuple[tuple[Selector, ...], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    define: Define
    module: Module

    @property
    def name(self) -> str:
        return self.define.name.text


@dataclass(frozen=True, slots=True)
class Builtin:
    name: str


Value: TypeAlias = (
    "int | float | bool | str | Size | tuple[Value, ...] | range | Selector | Mesh | Slice | Axis | StepsValue |"
    " Function | Builtin | Module | None"
)

_KINDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    Size: "a size",
    tuple: "a list",
    range: "a range",
    Selector: "a selector",
    Mesh: "a mesh",
    Slice: "a submesh",
    Axis: "a mesh axis",
    StepsValue: "several steps",
    Function: "a function",
    Builtin: "a function",
    type(None): "nothing",
}


def kind(value: object) -> str:
    return _KINDS.get(type(value), "a module")


def show(value: Value) -> str:
    """A value as `print` writes it. Visits all of it: charge for it first."""
    return "".join(_parts(value))


def brief(value: Value) -> str:
    """A value as a message quotes it, shortened if it is large."""
    parts = list(islice(_parts(value), 41))
    return "".join(parts[:40]) + (" ..." if len(parts) > 40 else "")


def _parts(value: Value, inside: bool = False) -> Iterator[str]:
    if isinstance(value, tuple | range):
        yield "["
        for i, item in enumerate(value):
            if i:
                yield ", "
            yield from _parts(item, True)
        yield "]"
    elif isinstance(value, StepsValue):
        yield ", ".join(" & ".join(map(str, group)) for group in value.groups)
    elif isinstance(value, Function | Builtin):
        yield f"function {value.name}"
    else:
        yield f'"{value}"' if inside and isinstance(value, str) else str(value)
