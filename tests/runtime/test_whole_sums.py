"""Sums over the batch that a model computes with, and batch normalization, where devices divide the batch: the same as
plain PyTorch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

import piperlang
from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard.program import verify
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.equivalence import compiled
from tests.support.images import Images, labelled
from tests.support.often import one_in

SAMPLES, STEPS, LIMIT = 8, 3, 1e-8
T = torch.Tensor


class Exact(Images):
    def __init__(self, kind: Callable[..., nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__(kind)
        self.double()


class Synchronized(Exact):
    def __init__(self) -> None:
        super().__init__(nn.SyncBatchNorm)


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(6))
        self.double()

    def forward(self, x: T) -> T:
        with annotate("stage", 0):
            x = torch.tanh(self.first(x))
        with annotate("stage", 1):
            return self.second(self.between(x))  # type: ignore[no-any-return]

    def between(self, x: T) -> T:
        return x


class Late(Vectors):
    """Running statistics that are read after they have changed, by two names, of a norm that is called twice; the mean
    of some numbers is much larger than their differences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def between(self, x: T) -> T:
        variance = self.norm.running_var
        x = self.norm(self.norm(x * 0.1 + 1e7) * 2)
        seen = self.norm.num_batches_tracked
        return x + torch.relu(self.norm.running_mean - 2) / 1e6 + variance * seen  # type: ignore[operator]


class Centred(Vectors):
    """A moving average, which later values depend on, and statistics that are written out."""

    def between(self, x: T) -> T:
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        spread = torch.var(x, 0, correction=0) + x.std((0, 1)) + x.std(0, keepdim=True)
        return (x - self.centre) / (spread + 0.1)


def pictures(step: int) -> tuple[T, T]:
    torch.manual_seed(step)
    x, y = labelled(SAMPLES)
    return x.double(), y


def numbers(step: int) -> tuple[T, T]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.rand(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (5, 3))  # type: ignore


def dice(output: T, target: T) -> T:
    p = output.sigmoid()
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


def correlation(output: T, target: T) -> T:
    """Concordance: means, variances and a covariance over all samples."""
    x, y = output.flatten(), target.flatten()
    covariance = ((x - x.mean()) * (y - y.mean())).mean()
    return 1 - 2 * covariance / (x.var() + y.var() + (x.mean() - y.mean()) ** 2)


def decorrelated(output: T, target: T) -> T:
    """Barlow twins: the cross-correlation of two standardized batches."""
    a, b = ((z - z.mean(0)) / z.std(0) for z in (output, target + output))
    off = (a.T @ b / len(a)).square()
    return f.mse_loss(output, target) + 0.1 * off.sum() + off.diagonal().sub(1).square().sum()


def root(output: T, target: T) -> T:
    return f.mse_loss(output, target).sqrt() + (output - target).abs().sum()


class Case:
    def __init__(self, model: Callable[[], nn.Module], loss: Any, batch: Callable[[int], tuple[T, T]]) -> None:
        self.model, self.loss, self.batch = model, loss, batch


CASES = {
    "batch norm": Case(Exact, f.cross_entropy, pictures),
    "dice": Case(Vectors, dice, numbers),
    "statistics by hand": Case(Centred, f.mse_loss, numbers),
    "correlation": Case(Vectors, correlation, numbers),
    "statistics read late": Case(Late, f.mse_loss, numbers),
    "SyncBatchNorm": Case(Synchronized, f.cross_entropy, pictures),
    "decorrelated": Case(Vectors, decorrelated, numbers),
    "root and a sum": Case(Vectors, root, numbers),
}
STAGES = "place [stage=0] on gpu[pp=0]\nplace [stage=1:] on gpu[pp=1]\n"
SCRIPTS = {
    "ddp": "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\n",
    "pp zero2": f"mesh gpu = pp: 2, dp: 2\n{STAGES}replicate [pass=*] over gpu.dp with grads=sharded\n",
    "zero3": "mesh gpu = dp: 4\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n",
    "two axes": "mesh gpu = dp: 2, ep: 2\nplace [pass=*] on gpu\n"
    "replicate [pass=*] over gpu.dp, gpu.ep with states=sharded\n",
    "fewer devices": "mesh gpu = dp: 4\nplace [stage=0] on gpu\nplace [stage=1:] on gpu[dp=0:2]\n"
    "replicate [pass=*] over gpu.dp\n",
    "one device, then two": "mesh gpu = dp: 2\nplace [stage=0] on gpu[dp=0]\nplace [stage=1:] on gpu\n"
    "replicate [stage=1:] over gpu.dp\n",
    "two devices, then one": "mesh gpu = dp: 2\nplace [stage=0] on gpu\nplace [stage=1:] on gpu[dp=1]\n"
    "replicate [stage=0] over gpu.dp\n",
    "recomputed": "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\nrecompute [pass=*]\n",
}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.parameters() if isinstance(params, nn.Module) else params, lr=0.1, momentum=0.9)


def net(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


@cache
def program(name: str) -> Program:
    case = CASES[name]
    return capture(case.model, case.loss, case.batch(0))


@cache
def plain(name: str) -> dict[str, T]:
    """Weights and buffers after some steps of plain PyTorch."""
    case = CASES[name]
    model = net(case)
    made = optimizer(model)
    for step in range(STEPS):
        made.zero_grad()
        x, y = case.batch(step)
        case.loss(model(x), y).backward()
        made.step()
    return {key: value.detach() for key, value in model.state_dict().items()}


def assert_equal(got: dict[str, T], name: str) -> None:
    expected = {key: value for key, value in plain(name).items() if key != "centre" or name == "statistics by hand"}
    for key, value in expected.items():
        difference = (got[key].double() - value.double()).abs().max()
        assert difference <= LIMIT * value.double().abs().max(), key


@pytest.mark.parametrize("script", one_in(5, SCRIPTS))
@pytest.mark.parametrize("name", one_in(12, CASES))
def test_simulated(name: str, script: str) -> None:
    case = CASES[name]
    graph, captured = compiled(program(name), SCRIPTS[script])
    run = GraphInterpreter(graph, captured, net(case), optimizer)
    for step in range(STEPS):
        run.step(case.batch(step))
    assert_equal(run.weights(), name)


@pytest.mark.parametrize("script", one_in(4, SCRIPTS))
def test_threads(script: str) -> None:
    case = CASES["batch norm"]
    graph, captured = compiled(program("batch norm"), SCRIPTS[script])
    plan, training = lower(graph), Training(case.model, optimizer)
    assert verify(captured, plan, case.batch(0), training).difference < 1e-9
    with ThreadJob(plan, captured, training, 20.0, "float64") as job:
        for step in range(STEPS):
            job.step(case.batch(step))
        assert_equal(job.weights(), "batch norm")


@pytest.mark.parametrize("name", one_in(2, ["batch norm", "correlation"]))
def test_workers(name: str, cluster: Cluster) -> None:
    case = CASES[name]
    graph, captured = compiled(program(name), SCRIPTS["ddp"])
    training = Training(case.model, optimizer)
    with Job(lower(graph), captured, training, timeout=30, loss_dtype="float64", cluster=cluster) as job:
        for step in range(STEPS):
            job.step(case.batch(step))
        assert_equal(job.weights(), name)


@pytest.mark.parametrize("line", ["split batch into 2 as mb", "split [stage=1] into 2 as mb"])
def test_microbatches_are_refused(line: str) -> None:
    with pytest.raises(PiperError) as found:
        compiled(program("batch norm"), f"mesh gpu = dp: 1\nplace [pass=*] on gpu\n{line}\n")
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0805"
    assert "batch_norm needs the statistics of the whole batch" in diagnostic.message
    assert diagnostic.notes[0].startswith("in module ")
    assert any("replicate" in help for help in diagnostic.helps)


@pytest.mark.slow
def test_evaluation_mixes_no_samples(tmp_path: Path) -> None:
    """A batch that cannot be divided is padded, as it is for other models."""
    (tmp_path / "s.piper").write_text(SCRIPTS["ddp"])
    x, y = (one[:5] for one in pictures(1))
    model = net(CASES["batch norm"]).eval()
    with piperlang.compile(
        Exact, tmp_path / "s.piper", loss=f.cross_entropy, example=pictures(0), optimizer=optimizer, executor="inline"
    ) as trainer:
        assert abs(trainer.evaluate((x, y)) - f.cross_entropy(model(x), y).item()) < 1e-9


class Written(Vectors):
    """Statistics between writes to one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def between(self, x: T) -> T:
        y = torch.zeros(len(x), 6, dtype=torch.float64)
        y[:, :3] = x[:, :3]
        y[:, 3:] = self.norm(x[:, 3:])
        return y


def test_a_program_is_not_cut_between_writes() -> None:
    """Where the batch is whole, there is nothing to add up."""
    traced = capture(Written, f.mse_loss, numbers(0))
    graph, captured = compiled(traced, "mesh gpu = pp: 2\n" + STAGES)
    plan = lower(graph)
    assert verify(captured, plan, numbers(0), Training(Written, optimizer)).difference < 1e-9
    with pytest.raises(PiperError, match="batch_norm needs the statistics of the whole batch"):
        compiled(traced, SCRIPTS["ddp"])


class Drifting(torch.autograd.Function):
    """Mixes samples once their mean is large enough; its backward does not."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x - torch.relu(x.mean(0) - 3)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:  # type: ignore[override]
        return gradient


class Drifted(Vectors):
    def between(self, x: T) -> T:
        return Drifting.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("line", ["replicate [pass=*] over gpu.dp", "split batch into 2 as mb"])
def test_functions_that_mix_samples(line: str) -> None:
    with pytest.raises(PiperError, match="Drifting is applied to a mean over the samples"):
        compiled(capture(Drifted, f.mse_loss, numbers(0)), f"mesh gpu = dp: 2\nplace [pass=*] on gpu\n{line}\n")


class Biased(nn.Module):
    """The gradient of the first bias is zero, and computed as rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: T) -> T:
        return self.last(self.norm(self.first(x.to(self.first.weight.dtype)))).double()  # type: ignore[no-any-return]


class Half(Biased):
    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class Far(Biased):
    def forward(self, x: T) -> T:
        return super().forward(x + 100)


@pytest.mark.parametrize("model", [Half, Far])
def test_rounding_is_no_difference(model: type[nn.Module]) -> None:
    graph, captured = compiled(capture(model, f.mse_loss, numbers(0)), SCRIPTS["ddp"])
    assert not verify(captured, lower(graph), numbers(0), Training(model, optimizer)).skipped


class Scaled(Half):
    def forward(self, x: T) -> T:
        return super().forward(x) * 1.3


def test_rounding_explains_no_factor() -> None:
    graph, captured = compiled(capture(Half, f.mse_loss, numbers(0)), SCRIPTS["ddp"])
    with pytest.raises(PiperError) as found:
        verify(captured, lower(graph), numbers(0), Training(Scaled, optimizer))
    assert found.value.diagnostics[0].code == "P0608"
