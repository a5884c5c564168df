"""Stage programs compiled by Inductor, without Dynamo, which would look at every call again, and would hold what a pass
has saved until its end.

Private API, kept in this file, tried on torch 2.11 and 2.13: `torch._inductor.compile_fx.compile_fx`, and `steal_arg`,
by which a graph says that its first input is a list which may be emptied: compiled autograd passes saved activations in
this way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.plan.plan import StageProgram
from piperlang.runtime.device.grouped import with_groups

Call = Callable[[list[Any]], Sequence[Any]]
"""Empties the list of what it is given."""


def compiled(pieces: Sequence[PassGraph | None], programs: Sequence[StageProgram]) -> list[PassGraph | None]:
    """The stage programs compiled by Inductor, each distinct one once. Those with routed tokens are not compiled,
    because they would be compiled again for every number of tokens."""
    known: dict[int, PassGraph] = {}
    found: list[PassGraph | None] = []
    for piece, program in zip(pieces, programs, strict=True):
        if piece is None or program.routed:
            found.append(piece)
            continue
        if id(piece) not in known:
            known[id(piece)] = replace(piece, compiled=_Compiled(with_groups(piece.module)))
        found.append(known[id(piece)])
    return found


class _Compiled:
    """Compiled when it is called, for tensors as it is given them: the code knows their shapes and strides."""

    lock = threading.Lock()

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.known: dict[tuple[Any, ...], Call] = {}

    def __call__(self, taken: list[Any]) -> Sequence[Any]:
        looks = tuple((one.shape, one.stride(), one.dtype, one.device) for one in taken)
        function = self.known.get(looks)
        if function is None:
            with self.lock:
                function = self.known[looks] = _by_inductor(self.module, taken)
        return function(taken)


def _by_inductor(module: fx.GraphModule, taken: list[torch.Tensor]) -> Call:
    from torch._inductor.compile_fx import compile_fx  # imports a compiler, which CPU workers do not need

    with torch.no_grad():
        return compile_fx(_of_a_list(module), [list(taken)])  # type: ignore[list-item, return-value]


def _of_a_list(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with one input: a list of what were its inputs."""
    graph = fx.Graph()
    given = graph.placeholder("taken")
    given.meta["steal_arg"] = True
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.call_function(getitem, (given, len(copies)))
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    return fx.GraphModule(module, graph)
