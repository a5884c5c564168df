"""Peak memory of workers that set up and train a model of 1 GB of weights under ZeRO-3, as a multiple of a worker's own
share of the weights: built by every worker, created once per node, and read from safetensors.

Resident memory without what is freed lazily, sampled: torch's allocator on aarch64 (mimalloc) frees what another thread
has allocated with MADV_FREE, so the system takes such pages when it needs some, and counts them until then.

python -m benchmarks.setup_memory [--workers 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from piperlang.capture.program import CutProgram, capture
from piperlang.capture.user.weight_files import FromFiles, StoredWeights
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.runtime.driver import initial
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import compiled

WIDTH, LAYERS, SAMPLES = 2048, 64, 8
SCRIPT = "from std.data import zero3\nmesh gpu = dp: {0}\nplace [pass=*] on gpu\nzero3(gpu.dp)\n"


class Layers(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from piperlang import annotate

        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = x + torch.tanh(layer(x))
        return x


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def batch(width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, width), torch.randn(SAMPLES, width)


def memory(pid: int) -> int:
    """Resident bytes that are in use."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return (sizes["Rss"] - sizes["LazyFree"]) * 1024


class Peaks:
    """The most memory of some processes, in a block."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids, self.most, self.ended = pids, [0] * len(pids), threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self.ended.wait(0.01):
            self.most = [max(most, memory(pid)) for most, pid in zip(self.most, self.pids, strict=True)]

    def __enter__(self) -> Peaks:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


EVERY, ONCE, FILES = "by every worker", "once per node", "from safetensors"


@contextmanager
def built_by_every_worker(every: bool) -> Iterator[None]:
    large = initial.LARGE
    initial.LARGE = 2**62 if every else large
    try:
        yield
    finally:
        initial.LARGE = large


def _job(
    model: Callable[[], nn.Module], width: int, workers: int, weights: StoredWeights | None = None
) -> tuple[Plan, CutProgram, Training]:
    make = model if weights is None else FromFiles(model, weights)
    graph, captured = compiled(capture(make, loss, batch(width)), SCRIPT.format(workers))
    return lower(graph), captured, Training(make, optimizer, weights=weights)


def measure(workers: int, kind: str, folder: Path) -> dict[str, Any]:
    stored = None
    if kind == FILES:
        save_file(Layers().state_dict(), folder / "model.safetensors")
        stored = StoredWeights(folder)
    made = _job(Layers, WIDTH, workers, stored)
    cluster = Cluster(workers)
    try:
        pids = [pid for pid in cluster.pids if pid is not None]
        with Job(*_job(lambda: Layers(8, 2), 8, workers), cluster=cluster) as job:  # imports what every worker needs
            job.step(batch(8))
        base = [memory(pid) for pid in pids]
        started = time.perf_counter()
        with Peaks(pids) as at_setup, built_by_every_worker(kind == EVERY):
            job = Job(*made, cluster=cluster)
        seconds = time.perf_counter() - started
        with job, Peaks(pids) as trained:
            for _ in range(2):
                job.step(batch())
    finally:
        cluster.close()
    share = made[1].weight_bytes / workers
    return {
        "initial weights": kind,
        "share_mb": round(share / 1e6),
        "baseline_mb": round(max(base) / 1e6),
        "setup_s": round(seconds, 1),
        "setup": round(max((a - b) / share for a, b in zip(at_setup.most, base, strict=True)), 2),
        "training": round(max((a - b) / share for a, b in zip(trained.most, base, strict=True)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(options.workers, kind, Path(folder)) for kind in (EVERY, ONCE, FILES)]
    print(json.dumps({"rows": rows}) if options.json else "\n".join(map(str, rows)))


if __name__ == "__main__":
    main()
