"""Dropout and other random numbers that do not depend on the schedule.

A mask is a hash of (seed and step, operator, global position of the element), not of a generator's state: however the
batch is divided and in whatever order stages run, every sample gets the same mask. The graph gets one more input,
`rng`: an int64 tensor of [seed and step mixed, index of the first sample here, position along each axis that shards the
weights]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piperlang.capture.trace.draws import number_draws, replace_draws
from piperlang.capture.trace.keep import keep, signed
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import error

PLACE = "rng"
_NUMBER = "piper_dropout"
DROPOUT = torch.ops.aten.dropout.default


def counter_dropout(x: torch.Tensor, rng: torch.Tensor, operator: int, p: float, samples: int) -> torch.Tensor:
    kept: torch.Tensor = x * keep(x, rng, operator, p, samples) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return kept


def mix(seed: int, step: int) -> int:
    """Seed and step mixed into one int64."""
    x = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return signed(x ^ (x >> 31))


def number_random(graph: fx.Graph) -> None:
    """Numbers dropouts and draws in the order in which the model calls them, as eager runs count them (eager.py). Must
    run before operators are removed from the graph."""
    number_draws(graph)
    for number, node in enumerate(node for node in graph.nodes if is_active(node.target, node.args)):
        node.meta[_NUMBER] = number


def is_active(target: object, args: Sequence[Any]) -> bool:
    """Whether a call is a dropout with an effect."""
    return target is DROPOUT and args[1] > 0.0 and bool(args[2])


def make_counted(graph: fx.Graph, samples: int, rng: torch.Tensor) -> bool:
    """Replace dropouts and draws from known distributions by counter-based ones; refuse other random operators. True if
    the graph now reads `rng`."""
    made: list[fx.Node] = []

    def place() -> fx.Node:
        if not made:
            first = next(node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(first):
                made.append(graph.placeholder(PLACE))
            made[0].meta["val"] = rng
        return made[0]

    replace_draws(graph, samples, place)
    for node in graph.nodes:
        _refuse(node)
    for node in [node for node in graph.nodes if is_active(node.target, node.args)]:
        x, p, _ = node.args
        if x.meta["val"].shape[0] % samples:
            raise error(
                "P0804",
                "the first dimension of a dropout is not the batch dimension",
                notes=[module_of(node)],
                help="apply dropout before the batch dimension is moved",
            )
        with graph.inserting_before(node):
            counted = graph.call_function(counter_dropout, (x, place(), node.meta[_NUMBER], p, samples))
        counted.meta = dict(node.meta)
        node.replace_all_uses_with(counted)
        graph.erase_node(node)
    return bool(made)


def _refuse(node: fx.Node) -> None:
    """Refuse every operator that draws random numbers, except supported dropouts."""
    if node.op != "call_function" or node.target is DROPOUT or not _draws(node):
        return
    name = str(getattr(node.target, "_schema").name).removeprefix("aten::")  # noqa: B009
    what = "attention with dropout inside" if "scaled_dot_product" in name else name
    raise error(
        "P0804",
        f"the random numbers of {what} would depend on the schedule",
        line_of_operator(node),
        notes=[module_of(node)],
        help=(
            "use nn.Dropout, or torch.rand, torch.randn or torch.bernoulli without a generator, whose numbers do not"
            " depend on the schedule; or draw the numbers in `data`"
        ),
    )


def _draws(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    name = schema.name.removeprefix("aten::")
    if "scaled_dot_product" in name:
        return _attention_dropout(node) > 0.0
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    if given.get("training", given.get("train", True)) is False or given.get("dropout") == 0.0:
        return False
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _attention_dropout(node: fx.Node) -> float:
    value = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def is_of_loss(node: fx.Node) -> bool:
    """Whether the loss runs an operator, and no module of the model."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1:] == [""]


def module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = [path for path, _ in stack.values()][-1] if stack else ""
    return f"in module {path.removeprefix('model').strip('.') or '(the model itself)'}"
