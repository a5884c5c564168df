"""Starts a job on a backend: in this process if its ranks are threads, on workers otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from piperlang.capture.autodiff.pass_graph import TracedModel
from piperlang.plan.files import digest
from piperlang.plan.plan import Plan
from piperlang.runtime.comm.backend import Backend
from piperlang.runtime.comm.process_group import ProcessBackend
from piperlang.runtime.comm.threads import Threads
from piperlang.runtime.driver.shapes import OtherShapes
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training

if TYPE_CHECKING:
    from piperlang.runtime.driver.cluster import Cluster, Patience
    from piperlang.runtime.driver.job import Job


def start(
    backend: Backend,
    plan: Plan,
    captured: TracedModel,
    training: Training,
    loss_dtype: str,
    *,
    timeout: float = 300.0,
    address: str | None = None,
    compiles: bool | None = None,
    cluster: Cluster | None = None,
    others: OtherShapes | None = None,
    patience: Patience | None = None,
    output: Path | None = None,
    graphs: bool | None = None,
) -> Job | ThreadJob:
    """`address`, `compiles`, `graphs` and `cluster` are for workers. `others`: how batches of other shapes are
    planned."""
    if isinstance(backend, Threads):
        return ThreadJob(plan, captured, training, timeout, loss_dtype, backend, others)
    from piperlang.runtime.driver.job import Job  # imports Ray, which threads do not need

    assert isinstance(backend, ProcessBackend)
    about = plan, captured, training, digest(plan)
    return Job(*about, address, timeout, loss_dtype, cluster, backend, compiles, others, patience, output, graphs)
