"""The types of values in the language, and their names in messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from piperlang.core.mesh import Axis, Mesh, Submesh
from piperlang.core.selector import Selector
from piperlang.syntax.tree import Define, Size

if TYPE_CHECKING:
    from piperlang.elaborate.modules import Module


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
    "int | float | bool | str | Size | tuple[Value, ...] | range | Selector | Mesh | Submesh | Axis | StepsValue |"
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
    Submesh: "a submesh",
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
