"""Seeds all generators that model code commonly uses: torch, `random` and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch

from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import error


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


GeneratorStates: TypeAlias = tuple[torch.Tensor, Any, Any]
"""Of torch, `random` and NumPy."""


def generator_states() -> GeneratorStates:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generator_states(states: GeneratorStates) -> None:
    of_torch, python, numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(python)
    np.random.set_state(numpy)


def same_states(one: GeneratorStates, other: GeneratorStates) -> bool:
    (of_torch, python, numpy), (of_torch_later, python_later, numpy_later) = one, other
    return (
        torch.equal(of_torch, of_torch_later)
        and python == python_later
        and all(np.array_equal(a, b) for a, b in zip(numpy, numpy_later, strict=True))
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators are seeded inside; their states are restored afterwards."""
    with restored():
        seed_all(seed)
        yield


@contextmanager
def seeding_seen(seen: Callable[[], None]) -> Iterator[None]:
    """Calls `seen` if torch's generator is seeded inside, or given a state."""
    names = [(place, name) for place in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
    kept = [getattr(place, name) for place, name in names]
    with restored():
        torch.manual_seed(_UNUSUAL)
        for (place, name), function in zip(names, kept, strict=True):
            setattr(place, name, _told(function, seen))
        try:
            yield
        finally:
            for (place, name), function in zip(names, kept, strict=True):
                setattr(place, name, function)
        if torch.initial_seed() != _UNUSUAL:  # by a function that was imported by its name
            seen()


_UNUSUAL = 0x5EED_0F_F0C5
"""A seed that nobody uses."""


def _told(function: Callable[..., Any], seen: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        seen()
        return function(*args, **kwargs)

    return called


@contextmanager
def generators_left_alone(on_step: Callable[..., Any]) -> Iterator[None]:
    """Refuses an `on_step` that draws random numbers where workers load the batches: in a plain loop, `data` would draw
    the numbers that follow."""
    before = generator_states()
    yield
    if not same_states(before, generator_states()):
        raise error(
            "P0801",
            "`on_step` uses the global generators of random numbers, and `data` is called in other processes",
            line_of_function(on_step),
            help="give it a generator of its own (`torch.Generator()`), or load batches in the driver: `--data driver`",
        )


@contextmanager
def restored() -> Iterator[None]:
    """The states of the generators are restored afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
