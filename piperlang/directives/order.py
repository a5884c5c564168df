"""order: the order of passes on some devices, or of nodes on any devices.

    mesh gpu = pp: 1
    place [stage=*] on gpu
    split batch into 2 as mb
    order on gpu:
        [stage=0, pass=F, mb=1], [stage=0, pass=F, mb=0]

Before:

    F[stage=0, mb=0]  gpu  4 weights -> [4, 16]
    ...
    F[stage=0, mb=1]  gpu  4 weights -> [4, 16]
    ...

After:

    F[stage=0, mb=1]  gpu  4 weights -> [4, 16]
    ...
    F[stage=0, mb=0]  gpu  4 weights -> [4, 16]
    ...

An order only adds temporal edges. `order A -> B` relates nodes on any devices, communication included.

Preconditions: the passes exist, run on those devices, and are ordered once. A step with `pass=I` or `pass=W` divides
those backward passes into I and W. At the end of the script, the graph must have no cycle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.build.match import name_halves, require_match
from piperlang.core.mesh import Submesh
from piperlang.core.selector import Selector
from piperlang.diagnostics import error
from piperlang.elaborate.directive import Directive, Step
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class Order(Directive):
    """order on MESH[AXIS=AT]: STEPS, or order A -> B
    The order of passes on some devices: `,` and a new line separate steps, `&` joins steps that may overlap.
    `order A -> B` orders nodes on any devices."""

    nodes = (tree.OrderBlock, tree.OrderChain)

    where: Submesh | None
    """None for `order A -> B`, which relates nodes wherever they are."""
    steps: tuple[Step, ...]

    @classmethod
    def read(cls, script: Interpreter, node: tree.OrderBlock | tree.OrderChain) -> Order:
        if isinstance(node, tree.OrderBlock):
            return cls(script.where(node.where), script.collect(node), **script.written(node))
        steps = tuple(step for part in node.steps for step in script.step(part))
        for step in steps:
            if any(item.next_keys() for item in step.items):
                raise error(
                    "P0304",
                    "`next` needs an order with devices",
                    step.span,
                    "this order names no devices",
                    help="use `order on MESH:`, or name the microbatch",
                )
        return cls(None, steps, **script.written(node))

    def __str__(self) -> str:
        if self.where is None:
            return f"order {' -> '.join(map(str, self.steps))}"
        return "\n".join([f"order on {self.where}:", *(f"    {step}" for step in self.steps)])

    def selectors(self) -> Iterable[Selector]:
        return [item for step in self.steps for item in step.items]

    def apply_to_outline(self, outline: Outline) -> None:
        if self.where is None:
            outline.chains.append(self)
        else:
            outline.lanes.order(self)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        for selector in self.selectors():
            if any(c.key in ("comm", "update") for conjunction in selector.alternatives for c in conjunction):
                require_match(schedule, selector)
            elif self.where is None:
                name_halves(schedule, selector, self)
                require_match(schedule, selector)
        schedule.outline.apply(self)
        if self.where is not None:
            _note_halves(schedule)


def _note_halves(schedule: Schedule) -> None:
    """Remember which backward passes the new steps name as I and W, and which as B."""
    for lane in schedule.outline.lanes.lanes:
        for work in lane.steps[schedule.seen_steps.get(id(lane), 0) :]:
            for item in work.items:
                if item.get("pass") in ("B", "I", "W") and "comm" not in item:
                    (schedule.by_whole if item["pass"] == "B" else schedule.by_halves).add(schedule.which(item))
        schedule.seen_steps[id(lane)] = len(lane.steps)
