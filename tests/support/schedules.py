"""The library's schedules as scripts, and their orders as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import piperlang.directives  # noqa: F401  (scripts use them)
from piperlang.diagnostics import PiperError
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.lanes import Lane
from piperlang.elaborate.modules import Importer, from_source
from piperlang.elaborate.outline import Outline
from piperlang.source import Source

if TYPE_CHECKING:  # published.py asks torch, which tests of the front end run without
    from tests.support.published import Order

_IMPORTER = Importer()
"""Shared, so that the library is parsed once for thousands of scripts."""


@dataclass(frozen=True)
class Schedule:
    name: str
    placement: str
    stages: int = 1
    """Stages on each rank; 0 for as many as asked for."""

    def script(self, ranks: int, micro: int, chunks: int = 2) -> str:
        more = f", {chunks}" if self.stages == 0 else ""
        place = {"loop": f"loop(gpu, ranks{more})", "vee": "vee(gpu, ranks)", "mirror": "mirror(gpu, ranks, micro)"}[
            self.placement
        ]
        return (
            f"from std.pipeline import {self.name}, {self.placement}\n"
            f"param ranks = {ranks}\nparam micro = {micro}\nmesh gpu = pp: ranks\n"
            f"split batch into micro as mb\n{place}\n{self.name}(gpu, ranks, micro{more and f', chunks={chunks}'})\n"
        )

    def lanes(self, ranks: int, micro: int, chunks: int = 2) -> list[Lane]:
        return lanes(self.script(ranks, micro, chunks))

    def order(self, ranks: int, micro: int, chunks: int = 2) -> Order:
        return plain(self.lanes(ranks, micro, chunks))

    def stage_count(self, ranks: int, chunks: int) -> int:
        return ranks * (self.stages or chunks)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "loop"),
        Schedule("one_f_one_b", "loop"),
        Schedule("zero_bubble", "loop"),
        Schedule("looped_bfs", "loop", 0),
        Schedule("interleaved", "loop", 0),
        Schedule("interleaved_zero_bubble", "loop", 0),
        Schedule("zbv", "vee", 2),
        Schedule("dualpipev", "vee", 2),
        Schedule("dualpipe", "mirror"),
    )
}


def outline(text: str) -> Outline:
    """The outline of a script that must be right."""
    graph = Outline()
    problems = Interpreter(graph, from_source(Source("test.piper", text)), importer=_IMPORTER).run()
    if problems:
        raise PiperError(*problems)
    return graph


def lanes(text: str) -> list[Lane]:
    return outline(text).orders()


def plain(found: list[Lane]) -> Order:
    """Per device, the steps as lists of items."""
    rows = {device: [list(work.items) for work in lane.steps] for lane in found for device in lane.devices}
    return [rows[device] for device in sorted(rows)]  # type: ignore[misc]
