"""recompute: runs the forward again before the backward instead of storing activations.

    recompute [stage=0]

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0]  device  4 weights
    update[stage=1]  device  4 weights

After:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    update[stage=1]  device  4 weights
    R[stage=0]  device  4 weights -> activations
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0]  device  4 weights

F stores only its inputs. R waits for the gradient of the outputs; one R serves a backward in two halves, too.

Preconditions: the chunks exist, and their activations are not offloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.build.divide import refuse_both
from piperlang.core.selector import Selector
from piperlang.elaborate.directive import Directive
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class Recompute(Directive):
    """recompute SELECTOR
    Recompute the forward before the backward instead of storing activations."""

    nodes = (tree.Recompute,)

    selector: Selector

    @classmethod
    def read(cls, script: Interpreter, node: tree.Recompute) -> Recompute:
        return cls(script.settled(node.selector), **script.written(node))

    def __str__(self) -> str:
        return f"recompute {self.selector}{self.with_options}"

    def apply_to_outline(self, outline: Outline) -> None:
        outline.recomputed.append(self.selector)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        for group, _ in schedule.meant(self.selector):
            refuse_both(self, group, schedule.offloaded.get(group), "offloaded")
            schedule.recomputed[group] = self
        self.apply_to_outline(schedule.outline)
