"""How the samples of a batch pass through a program.

Two traces of one program, at two batch sizes, are compared node by node: a dimension whose size differs is a batch
dimension. A rule per operator (`sample_rules.py`, by name in `sample_table.py`) propagates the samples to the loss. An
operator without a rule is decomposed; one that cannot be decomposed is judged by its shapes and a trial on numbers.

Private API, kept in this file: `torch._decomp.decomposition_table` (tried on torch 2.11 and 2.13)."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from piperlang.capture.batch.mixing import (
    Along,
    Free,
    Mixed,
    Mixing,
    Operand,
    OperatorCall,
    Placed,
    Repair,
    State,
    growing,
)
from piperlang.capture.batch.sample_constants import finds_its_sample, loses_samples, place_of, stays_uniform
from piperlang.capture.batch.sample_rules import scaled, unknown
from piperlang.capture.batch.sample_table import KEPT, NUMBERED, PERMUTED, name_of, rule_of
from piperlang.capture.trace.functions import Applied, backward_graph
from piperlang.capture.trace.trace import Traced

States: TypeAlias = State | tuple[State, ...]
"""One state; for an operator with several outputs, one per output."""
_DEEPEST = 4
"""The depth of nested decompositions beyond which an operator is not decomposed further."""


def walk_samples(small: Traced, large: Traced, known: Known | None = None) -> Walk | None:
    """`small` and `large`: one program traced at two batch sizes, both at least 2. None where they are two programs.
    `known`: of an earlier walk over traces in the same modes."""
    assert large.samples > small.samples > 1
    assert large.samples % small.samples == 0
    if not _same(small.graph, large.graph):
        return None
    walk = Walk((small.mode, large.mode), small.samples, large.samples // small.samples, known=known or Known())
    walk.run(
        small.graph,
        large.graph,
        [_given(small, large, a, b, walk) for a, b in pairs(small.graph, large.graph) if a.op == "placeholder"],
    )
    return walk


def pairs(small: fx.Graph, large: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    return list(zip(small.nodes, large.nodes, strict=True))


def _same(small: fx.Graph, large: fx.Graph) -> bool:
    """The same operators in the same order, reading the same values."""
    if len(small.nodes) != len(large.nodes):
        return False
    partner = dict(pairs(small, large))
    alike = ((a.op, name_of(a.target)) == (b.op, name_of(b.target)) for a, b in partner.items())
    return all(alike) and all(
        [partner[node] for node in a.all_input_nodes] == b.all_input_nodes for a, b in partner.items()
    )


def _given(small: Traced, large: Traced, a: fx.Node, b: fx.Node, walk: Walk) -> State:
    """The state of a placeholder: tensors of the batch depend on data, weights do not. A constant that differs between
    the two traces depends on the batch size."""
    if a.name in small.weights:
        one, two = small.weights[a.name].fake, large.weights[b.name].fake
        same = isinstance(one, FakeTensor) or isinstance(two, FakeTensor) or torch.equal(one, two)
        return Free(0 if same else None)
    value = a.meta.get("val")
    if a.name not in small.given or not isinstance(value, torch.Tensor):
        return Free()
    grown = growing(value, b.meta["val"])
    if len(grown) > 1:
        return Mixing("a tensor of the batch has two dimensions that grow with the batch size", Repair.PAIRS)
    return Along(grown[0], value.shape[grown[0]] // walk.samples) if grown else Free()


@dataclass
class Known:
    """Decompositions that have been made, and what they do to samples. The layers of a model are alike, so most
    operators are decomposed once."""

    graphs: dict[Hashable, fx.Graph | None] = field(default_factory=dict)
    states: dict[Hashable, States] = field(default_factory=dict)


@dataclass
class Walk:
    """One pass over the graphs of both traces."""

    modes: tuple[FakeTensorMode, FakeTensorMode]
    samples: int
    times: int
    shown: str = ""
    """The operator that this graph is the decomposition of; empty for the whole program."""
    depth: int = 0
    states: dict[fx.Node, States] = field(default_factory=dict)
    causes: dict[int, fx.Node] = field(default_factory=dict)
    """The node that caused each Mixing, by the id of the Mixing."""
    known: Known = field(default_factory=Known)

    def run(self, small: fx.Graph, large: fx.Graph, given: Sequence[States]) -> None:
        places = iter(given)
        for a, b in pairs(small, large):
            if a.op == "placeholder":
                self.states[a] = self._blamed(next(places), a)
            elif a.op == "call_function":
                self.states[a] = self._after(a, b)
                self._write(a, b)
            elif a.op != "output":
                self.states[a] = Free(zero=_is_zero(a))

    def _after(self, a: fx.Node, b: fx.Node) -> States:
        if a.target is operator.getitem:
            whole = self.states[a.args[0]]  # type: ignore[index]
            return whole[a.args[1]] if isinstance(whole, tuple) else whole  # type: ignore[index]
        causes = [
            state for node in a.all_input_nodes for state in several(self.states[node]) if isinstance(state, Mixing)
        ]
        if causes:  # the first of them in the order of the program
            order = list(self.causes)
            return min(causes, key=lambda state: order.index(id(state)))
        try:
            found = self._ruled(a, b)
        except Mixing as problem:
            found = problem.with_traceback(None)
        return self._blamed(found, a)

    def _blamed(self, states: States, node: fx.Node) -> States:
        for state in several(states):
            if isinstance(state, Mixing):
                self.causes.setdefault(id(state), node)  # a write into a view gives it to others, too
        return states

    def _ruled(self, a: fx.Node, b: fx.Node) -> States:
        results = tuple((x, y) for x, y in zip(_tensors(a), _tensors(b), strict=True))
        name = name_of(a.target)
        call = OperatorCall(
            name,
            self.shown or name.strip("_"),
            a.target,
            self._operands(a, a, b),
            self._operands(b, a, b),
            results,
            self.samples,
            self.times,
        )
        if not call.data and name not in ("counter_dropout", "counter_draw"):
            if isinstance(a.target, Applied):
                self._check_backward(a, b, tuple(Free() for _ in results), call)
            return _free(call)
        if not results:
            raise Mixing(f"{call.shown} reads values of the batch as Python numbers", Repair.NUMBERS)
        rule = None if isinstance(a.target, Applied) else rule_of(a.target)  # the user's forward is walked
        if any(
            isinstance(o.state, Free) and not o.state.uniform and not finds_its_sample(call, o.state.place)
            for o in call.operands
        ):
            raise call.placed()
        states = rule(call) if rule else self._decomposed(a, b, call)
        if isinstance(a.target, Applied) and not any(isinstance(state, Mixing) for state in several(states)):
            self._check_backward(a, b, states, call)
        every = states if isinstance(states, tuple) else (states,) * len(results)
        checked = tuple(_checked(call, state, *result) for state, result in zip(every, results, strict=True))
        return checked if isinstance(a.meta["val"], tuple | list) else checked[0]

    def _operands(self, node: fx.Node, a: fx.Node, b: fx.Node) -> dict[str, Any]:
        """The arguments by name, tensors as operands."""
        operands = {}
        for own, one, two in zip(node.all_input_nodes, a.all_input_nodes, b.all_input_nodes, strict=True):
            state, value = self.states[one], one.meta.get("val")
            operands[own] = (
                Operand(state, value, two.meta["val"])
                if isinstance(value, torch.Tensor) and not isinstance(state, tuple)
                else None
            )
        return {name: _replaced(value, operands) for name, value in arguments_of(node).items()}

    # ----------------------------------------------------------------------------------------------- decomposition

    def _decomposed(self, a: fx.Node, b: fx.Node, call: OperatorCall) -> States:
        given = tuple(self.states[leaf] for leaf in pytree.tree_leaves((a.args, a.kwargs)) if isinstance(leaf, fx.Node))
        key = self.depth, call.shown, _signature(a), _signature(b), given
        found = self.known.states.get(key)
        if found is None:
            found = self._walked(a, b, call, given)
            if not any(isinstance(state, Mixing) for state in several(found)):  # a Mixing has a node for its cause
                self.known.states[key] = found
        return found

    def _walked(self, a: fx.Node, b: fx.Node, call: OperatorCall, given: Sequence[States]) -> States:
        """The states of an operator's results, found by a walk over its decomposition."""
        graphs = [self._graph(node, mode) for node, mode in zip((a, b), self.modes, strict=True)]
        if self.depth == _DEEPEST or graphs[0] is None or graphs[1] is None:
            return unknown(call)
        if not _same(graphs[0], graphs[1]):  # a loop over the samples
            raise call.through()
        inside = Walk(self.modes, self.samples, self.times, call.shown, self.depth + 1, known=self.known)
        inside.run(graphs[0], graphs[1], given)
        (output,) = (node for node in graphs[0].nodes if node.op == "output")
        found = pytree.tree_leaves(output.args)
        states = tuple(s for node in found if isinstance(node, fx.Node) for s in several(inside.states[node]))
        if any(isinstance(state, Placed) for state in states):  # grid_sample indexes samples by their position
            return unknown(call)
        return states

    def _graph(self, node: fx.Node, mode: FakeTensorMode) -> fx.Graph | None:
        """The operator decomposed into a graph of other operators; None if it has no decomposition."""
        key = _signature(node)
        if key in self.known.graphs:
            return self.known.graphs[key]
        flat, layout = pytree.tree_flatten((node.args, node.kwargs))
        tensors: list[torch.Tensor] = [leaf.meta["val"] for leaf in flat if isinstance(leaf, fx.Node)]

        def call(*given: torch.Tensor) -> Any:
            rest = iter(given)
            args, kwargs = pytree.tree_unflatten(
                [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in flat], layout
            )
            return node.target(*args, **kwargs)  # type: ignore[operator]

        try:
            with mode, torch.no_grad():
                graph: fx.Graph | None = make_fx(call, decomposition_table=_table())(*tensors).graph
        except Exception:  # an operator that cannot be decomposed has no known rule
            graph = None
        if graph is not None and any(inner.target == node.target for inner in graph.nodes):
            graph = None
        self.known.graphs[key] = graph
        return graph

    # ------------------------------------------------------------------------------ backwards of autograd Functions

    def _check_backward(self, a: fx.Node, b: fx.Node, states: States, call: OperatorCall) -> None:
        """A user-defined backward must process each sample independently, as autograd's own backward does where the
        forward does."""
        given = [self.states[leaf] for leaf in a.args if isinstance(leaf, fx.Node)]
        # The gradient of a value that does not depend on data, such as a weight, is a sum over the samples.
        coming = [Along(s.dim, s.inner) if isinstance(s, Along) else Mixed(0) for s in several(states)]
        graphs = [backward_graph(node, mode, _table()) for node, mode in zip((a, b), self.modes, strict=True)]
        if not _same(graphs[0], graphs[1]):
            raise Mixing(f"the backward of {call.shown} depends on the batch size", Repair.ALIKE)
        inside = Walk(self.modes, self.samples, self.times, call.shown, self.depth + 1, known=self.known)
        inside.run(graphs[0], graphs[1], [*given, *coming])
        (output,) = (node for node in graphs[0].nodes if node.op == "output")
        for state, gradient in zip(
            given, pytree.tree_leaves(output.args, is_leaf=lambda leaf: leaf is None), strict=True
        ):
            found = inside.states[gradient] if isinstance(gradient, fx.Node) else Free(zero=True)
            along = (
                isinstance(state, Along)
                and isinstance(found, Along | Free)
                and (isinstance(found, Free) or found.dim == state.dim)
            )
            summed = not isinstance(state, Along) and (found == Mixed(0) or (isinstance(found, Free) and found.zero))
            if not (along or summed):
                raise Mixing(f"the backward of {call.shown} mixes the gradients of samples", Repair.WITHIN)

    # ------------------------------------------------------------------------------------------------------ writes

    def _write(self, a: fx.Node, b: fx.Node) -> None:
        """A write into a view changes the tensor it views, and the other views of that tensor."""
        schema = getattr(a.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        new, twin = self.states[a], dict(pairs(a.graph, b.graph))
        part = not any(
            large == small * self.times
            for x, y in zip(_tensors(a), _tensors(b), strict=True)
            for small, large in zip(x.shape, y.shape, strict=True)
        )
        for node in [node for node in self.states if node is not a and _root(node) is _root(a)]:
            if not isinstance(new, tuple) and not isinstance(old := self.states[node], tuple):
                self.states[node] = self._blamed(
                    _merged(
                        old,
                        new,
                        growing(node.meta["val"], twin[node].meta["val"]),
                        node.meta["val"],
                        self.samples,
                        part,
                    ),
                    a,
                )


def _merged(old: State, new: State, grown: list[int], value: torch.Tensor, samples: int, part: bool) -> State:
    """The state of a value after a value of another state was written into it; `part`: into some of the samples
    only."""
    if isinstance(new, Mixing) or isinstance(old, Mixing):
        return new if isinstance(new, Mixing) else old
    if isinstance(old, Free) and isinstance(new, Free):
        return Free(
            old.degree if old.degree == new.degree else None,
            old.zero and new.zero,
            old.uniform and new.uniform and not (part and grown),
        )
    kept, other = (new, old) if isinstance(old, Free) else (old, new)
    if isinstance(kept, Mixed):
        fits = not grown and ((isinstance(other, Free) and (other.zero or kept.degree == -1)) or other == kept)
    else:
        fits = len(grown) == 1 and (
            other == Free(zero=True) or (not isinstance(other, Mixed) and other.degree == kept.degree)
        )
    if not fits:
        return Mixing("a part of a value that combines all samples is overwritten", Repair.ALONE)
    return (
        Along(grown[0], value.shape[grown[0]] // samples, kept.degree)
        if isinstance(old, Free) and isinstance(kept, Along)
        else kept
    )


def _root(node: fx.Node) -> fx.Node:
    """The tensor at the start of a chain of views and writes."""
    schema = getattr(node.target, "_schema", None)
    while (
        schema is not None
        and schema.arguments
        and schema.arguments[0].alias_info is not None
        and isinstance(node.args[0], fx.Node)
    ):
        node = node.args[0]
        schema = getattr(node.target, "_schema", None)
    return node


def _signature(node: fx.Node) -> Hashable:
    """What the decomposition of an operator depends on: its arguments, of tensors their shapes, strides and dtypes."""
    flat, layout = pytree.tree_flatten((node.args, node.kwargs))
    leaves = (leaf.meta["val"] if isinstance(leaf, fx.Node) else repr(leaf) for leaf in flat)
    return (
        node.target,
        layout,
        *((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves),
    )


@cache
def _table() -> dict[Any, Any]:
    return {target: function for target, function in decomposition_table.items() if rule_of(target) is None}


def several(states: States) -> tuple[State, ...]:
    return states if isinstance(states, tuple) else (states,)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments by name, with defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(node.args)} | node.kwargs
    found = {}
    for i, argument in enumerate(schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def _replaced(value: Any, operands: dict[fx.Node, Operand | None]) -> Any:
    if isinstance(value, fx.Node):
        return operands[value]
    return [_replaced(item, operands) for item in value] if isinstance(value, list | tuple) else value


def _free(call: OperatorCall) -> Free:
    """The state of an operator whose operands do not depend on data. If it reduces a dimension of the batch size, or
    creates a tensor from a number, the result may depend on the batch size."""
    number = call.small.get("fill_value", call.small.get("s"))
    zero = call.name in ("zeros", "new_zeros", "zeros_like") or (isinstance(number, int | float) and number == 0)
    states = [operand.state for operand in call.operands if isinstance(operand.state, Free)]
    given = [state.degree for state in states]
    grows = any(growing(*result) for result in call.results)
    if states and call.name in (*KEPT, *NUMBERED, *PERMUTED):
        return states[0] if grows or states[0].uniform else replace(states[0], degree=None, uniform=True, place=0)
    if (
        rule_of(call.target) is scaled
        and not grows
        and not call.small.get("rounding_mode")
        and all(s.uniform for s in states)
    ):
        other = states[1].degree if len(states) > 1 else call.degree("other")
        known = [power for power in (states[0].degree, other) if power is not None]
        return Free((known[0] - known[1] if call.name == "div" else sum(known)) if len(known) == 2 else None, zero)
    if "fill_value" in call.small and all(degree == 0 for degree in given):
        return Free(call.degree("fill_value"), zero)
    changes = (
        any(degree != 0 for degree in given)
        or loses_samples(call)
        or (not grows and (call.changed or not all(state.uniform for state in states)))
    )
    return Free(None if changes else 0, zero, not grows or stays_uniform(call), place_of(call) if grows else 0)


def _is_zero(node: fx.Node) -> bool:
    """Whether a node is the constant 0."""
    value = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and value.numel() == 1
        and not value.item()
    )


def _checked(call: OperatorCall, state: State, small: torch.Tensor, large: torch.Tensor) -> State:
    """Checks the state of a result against its shapes in both traces."""
    grown = growing(small, large)
    if isinstance(state, Mixed) and grown:
        return Mixing(f"{call.shown} broadcasts a {state} over the samples to every sample", Repair.ALONE)
    if not isinstance(state, Along):
        return state
    if len(grown) > 1:
        return call.against()
    fits = (
        grown == [state.dim]
        and large.shape[state.dim] == small.shape[state.dim] * call.times
        and small.shape[state.dim] % (call.samples * state.inner) == 0
    )
    return state if fits else Mixing(f"{call.shown} selects some of the samples", Repair.EACH)
