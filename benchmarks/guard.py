"""What the guard of every job costs: a GPT of 10 M, 100 M and 1 B parameters, compared with eager PyTorch before the
first step.

    python -m benchmarks.guard [--json] [--sizes 10M 100M 1B] [--device cpu|cuda]
    python -m benchmarks.guard --examples [TEXT]

`--examples`: real jobs of the examples, on Ray workers, one step each. Start-up is from the start of `piperc` to the
end of the first step, and the guard's share of it.

Each size runs in a process of its own. `compile` is what a job does before it starts workers, whoever verifies it:
trace, schedule, plan and check, differentiate the chunks of the plan. `verify` is the guard alone. Memory is the growth
of the process (CPU) or of torch's allocator (CUDA) while it verifies."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate

SIZES = {"10M": (4, 384, 8_000), "100M": (12, 768, 16_000), "1B": (16, 2048, 32_000)}
"""Layers, width, words."""
LENGTH, BATCH, STAGES, MICROBATCHES = 128, 8, 4, 4

SCRIPT = f"""
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: {STAGES}
loop(gpu, {STAGES})
split batch into {MICROBATCHES} as mb
one_f_one_b(gpu, {STAGES}, {MICROBATCHES})
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        q, k, v = (
            t.view(samples, length, width // 64, 64).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(f.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            with annotate("stage", i * STAGES // len(self.blocks)):
                x = block(x)
        with annotate("stage", STAGES - 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def resident() -> int:
    """The most memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(size: str, device: str) -> dict[str, Any]:
    from piperlang.capture.program import CutProgram, capture
    from piperlang.pipeline import schedule
    from piperlang.plan.lower import lower
    from piperlang.plan.verify import check
    from piperlang.runtime.driver.training import Training
    from piperlang.runtime.guard.program import verify
    from piperlang.source import Source

    layers, width, words = SIZES[size]

    def model() -> nn.Module:
        return Gpt(layers, width, words)

    batch = (torch.randint(words, (BATCH, LENGTH), device=device), torch.randint(words, (BATCH, LENGTH), device=device))
    started = time.perf_counter()
    found = schedule(capture(model, loss, batch), Source("guard.piper", SCRIPT))
    assert not found.problems, found.problems
    captured = found.captured
    assert isinstance(captured, CutProgram)
    plan = lower(found.graph())
    check(plan)
    for program in plan.programs:
        captured.pass_graphs(program.chunk, program.samples, program.sharding)
    compiled = time.perf_counter() - started
    parameters = sum(torch.Size(w.shape).numel() for w in captured.model.weights.values())
    before = resident()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    verified = verify(captured, plan, batch, Training(model, adamw))
    after = torch.cuda.max_memory_allocated() if device == "cuda" else resident()
    return {
        "size": size,
        "parameters": parameters,
        "device": device,
        "compile_seconds": round(compiled, 2),
        "verify_seconds": round(verified.seconds, 2),
        "verify_bytes": after - before,
        "difference": verified.difference,
        "skipped": verified.skipped,
    }


def examples(wanted: str) -> None:
    """The guard's share of the start-up of every example whose name has `wanted`."""
    for script in sorted(Path("examples").glob("0[1-8]*/*.piper")):
        if wanted not in str(script):
            continue
        with tempfile.TemporaryDirectory() as out:
            command = [
                sys.executable,
                "-m",
                "piperlang",
                str(script.with_name("model.py")),
                str(script),
                "--steps",
                "1",
                "--out",
                out,
            ]
            started = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
                assert job.stdout is not None
                for line in job.stdout:
                    if line.startswith("step "):
                        startup = time.perf_counter() - started
            assert job.returncode == 0, script
            seconds = json.loads((Path(out) / "verified.json").read_text())["seconds"]
        print(
            f"{script.parent.name + '/' + script.stem:32}  start-up {startup:5.1f} s  verify {seconds:5.2f} s "
            f" {seconds / startup:6.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--examples",
        nargs="?",
        const="/",
        metavar="TEXT",
        help="the share of start-up for the examples, or those whose path has TEXT",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.examples:
        examples(options.examples)
        return
    if options.one:
        print(json.dumps(measure(options.one, options.device)))
        return
    rows = []
    for size in options.sizes:
        command = [sys.executable, "-m", "benchmarks.guard", "--one", size, "--device", options.device]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(row)
        if not options.json:
            outcome = row["skipped"] or f"{row['difference']:.0e}"
            print(
                f"{row['parameters'] / 1e6:8.1f} M on {row['device']:4}  compile {row['compile_seconds']:6.1f} s "
                f" verify {row['verify_seconds']:6.1f} s, {row['verify_bytes'] / 2**30:5.2f} GiB  {outcome}",
                flush=True,
            )
    if options.json:
        print(
            json.dumps(
                {
                    "rows": rows,
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                }
            )
        )


if __name__ == "__main__":
    main()
