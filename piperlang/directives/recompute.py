"""recompute: computes activations again in the backward instead of storing them.

    recompute [stage=0]

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

After:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    R[stage=0]  device  4 weights -> activations
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

F stores only its inputs. R waits for the gradient of the outputs; one R serves a backward in two halves, too.

With policy=cheap there is no R: F stores the fewest bytes from which pointwise operators, normalisations and the like
compute what B, I and W read (capture/autodiff/min_cut.py). Matrix products, attention and random operators run once.
That is the default on CUDA, where stage programs are compiled and such operators become part of others. policy=none
stores all that the backward reads, and takes back what an earlier line says.

Preconditions: the chunks exist; what is recomputed as a whole is not offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piperlang.build.divide import refuse_both
from piperlang.core.selector import Selector
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import Kind, Words
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


NONE, CHEAP, ALL = "none", "cheap", "all"


@dataclass(frozen=True)
class Recompute(Directive):
    """recompute SELECTOR [with policy=all|cheap|none]
    Recompute activations in the backward instead of storing them: all of the forward, or what is cheap."""

    nodes = (tree.Recompute,)
    legal: ClassVar[Mapping[str, Kind]] = {"policy": Words((ALL, CHEAP, NONE))}

    selector: Selector

    @classmethod
    def read(cls, script: Interpreter, node: tree.Recompute) -> Recompute:
        return cls(script.settled(node.selector), **script.written(node))

    def __str__(self) -> str:
        return f"recompute {self.selector}{self.with_options}"

    @property
    def policy(self) -> str:
        return next((str(option.value) for option in self.options), ALL)

    def apply_to_outline(self, outline: Outline) -> None:
        outline.recomputed.append((self.selector, self.policy == ALL))

    def apply_to_schedule(self, schedule: Schedule) -> None:
        groups = schedule.whole_chunks(self.selector, "recompute")
        for group in groups:
            schedule.recomputed.pop(group, None)
            if self.policy == ALL:
                refuse_both(self, group, schedule.offloaded.get(group), "offloaded")
                schedule.recomputed[group] = self
        schedule.cheaply.update(dict.fromkeys(groups, self.policy == CHEAP))
        self.apply_to_outline(schedule.outline)
