"""How near the simulated peak of memory comes to a real one.

The GPT of simulator.py with AdamW, under 1F1B, ZeRO-3 and recomputation: the most that any device holds in a step after
the first. On CPU workers every storage that torch allocates counts, in the order in which the host would issue
instructions on a GPU (runtime/device/measure.py), on a GPU (`--gpu`) what torch's allocator says.

    python -m benchmarks.simulated_memory [--json] [--gpu]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.simulator import Size, adam, letters, make_gpt, scheduled_gpt
from benchmarks.sleeping import options, show
from piperlang.runtime.comm.registry import for_workers
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.machine_files import load
from piperlang.simulate.result import simulated

RANKS = 2
PIPELINE = f"""from std.pipeline import one_f_one_b, loop
mesh gpu = pp: {RANKS}
split batch into 4 as mb
loop(gpu, {RANKS}, 1)
"""
CASES = {
    "1F1B": f"{PIPELINE}one_f_one_b(gpu, {RANKS}, 4)\n",
    "1F1B, what is cheap recomputed": (
        f"{PIPELINE}recompute [stage=*] with policy=cheap\none_f_one_b(gpu, {RANKS}, 4)\n"
    ),
    "1F1B, all stages recomputed": f"{PIPELINE}recompute [stage=*]\none_f_one_b(gpu, {RANKS}, 4)\n",
    "ZeRO-3": (
        f"mesh gpu = dp: {RANKS}\nplace [stage=*] on gpu\nsplit batch into 2 as mb\n"
        "replicate [stage=*] over gpu.dp with params=sharded\n"
    ),
}


def compared(cluster: Cluster, name: str, script: str, size: Size, device: str) -> dict[str, Any]:
    data = letters(size, "cpu")
    graph, captured, plan = scheduled_gpt(size, name, script, device)
    costs = MachineCosts(plan, graph, load("h200"))
    states = 2.0 * torch.empty((), dtype=size.dtype).element_size()
    memory = simulated(plan, graph, costs, states=states).timeline.memory
    predicted = max(held for curve in memory.values() for _, held in curve)
    with Job(plan, captured, Training(partial(make_gpt, size), adam), timeout=60, cluster=cluster) as job:
        job.step(next(data))
        if device == "cpu":
            measured = max(its.peak for its in job.measure(next(data)))
        else:
            cluster.each("reset_peak", count=RANKS)
            job.step(next(data))
            measured = max(its["allocated"] for its in cluster.each("reset_peak", count=RANKS))
    return {
        "case": f"gpt on {device}, {name}",
        "predicted_mib": round(predicted / 2**20, 1),
        "measured_mib": round(measured / 2**20, 1),
        "error": round(predicted / measured - 1, 4),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gpu", action="store_true", help="on NCCL")
    chosen = parser.parse_args()
    size, device = Size(stages=RANKS, layers=2), "cpu"
    if chosen.gpu:
        device = "cuda"
        size = Size(stages=RANKS, layers=4, width=2048, length=1024, words=8192, samples=8, dtype=torch.bfloat16)
    cluster = Cluster(RANKS, backend=for_workers() if chosen.gpu else None)
    try:
        show([compared(cluster, name, script, size, device) for name, script in CASES.items()], chosen.json)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
