"""Stage programs: the F, B, I and W graphs of a chunk, as values. Workers run them; what makes them (differentiate.py)
imports a compiler, which workers need not load.

Graphs call piperlang's own operators, which exist once their files have been imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import fx

from piperlang.capture.autodiff.cost import Cost
from piperlang.capture.batch.layout import BatchLayout
from piperlang.capture.trace import effects, functions, keep, routed, sums  # noqa: F401
from piperlang.capture.user.operators import operators_of_user
from piperlang.ir.model import Sharding, Slot


@dataclass(frozen=True)
class PassGraph:
    """One stage program (an F, B, I or W graph) that maps slots to slots."""

    module: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    cost: Cost
    compiled: Callable[[list[Any]], Sequence[Any]] | None = None
    """Runs it in place of the graph, with the same inputs."""

    @property
    def operators(self) -> frozenset[str]:
        """Users' own operators that it calls."""
        return frozenset(name for name, _ in operators_of_user(self.module.graph))

    def run(self, values: dict[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        return dict(zip(self.outputs, self.call([values[slot] for slot in self.inputs]), strict=True))

    def call(self, taken: list[Any]) -> Sequence[Any]:
        """Empties `taken`: what nobody else has is freed after its last use. Calls `forward` directly: a GraphModule
        called as a module prints its code when an operator raises, and loses the location."""
        function = freeing(self.module).forward if self.compiled is None else self.compiled
        return function(taken)

    def unsaved(self) -> PassGraph:
        """A forward that gives its outputs alone."""
        if self.module not in _unsaved:
            kept = [slot[0] == "output" for slot in self.outputs]
            graph = fx.Graph()
            copies: dict[fx.Node, fx.Node] = {}
            results: Any = graph.graph_copy(self.module.graph, copies)
            graph.output(tuple(compress(results, kept)))
            graph.eliminate_dead_code()
            slots, gave = tuple(compress(self.outputs, kept)), tuple(compress(self.cost.gave, kept))
            cost = replace(self.cost, gave=gave)
            _unsaved[self.module] = replace(
                self, module=fx.GraphModule(self.module, graph), outputs=slots, cost=cost, compiled=None
            )
        return _unsaved[self.module]


_unsaved: WeakKeyDictionary[fx.GraphModule, PassGraph] = WeakKeyDictionary()


class _Freeing(fx.graph.CodeGen):
    """Of a forward that is given a list, and empties it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **given: Any) -> str:
        names = [name.partition(":")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def forward(self, taken){maybe_return_annotation}:"]
        lines += [f"    {''.join(f'{name}, ' for name in names)} = taken"] if names else []
        return "\n".join([*lines, "    taken.clear()"])


_freeing: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()


def freeing(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, called with a list of its inputs, which it empties."""
    found = _freeing.get(module)
    if found is None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        graph.set_codegen(_Freeing())
        found = _freeing[module] = fx.GraphModule(module, graph)
    return found


@dataclass(frozen=True)
class PassGraphs:
    """All graphs of a chunk. I is None where no input requires a gradient, W where no weight does, B where neither
    does."""

    F: PassGraph
    B: PassGraph | None
    I: PassGraph | None
    W: PassGraph | None
    saved_bytes: int
    """Activations that F saves for the backward, without weights, their views and tensors of the batch."""
    kept_bytes: int
    """Residuals for the weight gradient, which I saves for W when the two run separately."""

    def reads_beyond(self, other: PassGraphs) -> frozenset[Slot]:
        """Inputs of the chunk that a backward pass reads here, and not there."""
        pairs = [(self.B, other.B), (self.I, other.I), (self.W, other.W)]
        more = (set(mine.inputs).difference(theirs.inputs) for mine, theirs in pairs if mine and theirs)
        return frozenset(slot for slots in more for slot in slots if slot[0] in ("weight", "batch", "input", "rng"))

    def saved(self) -> tuple[int, tuple[Slot, ...]]:
        """Of the activations saved for the backward: the bytes that nothing else keeps alive, and the inputs and
        outputs of F that they keep alive because they share their memory."""
        cost = self.F.cost
        mine = frozenset[int]().union(
            *(found for slot, found in zip(self.F.outputs, cost.gave, strict=True) if slot[0] == "saved")
        )
        others = [
            *zip(self.F.inputs, cost.given, strict=True),
            *((slot, found) for slot, found in zip(self.F.outputs, cost.gave, strict=True) if slot[0] != "saved"),
        ]
        apart = mine.difference(*(found for _, found in others))
        return sum(cost.sizes[storage] for storage in apart), tuple(
            slot for slot, found in others if slot[0] in ("input", "output") and found & mine
        )


class TracedModel(Protocol):
    """What an executor needs of a model that is cut into chunks."""

    @property
    def layout(self) -> BatchLayout: ...

    @property
    def constants(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def unsaved(self) -> frozenset[str]: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]: ...

    def check_state(self) -> None: ...

    def pass_graphs(self, chunk: int, samples: int, sharding: Sharding = ((), ())) -> PassGraphs: ...
