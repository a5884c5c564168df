"""The gradient of a cross entropy, computed by the forward, in the place of the logits.

The loss is one number, so the gradient of the logits is this number's gradient times what the forward knows already:
softmax less one at the target. With the linear layer before it, the factor can wait until after the layer's matrix
products. A backward then never has logits and their gradient at once, which is the memory peak of a small model with
many words, and reads neither logits nor targets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, fx

from piperlang.capture.trace.early import EARLY

aten = torch.ops.aten
SUM = 2
ROWS = {
    aten.flatten.using_ints,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,
}
"""What may be between the layer and the loss: views, and another dtype."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums the cross entropy of `x @ weight.T + bias` over rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, dtype: torch.dtype
    ) -> Tensor:
        logits = f.linear(x, weight, bias)
        found = torch.log_softmax(logits.to(dtype), 1)
        wide = found.to(torch.promote_types(dtype, torch.float32))
        own = torch.arange(len(weight), device=x.device) == target.unsqueeze(1)
        back = torch.where((target != ignored).unsqueeze(1), wide.exp() - own.to(wide.dtype), 0.0)
        ctx.save_for_backward(x, weight, EARLY(back.to(logits.dtype)))
        return f.nll_loss(found, target, reduction="sum", ignore_index=ignored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, back = ctx.saved_tensors
        factor = grads[0].to(back.dtype)
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        return (
            (back @ weight) * factor if of_x else None,
            (back.t() @ x) * factor if of_weight else None,
            back.sum(0) * factor if of_bias else None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, dtype: torch.dtype
) -> Tensor:
    """`x`: features, in any number of rows, in the order of `target`."""
    found: Tensor = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight, bias, target, ignored, dtype)  # type: ignore[no-untyped-call]
    return found


def fuse_cross_entropy(graph: fx.Graph) -> None:
    """Of the operators of a chunk: linear layers of which nothing but a summed cross entropy reads the result."""
    for node in list(graph.nodes):
        layer = _layer(node)
        if layer is None:
            continue
        x, weight, *bias = layer.args
        scores, target = node.args[:2]
        settings = _settings(node)
        with graph.inserting_before(node):
            given = (x, weight, *(bias or [None]), target, settings["ignore_index"], scores.meta["val"].dtype)
            fused = graph.call_function(linear_cross_entropy, given)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()


def _settings(node: fx.Node) -> dict[str, Any]:
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = dict(zip(names, node.args[2:], strict=False)) | dict(node.kwargs)
    return {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0} | given


def _layer(node: fx.Node) -> fx.Node | None:
    """The linear layer of a plain cross entropy, if nothing else reads what is between them."""
    if node.op != "call_function" or node.target is not aten.cross_entropy_loss.default:
        return None
    settings, target = _settings(node), node.args[1].meta["val"]  # type: ignore[union-attr]
    plain = settings["weight"] is None and settings["reduction"] == SUM and not settings["label_smoothing"]
    found: Any = node.args[0]
    words = found.meta["val"].shape[-1]
    if not plain or target.dim() != 1 or target.is_floating_point() or found.meta["val"].dim() != 2:
        return None
    while found.op == "call_function" and found.target in ROWS and len(found.users) == 1:
        found = found.args[0]
    layer = found.op == "call_function" and found.target is aten.linear.default and len(found.users) == 1
    return found if layer and found.meta["val"].shape[-1] == words else None
