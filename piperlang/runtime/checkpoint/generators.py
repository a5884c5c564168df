"""States of the generators of torch, `random` and NumPy, as JSON."""

from __future__ import annotations

import torch

from piperlang.capture.user.seeding import GeneratorStates
from piperlang.runtime.checkpoint import tree


def written(states: GeneratorStates) -> tree.Json:
    of_torch, python, (kind, keys, *rest) = states
    return tree.written((of_torch, python, (kind, torch.from_numpy(keys), *rest)), lambda _, one: tree.inline(one))


def read(found: tree.Json) -> GeneratorStates:
    of_torch, python, (kind, keys, *rest) = tree.read(found, tree.from_inline)
    return of_torch, python, (kind, keys.numpy(), *rest)
