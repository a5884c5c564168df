"""What loading batches costs the driver and the workers.

`driver`: CPU time of the driver process per step, for batches of 1, 10 and 100 MB on 4 data-parallel workers, where the
driver loads batches and where workers do. The driver's own batches are made before the clock starts: only what it does
with them counts.

`loader`: a torch DataLoader of two processes in every worker, whose samples take a while to make, and the time that
workers wait for a batch after a step.

`slices`: samples that take longer than that, from a DataLoader in every worker, with whole batches loaded in every
worker, and with `--data slices`.

    python -m benchmarks.data_loading [--json] [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from piperlang.capture.annotate import annotate
from piperlang.capture.program import CutProgram, capture
from piperlang.capture.user.seeding import GeneratorStates, generator_states, seed_all
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.loading import Loading
from piperlang.runtime.driver.shapes import TRAIN
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import compiled

WORKERS, SAMPLES = 4, 64
SCRIPT = f"from std.data import ddp\nmesh gpu = dp: {WORKERS}\nplace [stage=*] on gpu\nddp(gpu.dp)\n"
MEGABYTES = (1, 10, 100)


class Net(nn.Module):
    """Computes little, whatever the size of the batch."""

    def __init__(self, width: int = 64, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = x[:, : self.layers[0].in_features]
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def data(megabytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same memory for every batch: making numbers is not what is measured."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(SAMPLES, megabytes * 2**18 // SAMPLES, generator=generator), torch.zeros(SAMPLES, 64)
    while True:
        yield x, target


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take time to load, as files do."""

    def __init__(self, seconds: float, width: int) -> None:
        self.seconds, self.width = seconds, width

    def __len__(self) -> int:
        return 100 * SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((self.width,), i / len(self)), torch.zeros(self.width)


def loader(seconds: float, width: int, processes: int, cut: Any = iter) -> Iterator[Any]:
    """`cut`: as for `data` of a model file."""
    found: Iterator[Any] = cut(DataLoader(Slow(seconds, width), SAMPLES, shuffle=True, num_workers=processes))
    return found


def _planned(model: Any, batch: Any) -> tuple[Any, CutProgram, Training]:
    graph, captured = compiled(capture(model, loss, batch), SCRIPT)
    return lower(graph), captured, Training(model, optimizer)


def of_driver(cluster: Cluster, megabytes: int, steps: int) -> dict[str, Any]:
    batches = data(megabytes)
    batch = next(batches)
    plan, captured, training = _planned(Net, batch)
    found: dict[str, Any] = {"megabytes": megabytes}
    with Job(plan, captured, training, cluster=cluster) as job:
        found["driver loads: CPU ms per step"] = _cpu(lambda: job.step(batch), steps)
        assert job.load(Loading(partial(data, megabytes), {TRAIN: captured.layout}, 0), batch, _seeded()) is None
        found["workers load: CPU ms per step"] = _cpu(lambda: job.finish(job.begin_loaded(True)), steps)
    return found


def _seeded() -> GeneratorStates:
    seed_all(0)
    return generator_states()


def _cpu(step: Any, steps: int) -> float:
    step()
    spent = []
    for _ in range(steps):
        started = time.process_time()
        step()
        spent.append(1e3 * (time.process_time() - started))
    return round(median(spent), 2)


def of_loader(cluster: Cluster, steps: int, seconds: float, processes: int, sliced: bool = False) -> dict[str, Any]:
    """`seconds`: for a sample; `processes`: of the DataLoader in every worker."""
    width, depth = 512, 8
    make = partial(loader, seconds, width, processes)
    _seeded()
    batch = next(make())
    after = generator_states()
    plan, captured, training = _planned(partial(Net, width, depth), batch)
    with Job(plan, captured, training, cluster=cluster) as job:
        other = job.load(Loading(make, {TRAIN: captured.layout}, 0, sliced=sliced), batch, after)
        assert other is None, other
        results = [job.finish(job.begin_loaded(True)) for _ in range(3 * steps)][1:]
    waited = [1e3 * (result.waited or 0.0) for result in results]
    return {
        "workers load": "slices" if sliced else "whole batches",
        "loading a batch, one process: ms": round(1e3 * seconds * SAMPLES, 1),
        "step: ms": round(1e3 * median(result.seconds for result in results), 1),
        "waited: median ms": round(median(waited), 2),
        "waited: most ms": round(max(waited), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cluster = Cluster(WORKERS)
    try:
        rows = [of_driver(cluster, megabytes, options.steps) for megabytes in MEGABYTES]
        rows.append(of_loader(cluster, options.steps, 0.0005, 2))
        rows += [of_loader(cluster, options.steps, 0.005, 0, sliced) for sliced in (False, True)]
    finally:
        cluster.close()
    print(json.dumps({"rows": rows}) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
