"""One program for any batch size, from two traces.

The model is traced at two batch sizes. Node by node the two graphs must be equal except for constants and shapes. A
number that differs is a linear function of the batch size (a dim of a view), proportional to it (a count as a float) or
inversely proportional (the factor of a mean), so it can be computed for any other size. Two traces thus give the graphs
of any size, and show which dims are batch dimensions.

Two points always lie on a line, even those of a square of the batch size or of two readings of a clock. Numbers that
are not proportional to the batch size are therefore predicted for a third size and checked against a third trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from piperlang.capture.batch.layout import WholeValues, size_of
from piperlang.capture.batch.mixing import same_number
from piperlang.capture.batch.walk import Walk
from piperlang.capture.batch.whole import edits
from piperlang.capture.trace.buffers import ancestors
from piperlang.capture.trace.random import module_of
from piperlang.capture.trace.trace import Traced, trace, written
from piperlang.capture.trace.untraceable import refuse_cond, refuse_unknown_shapes
from piperlang.capture.user.where import line_of_function, line_of_operator
from piperlang.diagnostics import Diagnostic, PiperError, error


@dataclass(frozen=True)
class Sizes:
    """The program traced at `small.samples` samples, and at twice as many."""

    small: Traced
    large: Traced
    twin: dict[fx.Node, fx.Node]
    at: Callable[[int], Traced]
    """Traces again: to distinguish a program that depends on the batch size from one that differs in every trace."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors of the given batch."""
    dtypes: tuple[torch.dtype, ...] = ()
    layout: pytree.TreeSpec | None = None
    """The structure of a batch."""
    samples: int = 0
    """The number of samples of the given batch. It may be 1, though nothing is traced with fewer than 2."""
    walk: Walk | None = None
    """How values depend on the samples; None where the two traces are two programs."""

    def whole(self, samples: int) -> WholeValues | None:
        """Computes the values of the whole batch, which has this many samples."""
        small = self.small
        if not small.whole:
            return None
        graph, root = fx.Graph(), nn.Module()
        known: dict[str, fx.Node] = {name: graph.placeholder(name) for name in small.given}
        wanted = ancestors(list(small.whole.values()))
        for i, (name, value) in enumerate(self._constants_at(samples, wanted).items()):
            root.register_buffer(f"constant_{i}", value)
            known[name] = graph.get_attr(f"constant_{i}")
        nodes = [node for node in small.graph.nodes if node in wanted]
        values: dict[fx.Node, fx.Node] = {}
        for place, result in small.whole.items():  # later ones may depend on earlier ones
            behind = ancestors([result])
            for node in nodes:
                if node not in behind or node in values:
                    continue
                if node.op == "placeholder":
                    values[node] = known[node.name]
                else:
                    values[node] = graph.call_function(node.target, *self.arguments(node, samples, values.__getitem__))
            known[place] = values[result]
        graph.output([known[place] for place in small.whole])
        divisors = tuple(i for i, place in enumerate(small.whole) if self._divides(place))
        return WholeValues(fx.GraphModule(root, graph), divisors, line_of_function(small.loss))

    def _divides(self, place: str) -> bool:
        (node,) = (node for node in self.small.graph.nodes if node.name == place)
        return any(user.target is torch.ops.aten.div.Tensor and user.args[1] is node for user in node.users)

    def _constants_at(self, samples: int, wanted: set[fx.Node]) -> Mapping[str, torch.Tensor]:
        """The tensors that the program makes of numbers. Numbers may depend on the batch size."""
        found = {
            node: (self.small.weights[node.name].fake, self.large.weights[self.twin[node].name].fake)
            for node in wanted
            if node.name in self.small.weights
        }
        traced = self.small
        if samples != traced.samples and not all(torch.equal(*pair) for pair in found.values()):
            if samples < 2:
                raise error(
                    "P0807",
                    "the loss reads a Python number that depends on the batch size",
                    line_of_function(traced.loss),
                    help=(
                        "count elements of the target: `torch.ones_like(target).sum()`, or use batches of two or"
                        " more samples"
                    ),
                )
            traced = self.at(samples)
        twin = dict(zip(self.small.graph.nodes, traced.graph.nodes, strict=True))
        return {node.name: traced.weights[twin[node].name].fake for node in found}

    def dims(self, node: fx.Node) -> tuple[tuple[int, int], ...]:
        """Every dim of a node's value as (a, b): its size is a * samples + b."""
        a, b = self.small.value(node), self.large.value(self.twin[node])
        return tuple(self._line(x, y, node) for x, y in zip(a.shape, b.shape, strict=True))

    def shape(self, node: fx.Node, samples: int) -> tuple[int, ...]:
        return tuple(a * samples + b for a, b in self.dims(node))

    def arguments(
        self, node: fx.Node, samples: int, substitute: Callable[[fx.Node], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node at this batch size, with other nodes substituted."""
        if samples == self.small.samples:
            return fx.node.map_arg((node.args, node.kwargs), substitute)
        twin = self.twin[node]
        mine, layout = pytree.tree_flatten((node.args, node.kwargs))
        other, _ = pytree.tree_flatten((twin.args, twin.kwargs))
        flat = [
            substitute(x) if isinstance(x, fx.Node) else self._at(x, y, samples, node)
            for x, y in zip(mine, other, strict=True)
        ]
        return pytree.tree_unflatten(flat, layout)  # type: ignore[no-any-return]

    def _at(self, x: Any, y: Any, samples: int, node: fx.Node) -> Any:
        if same_number(x, y):
            return x
        if type(x) is int and type(y) is int:
            a, b = self._line(x, y, node)
            return a * samples + b
        if isinstance(x, float) and isinstance(y, float) and x * self.small.samples == y * self.large.samples:
            return x * self.small.samples / samples
        if isinstance(x, float) and isinstance(y, float) and x * self.large.samples == y * self.small.samples:
            return x / self.small.samples * samples
        raise self._unclear(node)

    def _line(self, x: int, y: int, node: fx.Node) -> tuple[int, int]:
        slope = Fraction(y - x, self.small.samples)
        if slope.denominator != 1:
            raise self._unclear(node)
        return int(slope), x - int(slope) * self.small.samples

    def _unclear(self, node: fx.Node) -> Exception:
        return _differing(self.small, self.at, node)

    def verify(self) -> None:
        """Checks numbers that are neither equal nor proportional to the batch size against a third batch size."""
        nodes = list(self.small.graph.nodes)
        if all(self._proportional(node) for node in nodes):
            return
        third = self.at(3 * self.small.samples)
        for node, other in _twins(self.small, third, self.at).items():
            foretold = self.arguments(node, third.samples, lambda _: None)
            found = fx.node.map_arg((other.args, other.kwargs), lambda _: None)
            if repr(foretold) != repr(found) or any(
                self.shape(node, third.samples) != shape for shape in _shapes(other)
            ):
                raise self._unclear(node)

    def _proportional(self, node: fx.Node) -> bool:
        twin = self.twin[node]
        mine, other = (pytree.tree_leaves((n.args, n.kwargs, _shapes(n))) for n in (node, twin))
        return all(
            not isinstance(x, int) or x == y or x * self.large.samples == y * self.small.samples
            for x, y in zip(mine, other, strict=True)
        )


def trace_sizes(
    make_model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], batch: tuple[Any, Any], seed: int = 0
) -> Sizes:
    """Trace at the size of `batch` (at least two samples, so that no dimension looks like a broadcast) and at twice as
    many."""
    flat, layout = pytree.tree_flatten(tuple(batch))
    samples = size_of(flat)
    size = max(2, samples)

    def at(samples_traced: int) -> Traced:
        try:
            return trace(make_model, loss, _resized(batch, samples, samples_traced), seed)
        except PiperError as problem:
            raise PiperError(*(_at_another_size(d, samples_traced, samples) for d in problem.diagnostics)) from None

    small = at(size)
    refuse_unknown_shapes(small.graph, loss)
    refuse_cond(small.graph)
    _refuse_several_losses(small, loss)
    large = at(2 * size)
    shapes, dtypes = tuple(tuple(t.shape) for t in flat), tuple(t.dtype for t in flat)
    _twins(small, large, at)
    changes, small, large, walk = edits(small, large)
    _refuse_loss_without_weights(small, loss)

    def edited(samples_traced: int) -> Traced:
        traced = at(samples_traced)
        for edit in changes:
            traced = edit(traced)
        return traced

    twins = _twins(small, large, edited)
    sizes = Sizes(small, large, twins, edited, shapes, dtypes, layout, samples, walk)
    sizes.verify()
    return sizes


def _at_another_size(problem: Diagnostic, traced: int, given: int) -> Diagnostic:
    """An error that the model code raises at a batch size other than the user's, with a note that says so."""
    if traced == given or problem.code != "P0802":
        return problem
    note = (
        f"this happens with {traced} samples: a batch may be divided, so the model is also traced with batch sizes"
        f" other than {given}"
    )
    size = ("use `x.shape[0]`, or -1 in a view, instead of a fixed batch size",)
    return replace(
        problem, notes=(*problem.notes, note), helps=size if traced > 2 else problem.helps
    )  # traced with 2 samples instead of 1, so the cause may be another


def _refuse_several_losses(traced: Traced, loss: Callable[[Any, Any], Any]) -> None:
    value = traced.value(traced.result)
    if value.numel() != 1:
        raise error(
            "P0807",
            f"the loss has shape {list(value.shape)} instead of being a scalar",
            line_of_function(loss),
            help="return its mean, its sum, or (sum, count)",
        )


def _refuse_loss_without_weights(traced: Traced, loss: Callable[[Any, Any], Any]) -> None:
    if traced.result not in traced.learning:
        raise error(
            "P0807",
            "the loss does not depend on any weight that requires gradients",
            line_of_function(loss),
            help="look for `detach`, `torch.no_grad`, `argmax` and `requires_grad_(False)` in the loss and the model",
        )


def _twins(small: Traced, large: Traced, at: Callable[[int], Traced]) -> dict[fx.Node, fx.Node]:
    """Each node of a trace mapped to the node of another trace that runs the same operator on the same values."""
    first, second = list(small.graph.nodes), list(large.graph.nodes)
    twin = dict(zip(first, second, strict=False))
    for a, b in twin.items():
        if (a.op, str(a.target) if a.op == "call_function" else "") != (
            b.op,
            str(b.target) if b.op == "call_function" else "",
        ):
            raise _differing(
                small,
                at,
                b,
                f"with {large.samples} samples it runs {b.target}, with {small.samples} samples it runs {a.target}",
            )
        mine, other = (pytree.tree_flatten((n.args, n.kwargs)) for n in (a, b))
        if mine[1] != other[1] or [twin[x] if isinstance(x, fx.Node) else None for x in mine[0]] != [
            x if isinstance(x, fx.Node) else None for x in other[0]
        ]:
            raise _differing(
                small,
                at,
                b,
                f"with {large.samples} samples it runs {b.target} on different values than with {small.samples}",
            )
    if len(first) != len(second):
        raise _differing(small, at, first[-1])
    return twin


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    value = node.meta.get("val")
    return [tuple(value.shape)] if isinstance(value, torch.Tensor) else []


def _resized(batch: tuple[Any, Any], samples: int, size: int) -> tuple[Any, Any]:
    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.dim() or t.shape[0] != samples:
            return t
        return t[:1].expand(size, *t.shape[1:]) if size != samples else t  # only the shape is used

    resized: tuple[Any, Any] = pytree.tree_map(one, batch)
    return resized


def _differing(small: Traced, at: Callable[[int], Traced], node: fx.Node, what: str = "") -> Exception:
    """Why two traces differ: because of the batch size, or because the program is different in every trace."""
    if written(small.graph) != written(at(small.samples).graph):
        return error(
            "P0808",
            "the model runs different operators every time it is called",
            line_of_operator(node) or line_of_function(small.loss),
            notes=["two traces with the same batch differ", *([what] if what else []), module_of(node)],
            help=(
                "look for state that the code reads besides its weights and its inputs: a counter, a clock, a random"
                " number, a cache"
            ),
        )
    return error(
        "P0806",
        "the model depends on the batch size",
        line_of_operator(node) or line_of_function(small.loss),
        notes=[what or f"operator {node.target}", module_of(node)],
        help="let only shapes depend on the batch size",
    )
