"""Operators with side effects, as ahead-of-time autograd represents them: `with_effects(token, operator, ...)`, ordered
by tokens.

The error checks of `torch.linalg` (whether a matrix could be solved) are such effects: they only raise. Each becomes a
value that passes through the check, so the check runs wherever the value is computed.

Private API, kept in this file, tried on torch 2.11 and 2.13: the form of these nodes, `aten._linalg_check_errors`, and
the registry of effects, which has that operator since 2.13. Before, autograd drops it, and the program continues with
the invalid result."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._higher_order_ops import effects
from torch._library.effects import EffectType

from piperlang.capture.trace.random import module_of
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import error

_CHECK = torch.ops.aten._linalg_check_errors.default
if effects._get_effect(_CHECK) is None:
    effects._register_effectful_op(_CHECK, EffectType.ORDERED)


@torch.library.custom_op(
    "piper::checked", mutates_args=(), schema="(Tensor value, Tensor info, str name, bool is_matrix) -> Tensor"
)
def checked(value: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    """Returns the value; raises if `info` reports an error."""
    _CHECK(info, name, is_matrix=is_matrix)
    return value.clone()


@checked.register_fake
def _(value: torch.Tensor, info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    return value.clone()


def without_effects(joint: fx.GraphModule) -> None:
    """Turns checks into values, and removes the tokens, which are the first inputs and outputs of a graph. Refuses
    other effects."""
    graph = joint.graph
    found = [node for node in graph.nodes if node.target is torch.ops.higher_order.with_effects]
    if not found:
        return
    for node in found:
        if node.args[1] is not _CHECK:
            raise error(
                "P0802",
                f"operator {node.args[1]} has side effects",
                line_of_operator(node),
                notes=[module_of(node)],
                help=(
                    "move it out of the model: chunks run on several devices, and a step runs each of them once per"
                    " microbatch"
                ),
            )
        _pass_through(graph, node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    tokens = {user for node in found for user in node.users if user.target is operator.getitem and user.args[1] == 0}
    output.args = ([value for value in output.args[0] if value not in tokens],)
    for node in reversed(found):
        for user in list(node.users):
            graph.erase_node(user)
        token = node.args[0]
        graph.erase_node(node)
        if isinstance(token, fx.Node) and token.op == "placeholder" and not token.users:
            graph.erase_node(token)
    joint.recompile()


def _pass_through(graph: fx.Graph, check: fx.Node) -> None:
    """Passes the other outputs of the operator whose status the check reads through the check."""
    info, name = check.args[2], check.args[3]
    assert isinstance(info, fx.Node)
    together = [node for node in info.all_input_nodes[0].users if node.target is operator.getitem and node is not info]
    places = {node: i for i, node in enumerate(graph.nodes)}
    for value in together:
        with graph.inserting_after(max(value, info, key=lambda node: places[node])):
            new = graph.call_function(
                torch.ops.piper.checked.default, (value, info, name, bool(check.kwargs.get("is_matrix", False)))
            )
        new.meta = {**check.meta, "val": value.meta["val"]}
        value.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)  # type: ignore[misc]
