"""Memory on real workers: what a step takes is what the plan foresees, and what theory says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import CutProgram, Program, capture
from piperlang.capture.user.precision import TRUE, InPrecision
from piperlang.ir.graph import Graph
from piperlang.ir.model import Copies
from piperlang.plan.estimate.memory import peaks
from piperlang.plan.instructions import ReduceGradients, ScatterGradients
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.plan.rewrite.clip import with_norm
from piperlang.runtime.device.measure import Measured
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import compiled

WIDTH, LAYERS, SAMPLES = 512, 4, 16
BYTES = 4 * LAYERS * WIDTH * WIDTH
"""Of all weights."""
NEAR = pytest.approx


class Layers(nn.Module):
    """Layers without biases, each a stage and a chunk of its own."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        return x


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target)


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, tokens, WIDTH)
    return x, torch.tanh(x)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


@cache
def program(tokens: int, precision: str | None = None, ema: bool = False) -> Program:
    make: Callable[[], Any] = partial(Layers, tokens)
    make = make if precision is None else InPrecision(make, precision)
    return capture(make, loss, batch(tokens), copies=Copies(precision == TRUE, ema))


def run(
    cluster: Cluster,
    script: str,
    tokens: int = 4,
    max_norm: float | None = None,
    precision: str | None = None,
    ema: float | None = None,
) -> tuple[Graph, CutProgram, Plan, list[Measured]]:
    """The second step of a job: optimizer states are there from the first."""
    make: Callable[[], Any] = partial(Layers, tokens)
    make = make if precision is None else InPrecision(make, precision)
    graph, captured = compiled(program(tokens, precision, ema is not None), script)
    plan = lower(graph) if max_norm is None else with_norm(lower(graph), max_norm)
    training = Training(make, optimizer, masters=precision == TRUE, ema=ema)
    with Job(plan, captured, training, timeout=60, cluster=cluster) as job:
        job.step(batch(tokens))
        return graph, captured, plan, job.measure(batch(tokens))


def pipeline(name: str, place: str, ranks: int, width: int, data: str = "", micro: int = 8) -> str:
    return (
        f"from std.pipeline import {name}, {place}\nmesh gpu = pp: {ranks}, dp: {width}\nsplit batch into {micro} as"
        f" mb\n{place}(gpu, {ranks})\n{data}\n{name}(gpu, {ranks}, {micro})\n"
    )


def zero(options: str) -> str:
    return f"mesh gpu = dp: 4\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp{options}\n"


@pytest.mark.slow
def test_activations_of_1f1b(cluster: Cluster) -> None:
    """On stage s of p, those of p - s microbatches are alive at once."""
    graph, _, _, found = run(cluster, pipeline("one_f_one_b", "loop", 4, 1), tokens=256)
    for stage, measured in enumerate(found):
        of_one = graph.model.chunks[stage].saved_bytes / 8
        assert max(held["activations"] for held in measured.held) == NEAR((4 - stage) * of_one, rel=0.05), stage


@pytest.mark.parametrize(
    ("options", "weights", "states"),
    [
        ("", 1, 1),
        (" with states=sharded", 1, 1 / 4),
        (" with grads=sharded", 1, 1 / 4),
        (" with params=sharded", 1 / 4, 1 / 4),
    ],
)
def test_weights_and_states_of_zero(cluster: Cluster, options: str, weights: float, states: float) -> None:
    for measured in run(cluster, zero(options))[3]:
        assert measured.held[-1]["weights"] == NEAR(weights * BYTES, rel=0.05)
        feeds = 2 * SAMPLES // 4 * 4 * WIDTH * 4
        assert measured.start - feeds == NEAR((weights + 2 * states) * BYTES, rel=0.05)


@pytest.mark.parametrize(
    ("options", "part"),
    [("", 1), (" with states=sharded", 1), (" with grads=sharded", 1 / 4), (" with params=sharded", 1 / 4)],
)
def test_gradients_of_zero(cluster: Cluster, options: str, part: float) -> None:
    """Before the norm of all gradients is known no weight is updated, and every gradient is there: whole, or the
    device's part of it."""
    _, _, plan, found = run(cluster, zero(options), max_norm=1.0)
    for device, measured in zip(plan.devices, found, strict=True):
        norm = next(i for i, x in enumerate(device.instructions) if x.op == "norm")
        assert measured.held[norm]["gradients"] == NEAR(part * BYTES, rel=0.05)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_whole_weights_under_zero_3(cluster: Cluster, prefetch: int) -> None:
    """Prefetching one ahead, at most two chunks are whole at once; prefetching none, one."""
    script = (
        "mesh gpu = pp: 2, dp: 2\nsplit batch into 4 as mb\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on"
        f" gpu[pp=1]\nreplicate [pass=*] over gpu.dp with params=sharded, prefetch={prefetch}\n"
    )
    for r in range(2):
        first, second = 2 * r, 2 * r + 1
        script += f"order on gpu[pp={r}]:\n"
        script += "".join(f"    [stage={first}, pass=F, mb={m}], [stage={second}, pass=F, mb={m}]\n" for m in range(4))
        script += "".join(f"    [stage={second}, pass=B, mb={m}], [stage={first}, pass=B, mb={m}]\n" for m in range(4))
    chunk = BYTES / LAYERS
    for measured in run(cluster, script)[3]:
        shard = chunk  # two chunks on two devices
        above = max(held["weights"] for held in measured.held) - shard
        assert chunk * 0.95 <= above <= (1 + prefetch) * chunk * 1.05


@pytest.mark.parametrize(
    ("name", "place", "ranks"),
    [
        ("gpipe", "loop", 4),
        ("one_f_one_b", "loop", 4),
        ("zero_bubble", "loop", 4),
        ("zbv", "vee", 2),
        ("dualpipev", "vee", 2),
    ],
)
def test_gathered_weights_that_stay_cost_no_memory(name: str, place: str, ranks: int) -> None:
    """Where weights dominate: they stay only where the next pass would gather them again."""
    found = []
    for keep in ("pass", "stage", "turn"):
        data = f"replicate [pass=*] over gpu.dp with params=sharded, keep={keep}"
        graph, _ = compiled(program(4), pipeline(name, place, ranks, 2, data))
        found.append(max(one.bytes for one in peaks(lower(graph), graph)))
    assert max(found[1:]) <= found[0] * 1.01


SCHEDULES = {
    "1f1b": pipeline("one_f_one_b", "loop", 4, 1),
    "1f1b x zero3": pipeline("one_f_one_b", "loop", 4, 2, "replicate [pass=*] over gpu.dp with params=sharded"),
    "1f1b x zero3, added up in parts": pipeline(
        "one_f_one_b", "loop", 4, 2, "replicate [pass=*] over gpu.dp with params=sharded, accumulate=sharded"
    ),
    "gpipe x zero3": pipeline("gpipe", "loop", 4, 2, "replicate [pass=*] over gpu.dp with params=sharded"),
    "looped bfs x zero3, kept through the turn": pipeline(
        "looped_bfs", "loop", 2, 2, "replicate [pass=*] over gpu.dp with params=sharded, keep=turn"
    ).replace("loop(gpu, 2)", "loop(gpu, 2, 2)"),
    "zbv x zero3, each gathered for itself": pipeline(
        "zbv", "vee", 2, 2, "replicate [pass=*] over gpu.dp with params=sharded, keep=pass"
    ),
    "zbv x zero2": pipeline("zbv", "vee", 2, 2, "replicate [pass=*] over gpu.dp with grads=sharded"),
    "dualpipev x zero1": pipeline("dualpipev", "vee", 2, 2, "replicate [pass=*] over gpu.dp with states=sharded"),
    "dp": zero(""),
    "zero1": zero(" with states=sharded"),
    "zero2": zero(" with grads=sharded"),
    "zero3": zero(" with params=sharded"),
    "recompute": pipeline("gpipe", "loop", 4, 1, "recompute [stage=0:3]"),
    "recompute cheap": pipeline("gpipe", "loop", 4, 1, "recompute [stage=*] with policy=cheap"),
    "recompute cheap, in halves": pipeline(
        "zbv", "vee", 2, 2, "replicate [pass=*] over gpu.dp\nrecompute [stage=*] with policy=cheap"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4, 128])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_foresees_it(cluster: Cluster, name: str, tokens: int) -> None:
    """Within 5%, where weights dominate and where activations do; and nothing is kept that nobody will read."""
    graph, _, plan, found = run(cluster, SCHEDULES[name], tokens)
    for device, foreseen, measured in zip(plan.devices, peaks(plan, graph), found, strict=True):
        assert foreseen.bytes == NEAR(measured.peak, rel=0.05), (
            device.device,
            foreseen,
            device.instructions[measured.at],
            plan.nodes[device.instructions[measured.at].node].name,
        )
        assert not measured.stale


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("options", ["", " with states=sharded", " with params=sharded"])
def test_master_weights_are_foreseen(cluster: Cluster, options: str, micro: int, max_norm: float | None) -> None:
    """Of weights in bfloat16, with their states; and sums and updates of gradients in float32."""
    script = zero(options).replace("dp: 4", "dp: 2") + (f"split batch into {micro} as mb\n" if micro > 1 else "")
    graph, _, plan, found = run(cluster, script, max_norm=max_norm, precision=TRUE)
    reduced = [x for x in plan.devices[0].instructions if isinstance(x, ReduceGradients | ScatterGradients)]
    assert {x.dtype for x in reduced} == {"float32" if micro > 1 else "bfloat16"}
    for foreseen, measured in zip(peaks(plan, graph), found, strict=True):
        assert foreseen.bytes == NEAR(measured.peak, rel=0.05), foreseen


@pytest.mark.parametrize("precision", [None, TRUE])
def test_moving_averages_are_foreseen(cluster: Cluster, precision: str | None) -> None:
    graph, _, plan, found = run(cluster, zero(" with states=sharded"), precision=precision, ema=0.9)
    for foreseen, measured in zip(peaks(plan, graph), found, strict=True):
        assert foreseen.bytes == NEAR(measured.peak, rel=0.05), foreseen
