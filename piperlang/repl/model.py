"""The model of a session: loaded and traced once, kept for the whole session. The only files of this folder
that need torch are this one and training.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.diagnostics import error
from piperlang.interrupts import uninterrupted
from piperlang.progress import phase
from piperlang.repl.state import Cuts

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile

NEEDED = ("torch", "ray", "numpy", "safetensors")
"""What `piperlang[run]` installs."""


@dataclass
class OpenModel:
    file: ModelFile
    program: Cuts
    seed: int
    seconds: float
    """Seconds that tracing took."""

    @cached_property
    def doubled(self) -> Cuts:
        """The same model in float64, for numeric comparison."""
        from piperlang.runtime.reference.numerics import capture_doubled

        return Cuts(capture_doubled(self.file, self.seed))

    @property
    def nodes(self) -> int:
        """Number of nodes of the trace."""
        return len(self.program.program.sizes.small.graph.nodes)  # type: ignore[attr-defined]

    @cached_property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """Paths of all modules that compute something."""
        found: set[tuple[str, ...]] = self.program.program.modules()  # type: ignore[attr-defined]
        return tuple(sorted(found))

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """The same batches as `piperc MODEL.py SCHEDULE.piper` uses: seeded, and starting over when
        they end."""
        from piperlang.capture.user.seeding import seed_all

        seed_all(self.seed)
        while True:
            yield from self.file.data()


def open_model(path: Path, seed: int = 0) -> OpenModel:
    """Load and trace a model file; every problem is reported as a located diagnostic."""
    with phase(f"loading {path.name}", f"loaded {path.name}"):
        try:
            with uninterrupted():
                from piperlang.capture.program import capture
                from piperlang.capture.user.batches import placed
                from piperlang.capture.user.model_file import load_model
                from piperlang.capture.user.seeding import seeded
                from piperlang.runtime.comm.registry import for_workers

                device = for_workers().device.name
        except ModuleNotFoundError as problem:
            if problem.name not in NEEDED:
                raise
            raise error(
                "P0902",
                f"a session with a model needs {problem.name}, which is not installed",
                help="`pip install 'piperlang[run]'` installs it; `piperc repl` without a model does not need it",
            ) from None
        file = load_model(path, seed)
    started = time.perf_counter()
    with phase(f"tracing {path.name}", "traced") as tracing:
        with seeded(seed):
            batch = next(iter(file.data()))
        program = capture(file.model, file.loss, placed(batch, device), seed, file.copies)
        tracing.detail = f"{len(program.sizes.small.graph.nodes):,} nodes"
    # torch and the trace are never freed: exclude them from garbage collection, which would delay directives.
    gc.collect()
    gc.freeze()
    return OpenModel(file, Cuts(program), seed, time.perf_counter() - started)
