"""One GPU: models of about a billion parameters or less in bfloat16, trained through a plan, against plain PyTorch on
the same model, data and fused AdamW: eager, torch.compile, and torch.compile with the whole step as one CUDA graph.

    python -m benchmarks.one_gpu [--model gpt|llama|moe|gpt2 ...] [--way eager|compile|graph|piper|kept|issued ...]
        [--steps 14] [--json]

`piper` is the default of CUDA workers; `kept` keeps all activations, `issued` is without CUDA graphs. Each way runs in
a process of its own; the median of the last steps counts, and the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import torch

from benchmarks.one_gpu_models import MODELS, Model, loss

WAYS = ("eager", "compile", "graph", "piper", "kept", "issued")
SCRIPT = "mesh gpu = d: 1\nplace [pass=*] on gpu\n"


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=torch.cuda.is_available())


def plain(chosen: Model, steps: int, compiles: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = chosen().cuda()
    run: Any = torch.compile(model) if compiles else model
    opt = optimizer(model.parameters())
    times, losses = [], []
    for step in range(steps):
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


def graph(chosen: Model, steps: int) -> dict[str, Any]:
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
    for number in range(steps):
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


def piper(chosen: Model, steps: int, script: str, graphs: bool | None = None) -> dict[str, Any]:
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
        for step in range(steps):
            done = job.step(chosen.inputs(step, "cpu"))
            if step < 4:
                said(f"step {step + 1}")
            times.append(done.seconds)
            losses.append(done.loss)
            memory, host = done.memory, done.issued or 0.0
        notes = sorted(job.not_captured)
    return {"times": times, "losses": losses, "memory": memory, "host_ms": round(1e3 * host, 3), "not captured": notes}


def run(way: str, chosen: Model, steps: int) -> dict[str, Any]:
    match way:
        case "eager" | "compile":
            return plain(chosen, steps, way == "compile")
        case "graph":
            return graph(chosen, steps)
        case _:
            kept = "recompute [pass=*] with policy=none\n" if way == "kept" else ""
            return piper(chosen, steps, SCRIPT + kept, False if way == "issued" else None)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        (model,), (way,) = options.model, options.way
        print(json.dumps(row(model, way, run(way, MODELS[model], options.steps))))
        return
    rows = []
    for model in options.model:
        for way in options.way:
            about = ["--here", "--model", model, "--way", way, "--steps", str(options.steps)]
            command = [sys.executable, "-m", "benchmarks.one_gpu", *about]
            started = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(model, way, "failed", file=sys.stderr, flush=True)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            if not options.json:
                it = rows[-1]
                print(
                    f"{model:6} {way:8} {it['ms']:9.2f} ms  {it['tokens_per_second']:9,} tokens/s "
                    f" {it['peak_bytes'] / 2**30:6.2f} GiB  losses {it['losses'][:2]} ... {it['losses'][-1]}"
                    f"  (first step {it['first_step']} s, {time.perf_counter() - started:.0f} s)"
                    f" {it.get('host_ms', '')} {it.get('not captured', '')}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
