"""State that shows late: the first two calls are alike, the third is not. Whoever compares two calls sees nothing."""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.habits import late_helper
from tests.habits.habit import EITHER, REFUSED, Between, Category, Layers, sgd

LATE = Category("late", "State that shows in the third step")


def scale(call: int) -> float:
    """Of the n-th call of a model."""
    return 1.0 if call <= 2 else 0.25


@LATE.habit("an attribute that counts calls", REFUSED)
class Attribute(Between):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * scale(self.calls)


@LATE.habit("an attribute of a part of the model", REFUSED)
class OfPart(Between):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[2].calls += 1
        return x * scale(self.layers[2].calls)


@LATE.habit("an attribute that counts down and stays at 0", REFUSED)
class CountsDown(Between):
    def __init__(self) -> None:
        super().__init__()
        self.left = 3

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.left = max(0, self.left - 1)
        return x * (1.0 if self.left else 0.25)


@LATE.habit("a closure that counts (late)", REFUSED)
class Closure(Between):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * scale(self.count())


@LATE.habit("a forward replaced on the instance, with a count in its closure", REFUSED)
class Replaced(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.forward = _counted(super().forward)  # type: ignore[method-assign]


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def call(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return function(x) * scale(calls)

    return call


def counted_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that counts calls on the function that it makes."""

    @functools.wraps(function)
    def call(self: nn.Module, x: torch.Tensor) -> Any:
        call.calls += 1  # type: ignore[attr-defined]
        return function(self, x) * scale(call.calls)  # type: ignore[attr-defined]

    call.calls = 0  # type: ignore[attr-defined]
    return call


@LATE.habit("a decorator that counts on the function", REFUSED)
class Decorated(Between):
    def __init__(self) -> None:
        super().__init__()
        type(self).between.calls = 0  # type: ignore[attr-defined]

    @counted_method
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


@LATE.habit("a generator in an attribute", REFUSED)
class Generated(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scales = _scales()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scales)


def _scales() -> Iterator[float]:
    for call in itertools.count(1):
        yield scale(call)


@LATE.habit("itertools.chain in an attribute", REFUSED)
class Chained(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.chain([1.0, 1.0], itertools.repeat(0.25))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scales)


@LATE.habit("an iterator over a list in an attribute", REFUSED)
class Iterated(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scales = iter([1.0, 1.0] + [0.25] * 20)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scales)


@LATE.habit("a deque of the last shapes", REFUSED)
class Recent(Between):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[torch.Size] = deque(maxlen=3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.recent.append(x.shape)
        return x * scale(len(self.recent))


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@LATE.habit("an object with slots", REFUSED)
class InSlots(Between):
    def __init__(self) -> None:
        super().__init__()
        self.state = Slotted()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.state.calls += 1
        return x * scale(self.state.calls)


@LATE.habit("a bound method of a helper object that counts", REFUSED)
class HelperMethod(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scale = late_helper.Schedule().next

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale()


@LATE.habit("functools.partial over a list that grows", REFUSED)
class Partial(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scale = functools.partial(_grown, [])

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale()


def _grown(seen: list[int]) -> float:
    seen.append(0)
    return scale(len(seen))


COUNT = 0


@LATE.habit("a global number", REFUSED)
class GlobalNumber(Between):
    def __init__(self) -> None:
        super().__init__()
        global COUNT
        COUNT = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * scale(COUNT)


@LATE.habit("a global number of another module", REFUSED)
class OtherModule(Between):
    def __init__(self) -> None:
        super().__init__()
        late_helper.reset()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * late_helper.next_scale()


@LATE.habit("a function's attribute", REFUSED)
class FunctionAttribute(Between):
    def __init__(self) -> None:
        super().__init__()
        scale.calls = 0  # type: ignore[attr-defined]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        scale.calls += 1  # type: ignore[attr-defined]
        return x * scale(scale.calls)  # type: ignore[attr-defined]


@LATE.habit("a default argument that grows (late)", REFUSED)
class DefaultArgument(Between):
    def __init__(self) -> None:
        super().__init__()
        _remembered(clear=True)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * _remembered()


def _remembered(clear: bool = False, seen: list[int] = []) -> float:  # noqa: B006
    seen.append(0)
    if clear:
        seen.clear()
    return scale(len(seen))


LOCAL = threading.local()


@LATE.habit("threading.local", REFUSED)
class ThreadLocal(Between):
    def __init__(self) -> None:
        super().__init__()
        LOCAL.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return x * scale(LOCAL.calls)


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)


@LATE.habit("a context variable", REFUSED)
class ContextVariable(Between):
    def __init__(self) -> None:
        super().__init__()
        VARIABLE.set(0)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        VARIABLE.set(VARIABLE.get() + 1)
        return x * scale(VARIABLE.get())


@functools.cache
def _calls_of(key: int) -> list[int]:
    return []


@LATE.habit("a list in functools.cache", REFUSED)
class Cached(Between):
    def __init__(self) -> None:
        super().__init__()
        _calls_of.cache_clear()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        _calls_of(0).append(0)
        return x * scale(len(_calls_of(0)))


@LATE.habit("a property that counts its reads", REFUSED)
class Property(Between):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_reads"] = types.SimpleNamespace(number=0)

    @property
    def scale(self) -> float:
        self._reads.number += 1
        return scale(self._reads.number)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@LATE.habit("a method of the class that counts on the class", REFUSED)
class ClassMethod(Between):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).calls = 0

    @classmethod
    def count(cls) -> int:
        cls.calls += 1
        return cls.calls

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * scale(self.count())


@LATE.habit("a count in a submodule's own forward", REFUSED)
class InSubmodule(Between):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return x * scale(self.seen["calls"])


@LATE.habit("a count in a forward hook's closure", REFUSED)
class InHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output * scale(calls)

        self.layers[1].register_forward_hook(hook)


class Fading(Function):
    """The backward counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Fading.calls += 1
        return grads[0] * scale(Fading.calls)


@LATE.habit("a count in the backward of a function", REFUSED)
class InBackward(Between):
    def __init__(self) -> None:
        super().__init__()
        Fading.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Fading.apply(x)


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.rand_like(grads[0])


@LATE.habit("random numbers in the backward of a function", REFUSED)
class NoisyBackward(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Noisy.apply(x)


LOSS_CALLS = [0]


def fading_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    LOSS_CALLS[0] += 1
    return torch.nn.functional.mse_loss(output, target) * scale(LOSS_CALLS[0])


@LATE.habit("a global count in the loss", REFUSED, loss=fading_loss)
class InLoss(Layers):
    def __init__(self) -> None:
        super().__init__()
        LOSS_CALLS[0] = 0


@LATE.habit("a layer frozen by the forward in the third step", REFUSED)
class FrozenLate(Between):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.calls) == 3:
            self.layers[2].requires_grad_(False)
        return x


# ------------------------------------------------------------------------------------------ optimizers and schedules


class LateStep(torch.optim.SGD):
    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * scale(self.calls)
        return super().step()


@LATE.optimizer("an optimizer that changes its rate by its own count")
def late_step(params: Any) -> torch.optim.Optimizer:
    return LateStep(params)


class Schedule:
    """In the third step it does something."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1
        if self.calls == 2:
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class ChangesDecay(Schedule):
    def act(self) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.5


class ClampsWeights(Schedule):
    @torch.no_grad()
    def act(self) -> None:
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.clamp_(-0.1, 0.1)


class Freezes(Schedule):
    def act(self) -> None:
        for parameter in self.optimizer.param_groups[0]["params"][:2]:
            parameter.requires_grad_(False)


class ClearsState(Schedule):
    def act(self) -> None:
        self.optimizer.state.clear()


class DropsParameters(Schedule):
    def act(self) -> None:
        del self.optimizer.param_groups[0]["params"][0]


class AddsGroup(Schedule):
    def act(self) -> None:
        group = self.optimizer.param_groups[0]
        moved = [p for p in group["params"] if p.ndim == 1]
        group["params"] = [p for p in group["params"] if p.ndim > 1]
        self.optimizer.add_param_group({"params": moved, "lr": 0.01})


class ByNorm(Schedule):
    """Reads the weights."""

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / float(sum(p.detach().norm() for p in group["params"]))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


LATE.add("a schedule that changes the weight decay", lr_schedule=ChangesDecay)
LATE.add("a schedule that clamps the weights", Layers, REFUSED, lr_schedule=ClampsWeights)
LATE.add("a schedule that freezes parameters", Layers, REFUSED, lr_schedule=Freezes)
LATE.add("a schedule that clears the optimizer's state", Layers, REFUSED, optimizer=momentum, lr_schedule=ClearsState)
LATE.add("a schedule that drops a parameter", Layers, REFUSED, lr_schedule=DropsParameters)
LATE.add("a schedule that moves parameters to another group", Layers, REFUSED, lr_schedule=AddsGroup)
LATE.add("a schedule that reads the weights", Layers, REFUSED, lr_schedule=ByNorm)


def _switching(params: Any) -> torch.optim.Optimizer:
    """Its step hook acts in the third step."""
    found, calls = sgd(params), itertools.count(1)
    found.register_step_pre_hook(lambda optimizer, args, kwargs: _scaled(optimizer, scale(next(calls))))
    return found


def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None if parameter.grad is None else factor * parameter.grad


LATE.add("a step hook that acts in the third step", Layers, EITHER, optimizer=_switching)
