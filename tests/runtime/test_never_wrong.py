"""Eight kinds of models and habits that once trained to the end, silently wrong: each now trains as plain PyTorch does,
or is refused.

And the guard of every job: with everything that was built for these kinds switched off, it alone stops each that a
comparison of two calls can tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.program import capture
from piperlang.capture.trace import learning, observed, trace
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.plan.verify import check
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard import optimizer as guard_optimizer
from piperlang.runtime.guard import program as guard
from piperlang.runtime.guard.program import Verified, verify
from piperlang.runtime.optimizer import distributed
from piperlang.runtime.optimizer.optimize import Update
from piperlang.runtime.optimizer.user import UpdateScope
from tests.habits import HABITS
from tests.habits.habit import SAME, SUMMED, Layers, sgd, square, vectors
from tests.habits.plain import plain
from tests.habits.run import SCHEDULES, Runner, clean, is_expected, schedules
from tests.support.equivalence import compiled
from tests.support.often import one_in

KINDS = {
    "autograd function": "gradient reversal",
    "autograd function bound to a name": "function bound to a name: f = F.apply",
    "groups by shape": "groups by the number of dimensions: no decay for biases",
    "groups by position": "groups by position: a larger rate for the first layer",
    "buffer assigned": "counter by assignment: self.steps = self.steps + 1",
    "buffer in place": "counter by add_",
    "statistics": "BatchNorm that trains",
    "optimizer subclass": "a subclass of AdamW that clamps weights in its step",
    "frozen prefix": "no_grad around the first three stages",
    "random constructor": "random.random() in the constructor",
    "NumPy constructor": "numpy weights in the constructor",
    "tensor hook": "tensor hook that scales the gradient",
    "parameter hook": "parameter hook that scales the gradient",
    "module hook": "full backward hook that changes the input's gradient",
    "annealed coefficient": "a coefficient that is annealed in the forward",
}


@pytest.fixture(scope="module")
def threads() -> Iterator[Runner]:
    runner = Runner("threads")
    yield runner
    runner.close()


@pytest.fixture
def workers(cluster: Cluster) -> Iterator[Runner]:
    """On the workers that all tests share."""
    runner = Runner("ray")
    runner.cluster = cluster
    yield runner
    runner.cluster = None
    runner.close()


def outcomes(runner: Runner, kind: str, names: Sequence[str]) -> None:
    habit = HABITS[KINDS[kind]]
    with clean():
        reference = plain(habit)
    for schedule in (one for one in names if one in schedules(habit)):
        found = runner.run(habit, schedule, reference)
        assert is_expected(habit, schedule, found), (schedule, found)
        if found.kind == "refused":
            assert found.place or found.code == "P0601", found


@pytest.mark.parametrize("kind", one_in(5, KINDS))  # workers run them all
def test_kinds_in_threads(kind: str, threads: Runner) -> None:
    outcomes(threads, kind, ["ddp", "zero1", "zero3", "pp"])


@pytest.mark.parametrize("names", [["zero3", "pp"], pytest.param(["ddp", "zero1"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", one_in(2, [kind for kind, name in KINDS.items() if HABITS[name].expected in (SAME, SUMMED)])
)
def test_kinds_on_workers(kind: str, names: Sequence[str], workers: Runner) -> None:
    """What is refused is refused before any worker starts, whoever would run it."""
    outcomes(workers, kind, names)


def test_statistics_where_the_batch_is_whole(threads: Runner) -> None:
    habit = HABITS["BatchNorm that trains"]
    assert threads.run(habit, "pp-whole").kind == "same"


class Unseeded(Layers):
    """Drawn from a generator that nobody can seed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.layers[0].weight.add_(os.urandom(1)[0] / 256 + os.urandom(1)[0])


def test_workers_that_make_different_models(workers: Runner) -> None:
    program = capture(Unseeded, square, vectors())
    graph, captured = compiled(program, SCHEDULES["ddp"])
    with pytest.raises(PiperError) as found:
        Job(lower(graph), captured, Training(Unseeded, sgd, None, 0), timeout=30, cluster=workers._workers())
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0607"
    assert diagnostic.helps


def random_rate(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=int.from_bytes(os.urandom(6)) / 2**48)


class Drawn(torch.optim.lr_scheduler.LambdaLR):
    """Starts alike everywhere, and draws another rate for the second step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: int.from_bytes(os.urandom(6)) / 2**48 if step else 1.0)


class Halved(torch.optim.SGD):
    """Reads a number of its own in every step."""

    per_parameter = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.part = int.from_bytes(os.urandom(6)) / 2**48

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.part)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "what"),
    [
        (random_rate, None, "lr of weight layers.0.bias: 0."),
        (sgd, Drawn, "lr of weight layers.0.bias: 0."),
        (Halved, None, "attribute `part` of `Halved`: 0."),
    ],
)
@pytest.mark.parametrize("name", ["ddp", "pp"])
def test_workers_that_set_different_options(
    optimizer: Any, schedule: Any, what: str, name: str, workers: Runner
) -> None:
    """Every worker calls `optimizer` and `lr_schedule` itself."""
    graph, captured = compiled(capture(Layers, square, vectors()), SCHEDULES[name])
    training = Training(Layers, optimizer, schedule, 0)

    def train() -> None:
        job = Job(lower(graph), captured, training, timeout=30, cluster=workers._workers())
        job.step(vectors())

    with pytest.raises(PiperError) as found:
        train()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0607"
    assert f"devices 0 and 1 differ in {what}" in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.helps


class Clock(Layers):
    """Reads what no snapshot of Python objects can show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + time.perf_counter_ns() % 997))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_program_that_is_another_one_every_time() -> None:
    for _ in range(6):  # two readings are on a line with integer slope every sixth time
        with pytest.raises(PiperError) as found:
            capture(Clock, square, vectors()).cut()
        (diagnostic,) = found.value.diagnostics
        assert diagnostic.code == "P0808"
        assert "different operators every time" in diagnostic.message
        assert diagnostic.span is not None
        assert "perf_counter_ns" in diagnostic.span.source.text.splitlines()[diagnostic.span.first.line - 1]


class Sized(Layers):
    """Scales by a function of the batch size."""

    def __init__(self, scale: Callable[[int], Any]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale(x.shape[0]))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "scale", [lambda n: n**2, lambda n: n**2 - 5 * n, lambda n: 0.5**n, lambda n: n.bit_length(), lambda n: n > 8]
)
def test_a_program_that_depends_on_the_batch_size(scale: Callable[[int], Any]) -> None:
    """Two points always lie on a line: only a third size tells a square from it."""
    with pytest.raises(PiperError) as found:
        capture(lambda: Sized(scale), square, vectors()).cut()
    assert [diagnostic.code for diagnostic in found.value.diagnostics] == ["P0806"]


@pytest.mark.parametrize("scale", [lambda n: n, lambda n: 3 * n - 1, lambda n: 1 / n])
def test_numbers_that_grow_with_the_batch(scale: Callable[[int], Any]) -> None:
    assert capture(lambda: Sized(scale), square, vectors()).cut().chunks


# ---------------------------------------------------------------------------------------------------------- the guard


def guarded(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], Any] = sgd,
    schedule: str = "pp",
    loss: Callable[..., Any] = square,
) -> Verified:
    program = capture(model, loss, vectors())
    graph, captured = compiled(program, SCHEDULES[schedule])
    plan = lower(graph)
    check(plan)
    return verify(captured, plan, vectors(), Training(model, optimizer, None, 0))


@pytest.mark.slow  # every job of other tests passes it
def test_the_guard_lets_a_plain_model_pass() -> None:
    for schedule in ("ddp", "zero3", "pp"):
        found = guarded(Layers, schedule=schedule)
        assert not found.skipped
        assert found.difference < 1e-5


def every_special_case_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had thought of any of the kinds."""
    monkeypatch.setattr(trace, "recorded", lambda: nullcontext([]))
    monkeypatch.setattr(trace, "only_forward", nullcontext)
    monkeypatch.setattr(trace, "refuse_hooks", lambda model: None)
    monkeypatch.setattr(observed, "snapshot", lambda model, loss: {})
    monkeypatch.setattr(trace, "new_values", lambda values, names: {})
    monkeypatch.setattr(learning, "_behind", lambda loss: _Everything())
    for module in (distributed, guard_optimizer):
        monkeypatch.setattr(module, "scope_of", lambda optimizer, make: UpdateScope.ELEMENT)
    monkeypatch.setattr(guard_optimizer, "Optimizers", _OnParts)


class _Everything:
    """Contains all that requires a gradient: as if the loss depended on all of it."""

    def isdisjoint(self, edges: Sequence[object]) -> bool:
        return not edges


class _OnParts:
    """The user's optimizer made on each update's parts, flat as ZeRO has them."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        make_schedule: object,
        updates: Sequence[Update],
        masters: bool,
        updated: object,
    ) -> None:
        self.made = {}
        for update in updates:
            parameters = [nn.Parameter(part.now) for part in update.parts]
            self.made[update.device, update.key] = make(parameters), parameters

    def update(self, device: int, key: str, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        optimizer, parameters = self.made[device, key]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()

    def advance(self) -> None:
        pass

    def discard(self) -> None:
        pass


class Decaying(torch.optim.AdamW):
    """Does more than AdamW in its step: divides by the norm of what it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.div_(parameter.norm())


def by_ndim(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.5},
            {"params": [p for p in params if p.ndim < 2], "lr": 0.3},
        ],
        lr=0.1,
    )


def decaying(params: Any) -> torch.optim.Optimizer:
    return Decaying(params, lr=0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gradient reversal", "gradient"),
        ("function bound to a name: f = F.apply", "gradient"),
        ("counter by assignment: self.steps = self.steps + 1", "steps"),
        ("BatchNorm that trains", "buffer"),
        ("no_grad around the first three stages", "in only one of them"),
        ("tensor hook that scales the gradient", "gradient"),
        ("parameter hook that scales the gradient", "gradient"),
        ("full backward hook that changes the input's gradient", "gradient"),
        ("a coefficient that is annealed in the forward", ""),
        ("a global counter", ""),
    ],
)
def test_the_guard_alone_finds(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_special_case_off(monkeypatch)
    habit = HABITS[name]
    with pytest.raises(PiperError) as found, clean():
        guarded(habit.model, loss=habit.loss, schedule="pp-whole")
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0608"
    assert words in diagnostic.message


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [(by_ndim, "zero1"), (by_ndim, "zero3"), (decaying, "zero1"), (decaying, "zero3")]
)
def test_the_guard_alone_finds_optimizers(
    optimizer: Callable[[Any], Any], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_special_case_off(monkeypatch)
    with pytest.raises(PiperError) as found:
        guarded(Layers, optimizer, schedule)
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0608"
    assert "optimizer" in diagnostic.message


def test_a_mismatch_names_the_first_module_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reversal stands before layer 2: what follows it has the right gradients."""
    every_special_case_off(monkeypatch)
    with pytest.raises(PiperError) as found, clean():
        guarded(HABITS["gradient reversal"].model)
    (diagnostic,) = found.value.diagnostics
    assert any("layers.1 is the first" in note for note in diagnostic.notes), diagnostic.notes


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "free_bytes", lambda device: 1000)
    found = guarded(Layers)
    assert "not verified" in str(found)


# ------------------------------------------------------------------------------------------------------ counts of
# losses


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weighted mean, the weights a table in the code."""
    weight = torch.tensor([1.0, 2.0])[(target > 0).long()]
    return ((output - target).square() * weight).sum(), weight.sum()


def number_of_samples(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (output - target).square().sum(), torch.tensor(float(len(target)))


@pytest.mark.parametrize("loss", [weighted, number_of_samples])
@pytest.mark.parametrize("schedule", one_in(4, ["ddp", "zero3", "pp"]))
def test_counts_made_with_constants(loss: Callable[..., Any], schedule: str) -> None:
    assert guarded(Layers, schedule=schedule, loss=loss).difference < 1e-5
    batch = vectors()
    *_, count = capture(Layers, loss, batch).cut().layout.flatten(batch)
    assert float(count) == pytest.approx(float(loss(batch[1], batch[1])[1]))


def test_a_count_that_follows_the_size_of_a_batch_of_one() -> None:
    x, y = vectors()
    one = (x[:1], y[:1])
    assert capture(Layers, weighted, one).cut()
    with pytest.raises(PiperError, match="depends on the batch size"):
        capture(Layers, number_of_samples, one).cut().layout.flatten(one)
