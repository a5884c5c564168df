"""Seeds all generators that model code commonly uses: torch, `random` and NumPy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators are seeded inside; their states are restored afterwards."""
    with restored():
        seed_all(seed)
        yield


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
