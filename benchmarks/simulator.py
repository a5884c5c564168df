"""How near a simulated step comes to a real one.

Three kinds of cases, all in one run. `sleep`: the network that sleeps, under every schedule of the library at pp=2 and
pp=4; the simulator is told what the naps take and the description of CPU workers, and nothing was measured before.
`gpt`: a GPT on CPU workers; passes and transfers are measured under one schedule (`piperc profile`), and schedules that
were never run before are predicted from that. `--gpu`: the same on NCCL, with one rank and with four.

A measured step is the median of some steps, each from its begin on the workers to the end of the last of them.

    python -m benchmarks.simulator [--json] [--steps 5] [--only sleep|gpt] [--gpu]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from benchmarks.sleeping import Asleep, batch, compiled, make_model, optimizer, options, show
from piperlang.plan.instructions import Compute, Instruction
from piperlang.plan.lower import lower
from piperlang.plan.plan import DevicePlan
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.simulate.costs import InstructionCost, MachineCosts
from piperlang.simulate.execute import execute
from piperlang.simulate.machine_files import load

MS = 30.0
PLACES = {
    "gpipe": ("loop(gpu, {ranks})", 1),
    "one_f_one_b": ("loop(gpu, {ranks})", 1),
    "zero_bubble": ("loop(gpu, {ranks})", 1),
    "looped_bfs": ("loop(gpu, {ranks}, 2)", 2),
    "interleaved": ("loop(gpu, {ranks}, 2)", 2),
    "interleaved_zero_bubble": ("loop(gpu, {ranks}, 2)", 2),
    "zbv": ("vee(gpu, {ranks})", 2),
    "dualpipev": ("vee(gpu, {ranks})", 2),
    "dualpipe": ("mirror(gpu, {ranks}, {micro})", 1),
}
"""How each schedule is placed, and its stages on a rank."""


def script(name: str, ranks: int, micro: int) -> str:
    place = PLACES[name][0].format(ranks=ranks, micro=micro)
    return (
        f"from std.pipeline import {name}, {place.partition('(')[0]}\nmesh gpu = pp: {ranks}\n"
        f"split batch into {micro} as mb\n{place}\n{name}(gpu, {ranks}, {micro})\n"
    )


class Naps(MachineCosts):
    """Passes take their naps; the rest is what the machine's description says."""

    asleep: Asleep

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        if isinstance(x, Compute):
            return InstructionCost(self.machine.launch + self.asleep.seconds(self.graph.nodes[x.node]))
        return super().cost(device, x)


def sleeping(cluster: Cluster, ranks: int, steps: int) -> Iterator[dict[str, Any]]:
    layers, micro = 2 * ranks, 2 * ranks
    for name, (_, stages) in PLACES.items():
        make = partial(make_model, layers, stages * ranks, ms=MS)
        graph, captured = compiled(make, micro, script(name, ranks, micro))
        plan = lower(graph)
        costs = Naps(plan, graph, load("cpu"))
        costs.asleep = Asleep(graph, captured)
        predicted = execute(plan, costs).timeline.length
        with Job(plan, captured, Training(make, optimizer), timeout=60, cluster=cluster) as job:
            taken = [job.step(batch(micro)).seconds for _ in range(steps + 1)][1:]
        yield row(f"sleep, {name}, pp={ranks}", predicted, taken)


def row(case: str, predicted: float, taken: list[float]) -> dict[str, Any]:
    measured = median(taken)
    return {
        "case": case,
        "predicted_ms": round(1e3 * predicted, 3),
        "measured_ms": round(1e3 * measured, 3),
        "error": round(predicted / measured - 1, 4),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("sleep", "gpt"))
    parser.add_argument("--gpu", action="store_true", help="on NCCL")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if chosen.only in (None, "sleep") and not chosen.gpu:
        for ranks in (2, 4):
            cluster = Cluster(ranks)
            try:
                rows += sleeping(cluster, ranks, chosen.steps)
            finally:
                cluster.close()
    show(rows, chosen.json)


if __name__ == "__main__":
    main()
