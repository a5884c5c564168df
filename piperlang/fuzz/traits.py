"""Properties of a model that a random schedule needs: its stages, the divisors of its batch, and which of its parts can
be sharded, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from piperlang.diagnostics import PiperError
from piperlang.ir.graph import Graph
from piperlang.pipeline import schedule
from piperlang.source import Source

if TYPE_CHECKING:
    from piperlang.capture.program import Program
    from piperlang.ir.model import Model

STAGES = 4
"""Maximum number of stages for a model without stage tags."""


@dataclass(frozen=True)
class ShardCandidate:
    """A candidate for `shard`."""

    lines: tuple[str, ...]
    """Tag directives that make it a chunk."""
    selector: str
    rest: str
    """Selector of the rest of the model."""
    style: str


class Traits:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._allowed: dict[tuple[ShardCandidate, int], bool] = {}

    @cached_property
    def plain(self) -> Model:
        return self.program.cut().model

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """Tag directives for a model without stages: its modules in order, in runs of about the same
        number."""
        if any("stage" in chunk.tags for chunk in self.plain.chunks):
            return ()
        paths = list(dict.fromkeys(_block(path) for chunk in self.plain.chunks for path in chunk.modules))
        count = min(STAGES, len(paths))
        runs = groupby(enumerate(paths), key=lambda item: item[0] * count // len(paths))
        return tuple(f"tag stage={stage} at {', '.join(_quoted(path) for _, path in run)}" for stage, run in runs)

    @cached_property
    def model(self) -> Model:
        found = schedule(self.program, Source("tags.piper", "".join(f"{line}\n" for line in self.tags)))
        return found.captured.model

    @cached_property
    def stages(self) -> tuple[int | str, ...]:
        """Values of the tag `stage`, in order of appearance."""
        return tuple(dict.fromkeys(chunk.tags["stage"] for chunk in self.model.chunks if "stage" in chunk.tags))

    @cached_property
    def numbered(self) -> bool:
        """Whether the stages are 0, 1, ..., as the library's schedules require, no node is outside of them, and none
        reads the output of a later one."""
        if self.loose or self.stages != tuple(range(len(self.stages))):
            return False
        made = {name: chunk.tags["stage"] for chunk in self.model.chunks for name in chunk.outputs}
        return all(
            self.stages.index(made[name]) <= self.stages.index(chunk.tags["stage"])
            for chunk in self.model.chunks
            for name in chunk.inputs
        )

    @cached_property
    def loose(self) -> bool:
        """Whether some nodes have no stage."""
        return any("stage" not in chunk.tags for chunk in self.model.chunks)

    @property
    def samples(self) -> int:
        return self.model.samples

    @property
    def divides(self) -> bool:
        """Whether the batch may be divided."""
        return all(chunk.mixing is None for chunk in self.model.chunks)

    @cached_property
    def tied(self) -> bool:
        """Whether stages share a weight: they must then be sharded alike."""
        readers: dict[str, set[object]] = {}
        for chunk in self.model.chunks:
            for name in chunk.weights:
                readers.setdefault(name, set()).add(chunk.tags.get("stage"))
        return any(len(stages) > 1 for stages in readers.values())

    # --------------------------------------------------------------------------------------------------- dividing

    @cached_property
    def parts(self) -> Sequence[ShardCandidate]:
        """Candidates for `shard`: chunks with their own tag as experts, layers by columns and rows, norms
        by sequence."""
        others = sorted({key for chunk in self.model.chunks for key in chunk.tags if key != "stage"})
        found = [ShardCandidate((), f"[{key}=*]", f"[!{key}]", "experts") for key in others]
        weights = {name: weight.shape for name, weight in self.model.weights.items()}
        for path in dict.fromkeys(path for chunk in self.model.chunks for path in chunk.modules):
            shape = weights.get(f"{path}.weight")
            styles = (
                ("columns", "rows")
                if shape is not None and len(shape) == 2
                else ("sequence",)
                if shape is not None and len(shape) == 1
                else ()
            )
            found += [
                ShardCandidate((f'tag part="{style}" at {_quoted(path)}',), f'[part="{style}"]', "[!part]", style)
                for style in styles
            ]
        return found

    def allows(self, part: ShardCandidate, size: int) -> bool:
        """Whether the compiler can shard it, alone, over `size` devices."""
        if (part, size) not in self._allowed:
            lines = [
                *self.tags,
                *part.lines,
                f"mesh gpu = d: {size}",
                "place [pass=*] on gpu",
                f"shard {part.selector} over gpu.d with style={part.style}",
                f"replicate {part.rest} over gpu.d",
            ]
            try:
                self._allowed[part, size] = self.compiles(lines) is not None
            except Exception:
                self._allowed[part, size] = True  # a compiler bug: it will appear when the script is run
        return self._allowed[part, size]

    def compiles(self, lines: Sequence[str]) -> Graph | None:
        """The graph of a script, or None if it is rejected. Any other exception is a compiler bug."""
        found = schedule(self.program, Source("draft.piper", "\n".join(lines) + "\n"))
        if found.problems:
            return None
        try:
            return found.graph()
        except PiperError:
            return None


def _block(path: str) -> str:
    """The part of a module's path that is a layer of the model: to the first number in it, or its first name."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1])


def _quoted(path: str) -> str:
    return f'"{path}"'
