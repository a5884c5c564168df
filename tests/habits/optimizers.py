"""Optimizers, parameter groups, learning-rate schedules and clipping."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.habits.habit import EITHER, REFUSED, WIDTH, Category, Layers, sgd

OPTIMIZERS = Category("optimizers", "Optimizers, groups and schedules")

# ------------------------------------------------------------------------------------------------------------ groups


@OPTIMIZERS.optimizer("groups by the number of dimensions: no decay for biases")
def by_ndim(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.1,
    )


@OPTIMIZERS.optimizer("groups by shape")
def by_shape(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in every if p.shape == (WIDTH,)], "lr": 0.5},
            {"params": [p for p in every if p.shape != (WIDTH,)]},
        ],
        lr=0.1,
    )


@OPTIMIZERS.optimizer("groups by the number of elements")
def by_numel(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in every if p.numel() > 10], "lr": 0.5},
            {"params": [p for p in every if p.numel() <= 10]},
        ],
        lr=0.1,
    )


@OPTIMIZERS.optimizer("groups by position: a larger rate for the first layer")
def by_position(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD([{"params": every[:2], "lr": 0.5}, {"params": every[2:]}], lr=0.1)


@OPTIMIZERS.optimizer("layer-wise decay of the rate by position")
def layer_wise(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.5 ** (i // 2)} for i, p in enumerate(every)], lr=0.1)


class Marked(Layers):
    """Parameters know their group by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.group = "head" if name.startswith("layers.3") else "body"  # type: ignore[attr-defined]


@OPTIMIZERS.optimizer("groups by an attribute of the parameters", model=Marked)
def by_attribute(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    head = [p for p in every if getattr(p, "group", None) == "head"]
    return torch.optim.SGD(
        [{"params": head, "lr": 0.5}, {"params": [p for p in every if getattr(p, "group", None) != "head"]}], lr=0.1
    )


@OPTIMIZERS.optimizer("groups by name: optimizer(named_params)")
def by_name(named_params: Any) -> torch.optim.Optimizer:
    every = list(named_params)
    head = [p for name, p in every if name.startswith("layers.3")]
    return torch.optim.SGD(
        [{"params": head, "lr": 0.5}, {"params": [p for name, p in every if not name.startswith("layers.3")]}], lr=0.1
    )


@OPTIMIZERS.optimizer("pairs of names and parameters given to the optimizer as they are")
def named(named_params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named_params, lr=0.1, momentum=0.9)


@OPTIMIZERS.optimizer("groups by module: optimizer(model)")
def by_module(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model.layers[3].parameters(), "lr": 0.5}, {"params": model.layers[:3].parameters()}], lr=0.1
    )


@OPTIMIZERS.optimizer("the optimizer freezes a layer of the model")
def freezes(model: Any) -> torch.optim.Optimizer:
    model.layers[0].requires_grad_(False)
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


MODELS: list[nn.Module] = []


class Known(Layers):
    """The optimizer looks parameters up by name, in the model made last."""

    def __init__(self) -> None:
        super().__init__()
        MODELS[:] = [self]


@OPTIMIZERS.optimizer("groups by name, from a model kept in a global", model=Known)
def by_global_name(params: Any) -> torch.optim.Optimizer:
    names = {id(p): name for name, p in MODELS[0].named_parameters()}
    every = list(params)
    head = [p for p in every if names.get(id(p), "").startswith("layers.3")]
    return torch.optim.SGD(
        [{"params": head, "lr": 0.5}, {"params": [p for p in every if not any(p is q for q in head)]}], lr=0.1
    )


@OPTIMIZERS.optimizer("parameters of the model itself, not those that are given", model=Known)
def not_given(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(MODELS[0].parameters(), lr=0.1)


@OPTIMIZERS.optimizer("a group with a rate of 0")
def rate_zero(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD(
        [{"params": [p for p in every if p.ndim < 2], "lr": 0.0}, {"params": [p for p in every if p.ndim >= 2]}], lr=0.1
    )


@OPTIMIZERS.optimizer("parameters left out, by their dimensions")
def left_out(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in params if p.ndim >= 2], lr=0.1)


@OPTIMIZERS.optimizer("parameters left out, by position")
def left_out_by_position(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[2:], lr=0.1)


@OPTIMIZERS.optimizer("a group added afterwards")
def added_group(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    found = torch.optim.SGD([p for p in every if p.ndim >= 2], lr=0.1)
    found.add_param_group({"params": [p for p in every if p.ndim < 2], "lr": 0.5})
    return found


@OPTIMIZERS.optimizer("a group that may be empty")
def empty_group(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    return torch.optim.SGD(
        [
            {"params": [p for p in every if p.ndim >= 2]},
            {"params": [p for p in every if p.ndim < 2], "lr": 0.5},
            {"params": [p for p in every if p.ndim > 9]},
        ],
        lr=0.1,
    )


@OPTIMIZERS.optimizer("params used as an iterator")
def as_iterator(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(iter(params), lr=0.1)


# --------------------------------------------------------------------------------------------------- torch's own


@OPTIMIZERS.optimizer("SGD with momentum")
def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@OPTIMIZERS.optimizer("SGD with Nesterov momentum and weight decay")
def nesterov(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)


@OPTIMIZERS.optimizer("SGD that maximizes")
def maximizes(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, maximize=True)


@OPTIMIZERS.optimizer("AdamW with amsgrad, foreach", limit=1e-4)
def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True)


@OPTIMIZERS.optimizer("fused AdamW", limit=1e-4)
def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


@OPTIMIZERS.optimizer("Adam with a tensor as rate", limit=1e-4)
def tensor_rate(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=torch.tensor(0.01))


@OPTIMIZERS.optimizer("RMSprop, centered", limit=1e-4)
def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, centered=True)


@OPTIMIZERS.optimizer("Adagrad", limit=1e-4)
def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.01)


@OPTIMIZERS.optimizer("Adafactor: rows and columns", EITHER, limit=1e-4)
def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.01)


class Matrices(Layers):
    """Muon wants matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))


@OPTIMIZERS.optimizer("Muon: whole matrices", EITHER, model=Matrices, limit=2e-2)
def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.01)


@OPTIMIZERS.optimizer("LBFGS: needs a closure", REFUSED)
def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=2)


class Unlearned(Layers):
    """A parameter whose gradient is zero, one that has none, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.zero, self.none, self.unread = (nn.Parameter(torch.ones(WIDTH)) for _ in range(3))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + (0.0 * self.zero + 0.1 * self.none.detach() if i == 1 else 0)


@OPTIMIZERS.optimizer("weight decay on parameters with a gradient of zero, and with none", model=Unlearned)
def decays(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.5)


# ----------------------------------------------------------------------------------------------------- of one's own


class Clamping(torch.optim.AdamW):
    """Does more in its step than its base: element by element, but nobody knows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


@OPTIMIZERS.optimizer("a subclass of AdamW that clamps weights in its step", EITHER, limit=1e-4)
def clamping(params: Any) -> torch.optim.Optimizer:
    return Clamping(params, lr=0.01)


class GlobalClip(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step()


@OPTIMIZERS.optimizer("a subclass of SGD that clips the global norm in its step", EITHER)
def global_clip(params: Any) -> torch.optim.Optimizer:
    return GlobalClip(params, lr=0.1)


class EachClip(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_((0.01 / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))
        return super().step()


@OPTIMIZERS.optimizer("a subclass of SGD that clips the norm of each parameter", EITHER)
def each_clip(params: Any) -> torch.optim.Optimizer:
    return EachClip(params, lr=0.1)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * (first * average + (1 - first) * parameter.grad).sign())
                average.lerp_(parameter.grad, 1 - second)


class ElementwiseLion(Lion):
    elementwise = True


@OPTIMIZERS.optimizer("an optimizer of one's own (Lion)", EITHER)
def lion(params: Any) -> torch.optim.Optimizer:
    return Lion(params)


@OPTIMIZERS.optimizer("an optimizer of one's own that says elementwise = True")
def elementwise_lion(params: Any) -> torch.optim.Optimizer:
    return ElementwiseLion(params)


class Scaling(torch.optim.Optimizer):
    """Writes into gradients, which are its own in plain training."""

    per_parameter = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5).add_(parameter, alpha=0.1)
                    parameter.sub_(parameter.grad, alpha=group["lr"])


@OPTIMIZERS.optimizer("an optimizer that writes into gradients", EITHER)
def scaling(params: Any) -> torch.optim.Optimizer:
    return Scaling(params)


class Added(Layers):
    """Two parameters are added up, and have one gradient; the gradient of a sum is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.full((WIDTH,), 0.5))
        self.scalars = nn.Parameter(torch.ones(3) / 3)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        return x * (self.one + self.other) + self.scalars.sum() if i == 1 else x


OPTIMIZERS.add("gradients that share memory", Added)
OPTIMIZERS.add("an optimizer that writes into gradients that share memory", Added, EITHER, optimizer=scaling)


@OPTIMIZERS.optimizer("weights are initialised where the optimizer is made", REFUSED)
def initialising(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    with torch.no_grad():
        for parameter in every:
            parameter.mul_(0.5)
    return sgd(every)


@OPTIMIZERS.optimizer("weights are initialised through `.data` where the optimizer is made", REFUSED)
def initialising_data(params: Any) -> torch.optim.Optimizer:
    every = list(params)
    every[0].data.mul_(0.5)
    return sgd(every)


class Lamb(torch.optim.Optimizer):
    """The norm of each parameter scales its step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.norm() / (parameter.grad.norm() + 1e-6) * parameter.grad)


@OPTIMIZERS.optimizer("a trust ratio for each parameter (LAMB)", EITHER)
def lamb(params: Any) -> torch.optim.Optimizer:
    return Lamb(params)


class GlobalRatio(torch.optim.Optimizer):
    """One scale for all parameters, from all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for parameter in every:
            parameter.sub_(0.1 * parameter.grad / norm)


@OPTIMIZERS.optimizer("an optimizer of one's own that divides by the norm of all gradients", EITHER)
def global_ratio(params: Any) -> torch.optim.Optimizer:
    return GlobalRatio(params)


class Centralized(torch.optim.SGD):
    """Gradients of matrices minus the mean of their rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        return super().step()


@OPTIMIZERS.optimizer("a subclass of SGD that centralizes gradients", EITHER)
def centralized(params: Any) -> torch.optim.Optimizer:
    return Centralized(params, lr=0.1)


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


@OPTIMIZERS.optimizer("noise in the step", REFUSED)
def langevin(params: Any) -> torch.optim.Optimizer:
    return Langevin(params, lr=0.1)


class EverySecond(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step() if self.calls % 2 == 0 else None


@OPTIMIZERS.optimizer("a step that updates every second time", EITHER)
def every_second(params: Any) -> torch.optim.Optimizer:
    return EverySecond(params, lr=0.1)


class Lookahead:
    """Wraps an optimizer and is none."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.calls = inner, inner.param_groups, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, old in zip(group["params"], slow, strict=True):
                    old.lerp_(parameter, 0.5)
                    parameter.copy_(old)


@OPTIMIZERS.optimizer("a wrapper that is no Optimizer (Lookahead)", REFUSED)
def lookahead(params: Any) -> Any:
    return Lookahead(sgd(params))


class Both:
    """Two optimizers behind one."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [group for one in inner for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.inner:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


@OPTIMIZERS.optimizer("two optimizers: Muon for matrices, AdamW for the rest", REFUSED, limit=2e-2)
def both(params: Any) -> Any:
    every = list(params)
    return Both(
        torch.optim.Muon([p for p in every if p.ndim == 2], lr=0.01),
        torch.optim.AdamW([p for p in every if p.ndim != 2], lr=0.01),
    )


class Average(torch.optim.SGD):
    """Keeps an average of the weights beside them; nobody reads it here."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.1)


@OPTIMIZERS.optimizer("an average of the weights kept by the optimizer", EITHER)
def average(params: Any) -> torch.optim.Optimizer:
    return Average(params, lr=0.1)


# --------------------------------------------------------------------------------------------------------- schedules

OPTIMIZERS.add("cosine schedule", lr_schedule=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4))
OPTIMIZERS.add(
    "one-cycle schedule, with momentum",
    optimizer=momentum,
    lr_schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=5),
)
OPTIMIZERS.add(
    "warm-up, then cosine (SequentialLR)",
    lr_schedule=lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        [1],
    ),
)
OPTIMIZERS.add(
    "LambdaLR, one function for all groups",
    lr_schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
)
OPTIMIZERS.add(
    "LambdaLR with a function for each group",
    optimizer=by_ndim,
    lr_schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step]),
)
OPTIMIZERS.add(
    "a group frozen later, by its rate",
    optimizer=by_ndim,
    lr_schedule=lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: float(step < 1)]),
)
OPTIMIZERS.add(
    "ReduceLROnPlateau: needs the loss",
    expected=REFUSED,
    lr_schedule=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0),
)
OPTIMIZERS.add(
    "cosine schedule with groups",
    optimizer=by_ndim,
    lr_schedule=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
)


class OwnSchedule:
    """Sets the rates itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.rates = [group["lr"] for group in copy.copy(optimizer.param_groups)]

    def step(self) -> None:
        self.steps += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate / (1 + self.steps)


OPTIMIZERS.add("a schedule of one's own", lr_schedule=OwnSchedule)
OPTIMIZERS.add("clipping with a small max_norm", max_norm=0.05)
OPTIMIZERS.add("clipping with a max_norm that is never reached", max_norm=1e6)
OPTIMIZERS.add("clipping, groups and a schedule", max_norm=0.05, optimizer=by_ndim, lr_schedule=OwnSchedule)


# ------------------------------------------------------------------------------------------------- several optimizers


def each_half(optimizers: Any) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]


@OPTIMIZERS.optimizer("two optimizers, each with a schedule", lr_schedule=each_half)
def two_optimizers(params: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


@OPTIMIZERS.optimizer("Muon for matrices, AdamW for the rest", EITHER)
def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@OPTIMIZERS.optimizer("two optimizers that train the same weights", REFUSED)
def overlapping_optimizers(params: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(params, lr=0.1), torch.optim.AdamW(params[:1], lr=0.01)]
