"""Optimizers, parameter groups and learning rate schedules under a schedule do what they do in plain PyTorch, or are
refused."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model, shipped
from piperlang.cli.main import main
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.optimizer.optimize import Optimizers
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.equivalence import compiled, relative
from tests.support.often import one_in
from tests.support.optimizer_jobs import (
    SCRIPTS,
    STEPS,
    WIDTH,
    Make,
    Rates,
    assert_equal,
    assert_same,
    batch,
    net,
    plain,
    scheduled,
    simulated,
    threads,
    workers,
)

# ------------------------------------------------------------------------------------------------------------- groups

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "momentum": partial(optim.SGD, momentum=0.9, dampening=0.1),
    "nesterov": partial(optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    "fused sgd": partial(optim.SGD, momentum=0.9, fused=True),
    "maximize": partial(optim.SGD, maximize=True),
    "adam": optim.Adam,
    "amsgrad": partial(optim.Adam, amsgrad=True, foreach=True),
    "fused adam": partial(optim.Adam, fused=True),
    "tensor rate": optim.Adam,
    "adamw": optim.AdamW,
    "adamax": optim.Adamax,
    "nadam": partial(optim.NAdam, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "adagrad": partial(optim.Adagrad, initial_accumulator_value=0.3, lr_decay=0.1),
    "fused adagrad": partial(optim.Adagrad, initial_accumulator_value=0.3, fused=True),
    "adadelta": optim.Adadelta,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "rprop": optim.Rprop,
    "asgd": partial(optim.ASGD, t0=1),
}


def two(name: str, first: list[nn.Parameter], second: list[nn.Parameter]) -> optim.Optimizer:
    """An optimizer with two groups that differ in all that their class has."""
    rates = (
        [torch.tensor(rate, dtype=torch.float64) for rate in (0.02, 0.003)] if name == "tensor rate" else [0.02, 0.003]
    )
    groups = [{"params": first, "lr": rates[0], "weight_decay": 0.1}, {"params": second, "lr": rates[1]}]
    if name == "rprop":
        del groups[0]["weight_decay"]
    return OPTIMIZERS[name](groups)


def by_shape(name: str, params: list[nn.Parameter]) -> optim.Optimizer:
    return two(name, [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1])


def by_position(name: str, params: list[nn.Parameter]) -> optim.Optimizer:
    return two(name, params[:1] + params[4:6], params[1:4] + params[6:])


def by_name(name: str, named_params: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    decayed = [p for n, p in named_params if n.endswith("weight") and "norm" not in n]
    return two(name, decayed, [p for n, p in named_params if not n.endswith("weight") or "norm" in n])


def by_module(name: str, model: nn.Module) -> optim.Optimizer:
    """A frozen layer is handed in, one bias is not."""
    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    ours = [p for n, p in model.named_parameters() if n != "last.bias"]
    return two(name, [p for p in ours if id(p) not in norms], [p for p in ours if id(p) in norms])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


CHOICES: dict[str, tuple[Any, Callable[[Any, nn.Module], optim.Optimizer]]] = {
    "shape": (by_shape, lambda name, model: by_shape(name, trained(model))),
    "position": (by_position, lambda name, model: by_position(name, trained(model))),
    "name": (
        by_name,
        lambda name, model: by_name(name, [(n, p) for n, p in model.named_parameters() if p.requires_grad]),
    ),
    "module": (by_module, by_module),
}


def same(script: str, name: str, choice: str, schedule: Rates = None) -> None:
    make, reference = CHOICES[choice]
    assert_same(script, partial(make, name), partial(reference, name), schedule)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("script", one_in(3, [name for name in SCRIPTS if name != "one"]))
def test_groups(script: str, choice: str) -> None:
    """Chosen by shape, by position, by name and by module: as plain PyTorch has them."""
    same(script, "adamw", choice)


@pytest.mark.parametrize("name", one_in(4, OPTIMIZERS))
def test_optimizers_of_torch(name: str) -> None:
    number = list(OPTIMIZERS).index(name)
    for i, script in enumerate(("ddp", "zero1", "zero3", "pp", "pp zero3")):
        same(script, name, tuple(CHOICES)[(number + i) % len(CHOICES)])
    same(("columns", "columns zero1")[number % 2], name, "shape")


@pytest.mark.parametrize(
    ("script", "name", "choice"),
    [("pp zero3", "adagrad", "name"), ("zero1", "nesterov", "shape"), ("pp", "amsgrad", "module")],
)
def test_groups_on_workers(cluster: Cluster, script: str, name: str, choice: str) -> None:
    make, reference = CHOICES[choice]
    rates = per_group if name == "adagrad" else one_cycle
    assert_equal(workers(cluster, script, partial(make, name), rates), plain(partial(reference, name), rates))


CALLS: list[int] = []


def counted(params: list[nn.Parameter]) -> optim.Optimizer:
    CALLS.append(len(params))
    return optim.AdamW(params)


@pytest.mark.parametrize("script", ["pp zero1", "ddp"])
def test_the_function_is_called_once_on_all_parameters(script: str) -> None:
    for train in (simulated, threads):
        CALLS.clear()
        train(script, counted, steps=1)
        assert [len(trained(net()))] == CALLS


class Sgd:
    def __call__(self, named_parameters: list[tuple[str, nn.Parameter]], rate: float = 0.1) -> optim.Optimizer:
        return optim.SGD([p for _, p in named_parameters], lr=rate)


def keyword(rate: float, model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=rate)


@pytest.mark.parametrize("make", [Sgd(), partial(Sgd(), rate=0.1), partial(keyword, 0.1), partial(optim.SGD, lr=0.1)])
def test_any_callable(make: Make) -> None:
    assert_equal(simulated("zero1", make), plain(lambda model: optim.SGD(trained(model), lr=0.1)))


def named(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.named_parameters(), lr=0.01)


def test_parameters_given_with_their_names() -> None:
    assert_same("pp zero1", named, named)


# ---------------------------------------------------------------------------------------------------------- schedules


def per_group(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: min(1.0, (step + 1) / 3)])


def one_cycle(optimizer: optim.Optimizer) -> Any:
    """Changes momentum, or betas, too."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.01], total_steps=8)


def sequence(optimizer: optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


RATES: dict[str, Callable[[Any], Any]] = {
    "lambda": per_group,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "sequence": sequence,
    "one cycle": one_cycle,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
}


@pytest.mark.parametrize("rates", one_in(3, RATES))
@pytest.mark.parametrize("name", ["momentum", "adamw", "tensor rate"])
@pytest.mark.parametrize("script", ["zero1", "pp"])
def test_learning_rate_schedules(script: str, name: str, rates: str) -> None:
    """As in plain PyTorch, and without torch's warning about the order of steps, which is right here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if rates == "sequence":  # it warns in plain PyTorch, too
            warnings.filterwarnings("ignore", message="The epoch parameter")
        same(script, name, "shape", RATES[rates])


class Warns(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float | torch.Tensor]:
        warnings.warn("a warning of the user's", stacklevel=1)
        return [0.1 for _ in self.optimizer.param_groups]


def test_other_warnings_are_shown() -> None:
    with pytest.warns(UserWarning, match="a warning of the user's"):
        simulated("ddp", optim.SGD, Warns, 1)


class Counting(optim.Optimizer):
    """Writes into its own groups, which a schedule must not undo."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] / group["k"] * p.grad


def test_options_that_the_optimizer_changes_itself() -> None:
    """And weights that it replaces, not changes."""
    for script in ("ddp", "zero3", "pp zero1"):
        assert_same(script, Counting, lambda model: Counting(trained(model)), RATES["cosine"])


# ---------------------------------------------------------------------------------------------------- what steps need


class Normed(optim.AdamW):
    """Scales gradients by the norm of all of them: passes for an AdamW, and is none."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for g in gradients:
            g.div_(norm)
        super().step()


class Halved(Normed):
    per_parameter = True


class Composed(optim.Optimizer):
    """Two optimizers in one, which no copy for some of the weights can have."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.inner = [
            optim.Adam([p for p in params if p.ndim > 1], lr=0.01),
            optim.SGD([p for p in params if p.ndim <= 1], lr=0.01),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


class ElementwiseComposed(Composed):
    elementwise = True


class Sam(optim.SGD):
    elementwise = True

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def clip(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)


def hooked(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.1)
    made.register_step_pre_hook(clip)
    return made


def replaced(params: Any) -> optim.Optimizer:
    made = optim.SGD(params, lr=0.1)
    made.step = lambda closure=None: None  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("script", ["one", "ddp"])
@pytest.mark.parametrize("make", [Normed, Composed, hooked])
def test_an_optimizer_that_looks_at_all_weights(script: str, make: Make) -> None:
    """Where every device has them all it steps once for all of them, however many updates there are."""
    assert_same(script, make, lambda model: make(trained(model)), RATES["cosine"])


def matrices(kind: Make, named_params: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    return kind([p for n, p in named_params if p.ndim == 2])


@pytest.mark.parametrize("script", ["ddp", "pp"])
@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon])
def test_an_optimizer_that_needs_whole_weights(script: str, kind: Any) -> None:
    assert_same(script, partial(matrices, kind), lambda model: kind([p for p in trained(model) if p.ndim == 2]))


def all_but(name: str, model: nn.Module) -> optim.Optimizer:
    return optim.Adafactor([p for n, p in model.named_parameters() if name not in n])


def test_only_weights_that_are_updated_must_be_whole() -> None:
    assert_same("columns", partial(all_but, "middle"), partial(all_but, "middle"))


REFUSED: dict[str, tuple[str, Make, tuple[str, ...]]] = {
    "subclass under ZeRO": (
        "zero1",
        Normed,
        ("Normed may read all", "`elementwise = True`", "`per_parameter = True`", "is sharded"),
    ),
    "subclass under a pipeline": (
        "pp",
        Normed,
        ("Normed may read all", "is not on device", "keep all weights unsharded on every device"),
    ),
    "declared per parameter": ("zero1", Halved, ("Halved needs unsharded weights", "is sharded", "AdamW")),
    "Adafactor": ("pp zero3", optim.Adafactor, ("Adafactor needs unsharded weights", "partition=weights")),
    "Muon": ("columns", partial(matrices, optim.Muon), ("Muon needs unsharded weights", "middle.weight is sharded")),
    "LBFGS": ("ddp", optim.LBFGS, ("LBFGS.step needs a closure",)),
    "SAM": ("ddp", Sam, ("Sam.step needs a closure",)),
    "SparseAdam": ("ddp", optim.SparseAdam, ("SparseAdam needs sparse gradients",)),
    "hooks": ("pp", hooked, ("step hooks of SGD",)),
    "step of the instance": ("one", replaced, ("replaced on the instance",)),
    "inner optimizers": ("pp", ElementwiseComposed, ("ElementwiseComposed cannot be copied", "references parameters")),
    "differentiable": ("one", partial(optim.SGD, differentiable=True), ("differentiable=True",)),
}


def test_hooks_of_all_optimizers() -> None:
    handle = register_optimizer_step_pre_hook(clip)
    try:
        with pytest.raises(PiperError, match="step hooks of SGD"):
            simulated("zero1", optim.SGD, steps=0)
        assert_same("ddp", partial(optim.SGD, lr=0.1), lambda model: optim.SGD(trained(model), lr=0.1))
    finally:
        handle.remove()


def said(problem: PiperError) -> str:
    (diagnostic,) = problem.diagnostics
    return " ".join((diagnostic.message, *diagnostic.notes, *diagnostic.helps))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(case: str) -> None:
    script, make, words = REFUSED[case]
    for train in (simulated, threads):
        with pytest.raises(PiperError) as caught:
            train(script, make, steps=0)
        assert caught.value.diagnostics[0].code == "P0601"
        assert all(word in said(caught.value) for word in words), said(caught.value)


def test_a_refusal_points_at_the_directive() -> None:
    with pytest.raises(PiperError) as caught:
        simulated("zero1", optim.Adafactor, steps=0)
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert (span.source.name, span.first.line) == ("s.piper", 3)
    with pytest.raises(PiperError) as caught:
        threads("zero1", optim.Adafactor, steps=0)
    assert "sharded by s.piper:3" in said(caught.value)


def test_refused_on_workers(cluster: Cluster) -> None:
    with pytest.raises(PiperError) as caught:
        workers(cluster, "pp zero3", Normed, steps=0)
    assert caught.value.diagnostics[0].code == "P0601"
    assert "sharded by s.piper:5" in said(caught.value)
    assert_equal(
        workers(cluster, "ddp", Normed, RATES["cosine"]), plain(lambda model: Normed(trained(model)), RATES["cosine"])
    )


def foreign(params: list[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD([*params, nn.Parameter(torch.ones(5))], lr=0.1)


def plateau(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def short(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)


@pytest.mark.parametrize(
    ("make", "schedule", "words"),
    [
        (foreign, None, ("not a parameter of the model",)),
        (lambda params: params, None, ("`optimizer` returns a list with a Parameter",)),
        (optim.SGD, plateau, ("ReduceLROnPlateau.step needs `metrics`",)),
        (optim.SGD, lambda optimizer: None, ("`lr_schedule` returns NoneType",)),
        (partial(optim.SGD, momentum=0.9), short, ("raised an exception in `step`",)),
    ],
    ids=["foreign tensor", "no optimizer", "schedule with an argument", "no schedule", "schedule that ends"],
)
def test_mistakes_of_the_model_file(make: Make, schedule: Any, words: tuple[str, ...]) -> None:
    for train in (simulated, threads):
        with pytest.raises(PiperError) as caught:
            train("zero1", make, schedule)
        assert caught.value.diagnostics[0].code == "P0801"
        assert all(word in said(caught.value) for word in words), said(caught.value)
        if inspect.isfunction(make):
            assert caught.value.diagnostics[0].span is not None


def test_diagnostics_travel() -> None:
    with pytest.raises(PiperError) as caught:
        simulated("zero1", optim.Adafactor, steps=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.diagnostics[0].message == caught.value.diagnostics[0].message


# ------------------------------------------------------------------------------------------------------------- others


class Turned(nn.Module):
    """Experts as libraries have them: the gradient of a product comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unsqueeze(0).expand(3, -1, -1)
        return torch.bmm(rows, self.experts.transpose(1, 2)).mean(0)


class SeesStrides(optim.AdamW):
    """Fused kernels ask for this."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad.stride() == p.stride()
        return super().step(closure)


def test_gradients_have_the_strides_of_their_weights() -> None:
    given = torch.randn(8, 4), torch.randn(8, 5)
    graph, captured = compiled(capture(Turned, f.mse_loss, given), "split batch into 2 as mb\n")
    torch.manual_seed(0)
    plain = Turned()
    eager = optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    with ThreadJob(lower(graph), captured, Training(Turned, partial(SeesStrides, lr=0.1, fused=True))) as job:
        for _ in range(2):
            job.step(given)
            eager.zero_grad()
            f.mse_loss(plain(given[0]), given[1]).backward()  # type: ignore[no-untyped-call]
            eager.step()
        assert relative(job.weights()["experts"], plain.experts.detach()) < 1e-6


class Assigns(optim.Optimizer):
    """At every third step, a weight becomes one of its states: from then on both are one tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["slow"], state["steps"] = p.clone(), 0
            state["steps"] += 1
            p.sub_(0.3 * p.grad)
            if state["steps"] % 3 == 0:
                state["slow"].lerp_(p, 0.5)
                p.data = state["slow"]


def test_a_weight_that_becomes_one_of_its_states() -> None:
    given = torch.randn(8, 4), torch.randn(8, 5)
    graph, captured = compiled(capture(Turned, f.mse_loss, given), "split batch into 2 as mb\n")
    torch.manual_seed(0)
    plain = Turned()
    eager = Assigns(plain.parameters())
    with ThreadJob(lower(graph), captured, Training(Turned, Assigns)) as job:
        for _ in range(8):
            loss = f.mse_loss(plain(given[0]), given[1])
            assert job.step(given).loss == pytest.approx(float(loss.detach()), rel=1e-5)
            eager.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            eager.step()
        assert relative(job.weights()["experts"], plain.experts.detach()) < 1e-5


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output.float(), target)


def test_float32_masters() -> None:
    """State that is there before the first step is in float32, too."""
    x, y = (value[0].bfloat16() for value in (batch(0), batch(1)))
    make = partial(by_shape, "adagrad")
    graph, captured = compiled(capture(Half, loss, (x, y.float())), "mesh gpu = dp: 1\nplace [pass=*] on gpu\n")
    torch.manual_seed(0)
    model = Half()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    optimizer = make(list(masters.values()))
    with ThreadJob(lower(graph), captured, Training(Half, make, masters=True)) as job:
        for _ in range(STEPS):
            job.step((x, y.float()))
            model.zero_grad()
            loss(model(x), y.float()).backward()  # type: ignore[no-untyped-call]
            for name, p in model.named_parameters():
                assert p.grad is not None
                masters[name].grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(masters[name])
        weights = job.weights()
        assert {state["sum"].dtype for state in job.optimizers.states()} == {torch.float32}
        found = sorted(
            (p for one in job.optimizers.each for _, its in one.local.values() for p in its if p is not None),
            key=torch.Tensor.numel,
        )
    expected = sorted(masters.values(), key=torch.Tensor.numel)
    assert found[0].dtype == torch.float32
    # Gradients are in bfloat16, and kernels may round them differently; what a step of bfloat16 weights would lose is
    # much more.
    assert relative(found[0], expected[0]) <= 1e-3
    assert max(relative(weights[name], p) for name, p in model.named_parameters()) <= 2**-7


def test_the_whole_model_is_not_kept() -> None:
    graph, captured, _ = scheduled("zero3")
    optimizers: Optimizers = GraphInterpreter(graph, captured, net(), partial(by_shape, "adagrad")).shards.optimizers
    with torch._C.DisableTorchFunctionSubclass():  # what stands for parameters refuses to be looked at
        groups = [group for one in optimizers.user.each for group in one.param_groups]
        assert sum(p.numel() for group in groups for p in group["params"]) == 0
    with pytest.raises(PiperError, match="uses the state of the optimizer"):
        optimizers.user.each[0].state.items()
    held = sum(state["sum"].numel() for state in optimizers.states())
    assert held == sum(
        p.numel() for n, p in net().named_parameters() if p.requires_grad and n != "spare"
    )  # on four devices together


FILE = """
import torch
from torch import nn
from piperlang import annotate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        with annotate("stage", 0):
            x = nn.functional.dropout(torch.tanh(self.norm(self.a(x))), DROPOUT, self.training)
        with annotate("stage", 1):
            return self.b(x)


def model():
    return Net()


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def data():
    while True:
        x = torch.randn(8, 4)
        yield x, torch.sin(x)


def optimizer(named_params):
    matrices = [p for n, p in named_params if p.ndim > 1]
    biases = [p for n, p in named_params if n.endswith("bias")]  # norm.weight is in no group
    return torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}], lr=0.01)


def lr_schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1 / (step + 1)])
"""


@pytest.mark.parametrize("dropout", ["0.0", "0.5"])
def test_groups_in_a_model_file(dropout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--numerics`, against eager training and against the unscheduled graph; and a job whose function travels to
    workers."""
    model, script = tmp_path / "model.py", tmp_path / "s.piper"
    model.write_text(FILE.replace("DROPOUT", dropout))
    script.write_text("mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with states=sharded\n")
    assert main(["check", str(model), str(script), "--numerics", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    function = shipped(load_model(model), "optimizer")
    assert function is not None
    assert list(inspect.signature(pickle.loads(pickle.dumps(function))).parameters) == ["named_params"]
    assert (
        main(
            [str(model), str(script), "--steps", "2", "--executor", "inline", "--json", "--out", str(tmp_path / "run")]
        )
        == 0
    )
