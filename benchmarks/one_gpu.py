"""One GPU: models of about a billion parameters or less in bfloat16, trained through a plan, against plain PyTorch on
the same model, data and fused AdamW: eager, torch.compile, and torch.compile with the whole step as one CUDA graph.

    python -m benchmarks.one_gpu [--model gpt|llama|moe|gpt2 ...] [--way eager|compile|graph|piper|beside ...]
        [--steps 14] [--together] [--json]

`piper` is the default of CUDA workers; `beside` has updates on a stream of their own, beside the backward, `kept` keeps
all activations, `issued` is without CUDA graphs. Each way runs in a process of its own; the median of the last half of
the steps counts, and the peak of allocated memory. `--together`: all processes start at once, which saves most of the
time, and take turns for the steps that count, which begin when all of them have compiled (their memory must fit beside
each other).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.one_gpu_models import MODELS, Model, loss

WAYS = ("eager", "compile", "graph", "piper", "beside", "kept", "issued")
MORE = {"beside": 'stream [update] on "update"\n', "kept": "recompute [pass=*] with policy=none\n"}
"""Of a script, besides where passes are."""
SCRIPT = "mesh gpu = d: 1\nplace [pass=*] on gpu\n"


@dataclass(frozen=True)
class Steps:
    """How many there are, and the lock of processes that share the GPU: shared while one warms up, and exclusive while
    it takes the steps that count. A lock belongs to an opened file, which a process inherits with its lock: so none
    takes its turn before all have started and warmed up."""

    count: int
    lock: int | None = None

    @property
    def counted(self) -> int:
        """The first one that counts."""
        return self.count // 2

    def __iter__(self) -> Iterator[int]:
        for step in range(self.count):
            if step == self.counted and self.lock is not None:
                fcntl.flock(self.lock, fcntl.LOCK_EX)
            yield step
        if self.lock is not None:
            fcntl.flock(self.lock, fcntl.LOCK_UN)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=torch.cuda.is_available())


def plain(chosen: Model, steps: Steps, compiles: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = chosen().cuda()
    run: Any = torch.compile(model) if compiles else model
    opt = optimizer(model.parameters())
    times, losses = [], []
    for step in steps:
        ids, target = chosen.inputs(step, "cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        value = loss(run(ids), target)
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        losses.append(float(value.detach()))
        times.append(time.perf_counter() - started)
    return {"times": times, "losses": losses, "memory": torch.cuda.max_memory_allocated()}


def graph(chosen: Model, steps: Steps) -> dict[str, Any]:
    """What one writes by hand to have all of a compiled step in one graph."""
    torch.manual_seed(0)
    model = chosen().cuda()
    run: Any = torch.compile(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    ids, target = chosen.inputs(0, "cuda")

    def step() -> torch.Tensor:
        opt.zero_grad(set_to_none=True)
        value = loss(run(ids), target)
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        return value.detach()

    times, losses = [], []
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    captured: Any = torch.cuda.CUDAGraph()
    result = torch.zeros(())
    for number in steps:
        new = chosen.inputs(number, "cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        ids.copy_(new[0])
        target.copy_(new[1])
        if number < 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if number == 3:
                opt.zero_grad(set_to_none=True)
                with torch.cuda.graph(captured):
                    result = step()
            captured.replay()
        losses.append(float(result))
        times.append(time.perf_counter() - started)
    return {"times": times, "losses": losses, "memory": torch.cuda.max_memory_allocated()}


def piper(chosen: Model, steps: Steps, script: str, graphs: bool | None = None) -> dict[str, Any]:
    from piperlang.capture.program import capture
    from piperlang.pipeline import schedule
    from piperlang.plan.lower import lower
    from piperlang.runtime.comm.registry import for_workers
    from piperlang.runtime.driver.cluster import Cluster
    from piperlang.runtime.driver.job import Job
    from piperlang.runtime.driver.training import Training
    from piperlang.source import Source

    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()

    def said(what: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s {what}", file=sys.stderr, flush=True)

    program = capture(chosen, loss, chosen.inputs(0, device))
    found = schedule(program, Source("one.piper", script))
    assert not found.problems, found.problems
    made = found.graph()
    captured: Any = found.captured
    times, losses, memory, host = [], [], 0, 0.0
    said("captured and scheduled")
    cluster = Cluster(1, backend=for_workers())
    said("Ray is there")
    with (
        closing(cluster),
        Job(
            lower(made),
            captured,
            Training(chosen, optimizer),
            loss_dtype=made.model.tensors[made.model.loss].dtype,
            cluster=cluster,
            graphs=graphs,
        ) as job,
    ):
        said("the worker is ready")
        for step in steps:
            done = job.step(chosen.inputs(step, "cpu"))
            if step < 4:
                said(f"step {step + 1}")
            times.append(done.seconds)
            losses.append(done.loss)
            memory, host = done.memory, done.issued or 0.0
        notes = sorted(job.not_captured)
    return {"times": times, "losses": losses, "memory": memory, "host_ms": round(1e3 * host, 3), "not captured": notes}


def run(way: str, chosen: Model, steps: Steps) -> dict[str, Any]:
    match way:
        case "eager" | "compile":
            return plain(chosen, steps, way == "compile")
        case "graph":
            return graph(chosen, steps)
        case _:
            return piper(chosen, steps, SCRIPT + MORE.get(way, ""), False if way == "issued" else None)


def row(model: str, way: str, found: dict[str, Any]) -> dict[str, Any]:
    times = found["times"]
    middle = statistics.median(times[len(times) // 2 :])
    chosen = MODELS[model]
    others = {key: value for key, value in found.items() if key not in ("times", "losses", "memory") and value}
    return {
        "model": model,
        "way": way,
        "ms": round(1e3 * middle, 2),
        "tokens_per_second": round(chosen.batch * chosen.length / middle),
        "peak_bytes": found["memory"],
        "losses": [round(x, 5) for x in found["losses"]],
        "first_step": round(times[0], 1),
        **others,
    }


@dataclass(frozen=True)
class Started:
    model: str
    way: str
    process: subprocess.Popen[str]
    at: float

    @classmethod
    def new(cls, model: str, way: str, steps: int, lock: str | None) -> Started:
        """`lock`: the file that processes which run together lock."""
        command = [sys.executable, "-m", "benchmarks.one_gpu", "--here", "--model", model, "--way", way]
        command += ["--steps", str(steps)]
        began = time.perf_counter()
        if lock is None:
            return cls(model, way, subprocess.Popen(command, stdout=subprocess.PIPE, text=True), began)
        opened = os.open(lock, os.O_RDWR)
        fcntl.flock(opened, fcntl.LOCK_SH)
        command += ["--lock", str(opened)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[opened])
        os.close(opened)
        return cls(model, way, process, began)

    def result(self) -> dict[str, Any] | None:
        said, _ = self.process.communicate()
        if self.process.returncode:
            print(self.model, self.way, "failed", file=sys.stderr, flush=True)
            return None
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found


def said(it: dict[str, Any], seconds: float) -> str:
    return (
        f"{it['model']:6} {it['way']:8} {it['ms']:9.2f} ms  {it['tokens_per_second']:9,} tokens/s "
        f" {it['peak_bytes'] / 2**30:6.2f} GiB  losses {it['losses'][:2]} ... {it['losses'][-1]}"
        f"  (first step {it['first_step']} s, {seconds:.0f} s)"
        f" {it.get('host_ms', '')} {it.get('not captured', '')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--together", action="store_true", help="all at once, but for the steps that count")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        (model,), (way,) = options.model, options.way
        if options.lock is not None:
            os.set_inheritable(options.lock, False)
        print(json.dumps(row(model, way, run(way, MODELS[model], Steps(options.steps, options.lock)))))
        return
    chosen = [(model, way) for model in options.model for way in options.way]
    rows = []
    with tempfile.NamedTemporaryFile(prefix="one-gpu-") as file:
        lock = file.name if options.together else None
        coming = [Started.new(*one, options.steps, lock) for one in (chosen if options.together else ())]
        for i, one in enumerate(chosen):
            started = coming[i] if options.together else Started.new(*one, options.steps, lock)
            found = started.result()
            if found is not None:
                rows.append(found)
                told = sys.stderr if options.json else sys.stdout
                print(said(found, time.perf_counter() - started.at), file=told, flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
