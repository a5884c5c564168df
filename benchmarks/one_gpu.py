"""One GPU: a GPT of about 1 B parameters in bf16, trained through a plan, against eager and torch.compile on the same
model, data and optimizer.

    python -m benchmarks.one_gpu [--json] [--layers 16] [--steps 12]

Each way runs in a process of its own; the median of the last steps counts, and the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate

WIDTH, HEADS, LENGTH, WORDS, BATCH = 2048, 16, 2048, 32_000, 8
LAYERS = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(f.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for i, block in enumerate(self.blocks):
            with annotate("stage", i + 1):
                x = block(x)
        with annotate("stage", len(self.blocks) + 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]


class Make:
    """The model of the benchmark, made the same by everybody."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def __call__(self) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Gpt(self.layers)
        finally:
            torch.set_default_dtype(before)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=torch.cuda.is_available())


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    ids = torch.randint(WORDS, (BATCH, LENGTH + 1))
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def plain(layers: int, steps: int, compiles: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Make(layers)().to(device)
    run: Any = torch.compile(model) if compiles else model
    opt = optimizer(model.parameters())
    times, losses = [], []
    for step in range(steps):
        ids, target = batch(step, device)
        torch.cuda.synchronize() if device == "cuda" else None
        started = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        value = loss(run(ids), target)
        value.backward()  # type: ignore[no-untyped-call]
        opt.step()
        losses.append(float(value.detach()))
        times.append(time.perf_counter() - started)
    return _row(
        "compile" if compiles else "eager", times, losses, torch.cuda.max_memory_allocated() if device == "cuda" else 0
    )


def piper(layers: int, steps: int) -> dict[str, Any]:
    from piperlang.capture.program import capture
    from piperlang.pipeline import schedule
    from piperlang.plan.lower import lower
    from piperlang.runtime.driver.job import Job
    from piperlang.runtime.driver.training import Training
    from piperlang.source import Source

    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = capture(Make(layers), loss, batch(0, device))
    found = schedule(program, Source("one.piper", "mesh gpu = d: 1\nplace [pass=*] on gpu\n"))
    assert not found.problems, found.problems
    graph = found.graph()
    captured: Any = found.captured
    times, losses, memory = [], [], 0
    with Job(
        lower(graph),
        captured,
        Training(Make(layers), optimizer),
        loss_dtype=graph.model.tensors[graph.model.loss].dtype,
    ) as job:
        for step in range(steps):
            done = job.step(batch(step, "cpu"))
            times.append(done.seconds)
            losses.append(done.loss)
            memory = done.memory
    return _row("piper", times, losses, memory)


def _row(way: str, times: list[float], losses: list[float], memory: int) -> dict[str, Any]:
    middle = statistics.median(times[len(times) // 3 :])
    return {
        "way": way,
        "ms": round(1e3 * middle, 2),
        "tokens_per_second": round(BATCH * LENGTH / middle),
        "peak_bytes": memory,
        "losses": [round(x, 5) for x in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--way", choices=("eager", "compile", "piper"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        row = (
            piper(options.layers, options.steps)
            if options.way == "piper"
            else plain(options.layers, options.steps, options.way == "compile")
        )
        print(json.dumps(row))
        return
    rows = []
    for way in ("eager", "compile", "piper"):
        command = [
            sys.executable,
            "-m",
            "benchmarks.one_gpu",
            "--way",
            way,
            "--layers",
            str(options.layers),
            "--steps",
            str(options.steps),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        if not options.json:
            row = rows[-1]
            print(
                f"{row['way']:8} {row['ms']:9.1f} ms  {row['tokens_per_second']:9,} tokens/s "
                f" {row['peak_bytes'] / 2**30:6.2f} GiB  losses {row['losses'][:2]} ... {row['losses'][-1]}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
