"""Gradients of microbatches are added up in place: nothing else may lie in the memory of a sum. Weights without a batch
dimension, with one sample a microbatch, have gradients that are those of activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import capture
from piperlang.core.value_id import ValueId
from piperlang.plan.lower import lower
from piperlang.runtime.device.compiled import compiled as compiled_pieces
from piperlang.runtime.device.values import DeviceValues
from piperlang.runtime.driver import thread_job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import LIMIT, compiled, relative

SAMPLES, LENGTH, WIDTH, STAGES = 4, 6, 8, 4
Batch = tuple[torch.Tensor, torch.Tensor]


class Embedded(nn.Module):
    """Adds a position embedding to what it gets; the gradients of both are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.position
        return x + torch.tanh(self.linear(x))


class Behind(Embedded):
    """The gradient of the embedding is that of the output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + self.position


class Added(Embedded):
    """Three weights with one gradient, of which a compiler makes one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.last = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x + (self.position + self.more + self.last)))


class Joined(Embedded):
    """Gradients of weights are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = x @ torch.cat([self.linear.weight, self.other])[: 2 * WIDTH].t()
        return x + self.position + torch.tanh(both[..., :WIDTH]) * torch.tanh(both[..., WIDTH:])


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, block in enumerate(self.blocks):
            with annotate("stage", stage):
                x = block(x)
        return x


class Biased(nn.Module):
    """A bias without a batch dimension that goes through all stages, changed by each."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))
        self.changes = nn.ParameterList(torch.randn(LENGTH, LENGTH) for _ in range(STAGES))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        for stage, layer in enumerate(self.layers):
            with annotate("stage", stage):
                bias = bias + self.changes[stage]
                x = x + torch.tanh(layer(torch.softmax(x @ x.transpose(1, 2) / 4 + bias, -1) @ x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedded": lambda: Chain(Embedded),
    "behind": lambda: Chain(Behind),
    "added": lambda: Chain(Added),
    "joined": lambda: Chain(Joined),
    "biased": Biased,
}
STAGE_BY_STAGE = """
mesh gpu = x: 1
place [pass=*] on gpu
split batch into 4 as mb
order on gpu:
    for s in range(4):
        repeat 4: [stage=s, pass=F, mb=next]
    for s in reversed(range(4)):
        repeat 4: {backward}
"""
SCRIPTS = {
    "B": STAGE_BY_STAGE.format(backward="[stage=s, pass=B, mb=next]"),
    "I, W": STAGE_BY_STAGE.format(backward="[stage=s, pass=I, mb=next], [stage=s, pass=W, mb=next]"),
    "zbv": "from std.pipeline import vee, zbv\nmesh gpu = pp: 2\nvee(gpu, 2)\nsplit batch into 4 as mb\nzbv(gpu, 2, 4)",
}


def square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def batch() -> Batch:
    return torch.randn(SAMPLES, LENGTH, WIDTH), torch.randn(SAMPLES, LENGTH, WIDTH)


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)  # type: ignore[arg-type]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sums in whose memory another value of the device lies, when they begin."""
    found: list[str] = []
    begin = DeviceValues._accumulate

    def accumulate(device: DeviceValues, total: ValueId, value: torch.Tensor, shared: bool) -> None:
        known = total in device.values
        begin(device, total, value, shared)
        memory = device.values[total].untyped_storage().data_ptr()
        for key, other in {} if known else dict(device.values).items():
            tensors = other.values() if isinstance(other, dict) else [other]
            if key != total and any(
                isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() == memory for one in tensors
            ):
                found.append(f"{total} and {key}")

    monkeypatch.setattr(DeviceValues, "_accumulate", accumulate)
    return found


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_lies_in_the_memory_of_a_sum(
    name: str, script: str, compiles: bool, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiles:  # as workers do
        pieces = thread_job._pieces
        monkeypatch.setattr(thread_job, "_pieces", lambda plan, of: compiled_pieces(pieces(plan, of), plan.programs))
    torch.manual_seed(0)
    model = MODELS[name]()
    graph, captured = compiled(capture(MODELS[name], square, batch()), SCRIPTS[script])
    torch.manual_seed(0)
    with ThreadJob(lower(graph), captured, Training(MODELS[name], optimizer)) as job:
        eager = optimizer(model.parameters())
        for _ in range(3):
            inputs, targets = batch()
            eager.zero_grad()
            loss = square(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            eager.step()
            assert job.step((inputs, targets)).loss == pytest.approx(float(loss.detach()), rel=LIMIT)
        weights = job.weights()
    for key, parameter in model.named_parameters():
        assert relative(weights[key], parameter) <= LIMIT, key
    assert not watched
