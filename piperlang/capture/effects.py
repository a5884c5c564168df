"""Operators with side effects, as ahead-of-time autograd writes them: `with_effects(token, operator, ...)`, with tokens that order them.

Private API, kept in this file: the form of these nodes (tried on torch 2.11 and 2.13).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from piperlang.capture.random import module_of
from piperlang.capture.where import line_of_operator
from piperlang.diagnostics import error

_CHECKS = (torch.ops.aten._linalg_check_errors.default,)
"""Only raise: without them a matrix that cannot be solved gives values that are not finite."""


def without_effects(joint: fx.GraphModule) -> None:
    """Takes out what only checks, and the tokens, which come first among what a graph takes and gives. Refuses other effects."""
    graph = joint.graph
    found = [node for node in graph.nodes if node.target is torch.ops.higher_order.with_effects]
    if not found:
        return
    for node in found:
        if node.args[1] not in _CHECKS:
            raise error(
                "P0802", f"operator {node.args[1]} has side effects", line_of_operator(node), notes=[module_of(node)],
                help="do it outside of the model: chunks run on several devices, and a step runs them once for every microbatch",
            )  # fmt: skip
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
