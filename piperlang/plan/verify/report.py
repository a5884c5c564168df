"""A plan being checked: its instructions by mnemonic, and what was found wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from piperlang.core.value_id import ValueId
from piperlang.diagnostics import LIMIT, Diagnostic, PiperError
from piperlang.plan.instructions import INSTRUCTIONS, Instruction, Send
from piperlang.plan.plan import Plan

T = TypeVar("T", bound=Instruction)
REBUILD = "make the plan again from its script, with `piperc plan`"


class At(NamedTuple):
    """An instruction of a plan."""

    device: int
    """Its place in the plan's list, which is not its number."""
    place: int
    does: Instruction


class Stop(Exception):
    """Enough was found."""


@dataclass
class Checked:
    plan: Plan
    of: dict[str, list[At]] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)
    made: list[dict[ValueId, int]] = field(default_factory=list)
    """By device: which instruction makes each value."""
    steps: int = 0
    """How much work it was, in instructions and parts looked at: tests see from it that the work grows with the
    plan."""

    def sort(self) -> None:
        self.of = {name: [] for name in INSTRUCTIONS}
        nodes = len(self.plan.nodes)
        for d, device in enumerate(self.plan.devices):
            for i, instruction in enumerate(device.instructions):
                if not 0 <= instruction.node < nodes:
                    raise malformed(
                        f"instruction {i} of device {device.device}, `{instruction.op}`, is of no node",
                        f"it says {instruction.node}, and there are {nodes}",
                    )
                at = At(d, i, instruction)
                self.of[instruction.op].append(at)
                if not instruction.writes and not isinstance(instruction, Send):
                    self.wrong("P0504", f"`{instruction.op}` writes nothing", at)
                for other in instruction.waits:
                    if not 0 <= other < i:
                        self._ahead(at, other)

    def _ahead(self, at: At, other: int) -> None:
        """Some devices issue their instructions one by one, and can wait only for what was issued before."""
        instructions = self.plan.devices[at.device].instructions
        there = [At(at.device, other, instructions[other])] if 0 <= other < len(instructions) else []
        what = "that comes later" if there else f"{other}, which is not there"
        self.wrong("P0501", f"device {self.plan.devices[at.device].device} waits for an instruction {what}", at, *there)

    def all(self, *names: str) -> Iterator[At]:
        for name in names:
            yield from self.of[name]

    def each(self, kind: type[T]) -> Iterator[tuple[At, T]]:
        """All instructions of a type, or of those derived from it."""
        for name, cls in INSTRUCTIONS.items():
            if issubclass(cls, kind):
                for at in self.of[name]:
                    yield at, at.does  # type: ignore[misc]

    def name(self, at: At) -> str:
        """An instruction as its author knows it."""
        node, device = self.plan.nodes[at.does.node], self.plan.devices[at.device].device
        line = f", {node.line}" if node.line else ""
        return f"{at.does.op} of {node.name} (device {device}, instruction {at.place}{line})"

    def wrong(self, code: str, message: str, *involved: At, notes: tuple[str, ...] = (), help: str = REBUILD) -> None:
        every = {(at.device, at.place): at for at in involved}
        named = tuple(f"{'and ' if k else ''}{self.name(at)}" for k, at in enumerate(every.values()))
        self.found.append(Diagnostic(code, message, notes=(*named, *notes), helps=(help,)))
        if len(self.found) >= LIMIT:
            raise Stop


def malformed(message: str, *notes: str) -> PiperError:
    return PiperError(Diagnostic("P0504", message, notes=notes, helps=(REBUILD,)))
