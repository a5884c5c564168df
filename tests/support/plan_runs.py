"""Plans of many schedules, and what each comes to on simulated devices."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from piperlang.ir.graph import Graph
from piperlang.plan import files
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.plan.verify import check
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.directive_scripts import script
from tests.support.equivalence import SAMPLES, compiled, optimizer, program
from tests.support.job_schedules import JOB_SCHEDULES, pipeline_script
from tests.support.models import CASES, Case

CROSSED = {
    f"{name} x {level}": (
        "mlp" if ranks == 4 else "gpt",
        pipeline_script(name, place, ranks, 2, f"replicate [pass=*] over gpu.dp with {level}", arguments),
    )
    for name, place, ranks, arguments in (
        ("one_f_one_b", "loop", 4, "4"),
        ("zero_bubble", "loop", 4, "4"),
        ("zbv", "vee", 2, "2"),
        ("dualpipev", "vee", 2, "2"),
        ("dualpipe", "mirror", 4, "4, 4"),
    )
    for level in ("states=sharded", "grads=sharded", "params=sharded, prefetch=1")
}
"""Pipelines of the library, with every level of ZeRO."""

MORE = {
    "+".join((model, *names)): (model, script(model, *names))
    for model, *names in (
        ("gpt", "shard", "zero3"),
        ("moe", "shard", "zero2"),
        ("unet", "shard", "split"),
        ("dropout", "place", "zero2"),
        ("gpt", "split", "recompute"),
        ("mlp", "shard", "order"),
        ("unet", "place", "offload"),
    )
}

SUBJECTS = {**JOB_SCHEDULES, **MORE, "zero_bubble x states=sharded": CROSSED["zero_bubble x states=sharded"]}
"""Whose mistakes are tried."""


def right_plan(graph: Graph) -> Plan:
    """The plan of a graph, which the check accepts, with and without buffers for sends, and which a file keeps as it
    is."""
    plan = lower(graph)
    check(plan)
    check(plan, buffered=False)
    assert files.load(files.dump(plan)) == plan
    return plan


@cache
def planned(model: str, text: str) -> tuple[Graph, Any, Plan]:
    graph, captured = compiled(program(model), text)
    return graph, captured, lower(graph)


def trained(
    case: Case, captured: Any, plan: Plan, dtype: str
) -> tuple[list[float], list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Losses, gradients and weights of two steps on simulated devices; a plan that hangs fails."""
    found: list[Any] = []

    def run() -> None:
        try:
            with ThreadJob(plan, captured, Training(case.model, optimizer), 5.0, dtype) as job:
                losses = []
                for step in range(2):
                    torch.manual_seed(100 + step)
                    losses.append(job.step(case.batch(SAMPLES), gradients=True).loss)
                found.append((losses, job.gradients(), [dict(device.kept) for device in job.training.devices]))
        except BaseException as problem:
            found.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    result: tuple[list[float], list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]] = found[0]
    return result


@cache
def expected(model: str, text: str) -> Any:
    graph, captured, plan = planned(model, text)
    return trained(CASES[model], captured, plan, graph.model.tensors[graph.model.loss].dtype)
