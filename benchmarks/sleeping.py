"""Networks that sleep instead of computing, so that schedules can be timed on any machine, and what runs them under a
script.

An operator is tanh(work(x) * weigh(w)). Sleeping takes no processor: four devices on two cores wait for each other as
four machines would. It has two parts because autograd sees a custom operator's backward as one node, and torch's own
split of a backward in halves would run that node twice; a product of two is divided by torch and by us alike: I is the
backward of `work`, W the backward of `weigh`.

Whoever imports this file has the operators; workers do, because they unpickle functions from here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.flop_counter import register_flop_formula

from piperlang.capture.annotate import annotate
from piperlang.capture.program import CutProgram, capture
from piperlang.diagnostics import PiperError
from piperlang.ir.graph import COMPUTE, Graph, Node
from piperlang.pipeline import schedule
from piperlang.plan.estimate.cost import Costs
from piperlang.plan.linearize import linearize
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.source import Source

WIDTH = 4
FLOPS = 4e11
"""What a millisecond of sleep stands for; only that it is much, beside latencies, matters."""
os.environ.setdefault(
    "RAY_worker_niceness", "0"
)  # Ray gives its workers 15, and on a busy machine every wake-up would come later than in torch's processes
TIMELINE = "PIPER_TIMELINE"
"""A folder: workers write there what they did and when."""


# Defined by hand: `torch.library.custom_op` wraps every call in checks that take 0.3 ms here, much more than an
# instruction does.
_LIBRARY = torch.library.Library("sleeping", "DEF")  # type: ignore[no-untyped-call]


def _sleep(x: torch.Tensor, ms: float) -> torch.Tensor:
    """Takes what it says: kernels wake sleepers about 0.1 ms late, so that last bit is waited for awake."""
    until = time.perf_counter() + ms / 1e3
    result = x.clone()
    time.sleep(max(0.0, until - time.perf_counter() - 1e-4))
    while time.perf_counter() < until:
        pass
    return result


def _awake(x: torch.Tensor, ms: float) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, ms: float) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.ms = inputs[1]


def _back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return nap(gradient.contiguous(), ctx.ms), None


def _define(
    name: str, run: Callable[[torch.Tensor, float], torch.Tensor], learns: bool
) -> Callable[[torch.Tensor, float], torch.Tensor]:
    _LIBRARY.define(f"{name}(Tensor x, float ms) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"sleeping::{name}", _fake, lib=_LIBRARY)
    if learns:
        torch.library.register_autograd(f"sleeping::{name}", _back, setup_context=_remember, lib=_LIBRARY)
    defined = getattr(torch.ops.sleeping, name)
    if run is _sleep:
        # Real operators have flops, and orders that leave something open are filled by them: these tell theirs the way
        # torch offers.
        register_flop_formula(defined)(lambda shape, ms, **_: int(FLOPS * ms))
    return defined  # type: ignore[no-any-return]


nap = _define("nap", _sleep, learns=False)
"""Sleeps, and has no gradient: what backwards are made of."""
work = _define("work", _sleep, learns=True)
"""Sleeps forward and backward."""
weigh = _define("weigh", _awake, learns=True)
"""Sleeps backward only."""


# ---------------------------------------------------------------------------------------------------------- network


class Layer(nn.Module):
    """As its parts say: `o` is an operator, whose F, I and W take `ms` each; `e` an exchange, which takes `exchange`
    each way and learns nothing."""

    def __init__(self, parts: str, ms: float, exchange: float) -> None:
        super().__init__()
        self.parts, self.ms, self.exchange = parts, ms, exchange
        self.weights = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(parts.count("o")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = iter(self.weights)
        for i, part in enumerate(self.parts):
            if part == "o":
                # The activation comes last, so that I computes something W needs: a W that reads the gradient itself
                # trips the verifier.
                x = torch.tanh(work(x, self.ms) * weigh(next(weights), self.ms))
            else:
                # Numbered, or two exchanges in a row would be one chunk.
                with annotate("exchange", i):
                    x = work(x, self.exchange)
        return x


class Network(nn.Module):
    """Layers in stages, after a chunk that takes no time: with it the first layer, too, gives a gradient of its
    input."""

    def __init__(self, layers: int, stages: int, parts: str, ms: float, exchange: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.per = layers // stages
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.layers = nn.ModuleList(Layer(parts, ms, exchange) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0), annotate("part", "entry"):
            x = x * self.scale
        for i, layer in enumerate(self.layers):
            with annotate("stage", i // self.per):
                x = layer(x)
        return x


def make_model(layers: int, stages: int, parts: str = "o", ms: float = 0.0, exchange: float = 0.0) -> Network:
    if TIMELINE in os.environ:
        _record(Path(os.environ[TIMELINE]))
    return Network(layers, stages, parts, ms, exchange)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=made), torch.randn(samples, WIDTH, generator=made)


def plain_loss(network: Network, samples: int) -> float:
    x, target = batch(samples)
    return float(mse_loss(network(x), target).detach())


# -------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Timed:
    loss: float
    ms: float
    """Of the shortest step: other work on the machine can only make a step longer."""
    median_ms: float
    foreseen_ms: float
    """What the orders allow, if nothing but naps takes time."""


def compiled(make: Callable[[], Network], samples: int, script: str) -> tuple[Graph, CutProgram]:
    found = schedule(capture(make, mse_loss, batch(samples)), Source("benchmark.piper", script))
    if found.problems:
        raise PiperError(*found.problems)
    captured = found.captured
    assert isinstance(captured, CutProgram)
    return found.graph(), captured


def timed(cluster: Cluster, make: partial[Network], samples: int, script: str, steps: int) -> Timed:
    """The first loss and the shortest of some steps, after one that does not count."""
    graph, captured = compiled(make, samples, script)
    foreseen = linearize(graph, Asleep(graph, captured)).seconds
    with Job(lower(graph), captured, Training(make, optimizer), timeout=60, cluster=cluster) as job:
        done = [job.step(batch(samples)) for _ in range(steps + 1)]
    taken = [1e3 * step.seconds for step in done[1:]]
    return Timed(done[0].loss, min(taken), median(taken), 1e3 * foreseen)


class Asleep(Costs):
    """What nodes really take here: their naps, and nothing else."""

    def __init__(self, graph: Graph, captured: CutProgram) -> None:
        super().__init__(graph)
        self.captured = captured

    def _seconds(self, node: Node) -> float:
        template = node.template
        if template.op not in COMPUTE or template.chunk is None:
            return 0.0
        piece = getattr(self.captured.pass_graphs(template.chunk, template.samples), template.op)
        return (
            sum(
                float(one.args[1])
                for one in piece.module.graph.nodes
                if one.target in (torch.ops.sleeping.nap.default, torch.ops.sleeping.work.default)
            )
            / 1e3
        )


def _record(folder: Path) -> None:
    """In a worker: keep the start and end of every instruction, and write them down whenever a step ends."""
    from piperlang.runtime.device import Device

    execute, end = Device.execute, Device.end
    if execute.__name__ == "recorded":
        return
    rows: list[tuple[str, str, int, float, float]] = []

    def recorded(self: Device, instruction: Any) -> None:
        start = time.time()
        execute(self, instruction)
        rows.append((instruction.op, instruction.stream, instruction.node, start, time.time()))

    def written(self: Device) -> float:
        (folder / f"{self.plan.device}.json").write_text(json.dumps(rows))
        rows.clear()
        return end(self)

    Device.execute, Device.end = recorded, written  # type: ignore[method-assign, assignment]


# ------------------------------------------------------------------------------------------------------------ output


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for line in ({key: key for key in widths}, *rows):
        print("  ".join(f"{line[key]!s:>{width}}" for key, width in widths.items()))


def options(about: str | None, steps: int = 5) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=steps, help=f"of which the shortest counts (default: {steps})")
    return parser
