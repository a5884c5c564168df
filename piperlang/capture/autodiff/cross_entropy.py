"""The gradient of a cross entropy, computed by the forward, in the place of the logits.

The loss is one number, so the gradient of the logits is this number's gradient times what the forward knows already:
softmax less one at the target. With the linear layer before it, the factor can wait until after the layer's matrix
products. A backward then never has logits and their gradient at once, which is the memory peak of a small model with
many words, and reads neither logits nor targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor, fx

from piperlang.capture.trace.early import EARLY
from piperlang.capture.trace.ratios import SUM, cross_entropy_settings

aten = torch.ops.aten
ROWS = {
    aten.flatten.using_ints,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,
}
"""What may be between the layer and the loss: views, and a dtype that has all numbers of the one before."""
_ALIGNED, _MANY = 128, 1024
"""Bytes, and from how many words on that counts."""


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
        # A mean divides by the number of rows, or by that of several parts of a batch: usually, 1 / `parts` of it is a
        # power of two, and the gradients of narrow dtypes are rounded once.
        ctx.parts = len(target) / 2 ** math.floor(math.log2(max(len(target), 1)))
        back = torch.where((target != ignored).unsqueeze(1), (wide.exp() - own.to(wide.dtype)) / ctx.parts, 0.0)
        ctx.save_for_backward(x, weight, EARLY(_aligned(back.to(logits.dtype))))
        return f.nll_loss(found, target, reduction="sum", ignore_index=ignored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, padded = ctx.saved_tensors
        back = padded[:, : len(weight)]
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        factor = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32)) * ctx.parts
        return (
            _times(back @ weight, factor) if of_x else None,
            _times(back.t() @ x, factor) if of_weight else None,
            _times(back.sum(0), factor) if of_bias else None,
            None,
            None,
            None,
        )


def _aligned(rows: Tensor) -> Tensor:
    """With columns of zeros, so that every row begins where matrix products read it fast, unlike the 50,257 words of
    GPT-2. Inductor lays out what stays within a stage program like this, but not what one gives to another."""
    more = -rows.shape[1] % (_ALIGNED // rows.element_size())
    return f.pad(rows, (0, more)) if more and rows.shape[1] >= _MANY else rows


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """Rounded once: a factor that was rounded itself would make all gradients too long or too short."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) * factor.to(wide)).to(grad.dtype)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignored: int, dtype: torch.dtype
) -> Tensor:
    """`x`: features, in any number of rows, in the order of `target`."""
    found: Tensor = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight, bias, target, ignored, dtype)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Fused:
    """A linear layer and the cross entropy of its result."""

    arguments: tuple[Any, ...]
    """Of `linear_cross_entropy`."""
    between: tuple[fx.Node, ...]
    """What it replaces besides the cross entropy."""


def fused(nodes: Sequence[fx.Node]) -> dict[fx.Node, Fused]:
    """Summed cross entropies among the operators of a chunk, with their linear layers, of which nothing else reads the
    result."""
    its = set(nodes)
    found = {}
    for node in nodes:
        if node.target is not aten.cross_entropy_loss.default:
            continue
        between = _between(node)
        if between and its.issuperset(between):
            x, weight, bias, *_ = [*between[-1].args, None]
            scores, target = _operands(node)
            given = (x, weight, bias, target, cross_entropy_settings(node)["ignore_index"], scores.meta["val"].dtype)
            found[node] = Fused(given, between)
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    scores, target = node.args[:2]
    assert isinstance(scores, fx.Node)
    assert isinstance(target, fx.Node)
    return [scores, target]


def _between(node: fx.Node) -> tuple[fx.Node, ...]:
    """From the scores of a plain cross entropy back to a linear layer; nothing if there is none."""
    settings = cross_entropy_settings(node)
    scores, target = _operands(node)
    shape, of_target = scores.meta["val"].shape, target.meta["val"]
    plain = settings["weight"] is None and settings["reduction"] == SUM and not settings.get("label_smoothing")
    if not plain or len(shape) != 2 or of_target.dim() != 1 or of_target.is_floating_point():
        return ()
    found = [scores]
    while found[-1].target in ROWS and len(found[-1].users) == 1:
        source = found[-1].all_input_nodes[0]
        narrow, wide = source.meta["val"].dtype, found[-1].meta["val"].dtype
        if torch.promote_types(narrow, wide) != wide:
            return ()
        found.append(source)
    layer = found[-1]
    fits = layer.target is aten.linear.default and len(layer.users) == 1 and layer.meta["val"].shape[-1] == shape[-1]
    return tuple(found) if fits else ()
