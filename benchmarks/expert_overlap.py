"""A mixture of experts over PP=2 x EP=2 in bf16: DualPipeV with the all-to-all on streams of its own, against 1F1B and
against torch's pipelines.

A layer is attention, dispatch, experts and combine; every sequence sends each token to one expert, as long as that one
has room. Ours: DualPipeV with `overlapped` all-to-alls, forward and backward ones on two streams, 1F1B with all on one
stream, since it pairs no forward with a backward, DualPipeV with resources of their streams (high priority, at most
eight thread blocks of NCCL), and DualPipeV with them on the compute stream. They are compiled, as by default on CUDA.
Torch: ScheduleDualPipeV and Schedule1F1B, with the same exchange written as an autograd function around
all_to_all_single, gradients averaged over the axis once a step; modules are not compiled. Same weights, data, optimizer
and microbatches; four processes compute on one GPU at once (shared_gpu.py). A step counts from the driver's call to the
end of all work of the last of some steps, divided by their number.

    python -m benchmarks.expert_overlap [--json] [--width 1024] [--hidden 4096] [--layers 8] [--tokens 512]
        [--batch 4] [--micro 8] [--steps 6] [--way "piper 1f1b" "torch 1f1b" ...] [--eager] [--minutes 5] [--small]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from benchmarks.shared_gpu import at_once
from benchmarks.torch_ranks import Ranks
from piperlang.capture.annotate import annotate

RANKS, PP, EP = 4, 2, 2
WARM = 4
"""Steps that do not count: ours are issued twice, and captured as a CUDA graph in the third."""
SCRIPT = """
from std.data import ddp
from std.expert import ep, overlapped
from std.pipeline import {name}, {place}
mesh gpu = pp: {pp}, ep: {ep}
{place}(gpu, {pp})
split batch into {micro} as mb
ddp(gpu.ep, [!expert])
{exchange}
{name}(gpu, {pp}, {micro})
"""
OURS = {
    "piper dualpipev": ("dualpipev", "vee", 2 * PP, "overlapped(gpu.ep)"),
    "piper dualpipev, priority=high, ctas=8": (
        "dualpipev",
        "vee",
        2 * PP,
        'overlapped(gpu.ep, priority="high", ctas=8)',
    ),
    "piper 1f1b": ("one_f_one_b", "loop", PP, "ep(gpu.ep)"),
    "piper dualpipev, one stream": (
        "dualpipev",
        "vee",
        2 * PP,
        'shard [expert=*] over gpu.ep\nstream [comm=all_to_all] on "compute"',
    ),
}
"""Schedule, placement, stages, and what is said of the experts."""
TORCH = {"torch dualpipev": 2 * PP, "torch 1f1b": PP}


@dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    layers: int
    experts: int
    heads: int
    words: int
    tokens: int
    batch: int
    """Samples of a microbatch on a rank."""
    micro: int
    dtype: str

    @property
    def samples(self) -> int:
        return self.micro * EP * self.batch

    @property
    def room(self) -> int:
        """How many tokens of one sequence an expert takes: a quarter more than its share."""
        return max(1, 5 * self.tokens // (4 * self.experts))


# ------------------------------------------------------------------------------------------------------------- model


class Layer(nn.Module):
    """`exchange` and `back` bring samples of this rank to the experts of this rank and back; they do nothing where all
    experts are here."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        width, hidden, experts = size.width, size.hidden, size.experts
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)
        self.exchange: Callable[[torch.Tensor], torch.Tensor] = _same
        self.back: Callable[[torch.Tensor], torch.Tensor] = _same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.first(x))
        normed = self.second(x)
        routed, weight = self._route(normed)
        packed = torch.einsum("stec,std->secd", routed, normed)
        with annotate("expert", "all"):
            arrived = self.exchange(packed)
            hidden = f.gelu(torch.einsum("secd,edh->sech", arrived, self.up))
            done = self.back(torch.einsum("sech,ehd->secd", hidden, self.down))
        return x + torch.einsum("stec,secd->std", routed, done) * weight.unsqueeze(-1)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, self.size.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        heads = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(samples, length, -1))  # type: ignore[no-any-return]

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which token has which place at which expert, and how much its expert counts for."""
        weight, chosen = torch.softmax(self.gate(x), -1).max(-1)
        routed = f.one_hot(chosen, self.size.experts)
        slot = (routed.cumsum(1) - 1) * routed  # counted within a sequence: samples stay independent of each other
        kept = routed * (slot < self.size.room)
        return (kept.unsqueeze(-1) * f.one_hot(slot.clamp(max=self.size.room - 1), self.size.room)).to(x.dtype), weight


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class Moe(nn.Module):
    """All layers, or those of one stage: only the first has an embedding, only the last a norm and a head."""

    def __init__(
        self,
        layers: list[Layer],
        stages: int,
        embed: nn.Embedding | None,
        norm: nn.LayerNorm | None,
        head: nn.Linear | None,
    ) -> None:
        super().__init__()
        self.layers, self.stages = nn.ModuleList(layers), stages
        self.embed, self.norm, self.head = embed, norm, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            with annotate("stage", 0):
                x = self.embed(x)
        per = len(self.layers) // self.stages
        for i, layer in enumerate(self.layers):
            with annotate("stage", i // per):
                x = layer(x)
        if self.head is None or self.norm is None:
            return x
        with annotate("stage", self.stages - 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]


def make_model(size: Size, stages: int) -> Moe:
    """Made the same by everybody, however many stages it has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, size.dtype))
    try:
        layers = [Layer(size) for _ in range(size.layers)]
        return Moe(
            layers,
            stages,
            nn.Embedding(size.words, size.width),
            nn.LayerNorm(size.width),
            nn.Linear(size.width, size.words, bias=False),
        )
    finally:
        torch.set_default_dtype(before)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def batch(size: Size, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(size.words, (size.samples, size.tokens + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain(size: Size, steps: int, device: str) -> list[float]:
    """Losses of one process, microbatch by microbatch, gradients added up in float32."""
    torch.manual_seed(0)
    model = make_model(size, 1).to(device)
    update = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        total = 0.0
        for x, target in zip(*(part.to(device).chunk(size.micro) for part in batch(size, step)), strict=True):
            value = loss(model(x), target) / size.micro
            for one, gradient in zip(sums, torch.autograd.grad(value, list(model.parameters())), strict=True):
                one += gradient
            total += float(value.detach())
        for p, gradient in zip(model.parameters(), sums, strict=True):
            p.grad = gradient.to(p.dtype)
        update.step()
        losses.append(total)
    return losses


# ------------------------------------------------------------------------------------------------------------- torch


class Exchange(torch.autograd.Function):
    """Dim `given` divided among the group, dim `taken` put together from all of it; backward the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, given: int, taken: int) -> torch.Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return _exchange(x, group, given, taken)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.taken, ctx.given), None, None, None


def _exchange(x: torch.Tensor, group: Any, given: int, taken: int) -> torch.Tensor:
    import torch.distributed as dist

    give = torch.stack(x.chunk(EP, given)).contiguous()
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give, group=group)
    return torch.cat(take.unbind(0), taken)


@dataclass(frozen=True)
class Request:
    size: Size
    stages: int
    steps: int


_MESHES: dict[str, Any] = {}


def torch_rank(rank: int, device: torch.device, request: Request) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    if device.type not in _MESHES:
        _MESHES[device.type] = init_device_mesh(device.type, (PP, EP), mesh_dim_names=("pp", "ep"))
    mesh, size, stages = _MESHES[device.type], request.size, request.stages
    along, part = divmod(rank, EP)
    group = mesh["ep"].get_group()
    mine = [along] if stages == PP else [along, stages - 1 - along]
    torch.manual_seed(0)
    whole = make_model(size, 1)
    modules = [_stage(whole, i, stages, part, group).to(device) for i in mine]
    del whole
    made: list[Any] = [
        pipelining.PipelineStage(module, i, stages, device, group=mesh["pp"].get_group())
        for module, i in zip(modules, mine, strict=True)
    ]
    schedule: Any = (
        pipelining.Schedule1F1B(made[0], size.micro, loss_fn=loss)
        if stages == PP
        else ScheduleDualPipeV(made, size.micro, loss_fn=loss)
    )
    params = [(name, p) for module in modules for name, p in module.named_parameters()]
    update = optimizer([p for _, p in params])
    losses: list[float] = []
    started = 0.0
    for step in range(WARM + request.steps):
        if step == WARM:
            dist.barrier()
            _settle(device)
            started = time.perf_counter()
        x, target = (
            one.view(size.micro, EP, -1, *one.shape[1:])[:, part].flatten(0, 1).to(device) for one in batch(size, step)
        )
        found: list[torch.Tensor] = []
        schedule.step(
            *([x] if 0 in mine else []), **({"target": target, "losses": found} if stages - 1 in mine else {})
        )
        _average(params, group)
        update.step()
        update.zero_grad()
        losses.append(sum(float(one.detach()) for one in found) / size.micro / EP)
    _settle(device)
    seconds = (time.perf_counter() - started) / request.steps
    del schedule, made, modules, params, update
    gc.collect()
    return {"losses": losses, "seconds": seconds}


def _stage(whole: Moe, stage: int, stages: int, part: int, group: Any) -> Moe:
    """A stage of the model with the experts of one rank."""
    per = len(whole.layers) // stages
    layers: list[Layer] = list(whole.layers[stage * per : (stage + 1) * per])  # type: ignore[arg-type]
    for layer in layers:
        layer.up, layer.down = (
            nn.Parameter(weight.detach().chunk(EP)[part].clone()) for weight in (layer.up, layer.down)
        )
        # From samples divided (dim 0) to experts divided (dim 1), and back.
        layer.exchange, layer.back = _applied(group, 1), _applied(group, 0)
    last = stage == stages - 1
    return Moe(
        layers, 1, whole.embed if stage == 0 else None, whole.norm if last else None, whole.head if last else None
    )


def _applied(group: Any, given: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: Exchange.apply(x, group, given, 1 - given)  # type: ignore[no-untyped-call]


def _average(params: list[tuple[str, nn.Parameter]], group: Any) -> None:
    """Over the axis: experts have seen the samples of all ranks, whatever else is there those of its own."""
    import torch.distributed as dist

    for p in [p for name, p in params if name.endswith((".up", ".down"))]:
        assert p.grad is not None
        p.grad /= EP
    others = [p for name, p in params if not name.endswith((".up", ".down"))]
    flat = torch.cat([p.grad.float().flatten() for p in others if p.grad is not None])
    dist.all_reduce(flat, group=group)
    flat /= EP
    for p, gradient in zip(others, torch.split(flat, [p.numel() for p in others]), strict=True):
        assert p.grad is not None
        p.grad.copy_(gradient.view_as(p))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def theirs(ranks: Ranks, way: str, size: Size, steps: int) -> dict[str, Any]:
    answers = ranks.ask(Request(size, TORCH[way], steps))
    return {
        "ms": 1e3 * max(answer["seconds"] for answer in answers),
        "losses": [sum(answer["losses"][i] for answer in answers) for i in range(WARM + steps)],
    }


# -------------------------------------------------------------------------------------------------------------- ours


class Ours:
    def __init__(self, cuda: bool, eager: bool) -> None:
        self.cuda, self.eager = cuda, eager
        self.cluster: Any = None

    def run(self, way: str, size: Size, steps: int) -> dict[str, Any]:
        from piperlang.runtime.comm import gloo, nccl
        from piperlang.runtime.driver.cluster import Cluster

        if self.cluster is None:
            self.cluster = Cluster(RANKS, backend=nccl.BACKEND if self.cuda else gloo.BACKEND)
        try:
            return self._run(way, size, steps)
        except BaseException:
            self.close()
            raise

    def _run(self, way: str, size: Size, steps: int) -> dict[str, Any]:
        from piperlang.capture.program import capture
        from piperlang.diagnostics import PiperError
        from piperlang.pipeline import schedule
        from piperlang.plan.lower import lower
        from piperlang.runtime.driver.job import Job
        from piperlang.runtime.driver.training import Training
        from piperlang.source import Source

        began = time.perf_counter()

        def said(what: str) -> None:
            print(f"{way}: {time.perf_counter() - began:.1f} s {what}", file=sys.stderr, flush=True)

        name, place, stages, exchange = OURS[way]
        make = partial(make_model, size, stages)
        x, target = (part.to("cuda" if self.cuda else "cpu") for part in batch(size, 0))
        script = SCRIPT.format(name=name, place=place, pp=PP, ep=EP, micro=size.micro, exchange=exchange)
        if self.eager:
            script += "recompute [pass=*] with policy=none\n"
        found = schedule(capture(make, loss, (x, target)), Source("expert_overlap.piper", script))
        if found.problems:
            raise PiperError(*found.problems)
        graph = found.graph()
        captured: Any = found.captured
        plan = lower(graph)
        loss_dtype = graph.model.tensors[graph.model.loss].dtype
        said("captured and scheduled")
        with Job(
            plan,
            captured,
            Training(make, optimizer),
            timeout=120,
            loss_dtype=loss_dtype,
            cluster=self.cluster,
            compiles=False if self.eager else None,
        ) as job:
            said("workers are ready")
            losses = [job.step(batch(size, step)).loss for step in range(WARM)]
            said("warm")
            batches = [batch(size, WARM + step) for step in range(steps)]
            self.cluster.each("reset_peak", count=RANKS)  # waits for all work on the device
            started = time.perf_counter()
            done = [job.step(one) for one in batches]
            self.cluster.each("reset_peak", count=RANKS)
            seconds = (time.perf_counter() - started) / steps
        return {
            "ms": 1e3 * seconds,
            "losses": losses + [step.loss for step in done],
            "foreseen_ms": round(1e3 * plan.seconds, 3),
            "instructions": max(len(device.instructions) for device in plan.devices),
        }

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


# -------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json",
        action="store_true",
        help="rows to standard error as they come, all of them to standard output at the end",
    )
    parser.add_argument("--small", action="store_true", help="on CPU over gloo, for trying it out")
    for name, about in (
        ("width", ""),
        ("hidden", "of an expert"),
        ("layers", ""),
        ("experts", ""),
        ("heads", ""),
        ("words", ""),
        ("tokens", "of a sample"),
        ("batch", "samples of a microbatch on a rank"),
    ):
        parser.add_argument(f"--{name}", type=int, help=about)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="that count")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--minutes", type=float, default=5.0, help="no new case after so many (default: 5)")
    parser.add_argument(
        "--eager", action="store_true", help="our chunks as torch's modules run: not compiled, nothing computed twice"
    )
    parser.add_argument("--way", nargs="+", choices=(*OURS, *TORCH), default=[*OURS, *TORCH])
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    cuda = not options.small
    sizes = (
        {
            "width": 1024,
            "hidden": 4096,
            "layers": 8,
            "experts": 8,
            "heads": 16,
            "words": 8192,
            "tokens": 512,
            "batch": 4,
        }
        if cuda
        else {"width": 32, "hidden": 64, "layers": 4, "experts": 4, "heads": 2, "words": 64, "tokens": 16, "batch": 2}
    )
    size = Size(
        **{name: getattr(options, name) or default for name, default in sizes.items()},
        micro=options.micro,
        dtype=options.dtype,
    )
    with at_once(RANKS if cuda else 1):
        rows = run(size, options.steps, options.way, cuda, options.eager, until, lambda row: say(row, options.json))
    if options.json:
        print(json.dumps({"rows": rows}))


def say(row: dict[str, Any], quiet: bool) -> None:
    print(
        json.dumps(row) if quiet else "  ".join(f"{key}={value}" for key, value in row.items()),
        file=sys.stderr if quiet else sys.stdout,
        flush=True,
    )


def run(
    size: Size,
    steps: int,
    ways: list[str],
    cuda: bool,
    eager: bool,
    until: float,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        tell(row)

    ours, ranks = Ours(cuda, eager), Ranks(RANKS, torch_rank, cuda, limit=100.0)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: {"losses": plain(size, WARM + steps, "cuda" if cuda else "cpu")}
    }
    cases |= {way: partial(ours.run, way, size, steps) for way in OURS if way in ways}
    cases |= {way: partial(theirs, ranks, way, size, steps) for way in TORCH if way in ways}
    add(
        {
            "what": "model",
            **size.__dict__,
            "ranks": RANKS,
            "device": "cuda" if cuda else "cpu",
            "torch": torch.__version__,
        }
    )
    found: dict[str, dict[str, Any]] = {}
    try:
        for way, case in cases.items():
            if way in TORCH:
                ours.close()
            if time.monotonic() > until:
                add({"what": "case", "way": way, "error": "no time left"})
                continue
            try:
                found[way] = case()
            except Exception as problem:
                add({"what": "case", "way": way, "error": f"{type(problem).__name__}: {problem}"[:400]})
                continue
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            done = found[way]
            add(
                {
                    "what": "case",
                    "way": way,
                    **{
                        key: round(value, 3) if key == "ms" else value for key, value in done.items() if key != "losses"
                    },
                    "losses": [round(one, 6) for one in done["losses"]],
                }
            )
    finally:
        ours.close()
        ranks.close()
    for row in _compared(found):
        add(row)
    return rows


def _compared(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for one, other in (
        ("piper dualpipev", "piper 1f1b"),
        ("piper dualpipev", "torch dualpipev"),
        ("piper 1f1b", "torch 1f1b"),
        ("torch dualpipev", "torch 1f1b"),
        ("piper dualpipev", "piper dualpipev, one stream"),
        ("piper dualpipev, priority=high, ctas=8", "piper dualpipev"),
    ):
        if one in found and other in found:
            rows.append(
                {"what": "ratio", "of": one, "to": other, "ratio": round(found[one]["ms"] / found[other]["ms"], 4)}
            )
    if "plain" in found:
        for way, done in found.items():
            if way != "plain":
                worst = max(abs(a - b) / abs(b) for a, b in zip(done["losses"], found["plain"]["losses"], strict=True))
                rows.append({"what": "losses against plain", "way": way, "largest_relative_difference": worst})
    return rows


if __name__ == "__main__":
    main()
