"""What a background checkpoint and the check of `--on-nan` cost a step.

    python -m benchmarks.saving [--cpu] [--layers 8] [--steps 12] [--folder DIR]

A GPT of one_gpu.py in bf16 with AdamW, on one GPU. Jobs with and without the check alternate; the median of their steps
counts. A checkpoint is saved after every sixth step: how long the step loop waits for it, how long it takes to be on
the disk, and how fast steps are meanwhile. `--cpu`: of a small GPT on two CPU workers, without the check.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_gpu import optimizer
from benchmarks.one_gpu_models import MODELS, Gpt, Model, loss
from benchmarks.simulator import STAGED, Size, adam, letters, make_gpt, scheduled_gpt
from piperlang.capture.program import capture
from piperlang.pipeline import planned, schedule
from piperlang.runtime.checkpoint.manifest import DataPosition
from piperlang.runtime.checkpoint.store import store_of
from piperlang.runtime.driver.checkpoints import Checkpoints
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.source import Source

EVERY = 6
SMALL = Size(stages=2, layers=3, width=512, samples=16)
"""On CPU workers: 20 million weights, a checkpoint of 240 MB."""


def job(layers: int, skips: bool) -> Job:
    make = Model(partial(Gpt, layers=layers), MODELS["gpt"].batch, MODELS["gpt"].length)
    program = capture(make, loss, make.inputs(0, "cuda"))
    found = schedule(program, Source("one.piper", "mesh gpu = d: 1\nplace [pass=*] on gpu\n"))
    assert not found.problems, found.problems
    graph, captured = found.graph(), found.captured
    dtype = graph.model.tensors[graph.model.loss].dtype
    return Job(planned(graph, None, skips), captured, Training(make, optimizer), loss_dtype=dtype)  # type: ignore[arg-type]


def job_on_cpu() -> Job:
    text = STAGED.format(name="one_f_one_b", ranks=2, micro=4, chunks=1)
    _, captured, plan = scheduled_gpt(SMALL, "two.piper", text, "cpu")
    return Job(plan, captured, Training(partial(make_gpt, SMALL), adam), timeout=60)


def batches() -> Iterator[Any]:
    return (MODELS["gpt"].inputs(step, "cpu") for step in count())


def timed(running: Job, given: Iterator[Any], steps: int) -> list[float]:
    return [running.step(batch).seconds for batch in islice(given, steps)]


def check_costs(layers: int, steps: int) -> dict[str, Any]:
    times: dict[bool, list[float]] = {False: [], True: []}
    memory: dict[bool, int] = {}
    for skips in (False, True, False, True):
        with job(layers, skips) as running:
            timed(running, batches(), 3)
            times[skips] += timed(running, batches(), steps)
            memory[skips] = running.step(MODELS["gpt"].inputs(0, "cpu")).memory
    middle = {skips: statistics.median(found) for skips, found in times.items()}
    return {
        "--on-nan continue": f"{1000 * middle[False]:.1f} ms, {memory[False] / 2**30:.2f} GiB",
        "--on-nan stop": f"{1000 * middle[True]:.1f} ms, {memory[True] / 2**30:.2f} GiB",
        "ratio": f"{middle[True] / middle[False]:.3f}",
    }


def save_costs(running: Job, given: Iterator[Any], steps: int, folder: Path) -> dict[str, Any]:
    with running:
        timed(running, given, 3)
        plain = statistics.median(timed(running, given, steps))
        checkpoints = Checkpoints(running, store_of(folder), 0, {}, 2)
        during, stalled, seconds = [], [], []
        for step in range(3 * EVERY):
            if step % EVERY == 0:
                checkpoints.save(step, DataPosition(step, step), {})
            during += timed(running, given, 1)
            done = checkpoints.finished()
            if done is not None:
                stalled.append(done.stalled)
                seconds.append(done.seconds)
        done = checkpoints.wait()
        if done is not None:
            stalled.append(done.stalled)
            seconds.append(done.seconds)
        size = sum(path.stat().st_size for path in store_of(folder).names()[0].iterdir())
    stall = statistics.median(stalled)
    return {
        "step": f"{1000 * plain:.1f} ms; while a checkpoint is written {1000 * statistics.median(during):.1f} ms",
        "checkpoint": f"{size / 2**30:.2f} GiB, on the disk after {statistics.median(seconds):.1f} s",
        "stall": f"{1000 * stall:.0f} ms, {stall / plain:.2f} steps",
        "share of training": f"{100 * stall / (stall + 100 * plain):.2f}% with --save-every 100",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    parser.add_argument("--cpu", action="store_true", help="two CPU workers")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("this needs a GPU, or `--cpu`")
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if options.cpu:
            found = save_costs(job_on_cpu(), letters(SMALL, "cpu"), options.steps, folder)
        else:
            found = check_costs(options.layers, options.steps)
            found |= save_costs(job(options.layers, True), batches(), options.steps, folder)
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
