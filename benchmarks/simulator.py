"""How near a simulated step comes to a real one.

Three kinds of cases, all in one run. `sleep`: the network that sleeps, under every schedule of the library at pp=2 and
pp=4; the simulator is told what the naps take and the description of CPU workers, and nothing was measured before.
`gpt`: a GPT on CPU workers; passes and transfers are measured under one schedule (`piperc profile`), and schedules that
were never run before are predicted from that. `--gpu`: the same on NCCL, with one rank and with four, which share the
GPU.

A measured step begins on the workers and ends with the last thing that any of them does, and is not recorded. Other
work on a machine only makes steps longer: of naps the shortest counts, and of the GPT, where no two steps are the same,
the shorter half of pairs with a recorded step that is for the profile, in several rounds in which the schedules take
turns. On GPUs, steps in a row take less: a host goes on when its own device has nothing more to say, and the next step
begins while others still update their weights. What one of them takes by the clock, driver and Ray included, is another
column.

    python -m benchmarks.simulator [--json] [--steps 5] [--rounds 10] [--only sleep|gpt] [--gpu] [--keep FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from benchmarks.shared_gpu import at_once
from benchmarks.sleeping import Asleep, batch, compiled, make_model, optimizer, options, show
from piperlang.capture.annotate import annotate
from piperlang.capture.program import CutProgram, capture
from piperlang.diagnostics import PiperError
from piperlang.ir.graph import Graph
from piperlang.pipeline import schedule
from piperlang.plan.instructions import Compute, Instruction
from piperlang.plan.lower import lower
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.runtime.comm.registry import for_workers
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.profiling import MeasuredPair, measured, profiled
from piperlang.runtime.driver.training import Training
from piperlang.simulate.costs import InstructionCost, MachineCosts
from piperlang.simulate.execute import execute
from piperlang.simulate.machine_files import load
from piperlang.simulate.measured import MeasuredCosts
from piperlang.simulate.profile import Profile
from piperlang.simulate.result import simulated
from piperlang.source import Source
from piperlang.view.page import page

MS = 60.0
TIMEOUT = 300.0
"""Seconds that a rank waits for the others: in the first step one may compile for a minute longer than another."""
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
        yield row(f"sleep, {name}, pp={ranks}", predicted, min(taken))


# -------------------------------------------------------------------------------------------------------------- a GPT


@dataclass(frozen=True)
class Size:
    stages: int = 4
    layers: int = 1
    """Of a stage."""
    width: int = 256
    length: int = 128
    words: int = 512
    samples: int = 8
    dtype: torch.dtype = torch.float32


class GptLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.width // 64
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.first(x)).view(samples, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(f.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class SimulatedGpt(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(size.words, size.width), nn.Linear(size.width, size.words)
        self.stages = nn.ModuleList(
            nn.Sequential(*(GptLayer(size) for _ in range(size.layers))) for _ in range(size.stages)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, layers in enumerate(self.stages):
            with annotate("stage", i):
                x = layers(x)
        with annotate("stage", len(self.stages) - 1):
            return self.head(x)  # type: ignore[no-any-return]


def make_gpt(size: Size) -> SimulatedGpt:
    return SimulatedGpt(size).to(size.dtype)


def words_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def letters(size: Size, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(size.words, (size.samples, size.length + 1), generator=generator).to(device)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def scheduled_gpt(size: Size, name: str, script: str, device: str) -> tuple[Graph, CutProgram, Plan]:
    found = schedule(capture(partial(make_gpt, size), words_loss, next(letters(size, device))), Source(name, script))
    if found.problems:
        raise PiperError(*found.problems)
    graph, captured = found.graph(), found.captured
    assert isinstance(captured, CutProgram)
    return graph, captured, lower(graph)


STAGED = """from std.pipeline import {name}, loop
mesh gpu = pp: {ranks}
split batch into {micro} as mb
loop(gpu, {ranks}, {chunks})
{name}(gpu, {ranks}, {micro})
"""
ALONE = "mesh gpu = pp: 1\nplace [stage=*] on gpu\nsplit batch into {micro} as mb\n"


class Measured:
    """One schedule, in all rounds."""

    def __init__(self, size: Size, name: str, script: str, device: str) -> None:
        self.size = size
        self.graph, self.captured, self.plan = scheduled_gpt(size, name, script, device)
        self.pairs: list[MeasuredPair] = []
        self.in_a_row = 0.0
        """Seconds of a step by the clock, in the last round."""

    def run(self, cluster: Cluster, steps: int, last: bool) -> None:
        training = Training(partial(make_gpt, self.size), adam)
        with Job(self.plan, self.captured, training, timeout=TIMEOUT, cluster=cluster) as job:
            batches = letters(self.size, "cpu")
            self.pairs += measured(job, batches, steps)
            if not last:
                return
            row_of_steps = list(islice(batches, steps))
            job.step(next(batches))
            started = perf_counter()
            for batch in row_of_steps:
                job.step(batch)
            self.in_a_row = (perf_counter() - started) / steps
            self.result = profiled(job, self.graph, self.pairs)


def predicted_and_measured(
    cluster: Cluster, size: Size, scripts: dict[str, str], steps: int, rounds: int, device: str, keep: Path | None
) -> Iterator[dict[str, Any]]:
    """All schedules from the profile of the first one; those with other passes from their own. They take turns, so that
    all of them have the same machine. `keep`: a folder for profiles, and for pages with the recorded step before the
    simulated one."""
    found = {name: Measured(size, name, text, device) for name, text in scripts.items()}
    for number in range(rounds):
        for one in found.values():
            one.run(cluster, steps, number == rounds - 1)
    first: Profile | None = None
    machine = load("h200" if device == "cuda" else "cpu")
    for name, one in found.items():
        graph, plan, result = one.graph, one.plan, one.result
        costs = MeasuredCosts(plan, graph, first or result.found, machine)
        predicted = simulated(plan, graph, costs)
        source = "itself" if first is None else "another schedule"
        if costs.unknown:
            costs, source = MeasuredCosts(plan, graph, result.found, machine), "itself"
            predicted = simulated(plan, graph, costs)
        first = first or result.found
        if keep is not None:
            file = keep / name.replace(", ", "-").replace(" ", "-")
            file.with_suffix(".json").write_text(result.found.dump(), encoding="utf-8")
            file.with_suffix(".html").write_text(page([result.typical], predicted.timeline), encoding="utf-8")
        yield {
            **row(f"{name}, profile of {source}", predicted.seconds, result.seconds),
            "in_a_row_ms": round(1e3 * one.in_a_row, 3),
            "recording": round(result.recording / result.seconds - 1, 4),
        }


def gpt(
    ranks: int, size: Size, steps: int, rounds: int, device: str, keep: Path | None = None
) -> Iterator[dict[str, Any]]:
    """One device: passes of a pipeline's stages one after the other. Several: pipelines."""
    about = f"gpt on {device}, {ranks} rank{'s' if ranks > 1 else ''}"
    if ranks == 1:
        scripts = {f"{about}, {micro} microbatches": ALONE.format(micro=micro) for micro in (4, 2)}
    else:
        scripts = (
            {
                f"{about}, {name}": STAGED.format(name=name, ranks=ranks, micro=4, chunks=size.stages // ranks)
                for name in ("one_f_one_b", "gpipe")
            }
            if size.stages == ranks
            else {
                f"{about}, {name}": STAGED.format(name=name, ranks=ranks, micro=4, chunks=2)
                for name in ("interleaved", "looped_bfs", "interleaved_zero_bubble")
            }
        )
    with at_once(ranks if device == "cuda" else 1):
        cluster = Cluster(ranks, backend=for_workers() if device == "cuda" else None)
        try:
            yield from predicted_and_measured(cluster, size, scripts, steps, rounds, device, keep)
        finally:
            cluster.close()


def row(case: str, predicted: float, measured: float) -> dict[str, Any]:
    found = {
        "case": case,
        "predicted_ms": round(1e3 * predicted, 3),
        "measured_ms": round(1e3 * measured, 3),
        "error": round(predicted / measured - 1, 4),
    }
    print(*found.values(), file=sys.stderr, flush=True)  # a run takes minutes
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("sleep", "gpt"))
    parser.add_argument("--gpu", action="store_true", help="on NCCL")
    parser.add_argument("--rounds", type=int, default=10, help="of a GPT on CPU workers (default: 10)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="of --gpu (default: 1 4)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for profiles and pages of a GPT")
    chosen = parser.parse_args()
    if chosen.keep is not None:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if chosen.only in (None, "sleep") and not chosen.gpu:
        for ranks in (2, 4):
            cluster = Cluster(ranks)
            try:
                rows += sleeping(cluster, ranks, chosen.steps)
            finally:
                cluster.close()
    if chosen.only in (None, "gpt") and not chosen.gpu:
        for size in (Size(), Size(stages=2)):
            rows += gpt(2, size, 2 * chosen.steps, chosen.rounds, "cpu", chosen.keep)
    if chosen.gpu:
        large = Size(layers=2, width=4096, length=1024, words=8192, samples=8, dtype=torch.bfloat16)
        for ranks in sorted(chosen.ranks):  # those that share the GPU last: NVIDIA's MPS keeps it
            rows += gpt(ranks, large, 4 * chosen.steps, 1, "cuda", chosen.keep)
    show(rows, chosen.json)


if __name__ == "__main__":
    main()
