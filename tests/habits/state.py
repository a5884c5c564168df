"""Python state: counters, caches, random numbers of Python and NumPy, branches."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import time

import numpy as np
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from tests.habits.habit import EITHER, REFUSED, SAME, WIDTH, Between, Category, Layers

STATE = Category("state", "Python state")

# ---------------------------------------------------------------------------------------------------------- counters


@STATE.habit("a count of calls used in the forward", REFUSED)
class Calls(Between):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.5 * self.calls)


@STATE.habit("a coefficient that is annealed in the forward", REFUSED)
class Annealed(Between):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.7
        return torch.tanh(x / self.temperature)


@STATE.habit("a list that grows", REFUSED)
class Grows(Between):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[0])
        return x / len(self.seen)


GLOBAL = {"calls": 0}


@STATE.habit("a global counter", REFUSED)
class GlobalCounter(Between):
    def __init__(self) -> None:
        super().__init__()
        GLOBAL["calls"] = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        GLOBAL["calls"] += 1
        return x * (1 + 0.5 * GLOBAL["calls"])


@STATE.habit("a counter on the class", REFUSED)
class ClassCounter(Between):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return x * (1 + 0.5 * type(self).calls)


@STATE.habit("a toggle that changes every other step", REFUSED)
class Toggle(Between):
    def __init__(self) -> None:
        super().__init__()
        self.even = False

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.even = not self.even
        return torch.relu(x) if self.even else torch.sigmoid(x)


@STATE.habit("a cycle of itertools", REFUSED)
class Cycle(Between):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([0.5, 1.0, 2.0])

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.scales)


@STATE.habit("a warm-up that ends after the first call", REFUSED)
class WarmUp(Between):
    def __init__(self) -> None:
        super().__init__()
        self.warm = True

    def between(self, x: torch.Tensor) -> torch.Tensor:
        scale, self.warm = (0.1 if self.warm else 1.0), False
        return x * scale


@STATE.habit("a warm-up over calls that is still on when traced", REFUSED)
class LongWarmUp(Between):
    """The first two calls are alike: whoever traces twice sees no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (0.1 if self.calls <= 2 else 1.0)


@STATE.habit("the last output kept and used in the next step", REFUSED)
class Memory(Between):
    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.last is None else x + 0.5 * self.last
        self.last = x.detach()
        return y


@STATE.habit("the hidden state of an RNN carried to the next step", REFUSED)
class Carried(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden: torch.Tensor | None = None

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i != 2:
            return super().stage(i, x)
        x = self.cell(x, self.hidden)
        self.hidden = x.detach()
        return x


@STATE.habit("layers frozen by the forward after the first call", REFUSED)
class FrozenLater(Between):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.layers[0].requires_grad_(False)
        return x


@STATE.habit("a closure that counts", REFUSED)
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
        return x * (1 + 0.5 * self.count())


@STATE.habit("a default argument that grows", REFUSED)
class DefaultArgument(Between):
    def __init__(self) -> None:
        super().__init__()
        _length([], True)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / _length()


def _length(more: list[int] | None = None, clear: bool = False, seen: list[int] = []) -> int:  # noqa: B006
    seen.append(0)
    if clear:
        seen.clear()
    return len(seen)


# -------------------------------------------------------------------------------------------------- harmless state


@STATE.habit("a counter only for logging")
class Logged(Between):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


@STATE.habit("a growing list only for logging")
class LoggedList(Between):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.shapes.append(x.shape)
        return x


@STATE.habit("a cached mask on the model")
class CachedMask(Between):
    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.5, x.shape[-1])
        return x * self.mask


@functools.cache
def cached_mask(size: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size)


@STATE.habit("a mask in functools.cache")
class CachedFunction(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * cached_mask(x.shape[-1])


@STATE.habit("a mask cached for the size of the batch")
class CachedBySize(Between):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, torch.Tensor] = {}

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in self.masks:
            self.masks[x.shape[0]] = torch.ones(x.shape[0], 1) * 1.5
        return x * self.masks[x.shape[0]]


@STATE.habit("rotary table that grows with the longest sequence seen")
class Rotary(Between):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > self.longest:
            self.longest = x.shape[-1]
            self.table = torch.cos(torch.arange(self.longest) / 10)
        return x * self.table[: x.shape[-1]]


@STATE.habit("self.training branches")
class Branches(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


@STATE.habit("an environment variable read in the forward")
class Environment(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if os.environ.get("HABIT_DOUBLE") else 0.5)


@STATE.habit("self.train() and self.eval() of a part in the forward")
class SwitchesMode(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].eval()
        y = x * (2.0 if self.layers[0].training else 0.5)
        self.layers[0].train()
        return y


# ------------------------------------------------------------------------------------------------- random numbers


@STATE.habit("random.random() in the constructor")
class PythonInit(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5 + random.random()

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@STATE.habit("random.seed() and random.random() in the constructor")
class PythonSeeded(PythonInit):
    def __init__(self) -> None:
        random.seed(3)
        super().__init__()


@STATE.habit("numpy weights in the constructor")
class NumpyInit(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = nn.Parameter(torch.from_numpy(np.random.randn(WIDTH, WIDTH).astype(np.float32)) / 4)


@STATE.habit("numpy weights of a seeded generator in the constructor")
class NumpySeeded(Layers):
    def __init__(self) -> None:
        super().__init__()
        made = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        self.layers[1].weight = nn.Parameter(torch.from_numpy(made) / 4)


@STATE.habit("random permutation from random.shuffle in the constructor")
class Shuffled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(WIDTH))
        random.shuffle(self.order)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x)[:, self.order] * torch.linspace(0.5, 1.5, WIDTH)


@STATE.habit("random.random() in the forward", REFUSED)
class PythonForward(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 + random.random())


@STATE.habit("layers skipped by random.random()", REFUSED)
class LayerDrop(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) if i != 1 or random.random() < 0.5 else x


@STATE.habit("numpy noise in the forward", REFUSED)
class NumpyForward(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(np.random.randn(WIDTH).astype(np.float32))


@STATE.habit("torch.rand noise in the forward", dropout=True)
class TorchNoise(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.rand(x.shape)


@STATE.habit("torch.randn_like noise in the forward", dropout=True)
class TorchNoiseLike(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x)


@STATE.habit("noise of a generator of the model's own", REFUSED)
class OwnGenerator(Between):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


@STATE.habit("torch.randint and torch.randperm of features in the forward", REFUSED)
class Permuted(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.randperm(WIDTH)]


@STATE.habit("noise by normal_() in place", dropout=True)
class InPlaceNoise(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.empty(x.shape).normal_()


@STATE.habit("noise of torch.distributions (rsample)", REFUSED)
class Distribution(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, 0.1).rsample()


@STATE.habit("stochastic depth by torch.rand for each sample", dropout=True)
class StochasticDepth(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand(x.shape[0], 1) < 0.8).to(x.dtype)
        return x + kept * super().stage(i, x)


@STATE.habit("torch.bernoulli masks, of numbers and of tensors", dropout=True)
class Masks(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.sigmoid(x.detach())) + torch.empty(x.shape[0], 1).bernoulli_(0.8)
        return x * kept * torch.randint(1, 3, (1, WIDTH))


@STATE.habit("dropout after torch.manual_seed in the forward", REFUSED)
class SeedsDropout(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.nn.functional.dropout(x, 0.25, self.training)


@STATE.habit("a seed inside fork_rng", REFUSED)
class SeedsFork(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + 0.1 * torch.rand(WIDTH)


@STATE.habit("noise for as many features as samples", EITHER, dropout=True, whole=SAME)
class AmbiguousNoise(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.rand(WIDTH)


@STATE.habit("numbers drawn in the constructor after weights", dropout=True)
class DrawnInInit(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.rand(4).tolist()
        self.table = [torch.rand(WIDTH) for _ in range(4)]

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scales[i] + self.table[i]


@STATE.habit("parameters in a Python list, too", REFUSED)
class ListedWeights(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [nn.Parameter(torch.randn(WIDTH)) for _ in range(4)]
        for i, row in enumerate(self.rows):
            self.register_parameter(f"row{i}", row)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + self.rows[i]


@STATE.habit("a copy of half precision, converted back, and a state dict loaded")
class Converted(Layers):
    def __init__(self) -> None:
        super().__init__()
        state = {name: torch.full_like(value, 0.1) for name, value in nn.Linear(WIDTH, WIDTH).state_dict().items()}
        self.layers[0].load_state_dict(state)
        self.layers = copy.deepcopy(self.layers).half().float()


@STATE.habit("torch.manual_seed in the forward", REFUSED)
class SeedsForward(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + 0.1 * torch.rand(WIDTH)


@STATE.habit("time.time() in the forward", REFUSED)
class Clock(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + time.time() % 1)


@STATE.habit("a random projection made in the constructor")
class Projection(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(WIDTH, WIDTH))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) @ self.projection if i == 1 else super().stage(i, x)


@STATE.habit("torch.manual_seed in the constructor")
class SeedsInit(Layers):
    def __init__(self) -> None:
        torch.manual_seed(17)
        super().__init__()


# ------------------------------------------------------------------------------------------- branches on values


@STATE.habit("a branch on the data", REFUSED)
class OnData(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@STATE.habit("a branch on a weight", REFUSED)
class OnWeight(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.layers[0].weight.norm() > 1 else x


@STATE.habit("a branch on a buffer's value", REFUSED)
class OnBuffer(Between):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("enabled", torch.tensor(True))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.enabled else x


@STATE.habit("an assertion on the data", REFUSED)
class Asserted(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(x).all()
        return x


@STATE.habit("item() for logging")
class Item(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.abs().mean().item()
        return x


@STATE.habit("a number from a tensor in the constructor")
class NumberInInit(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.linspace(0.5, 1.5, 4).tolist()

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scales[i]


@STATE.habit("a number from a weight in the constructor")
class NumberFromWeight(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 / float(self.layers[0].weight.detach().norm())

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scale


@STATE.habit("a loop whose length is the batch's size", REFUSED)
class LoopOverBatch(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(x[i]) for i in range(x.shape[0])])


@STATE.habit("a factor that is the batch's size", REFUSED, whole="same")
class BatchSize(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.shape[0]


@STATE.habit("a branch on the batch's size", whole="same")
class OnSize(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.shape[0] >= 8 else x


@STATE.habit("stages chosen by a dictionary of Python functions")
class Chosen(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        actions = {0: torch.tanh, 1: torch.relu, 2: torch.sigmoid, 3: lambda value: value}
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = actions[i](layer(x))
        return x
