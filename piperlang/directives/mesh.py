"""mesh: a named grid of devices.

    mesh gpu = pp: 2

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    ...

After:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    ...

The graph changes when something is placed on the mesh.

Preconditions: axes have different names and sizes of at least 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.core.mesh import Mesh
from piperlang.diagnostics import error
from piperlang.elaborate.directive import Directive
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline

MAX_DEVICES = 65_536


@dataclass(frozen=True)
class UseMesh(Directive):
    """mesh NAME = AXIS: SIZE, ...
    Declare a named grid of devices: `mesh gpu = pp: 2, dp: 4`."""

    nodes = (tree.MeshOf,)
    uses_chunks = False

    mesh: Mesh

    @classmethod
    def read(cls, script: Interpreter, node: tree.MeshOf) -> UseMesh:
        axes: dict[str, int] = {}
        for axis in node.axes:
            name = axis.name.text
            if name in axes:
                raise error(
                    "P0408", f"duplicate axis `{name}` in one mesh", axis.name.span, help="give each axis its own name"
                )
            size = script.integer(axis.size)
            if size < 1:
                raise error("P0408", f"axis `{name}` has size {size}", axis.size.span, "the size must be at least 1")
            axes[name] = size
        mesh = Mesh(node.name.text, tuple(axes.items()), node.span)
        if mesh.size > MAX_DEVICES:
            raise error("P0408", f"mesh `{mesh.name}` has {mesh.size:,} devices", node.span, f"at most {MAX_DEVICES:,}")
        script.bind((node.name,), mesh, node.span)
        return cls(mesh, **script.written(node))

    def __str__(self) -> str:
        return f"mesh {self.mesh.name} = {', '.join(f'{axis}: {size}' for axis, size in self.mesh.axes)}"

    def apply_to_outline(self, outline: Outline) -> None:
        outline.meshes.setdefault(self.mesh, self)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        schedule.meshes.setdefault(self.mesh, self)
