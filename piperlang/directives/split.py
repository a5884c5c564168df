"""split: divides the batch, or the samples of some chunks, into microbatches.

    split batch into 2 as mb

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    B[stage=0]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

After:

    F[stage=0, mb=0]  device  4 weights -> [4, 16]
    F[stage=1, mb=0]  device  4 weights -> []
    B[stage=1, mb=0]  device  2 weights -> [4, 16], 4 gradients
    B[stage=0, mb=0]  device  1 weight -> 4 gradients
    F[stage=0, mb=1]  device  4 weights -> [4, 16]
    F[stage=1, mb=1]  device  4 weights -> []
    B[stage=1, mb=1]  device  2 weights -> [4, 16], 4 gradients
    B[stage=0, mb=1]  device  1 weight -> 4 gradients
    update[stage=0:2]  device  8 weights

Gradients are accumulated: there is one update. `split SELECTOR` divides the samples that each device has of those
chunks; values on edges to other chunks are sliced and concatenated.

Preconditions: the name is new, no earlier directive orders passes or uses the name, the batch size is divisible by the
number of microbatches, and the chunks do not mix samples or sum over them (batch normalization)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from piperlang.build.divide import refuse_mixing, refuse_summing
from piperlang.core.selector import Selector
from piperlang.diagnostics import Label, PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.syntax import tree
from piperlang.syntax.words import RESERVED_KEYS

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline

MAX_SPLIT = 65_536


@dataclass(frozen=True)
class Split(Directive):
    """split batch into N as NAME
    Split the batch into microbatches; their gradients are accumulated."""

    nodes = (tree.SplitInto,)
    others_rely_on_it = True

    selector: Selector | None
    """None is the batch."""
    count: int
    name: str

    @classmethod
    def read(cls, script: Interpreter, node: tree.SplitInto) -> Split:
        selector = script.settled(node.selector) if node.selector is not None else None
        count = script.integer(node.count)
        if not 1 <= count <= MAX_SPLIT:
            raise error(
                "P0204",
                f"cannot split into {count:,} microbatches",
                node.count.span,
                f"the count must be 1 to {MAX_SPLIT:,}",
            )
        if node.name.text in RESERVED_KEYS:
            raise error(
                "P0301",
                f"`{node.name.text}` is a built-in key and cannot name a split",
                node.name.span,
                help="name the split `mb`",
            )
        return cls(selector, count, node.name.text, **script.written(node))

    def __str__(self) -> str:
        return f"split {'batch' if self.selector is None else self.selector} into {self.count} as {self.name}"

    def apply_to_outline(self, outline: Outline) -> None:
        known = outline.splits.get(self.name)
        if known is not None:
            raise error(
                "P0406",
                f"split `{self.name}` already exists",
                self.span,
                also=[Label(known.span, "first split here")],
                help="choose another name",
            )
        self._check_in_time(outline)
        outline.splits[self.name] = self
        outline.lanes.forget()

    def _check_in_time(self, outline: Outline) -> None:
        """Statements that name the microbatches of a split must come after it."""
        early = next((by for tags, by in outline.tagged.items() if any(key == self.name for key, _ in tags)), None)
        late = next((lane.steps[0].step for lane in outline.lanes.lanes if lane.steps), None)
        if early is not None:
            raise error(
                "P0410",
                f"`{self.name}` is used before its split",
                self.span,
                "split here",
                also=[Label(early.span, f"`{self.name}` is read as a tag here")],
                help="move the split before this line",
            )
        if late is not None:
            raise error(
                "P0410",
                "the batch is split after passes were ordered",
                self.span,
                "split here",
                also=[Label(late.span, "ordered without the split here")],
                help="move the split before this line",
            )

    def apply_to_schedule(self, schedule: Schedule) -> None:
        groups = None if self.selector is None else [group for group, _ in schedule.meant(self.selector)]
        samples = schedule.model.samples
        others = prod(s.count for s in schedule.outline.splits.values() if s.selector is None)
        if samples % (others * self.count):
            raise self._indivisible(samples, others)
        refuse_mixing(schedule, self, self.count, groups)
        refuse_summing(schedule, self, groups)
        schedule.outline.apply(self)

    def _indivisible(self, samples: int, others: int) -> PiperError:
        each = samples // others
        near = min((n for n in range(1, each + 1) if each % n == 0), key=lambda n: abs(n - self.count))
        by = f"{self.count}" if others == 1 else f"{others} * {self.count}"
        return error(
            "P0412",
            f"batch size {samples} is not divisible by {by}",
            self.span,
            "all microbatches must have the same size"
            if others == 1
            else f"the batch is already split into {others}; all microbatches must have the same size",
            help=f"split into {near}, or change the batch size in the model file",
        )
