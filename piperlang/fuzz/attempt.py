"""Runs a script on a model and compares the result with plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from piperlang.capture.program import CutProgram, Program
from piperlang.capture.user.model_file import ModelFile, shipped
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.ir.graph import Graph
from piperlang.ir.layout import devices_of
from piperlang.ir.sort import topological
from piperlang.pipeline import planned, schedule
from piperlang.plan.plan import Plan
from piperlang.runtime.reference.numerics import Candidate, InDouble, Planned, capture_doubled, compare
from piperlang.source import Source

EXECUTORS = ("graph", "inline", "ray")
OF_THE_MODEL = ("P0801", "P0802", "P0807")
"""Codes of errors in the model file, which do not depend on the schedule."""
TIMEOUT = 60.0
"""Timeout in seconds of communication between devices."""


@dataclass(frozen=True)
class Outcome:
    kind: str
    """same | different | refused | failed | raised"""
    what: str
    """The size of the graph and the difference, or the error."""
    error: str = ""
    """The code of the diagnostic, or the name of the exception: two failures with the same kind and error count as
    the same."""

    @property
    def fine(self) -> bool:
        return self.kind == "same"

    def like(self, other: Outcome) -> bool:
        return (self.kind, self.error) == (other.kind, other.error)


class Bench:
    """A model and an executor that trains it under any script."""

    def __init__(self, file: ModelFile, seed: int = 0, executor: str = "graph", workers: int = 8) -> None:
        self.file, self.seed, self.executor, self.workers = file, seed, executor, workers
        self.cluster: Any = None

    @cached_property
    def program(self) -> Program:
        return capture_doubled(self.file, self.seed)

    def attempt(self, script: str) -> Outcome:
        """Compile, plan, and train two steps, and compare them with plain PyTorch. Any exception becomes an outcome."""
        try:
            found = schedule(self.program, Source("fuzz.piper", script), say=lambda _: None)
            if found.problems:
                return _complained("refused", found.problems)
            graph = found.graph()
            topological(graph)
            plan = planned(graph, self.file.max_norm)
        except PiperError as problem:
            return _complained("refused", problem.diagnostics)
        except Exception as problem:
            return Outcome("raised", f"{type(problem).__name__}: {problem}", type(problem).__name__)
        cut = found.captured
        assert isinstance(cut, CutProgram)
        try:
            with self._trainer(graph, plan, cut) as trainer:
                compared = compare(self.file, self.program, graph, cut, self.seed, trainer)
        except PiperError as problem:
            if all(diagnostic.code in OF_THE_MODEL for diagnostic in problem.diagnostics):
                raise
            return _complained("failed", problem.diagnostics)
        except Exception as problem:
            return Outcome("raised", f"{type(problem).__name__}: {problem}", type(problem).__name__)
        devices = {device for template in graph.templates for device in devices_of(template.where)}
        size = f"{len(devices)} devices, {len(graph.nodes)} nodes"
        worst = max(compared.max_grad_rel_err, compared.max_weight_rel_err)
        if compared.ok:
            return Outcome("same", f"{size}, largest difference {worst:.0e}")
        return Outcome(
            "different",
            f"{size}, loss {compared.loss:.9g} instead of {compared.loss_reference:.9g}, largest difference {worst:.1e}"
            f" in {compared.worst}",
        )

    @contextmanager
    def _trainer(self, graph: Graph, plan: Plan, cut: CutProgram) -> Iterator[Candidate | None]:
        if self.executor == "graph":
            yield None
            return
        from piperlang.runtime.comm import gloo, threads
        from piperlang.runtime.driver.start import start
        from piperlang.runtime.driver.training import Training
        from piperlang.runtime.optimizer.optimize import default_optimizer

        make = shipped(self.file, "model")
        assert make is not None
        training = Training(
            InDouble(make),
            shipped(self.file, "optimizer") or default_optimizer,
            shipped(self.file, "lr_schedule"),
            self.seed,
        )
        loss_dtype = graph.model.tensors[graph.model.loss].dtype
        # The program is traced on the CPU.
        backend, cluster = (threads.BACKEND, None) if self.executor == "inline" else (gloo.BACKEND, self._workers())
        try:
            with start(backend, plan, cut, training, loss_dtype, timeout=TIMEOUT, cluster=cluster) as job:
                yield Planned(graph, job)
        except Exception:
            self.close()  # a failed job ends its workers: the next one starts new ones
            raise

    def _workers(self) -> Any:
        if self.cluster is None:
            from piperlang.runtime.driver.cluster import Cluster

            self.cluster = Cluster(self.workers)
        return self.cluster

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


def _complained(kind: str, problems: tuple[Diagnostic, ...]) -> Outcome:
    first = problems[0]
    return Outcome(kind, f"{first.code}: {first.message}", first.code)
