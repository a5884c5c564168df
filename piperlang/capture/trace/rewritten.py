"""Calls of torch that are computed in another way while a model is traced, and while it runs eagerly to be compared.

Attention with dropout: the fused kernels draw the mask inside, by a generator's state. It is written out, so that its
dropout is one that can be counted. That needs memory for the attention weights; calls without dropout stay as they are.

Dropout of whole features (dropout2d) is written out, too.

The length of `bincount(x, minlength=n)` depends on the values of x only if one of them is n or more: it is computed
with length n, which raises an exception for such a value. Routers count the tokens of each expert in this way.

A uniform number compared with 0: models that may skip a layer (layerdrop) draw one and branch on `number < p`, also
where p is 0. The branch is then known: a number in [0, 1) is not below 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as f
from torch.overrides import TorchFunctionMode

_ATTENTION = f.scaled_dot_product_attention
_BY_FEATURE = (f.dropout1d, f.dropout2d, f.dropout3d)
_COUNTS = (torch.bincount, torch.Tensor.bincount)
_DRAWS = (torch.rand, torch.rand_like)
_LESS = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt)
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_UNIFORM = "_piper_uniform"


@contextmanager
def rewritten() -> Iterator[None]:
    """torch's own functions find attention by its name, users may have imported it."""
    f.scaled_dot_product_attention = attention
    try:
        with _Rewritten():
            yield
    finally:
        f.scaled_dot_product_attention = _ATTENTION


class _Rewritten(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is _ATTENTION:
            return attention(*args, **given)
        if function in _BY_FEATURE:
            return feature_dropout(*args, **given)
        if function in _COUNTS:
            return counts(*args, **given)
        if function in _LESS and _never_below(*args):
            return torch.tensor(False) if not args[0].shape else torch.zeros(args[0].shape, dtype=torch.bool)
        result = function(*args, **given)
        if function in _DRAWS:
            setattr(result, _UNIFORM, True)
        return result


def feature_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drops whole features of samples: `input` is [samples, features, ...]."""
    if not training or p == 0.0:
        return input
    kept = torch.rand(*input.shape[:2], *[1] * (input.dim() - 2), device=input.device) >= p
    mask = kept.to(input.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return input.mul_(mask) if inplace else input * mask


def counts(input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Like `bincount`, whose weights have no gradient."""
    if minlength == 0:
        return torch.bincount(input, weights, minlength)
    each = torch.ones_like(input, dtype=torch.int64) if weights is None else weights.detach()
    if weights is not None and weights.dtype != torch.float32:
        each = each.double()
    return torch.zeros(minlength, dtype=each.dtype, device=input.device).scatter_add(0, input.long(), each)


def _never_below(number: Any, other: Any = None) -> bool:
    return hasattr(number, _UNIFORM) and isinstance(other, int | float) and other <= 0.0


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Like `scaled_dot_product_attention`. A query that may attend to nothing gets zeros, as there."""
    if dropout_p == 0.0:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    wide = _WIDE.get(query.dtype, query.dtype)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(wide) * factor) @ key.to(wide).mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return (torch.dropout(weights, dropout_p, True) @ value.to(wide)).to(query.dtype)
