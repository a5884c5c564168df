"""What a piece costs: floating-point operations and bytes moved, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    flops: int
    """Of matrix products, convolutions and attention, as torch counts them."""
    read_bytes: int
    written_bytes: int
    scratch_bytes: int = 0
    """Needed on the way, beyond what it reads and gives."""


def cost(module: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> Cost:
    counter = FlopCounterMode(display=False)
    watched = _Watched(module, inputs)
    with mode, counter, torch.no_grad():
        results = watched.run(*inputs)
    given = watched.storages(results)
    return Cost(int(counter.get_total_flops()), sum(map(size, inputs)), sum(map(size, results)), max(0, watched.most - sum(given.values())))


class _Watched(fx.Interpreter):
    """Runs a graph and sees how much of its own it holds at most; the generated code, too, lets go of a value after its last use."""

    def __init__(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        super().__init__(module)
        self.given: set[int] = set()
        self.given = set(self.storages(inputs))
        self.held: dict[fx.Node, dict[int, int]] = {}
        self.uses: dict[int, int] = {}
        self.now = self.most = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.held[n] = self.storages(result)
        for storage, length in self.held[n].items():
            self.now += length if not self.uses.get(storage) else 0
            self.uses[storage] = self.uses.get(storage, 0) + 1
        self.most = max(self.most, self.now)
        for done in self.user_to_last_uses.get(n, ()):
            for storage, length in self.held.pop(done, {}).items():
                self.uses[storage] -= 1
                self.now -= length if not self.uses[storage] else 0
        return result

    def storages(self, values: Any) -> dict[int, int]:
        """What values lie in, by identity, but for what was given."""
        found: dict[int, int] = {}
        for value in pytree.tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.given:
                    found[storage._cdata] = storage.nbytes()
        return found


def size(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(size, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    return sum(size(node.meta["val"]) for node in nodes)
