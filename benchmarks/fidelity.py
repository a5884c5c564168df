"""How near a step on real workers comes to what its order allows, and how near torch's own pipelines come.

Eight layers whose F, I and W sleep 40 ms each, on four ranks over gloo, eight microbatches. Schedules of one stage a
rank take two layers a stage, the others one, so the work is the same everywhere. The ideal is the unit-cost simulation
of the order, with free communication, times 40 ms. Ours and torch's classes run in the same call, one after the other,
each the shortest of some steps; a step counts from its begin on the workers to the end of the last of them, updates
included.

    python -m benchmarks.fidelity [--json] [--steps 5] [--only zbv] [--timeline DIR]
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import mse_loss

from benchmarks.sleeping import TIMELINE, Network, Timed, batch, make_model, optimizer, options, plain_loss, show, timed
from piperlang.pipeline import outline
from piperlang.runtime.driver.cluster import Cluster
from piperlang.simulate.unit import UNIT, UnitCosts, simulate
from piperlang.source import Source

MS, RANKS, MICRO = 40.0, 4, 8
LAYERS = 2 * RANKS


@dataclass(frozen=True)
class Case:
    name: str
    placement: str
    torch_class: Any
    stages: int = LAYERS

    @property
    def script(self) -> str:
        chunks = ", 2" if self.placement == "loop" and self.stages > RANKS else ""
        return (
            f"from std.pipeline import {self.name}, {self.placement}\nmesh gpu = pp: {RANKS}\nsplit batch into {MICRO}"
            f" as mb\n{self.placement}(gpu, {RANKS}{chunks})\n{self.name}(gpu, {RANKS}, {MICRO})\n"
        )

    @property
    def ideal(self) -> float:
        layers = LAYERS // self.stages
        found = outline(Source("benchmark.piper", self.script))
        return (
            MS
            * simulate(
                found.outline.orders(), UnitCosts({phase: layers * cost for phase, cost in UNIT.passes.items()})
            ).length
        )

    def mine(self, rank: int) -> list[int]:
        """The stages of a rank, for torch."""
        if self.stages == RANKS:
            return [rank]
        return [rank, LAYERS - 1 - rank] if self.placement == "vee" else [rank, rank + RANKS]


CASES = {
    case.name: case
    for case in (
        Case("gpipe", "loop", pipelining.ScheduleGPipe, RANKS),
        Case("one_f_one_b", "loop", pipelining.Schedule1F1B, RANKS),
        Case("interleaved", "loop", pipelining.ScheduleInterleaved1F1B),
        Case("interleaved_zero_bubble", "loop", pipelining.ScheduleInterleavedZeroBubble),
        Case("zbv", "vee", ScheduleZBVZeroBubble),
        Case("dualpipev", "vee", ScheduleDualPipeV),
    )
}


# ------------------------------------------------------------------------------------------------------------- torch


class Stage(nn.Module):
    """Some layers of the network, and in front of the first what comes before it."""

    def __init__(self, network: Network, stage: int) -> None:
        super().__init__()
        self.layers = network.layers[stage * network.per : (stage + 1) * network.per]
        self.scale = network.scale if stage == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.scale is None else x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def _rank(rank: int, names: Sequence[str], steps: int, folder: str) -> None:
    """One process of torch's pipelines: all schedules in turn."""
    logging.disable(logging.WARNING)  # a line per schedule built
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in names:
        times = torch.tensor(_steps(CASES[name], rank, steps))
        dist.all_reduce(times, dist.ReduceOp.MAX)  # a step ends when its last rank does
        if rank == 0:
            (Path(folder) / name).write_text(json.dumps([1e3 * one for one in times.tolist()]))
    dist.destroy_process_group()


def _steps(case: Case, rank: int, steps: int) -> list[float]:
    """How long each step took here, but for the first one, in which torch works out shapes."""
    network = make_model(LAYERS, case.stages, ms=MS)
    stages = [pipelining.PipelineStage(Stage(network, i), i, case.stages, torch.device("cpu")) for i in case.mine(rank)]
    schedule = case.torch_class(stages[0] if case.stages == RANKS else stages, MICRO, loss_fn=mse_loss)
    update = optimizer([parameter for stage in stages for parameter in stage.submod.parameters()])
    x, target = batch(MICRO)
    given = {"target": target} if case.stages - 1 in case.mine(rank) else {}
    taken = []
    for _ in range(steps + 1):
        update.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        schedule.step(*([x] if rank == 0 else []), **given)
        update.step()
        taken.append(time.perf_counter() - started)
    return taken[1:]


def torch_times(names: Sequence[str], steps: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (names, steps, folder), RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
        return {name: json.loads((Path(folder) / name).read_text()) for name in names}


# -------------------------------------------------------------------------------------------------------------- ours


def piper_times(names: Sequence[str], steps: int) -> dict[str, Timed]:
    cluster = Cluster(RANKS)
    try:
        return {
            name: timed(
                cluster, partial(make_model, LAYERS, CASES[name].stages, ms=MS), MICRO, CASES[name].script, steps
            )
            for name in names
        }
    finally:
        cluster.close()


def measure(names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    ours, theirs = piper_times(names, steps), torch_times(names, steps)
    expected = plain_loss(make_model(LAYERS, LAYERS), MICRO)
    rows = []
    for name in names:
        assert abs(ours[name].loss - expected) <= 1e-5 * expected, (name, ours[name].loss, expected)
        ideal = CASES[name].ideal
        rows.append(
            {
                "schedule": name,
                "pp": RANKS,
                "mb": MICRO,
                "ideal_ms": ideal,
                "piper_ms": round(ours[name].ms, 1),
                "torch_ms": round(min(theirs[name]), 1),
                "piper_over_ideal": round(ours[name].ms / ideal, 4),
                "torch_over_ideal": round(min(theirs[name]) / ideal, 4),
                "piper_median_ms": round(ours[name].median_ms, 1),
                "torch_median_ms": round(median(theirs[name]), 1),
            }
        )
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=CASES, action="append", help="may be given several times")
    parser.add_argument("--timeline", metavar="DIR", help="where workers write when they did what, of their last step")
    chosen = parser.parse_args()
    if chosen.timeline:
        Path(chosen.timeline).mkdir(parents=True, exist_ok=True)
        os.environ[TIMELINE] = str(Path(chosen.timeline).resolve())
    show(measure(chosen.only or list(CASES), chosen.steps), chosen.json)


if __name__ == "__main__":
    main()
