"""Random numbers other than dropout (noise, stochastic depth, random masks) that do not depend on the schedule.

Operators that draw from a known distribution are replaced by functions of uniform numbers by position (keep.py): in the
traced program, and where the plain model runs to be compared with it. Other random operators are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piperlang.capture.trace.keep import uniform

_OFFSET = 1 << 20
"""Draws are numbered apart from dropouts."""
_NUMBER = "piper_draw"
_HALF = 2.0**-25
"""Half of the distance of two uniform numbers: a normal one needs numbers that are not 0."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Distribution:
    name: str
    parameters: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    """From the arguments of the operator."""


_UNIT = Distribution("uniform", lambda _: (0.0, 1.0))
_NORMAL = Distribution("normal", lambda _: (0.0, 1.0))
_KNOWN: dict[Any, Distribution] = {
    aten.rand.default: _UNIT,
    aten.rand_like.default: _UNIT,
    aten.uniform_.default: Distribution("uniform", lambda a: (a["from"], a["to"])),
    aten.randn.default: _NORMAL,
    aten.randn_like.default: _NORMAL,
    aten.normal_.default: Distribution("normal", lambda a: (a["mean"], a["std"])),
    aten.bernoulli.default: Distribution("bernoulli", lambda a: (a["self"],)),
    aten.bernoulli.p: Distribution("bernoulli", lambda a: (a["p"],)),
    aten.bernoulli_.float: Distribution("bernoulli", lambda a: (a["p"],)),
    aten.bernoulli_.Tensor: Distribution("bernoulli", lambda a: (a["p"],)),
    aten.exponential_.default: Distribution("exponential", lambda a: (a["lambd"],)),
    aten.uniform.default: Distribution("uniform", lambda a: (a["from"], a["to"])),
    aten.normal_functional.default: Distribution("normal", lambda a: (a["mean"], a["std"])),
    aten.exponential.default: Distribution("exponential", lambda a: (a["lambd"],)),
    aten.randint.default: Distribution("integer", lambda a: (0, a["high"])),
    aten.randint.low: Distribution("integer", lambda a: (a["low"], a["high"])),
}


def distribution_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """The distribution that an operator draws from, with its parameters; None if it is no known one, or if the call
    has a generator of its own."""
    known = _KNOWN.get(target)
    if known is None:
        return None
    schema = target._schema.arguments
    given = {one.name: one.default_value for one in schema}
    given |= dict(zip((one.name for one in schema), args, strict=False)) | dict(kwargs)
    return None if given.get("generator") is not None else (known.name, known.parameters(given))


def counter_draw(
    rng: torch.Tensor,
    operator: int,
    shape: Sequence[int],
    samples: int,
    dtype: torch.dtype,
    distribution: str,
    *parameters: Any,
) -> torch.Tensor:
    u = uniform(rng, _OFFSET + operator, shape, samples)
    first, last = parameters[0], parameters[-1]
    if distribution == "uniform":
        drawn = u * (last - first) + first
    elif distribution == "normal":
        drawn = torch.erfinv((u + _HALF) * 2.0 - 1.0) * (last * math.sqrt(2.0)) + first
    elif distribution == "bernoulli":
        drawn = u < first
    elif distribution == "exponential":
        drawn = torch.log1p(-u) / -first
    else:
        assert distribution == "integer"
        drawn = torch.floor(u.double() * (last - first)) + first
    found: torch.Tensor = drawn.to(dtype)
    return found


def number_draws(graph: fx.Graph) -> None:
    """In the order in which the model calls them, as eager runs count them."""
    drawing = [node for node in graph.nodes if distribution_of(node.target, node.args, node.kwargs) is not None]
    for number, node in enumerate(drawing):
        node.meta[_NUMBER] = number


def replace_draws(graph: fx.Graph, samples: int, place: Callable[[], fx.Node]) -> None:
    """`place`: the graph's `rng`, which is made when it is first needed."""
    for node in list(graph.nodes):
        if _NUMBER not in node.meta:
            continue
        found = distribution_of(node.target, node.args, node.kwargs)
        assert found is not None
        value, (distribution, parameters) = node.meta["val"], found
        with graph.inserting_before(node):
            arguments = (place(), node.meta[_NUMBER], list(value.shape), samples, value.dtype, distribution)
            drawn = graph.call_function(counter_draw, (*arguments, *parameters))
            drawn.meta = dict(node.meta)
            if node.target._schema.is_mutable:
                drawn = graph.call_function(aten.copy_.default, (node.args[0], drawn))
                drawn.meta = dict(node.meta)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
