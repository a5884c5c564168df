"""offload: copies activations to host memory after the forward and back before the backward.

    offload [stage=0]

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

After:

    F[stage=0]  device  4 weights -> [8, 16]
    offload[stage=0]  device  activations  stream host
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    fetch[stage=0]  device  activations  stream host
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

The fetch waits for the gradient of the outputs; with `prefetch=N` it starts N backward passes earlier.

Preconditions: the chunks exist, and their activations are not recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piperlang.build.divide import refuse_both
from piperlang.core.selector import Selector
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import Count, Kind
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter


@dataclass(frozen=True)
class Offload(Directive):
    """offload SELECTOR [with prefetch=N]
    Move activations to host memory until they are needed."""

    nodes = (tree.Offload,)
    legal: ClassVar[Mapping[str, Kind]] = {"prefetch": Count()}

    selector: Selector

    @classmethod
    def read(cls, script: Interpreter, node: tree.Offload) -> Offload:
        return cls(script.settled(node.selector), **script.written(node))

    def __str__(self) -> str:
        return f"offload {self.selector}{self.with_options}"

    def apply_to_schedule(self, schedule: Schedule) -> None:
        for group in schedule.whole_chunks(self.selector, "offload"):
            refuse_both(self, group, schedule.recomputed.get(group), "recomputed")
            schedule.offloaded[group] = self
