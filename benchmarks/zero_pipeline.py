"""Memory of ZeRO-3 in a pipeline: a script against torch's Schedule1F1B with FSDP2, PP=2 x DP=2, on a model whose
weights dominate.

Layers of an MLP with a residual, eight on each of two stages, every layer a chunk. `torch` is Schedule1F1B with
`fully_shard` of every layer and of the stage, and `reshard_after_forward=True`; `torch_layers` is the same without the
stage: then torch's pipeline does not know of FSDP, and every microbatch reduces its gradients. `piper` goes through a
stage layer by layer, each with all microbatches, so that these share a gather and a reduction, and recomputes what is
inside layers. `piper_1f1b` has torch's order, with reductions of every microbatch. Same weights, data, optimizer
(AdamW) and microbatches. Four processes compute on one GPU at once (shared_gpu.py); the peak is that of the rank that
has most, over all steps but the first, as torch's allocator has it; a step is the median of the last half of them.

Rows: agreement with plain training of a narrow model; the peak at one sample a microbatch and rank; the largest batch
whose measured peak stays under some caps, which are multiples of torch's first peak.

    python -m benchmarks.zero_pipeline [--json] [--width 1536] [--layers 16] [--micro 4] [--tokens 32] [--steps 6]
        [--dtype float32] [--minutes 5] [--compile] [--small]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks import memory
from benchmarks.shared_gpu import at_once
from benchmarks.torch_ranks import Ranks
from piperlang.capture.annotate import annotate
from piperlang.core.value_id import ValueId

RANKS, PP, DP = 4, 2, 2
CAPS = (1.25, 1.5, 2.0)
NARROW = 128
PLACED = """
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: {pp}, dp: {dp}
loop(gpu, {pp})
split batch into {micro} as mb
"""
BY_LAYERS = (
    PLACED
    + """
recompute [pass=*]
replicate [pass=*] over gpu.dp with params=sharded, prefetch=2
for r in range({pp}):
    let layers = range({per} * r, {per} * r + {per})
    order on gpu[pp=r]:
        for l in layers:
            repeat {micro}: [layer=l, pass=F, mb=next]
        for l in reversed(layers):
            repeat {micro}: [layer=l, pass=B, mb=next]
"""
)
ONE_F_ONE_B = (
    PLACED
    + """
replicate [pass=*] over gpu.dp with params=sharded, prefetch=1, accumulate=sharded
one_f_one_b(gpu, {pp}, {micro})
"""
)


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    tokens: int
    micro: int
    dtype: str
    batch: int = 1
    """Samples of a microbatch on a rank."""

    @property
    def samples(self) -> int:
        return self.micro * DP * self.batch

    @property
    def layer_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in Layer(self.width).to(getattr(torch, self.dtype)).parameters())


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(f.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """All layers, or those of one stage."""

    def __init__(self, layers: list[Layer], stages: int) -> None:
        super().__init__()
        self.layers, self.per = nn.ModuleList(layers), len(layers) // stages

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i // self.per), annotate("layer", i):
                x = layer(x)
        return x


@dataclass(frozen=True)
class Make:
    """The model of the benchmark, made the same by everybody."""

    size: Size

    def __call__(self) -> Stack:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.size.dtype))
        try:
            return Stack([Layer(self.size.width) for _ in range(self.size.layers)], PP)
        finally:
            torch.set_default_dtype(before)


def batch(size: Size, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x, target = (
        torch.randn(size.samples, size.tokens, size.width, generator=made).to(getattr(torch, size.dtype))
        for _ in range(2)
    )
    return x, target


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double().cpu(), expected.double().cpu()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


# ------------------------------------------------------------------------------------------------------------- plain


def plain(size: Size, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps of one process, and the gradients of the first."""
    torch.manual_seed(0)
    model = Make(size)().to(device)
    update = optimizer(model.parameters())
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(2):
        x, target = (part.to(device) for part in batch(size, step))
        loss = mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        gradients = gradients or {
            name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None
        }
        update.step()
        update.zero_grad()
    return losses, gradients


# ------------------------------------------------------------------------------------------------------------- torch


@dataclass(frozen=True)
class Request:
    size: Size
    whole_stage: bool
    """Wrap the stage, too: then torch's pipeline reduces gradients once a step."""
    steps: int
    gradients: bool = False


def torch_rank(rank: int, device: torch.device, request: Request) -> dict[str, Any]:
    """Some steps on one rank of torch's: the loss of each, and the peak of all but the first."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size, cuda = request.size, device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if cuda else 0  # nothing, unless torch keeps something of the request before
    mesh = _mesh(device.type, init_device_mesh)
    stage, data = divmod(rank, DP)
    torch.manual_seed(0)
    made = list(Make(size)().layers)
    per = len(made) // PP
    part = Stack(made[stage * per : (stage + 1) * per], 1).to(device)  # type: ignore[arg-type]
    del made
    # Sums of gradients in half precision are made in float32, as ours are.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if size.dtype != "float32" else MixedPrecisionPolicy()
    for layer in part.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True, mp_policy=policy)
    if request.whole_stage:
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=True, mp_policy=policy)
    update = optimizer(part.parameters())
    schedule = pipelining.Schedule1F1B(
        pipelining.PipelineStage(part, stage, PP, device, group=mesh["pp"].get_group()), size.micro, loss_fn=mse_loss
    )
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    seconds: list[float] = []
    for step in range(request.steps):
        if step == 1:
            gc.collect()
            dist.barrier()
            _forget(cuda)
        x, target = (
            one.view(size.micro, DP, -1, *one.shape[1:])[:, data].flatten(0, 1).contiguous()
            for one in batch(size, step)
        )
        started = time.perf_counter()
        found: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x.to(device))
        else:
            schedule.step(target=target.to(device), losses=found)
        if request.gradients and step == 0:
            gradients = {
                f"layers.{stage * per + i}.{name}": p.grad.full_tensor().cpu()  # type: ignore[union-attr]
                for i, layer in enumerate(part.layers)
                for name, p in layer.named_parameters()
            }
        update.step()
        update.zero_grad()
        losses.append(sum(float(one.detach()) for one in found) / size.micro / DP)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = (
        {kind: most - before for kind, most in _peaks().items()} if cuda else {"allocated": memory.highest(os.getpid())}
    )
    return {"losses": losses, "peak": peak, "seconds": seconds, "gradients": gradients}


def _peaks() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {kind: int(stats[f"{kind}_bytes.all.peak"]) for kind in ("allocated", "active", "reserved")}


_MESHES: dict[str, Any] = {}


def _mesh(kind: str, make: Callable[..., Any]) -> Any:
    """One for all requests: every mesh has communicators of its own."""
    if kind not in _MESHES:
        _MESHES[kind] = make(kind, (PP, DP), mesh_dim_names=("pp", "dp"))
    return _MESHES[kind]


def _forget(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        memory.forget(os.getpid())


class Torch:
    def __init__(self, cuda: bool, whole_stage: bool = True) -> None:
        self.ranks, self.whole_stage, self.cuda = Ranks(RANKS, torch_rank, cuda), whole_stage, cuda
        self.base: list[int] = []

    def run(self, size: Size, steps: int = 2, gradients: bool = False) -> dict[str, Any]:
        if not self.cuda and not self.ranks.processes:
            self.ranks.ask(Request(replace(size, width=16), self.whole_stage, 2))  # imports and first uses
            self.base = [memory.resident(pid) for pid in self.ranks.pids()]
        answers = self.ranks.ask(Request(size, self.whole_stage, steps, gradients))
        peaks = [answer["peak"]["allocated"] - (self.base[i] if self.base else 0) for i, answer in enumerate(answers)]
        losses = [sum(answer["losses"][step] for answer in answers) for step in range(steps)]
        found = {name: gradient for answer in answers for name, gradient in answer["gradients"].items()}
        return {
            "losses": losses,
            "peaks": peaks,
            "seconds": typical([max(of_a_step) for of_a_step in zip(*(a["seconds"] for a in answers), strict=True)]),
            "gradients": found,
            "more": _most([answer["peak"] for answer in answers]),
        }

    def close(self) -> None:
        self.ranks.close()


# -------------------------------------------------------------------------------------------------------------- ours


class Ours:
    def __init__(self, cuda: bool, compiles: bool, script: str) -> None:
        self.cuda, self.compiles, self.script = cuda, compiles, script

    cluster: Any = None
    """One for all sides: Ray runs once in a process."""
    base: tuple[int, ...] = ()

    def run(self, size: Size, steps: int = 2, gradients: bool = False) -> dict[str, Any]:
        from piperlang.runtime.comm import gloo, nccl
        from piperlang.runtime.driver.cluster import Cluster

        if not self.cuda:
            self.close()  # the resident set has what earlier jobs have left
        if self.cluster is None:
            Ours.cluster = Cluster(RANKS, backend=nccl.BACKEND if self.cuda else gloo.BACKEND)
            if not self.cuda:
                self._run(replace(size, width=16), 2, False)
                Ours.base = tuple(memory.resident(pid) for pid in Ours.cluster.pids)
        try:
            return self._run(size, steps, gradients)
        except BaseException:
            self.close()
            raise

    def _run(self, size: Size, steps: int, gradients: bool) -> dict[str, Any]:
        from piperlang.capture.program import capture
        from piperlang.diagnostics import PiperError
        from piperlang.pipeline import schedule
        from piperlang.plan.estimate.memory import peaks
        from piperlang.plan.lower import lower
        from piperlang.runtime.driver.job import Job
        from piperlang.runtime.driver.training import Training
        from piperlang.source import Source

        x, target = (part.to("cuda" if self.cuda else "cpu") for part in batch(size, 0))
        script = self.script.format(pp=PP, dp=DP, micro=size.micro, per=size.layers // PP)
        found = schedule(capture(Make(size), mse_loss, (x, target)), Source("zero_pipeline.piper", script))
        if found.problems:
            raise PiperError(*found.problems)
        graph = found.graph()
        captured: Any = found.captured
        plan = lower(graph)
        foreseen = peaks(plan, graph, states=2 * getattr(torch, size.dtype).itemsize)
        loss_dtype = graph.model.tensors[graph.model.loss].dtype
        del x, target
        with Job(
            plan,
            captured,
            Training(Make(size), optimizer),
            timeout=120,
            loss_dtype=loss_dtype,
            cluster=self.cluster,
            compiles=self.compiles,
        ) as job:
            losses = [job.step(batch(size, 0), gradients=gradients).loss]
            parts = job.gradients() if gradients else []
            self._forget()
            done = [job.step(batch(size, step)) for step in range(1, steps)]
            losses += [one.loss for one in done]
            peaks_of = self.cluster.each("reset_peak", count=RANKS)
        highest = (
            [one["allocated"] for one in peaks_of]
            if self.cuda
            else [
                memory.highest(pid) - base
                for pid, base in zip(self.cluster.pids, self.base or [0] * RANKS, strict=True)
            ]
        )
        return {
            "more": _most(peaks_of),
            "losses": losses,
            "peaks": highest,
            "seconds": typical([one.seconds for one in done]),
            "gradients": _parts(plan, parts),
            "foreseen": max(peak.bytes for peak in foreseen),
            "foreseen_by": dict(max(foreseen, key=lambda peak: peak.bytes).by),
        }

    def _forget(self) -> None:
        self.cluster.each("reset_peak", count=RANKS)
        if not self.cuda:
            for pid in self.cluster.pids:
                memory.forget(pid)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            Ours.cluster = None


def typical(seconds: list[float]) -> float:
    return median(seconds[len(seconds) // 2 :])


def _most(peaks: list[dict[str, int]]) -> dict[str, int]:
    """Beside what is allocated: active counts what is free but still waited for by a stream, reserved what the process
    holds in all."""
    return {f"{kind}_bytes": max(one[kind] for one in peaks) for kind in ("active", "reserved") if kind in peaks[0]}


def _parts(plan: Any, found: list[dict[ValueId, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole gradients from what each device has of them."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for device, gradients in zip(plan.devices, found, strict=False):
        for key, gradient in gradients.items():
            held = device.weights[key]
            pieces.setdefault(held.weight, []).append(((held.interval or (0, 0))[0], gradient.flatten()))
    return {
        name: torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])]) for name, parts in pieces.items()
    }


# ------------------------------------------------------------------------------------------------------------ search


class Search:
    """The largest batch of one side under each cap, from measured peaks alone; a line through two of them only says
    where to look."""

    def __init__(self, measure: Callable[[int], int | None], first: int, top: int, until: float) -> None:
        self.measure, self.until, self.top = measure, until, top
        self.known: dict[int, int | None] = {1: first}

    def peak(self, batch: int) -> int | None:
        if batch not in self.known and time.monotonic() < self.until:
            self.known[batch] = self.measure(batch)
        return self.known.get(batch)

    def largest(self, cap: float, runs: int = 3) -> dict[str, Any]:
        before = len(self.known)
        while len(self.known) - before < runs and time.monotonic() < self.until:
            best, beyond = self._bounds(cap)
            if beyond - best <= 1:
                break
            self.peak(min(max(self._guess(cap), best + 1), beyond - 1))
        best, beyond = self._bounds(cap)
        return {
            "batch": best,
            "too_large": beyond if beyond <= self.top else None,
            "exact": beyond - best == 1,
            "peak": self.known.get(best),
        }

    def _bounds(self, cap: float) -> tuple[int, int]:
        fits = [one for one, peak in self.known.items() if peak is not None and peak <= cap]
        return max(fits, default=0), min(
            [one for one, peak in self.known.items() if peak is None or peak > cap] + [self.top + 1]
        )

    def _guess(self, cap: float) -> int:
        points = sorted((abs(peak - cap), one, peak) for one, peak in self.known.items() if peak is not None)[:2]
        (_, a, at_a), (_, b, at_b) = points if len(points) == 2 else (points[0], (0.0, 0, 0))
        best, beyond = self._bounds(cap)
        if not b or at_a == at_b:
            return 16
        guess = int(a + (cap - at_a) * (b - a) / (at_b - at_a))
        # The line has the right batch, or the one beside it: what is left to show is that one more is too much.
        return guess + 1 if guess == best else guess if best < guess < beyond else (best + beyond) // 2


# -------------------------------------------------------------------------------------------------------------- main


class Report:
    def __init__(self, quiet: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.quiet = quiet

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(
            json.dumps(row) if self.quiet else "  ".join(f"{key}={value}" for key, value in row.items()),
            file=sys.stderr if self.quiet else sys.stdout,
            flush=True,
        )


def attempt(report: Report, what: str, way: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """A case that fails is a row."""
    try:
        return run()
    except Exception as problem:
        report.add(what=what, way=way, error=f"{type(problem).__name__}: {problem}"[:400])
        return None


def agreement(report: Report, sides: dict[str, Any], size: Size, cuda: bool) -> None:
    losses, gradients = plain(size, "cuda" if cuda else "cpu")
    for way, side in sides.items():
        found = attempt(report, "agreement", way, lambda side=side: side.run(size, gradients=True))  # type: ignore[misc]
        if found is not None:
            assert found["gradients"].keys() == gradients.keys(), way
            worst = max(
                relative(found["gradients"][name].flatten(), gradient.flatten()) for name, gradient in gradients.items()
            )
            report.add(
                what="agreement",
                way=way,
                width=size.width,
                loss=max(abs(a - b) / abs(b) for a, b in zip(found["losses"], losses, strict=True)),
                gradients=worst,
            )


def first_peaks(report: Report, sides: dict[str, Any], size: Size, steps: int) -> dict[str, int]:
    firsts: dict[str, int] = {}
    took: dict[str, float] = {}
    for way, side in sides.items():
        found = attempt(report, "peak", way, lambda side=side: side.run(size, steps))  # type: ignore[misc]
        if found is not None:
            firsts[way], took[way] = max(found["peaks"]), found["seconds"]
            more = found["more"] | {key: found[key] for key in ("foreseen", "foreseen_by") if key in found}
            report.add(
                what="peak",
                way=way,
                batch=size.batch,
                bytes=firsts[way],
                stages=round(firsts[way] / (size.layer_bytes * size.layers // PP), 3),
                ranks=found["peaks"],
                seconds=round(found["seconds"], 3),
                losses=found["losses"],
                **more,
            )
    for ours in ("piper", "piper_1f1b"):
        for theirs in ("torch", "torch_layers"):
            if {ours, theirs} <= firsts.keys():
                report.add(
                    what="ratio",
                    batch=size.batch,
                    ours=ours,
                    theirs=theirs,
                    bytes=round(firsts[ours] / firsts[theirs], 4),
                    seconds=round(took[ours] / took[theirs], 4),
                )
    return firsts


def largest_batches(
    report: Report, sides: dict[str, Any], size: Size, firsts: dict[str, int], top: int, until: float
) -> None:
    """Half of the time that is left for torch, the rest for ours."""
    found: dict[tuple[str, float], int] = {}
    ways = [way for way in ("torch", "piper") if way in firsts]
    for number, way in enumerate(ways):

        def measure(samples: int, way: str = way) -> int | None:
            done = attempt(report, f"batch {samples}", way, lambda: sides[way].run(replace(size, batch=samples)))
            if done is None:
                return None
            report.add(
                what="measured",
                way=way,
                batch=samples,
                bytes=max(done["peaks"]),
                **done["more"],
                seconds=round(done["seconds"], 3),
            )
            return int(max(done["peaks"]))

        now = time.monotonic()
        search = Search(measure, firsts[way], top, now + (until - now) / (len(ways) - number))
        for cap in CAPS:
            best = search.largest(cap * firsts["torch"])
            found[way, cap] = best["batch"]
            report.add(what="largest", way=way, cap=cap, cap_bytes=round(cap * firsts["torch"]), **best)
        sides[way].close()
    for cap in CAPS:
        if ("torch", cap) in found and ("piper", cap) in found:
            report.add(
                what="largest ratio",
                cap=cap,
                piper=found["piper", cap],
                torch=found["torch", cap],
                piper_over_torch=round(found["piper", cap] / max(1, found["torch", cap]), 3),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json",
        action="store_true",
        help="rows to standard error as they come, all of them to standard output at the end",
    )
    parser.add_argument("--small", action="store_true", help="on CPU over gloo, for trying it out")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=6, help="of the first peaks")
    parser.add_argument("--minutes", type=float, default=5.0, help="no new run after so many (default: 5)")
    parser.add_argument("--top", type=int, default=512, help="the largest batch tried")
    parser.add_argument(
        "--compile", action="store_true", help="our chunks through Inductor; torch's modules run eagerly either way"
    )
    parser.add_argument("--peaks", action="store_true", help="no search for the largest batch")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    cuda = not options.small
    if not cuda:
        os.environ.update(memory.MAPPINGS)
    size = Size(
        options.width or (1536 if cuda else 384),
        options.layers or (16 if cuda else 8),
        options.tokens,
        options.micro,
        options.dtype,
    )
    report = Report(options.json)
    sides: dict[str, Any] = {
        "torch": Torch(cuda),
        "torch_layers": Torch(cuda, whole_stage=False),
        "piper": Ours(cuda, options.compile, BY_LAYERS),
        "piper_1f1b": Ours(cuda, options.compile, ONE_F_ONE_B),
    }
    with at_once(RANKS if cuda else 1), ExitStack() as ends:
        for side in sides.values():
            ends.callback(side.close)
        report.add(
            what="model",
            **size.__dict__,
            layer_bytes=size.layer_bytes,
            stage_bytes=size.layer_bytes * size.layers // PP,
            ranks=RANKS,
            device="cuda" if cuda else "cpu",
            torch=torch.__version__,
        )
        agreement(report, sides, replace(size, width=NARROW), cuda)
        firsts = first_peaks(report, sides, size, options.steps)
        sides["torch_layers"].close()
        if not options.peaks and "torch" in firsts:
            largest_batches(report, sides, size, firsts, options.top, until)
    if options.json:
        print(json.dumps({"rows": report.rows}))


if __name__ == "__main__":
    main()
