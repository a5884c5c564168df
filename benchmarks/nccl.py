"""The schedules of tests/support/job_schedules.py on CUDA over NCCL, four ranks sharing what GPUs there are, against
plain training on one, with clipping and evaluation. The first two steps are issued instruction by instruction, and give
their gradients; the next ones are CUDA graphs, with a learning rate that changes. Every second schedule has an
optimizer whose updates are part of the graph. `host_ms`: what the slowest host needed of the step until its graph was
issued, the batch included, in the best of the steps.

python -m benchmarks.nccl [--json]
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from typing import Any

import torch
import torch.nn.functional as f
from torch.utils import _pytree as pytree

from piperlang.capture.program import capture
from piperlang.capture.trace.observed import called
from piperlang.plan.lower import lower
from piperlang.plan.rewrite.clip import with_norm
from piperlang.plan.rewrite.forward import forward
from piperlang.runtime.comm import nccl
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.numerics import gradient_errors
from tests.support.equivalence import SAMPLES, compiled, optimizer, relative
from tests.support.images import Images, labelled
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.models import CASES, Case

RANKS = 4
ISSUED, STEPS = 2, 6
"""Steps before the graph, and all of them."""
MAX_NORM = 0.05
"""Gradients are clipped, as every job that trains a language model does."""

SUMMED = {
    "statistics of the batch": (
        "batch norm",
        "mesh gpu = pp: 2, dp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1:] on gpu[pp=1]\n"
        "replicate [pass=*] over gpu.dp with params=sharded\n",
    )
}


def fused(params: Any) -> torch.optim.Optimizer:
    """A large `eps`, so that an update is about as large as its gradient: others divide by what is next to zero."""
    return torch.optim.AdamW(params, lr=0.05, eps=0.1, fused=True)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def compare(
    cluster: Cluster, case: Case, script: str, compiles: bool, optimizer: Any = optimizer, steps: int = STEPS
) -> dict[str, Any]:
    """The largest relative differences of losses, gradients and weights from plain training."""

    def batch(step: int, device: str) -> Any:
        torch.manual_seed(100 + step)
        return pytree.tree_map(lambda t: t.to(device), case.batch(SAMPLES))

    graph, captured = compiled(capture(case.model, case.loss, batch(0, "cuda")), script)
    plan = with_norm(lower(graph), MAX_NORM)
    # Evaluated in training mode, to be compared with the step's loss; not where that changes buffers.
    evaluates = not any(chunk.changes for chunk in graph.model.chunks)
    if len(plan.devices) > RANKS:
        return {"devices": len(plan.devices), "skipped": f"needs {len(plan.devices)} ranks"}
    torch.manual_seed(0)
    plain = case.model().cuda()
    eager = optimizer([p for p in plain.parameters() if p.requires_grad])
    rates = falling(eager)
    worst = {"loss": 0.0, "gradients": 0.0}
    host: list[float] = []
    with Job(
        plan, captured, Training(case.model, optimizer, falling), timeout=60, cluster=cluster, compiles=compiles
    ) as job:
        if evaluates:
            job.shapes.add("evaluate", forward(lower(graph)), captured)
        for step in range(steps):
            evaluated = job.evaluate(batch(step, "cpu")) if evaluates else None
            done = job.step(batch(step, "cpu"), gradients=step < ISSUED)
            host += [done.issued] if done.issued is not None else []
            inputs, target = batch(step, "cuda")
            eager.zero_grad()
            loss = case.loss(called(plain, inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            worst["loss"] = max(
                worst["loss"],
                abs(done.loss - loss.item()) / abs(loss.item()),
                abs(evaluated - loss.item()) / abs(loss.item()) if evaluated is not None else 0.0,
            )
            if step < ISSUED:
                expected = {name: p.grad.cpu() for name, p in plain.named_parameters() if p.grad is not None}
                devices = [device.device for device in plan.devices]
                errors = gradient_errors(graph, devices, job.gradients(), expected)
                worst["gradients"] = max(worst["gradients"], *errors.values())
            torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            eager.step()
            rates.step()
        weights = job.weights()
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    worst["weights"] = max(relative(weights[name], t.detach().cpu()) for name, t in tensors.items() if name in weights)
    host_ms = round(1e3 * min(host), 3) if host else None
    return {"devices": len(plan.devices), **worst, "graph": ", ".join(job.not_captured) or "yes", "host_ms": host_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="schedules whose name has it")
    options = parser.parse_args()
    rows = []
    cases = {**CASES, "batch norm": Case("batch norm", Images, f.cross_entropy, labelled, 3)}
    cluster = Cluster(RANKS, backend=nccl.BACKEND)
    try:
        chosen = {name: job for name, job in {**JOB_SCHEDULES, **SUMMED}.items() if options.only in name}
        for number, (name, (model, script)) in enumerate(chosen.items()):
            started = time.perf_counter()
            script = script.replace("dp: 2", "dp: 1") if "pp: 4" in script else script  # four ranks are what there is
            try:
                row: dict[str, Any] = compare(
                    cluster, cases[model], script, options.compile, fused if number % 2 else optimizer
                )
            except Exception as problem:
                traceback.print_exc()
                row = {"error": f"{type(problem).__name__}: {problem}"[:300]}
            rows.append({"schedule": name, "model": model, **row, "seconds": round(time.perf_counter() - started, 1)})
            if not options.json:
                print(rows[-1], flush=True)
    finally:
        cluster.close()
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
