"""Applies directives to a model one by one: the graph that an evaluated script speaks to."""

from __future__ import annotations

from collections.abc import Iterable

from piperlang.build.complete import missing
from piperlang.build.graph import build
from piperlang.build.schedule import Schedule, SupportsCut
from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.elaborate.directive import Directive
from piperlang.ir.graph import Graph
from piperlang.ir.verify import verify


class Scheduler:
    """Implements `directive.Graph`. A schedule is the directives applied in order, so applying fewer of them is all
    that undo takes."""

    def __init__(self, program: SupportsCut, limit: int | None = None) -> None:
        """`limit`: apply only so many directives, and let the others pass."""
        self.schedule = Schedule(program)
        self.limit = limit
        self.lost = False
        """Whether a tag or a split has failed: what follows would fail with it."""

    def apply(self, directive: Directive) -> None:
        if self.limit is not None and len(self.schedule.directives) >= self.limit:
            return
        if self.lost and directive.uses_chunks:
            raise PiperError  # told where the tag or the split failed
        before = self.schedule.directives
        if before and type(before[-1]) is not type(directive):
            self._verify()
        try:
            directive.apply_to_schedule(self.schedule)
        except PiperError as problem:
            self.lost = self.lost or directive.others_rely_on_it
            raise PiperError(*(x.within(directive.trail) for x in problem.diagnostics)) from None
        self.schedule.directives.append(directive)

    def _verify(self) -> None:
        """After all directives of a kind, on one microbatch of everything; the whole graph is verified when it is
        built. What the script has not said yet is no fault: it may come."""
        try:
            sketch = build(self.schedule, sketch=True) if self.schedule.settled else None
        except PiperError:
            return  # reported when the script has ended, if it still holds then
        if sketch is not None:
            verify(sketch, sketch=True)

    def count(self, selector: Selector) -> int:
        return sum(1 for _ in self.graph().select(selector))

    def tags(self, name: str) -> Iterable[TagValue]:
        return {chunk.tags[name] for chunk in self.schedule.model.chunks if name in chunk.tags}

    def graph(self) -> Graph:
        """The graph as it is now. What is not placed yet is left where it was, on one device."""
        graph = build(self.schedule)
        verify(graph)
        return graph

    def finish(self) -> list[Diagnostic]:
        """What is missing once the script has ended."""
        return list(missing(self.schedule))
