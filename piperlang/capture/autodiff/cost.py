"""The cost of a stage program: floating-point operations and memory, from shapes alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from piperlang.ir.model import Scratch


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_back(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back,
}
"""Of a CPU, which torch does not count: a model traced there would compute less than one that is traced on a GPU."""


@dataclass(frozen=True)
class Cost:
    flops: Mapping[str, int]
    """Floating-point operations of matrix products, convolutions and attention, as torch counts them, by the dtype that
    they are in."""
    read_bytes: int
    written_bytes: int
    scratch: tuple[Scratch, ...] = ()
    """At the points of the pass where it may be the most."""
    given: tuple[frozenset[int], ...] = ()
    """For each input, the numbers of the storages it uses; the same for outputs. Equal numbers mean the same
    storage."""
    gave: tuple[frozenset[int], ...] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each storage."""


def cost(
    module: fx.GraphModule,
    inputs: list[Any],
    mode: FakeTensorMode,
    ending: Collection[int] = (),
    gradients: Collection[int] = (),
) -> Cost:
    """`ending`: the inputs that nothing reads after this. `gradients`: the outputs that are gradients of weights."""
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    watched = _Watched(module, [value for i, value in enumerate(inputs) if i not in ending], counter)
    with mode, counter, torch.no_grad():
        results = watched.run(*inputs)
    of_weights = watched.storages([results[i] for i in gradients])
    scratch = watched.scratch(watched.storages((inputs, results)), of_weights)
    taken, gave = [storages(value) for value in inputs], [storages(value) for value in results]
    sizes = {storage: length for found in (*taken, *gave) for storage, length in found.items()}
    numbers = {storage: i for i, storage in enumerate(sizes)}
    numbered = [tuple(frozenset(numbers[storage] for storage in one) for one in side) for side in (taken, gave)]
    return Cost(
        watched.flops,
        sum(map(size, inputs)),
        sum(map(size, results)),
        scratch,
        numbered[0],
        numbered[1],
        {numbers[storage]: length for storage, length in sizes.items()},
    )


def storages(values: Any) -> dict[int, int]:
    """The storages of values, by identity, with their sizes in bytes."""
    return {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in pytree.tree_leaves(values)
        if isinstance(value, torch.Tensor)
    }


class _Watched(fx.Interpreter):
    """Runs a graph and records what it has when, and its FLOPs. Like the generated code, it frees a value after its
    last use."""

    def __init__(self, module: fx.GraphModule, others: list[Any], counter: FlopCounterMode) -> None:
        """`others`: inputs that are not freed."""
        super().__init__(module)
        self.counter = counter
        self.flops: dict[str, int] = {}
        self.given: set[int] = set()
        self.given = set(self.storages(others))
        self.held: dict[fx.Node, dict[int, int]] = {}
        self.uses: dict[int, int] = {}
        self.changes: list[tuple[int, int]] = []
        """The numbers of storages that are made, with their bytes, and that are freed, with their bytes less than 0."""
        self.numbers: dict[int, int] = {}
        """Of storages: the identity of one that is freed may be that of a later one."""

    def run_node(self, n: fx.Node) -> Any:
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        self._count(int(self.counter.get_total_flops() - before), result)
        self.held[n] = self.storages(result)
        for storage, length in self.held[n].items():
            if not self.uses.get(storage):
                self.numbers[storage] = len(self.changes)
                self.changes.append((self.numbers[storage], length))
            self.uses[storage] = self.uses.get(storage, 0) + 1
        for done in self.user_to_last_uses.get(n, ()):
            for storage, length in self.held.pop(done, {}).items():
                self.uses[storage] -= 1
                if not self.uses[storage]:
                    self.changes.append((self.numbers[storage], -length))
        return result

    def scratch(self, counted: Mapping[int, int], gradients: Mapping[int, int]) -> tuple[Scratch, ...]:
        """`counted`: storages of inputs and outputs, and `gradients`: those of gradients of weights among them."""
        of_gradients = {self.numbers[storage] for storage in gradients if storage in self.numbers}
        now = [
            -sum(length for storage, length in counted.items() if storage not in gradients),
            -sum(gradients.values()),
        ]
        points: set[Scratch] = set()
        for number, length in self.changes:
            now[number in of_gradients] += length
            if length > 0:
                points.add(Scratch(*now))
        # Those that another one does not exceed in both.
        found: list[Scratch] = []
        for one in sorted(points, reverse=True):
            if not found or one.gradients > found[-1].gradients:
                found.append(one)
        return tuple(found)

    def _count(self, flops: int, result: Any) -> None:
        """In the dtype of the result: that of operands, which may be quantized, is not that of their products."""
        dtypes = [value.dtype for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        dtype = next((dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), None)
        if flops and dtype is not None:
            name = str(dtype).removeprefix("torch.")
            self.flops[name] = self.flops.get(name, 0) + flops

    def storages(self, values: Any) -> dict[int, int]:
        """The storages of values, without those of inputs that stay."""
        return {storage: length for storage, length in storages(values).items() if storage not in self.given}


def size(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(size, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    return sum(size(node.meta["val"]) for node in nodes)
