"""How long the graph of a very large model takes to build, and how much memory, from shapes alone.

A mixture of experts of 61 layers, attention and experts apart, as 32 stages on 16 pipeline ranks, 160 microbatches,
backward in two halves, on a mesh of 2,048 devices (pp=16, dp=2, ep=64). Twice the microbatches should cost about twice
as much.

    python -m benchmarks.graph_scale [--json] [--layers 61] [--microbatches 160]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

WIDTH, HEADS, LENGTH, EXPERTS, HIDDEN, WORDS = 7168, 56, 4096, 256, 2048, 129_280
RANKS, DATA, PER = 16, 2, 64

SCRIPT = """
from std.pipeline import interleaved_zero_bubble, loop
mesh gpu = pp: {ranks}, dp: {data}, ep: {per}
loop(gpu, {ranks}, 2)
split batch into {microbatches} as mb
replicate [pass=*] over gpu.dp with states=sharded
replicate [!expert] over gpu.ep with states=sharded
shard [expert=*] over gpu.ep with style=experts
stream [comm=p2p] on "pp"
stream [comm=all_to_all, pass=F] on "ep.forward"
stream [comm=all_to_all, pass={{B, I}}] on "ep.backward"
interleaved_zero_bubble(gpu, {ranks}, {microbatches}, chunks=2)
"""


def network(layers: int) -> Any:
    """The model of the benchmark: experts with a capacity per sequence, so that samples do not mix."""
    import torch
    import torch.nn.functional as f
    from torch import nn

    from piperlang import annotate

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
            self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            samples, length, _ = x.shape
            q, k, v = (t.view(samples, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
            attended = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))  # type: ignore[no-any-return]

        def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            h = self.second(x)
            gates = torch.softmax(self.gate(h), -1)
            weight, chosen = gates.max(-1)
            routed = f.one_hot(chosen, EXPERTS)
            slot = (routed.cumsum(1) - 1) * routed
            capacity = 2 * LENGTH // EXPERTS
            dispatch = (routed * (slot < capacity)).unsqueeze(-1) * f.one_hot(slot.clamp(max=capacity - 1), capacity)
            packed = torch.einsum("stec,std->secd", dispatch.to(h.dtype), h)
            return packed, dispatch, weight

        def experts(self, packed: torch.Tensor) -> torch.Tensor:
            return torch.einsum(
                "sech,ehd->secd", torch.relu(torch.einsum("secd,edh->sech", packed, self.up)), self.down
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.attend(x)
            packed, dispatch, weight = self.route(x)
            with annotate("expert", 0):
                done = self.experts(packed)
            return x + torch.einsum("stec,secd->std", dispatch.to(x.dtype) * weight[..., None, None], done)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with annotate("stage", 0):
                x = self.embed(ids)
            for i, layer in enumerate(self.layers):
                with annotate("stage", i * 2 * RANKS // layers):
                    x = layer(x)
            with annotate("stage", 2 * RANKS - 1):
                return self.head(x)  # type: ignore[no-any-return]

    return Network


def measure(layers: int, microbatches: int) -> dict[str, Any]:
    """Capture and build once, in this process."""
    import torch
    import torch.nn.functional as f

    from piperlang.capture.program import capture
    from piperlang.pipeline import schedule
    from piperlang.source import Source

    samples = microbatches * DATA * PER
    ids = torch.zeros((1, 1), dtype=torch.int64).expand(samples, LENGTH)
    started = time.perf_counter()
    program = capture(network(layers), lambda y, t: f.cross_entropy(y.flatten(0, 1), t.flatten()), (ids, ids))
    captured = program.cut(())
    capture_seconds = time.perf_counter() - started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    script = SCRIPT.format(ranks=RANKS, data=DATA, per=PER, microbatches=microbatches)
    scheduled = schedule(program, Source("scale.piper", script))
    assert not scheduled.problems, scheduled.problems
    graph = scheduled.graph()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "layers": layers,
        "chunks": len(captured.model.chunks),
        "microbatches": microbatches,
        "devices": RANKS * DATA * PER,
        "nodes": len(graph.nodes),
        "seconds": round(seconds, 2),
        "capture_seconds": round(capture_seconds, 1),
        "peak_bytes": peak,
        "capture_peak_bytes": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--microbatches", type=int, default=160)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.layers, options.microbatches)))
        return
    rows = []
    for count in (options.microbatches, 2 * options.microbatches):
        # Each size in a process of its own, so that peaks do not add up.
        command = [
            sys.executable,
            "-m",
            "benchmarks.graph_scale",
            "--alone",
            "--layers",
            str(options.layers),
            "--microbatches",
            str(count),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
        if not options.json:
            row = rows[-1]
            print(
                f"{row['microbatches']:4} microbatches: {row['nodes']:,} nodes in {row['seconds']} s, peak"
                f" {row['peak_bytes'] / 2**30:.2f} GiB (capture {row['capture_seconds']} s)"
            )
    growth = round(rows[1]["seconds"] / rows[0]["seconds"], 2)
    if options.json:
        print(json.dumps({**rows[0], "growth": growth, "twice": rows[1]}))
    else:
        print(f"growth {growth}")


if __name__ == "__main__":
    main()
