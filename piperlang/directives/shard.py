"""shard: tensor and expert parallelism. Shards the weights of chunks along device axes.

    mesh gpu = dp: 2
    place [stage=*] on gpu
    replicate [!expert] over gpu.dp
    shard [expert=*] over gpu.dp with style=experts

Before:

    F[stage=0]  gpu  2 weights -> [8, 6, 16], [8, 6], [8, 6, 4, 3], [8, 4, 3, 16]
    all_gather.F[expert=0, stage=1]  gpu over dp  [8, 4, 3, 16]
    F[expert=0, stage=1]  gpu  2 weights -> [8, 4, 3, 16]
    slice.F[stage=1]  gpu  [8, 4, 3, 16]
    F[stage=1]  gpu  2 weights -> []
    ...

After:

    F[stage=0]  gpu  2 weights -> [8, 6, 16], [8, 6], [8, 6, 4, 3], [8, 4, 3, 16]
    all_to_all.F[expert=0, stage=1]  gpu over dp  [8, 4, 3, 16]
    F[expert=0, stage=1]  gpu  2 weights -> [8, 4, 3, 16]
    all_to_all.F[expert=0, stage=1]  gpu over dp  [8, 4, 3, 16]
    F[stage=1]  gpu  2 weights -> []
    ...

`experts` shards dim 0 of weights that have one entry per expert; `columns` and `rows` shard output and input features;
`sequence` shards dim 1 of activations, with whole weights. Collectives follow from the placements on both sides of an
edge.

Preconditions: the chunks exist, none of them uses the axes for something else, the sizes of sharded dims are divisible
by the number of devices, and no chunk needs a collective inside: operators that need one are chunks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piperlang.build.divide import give_axes, use_axes
from piperlang.build.schedule import Use
from piperlang.core.mesh import Axis
from piperlang.core.selector import Selector
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import Kind, Words
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class Shard(Directive):
    """shard SELECTOR over MESH.AXIS [with style=experts|columns|rows|sequence]
    Shard weights along the axis."""

    nodes = (tree.ShardOver,)
    legal: ClassVar[Mapping[str, Kind]] = {"style": Words(("experts", "columns", "rows", "sequence"))}

    selector: Selector
    axes: tuple[Axis, ...]

    @classmethod
    def read(cls, script: Interpreter, node: tree.ShardOver) -> Shard:
        axes = tuple(script.axis(axis) for axis in node.axes)
        return cls(script.settled(node.selector), axes, **script.written(node))

    def __str__(self) -> str:
        return f"shard {self.selector} over {', '.join(map(str, self.axes))}{self.with_options}"

    def apply_to_outline(self, outline: Outline) -> None:
        use_axes(outline, self)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        style = next((str(option.value) for option in self.options), "experts")
        give_axes(schedule, self, Use(self, style=style))
