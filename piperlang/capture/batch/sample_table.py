"""The rule of each operator, by the operator's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from piperlang.capture.batch.mixing import Rule
from piperlang.capture.batch.sample_rules import (
    CLASSES,
    LETTERS,
    added,
    attended,
    bagged,
    chosen,
    contracted,
    copied,
    counted,
    diagonal,
    drawn,
    dropped,
    joined,
    kept,
    leading,
    lost,
    made,
    masked,
    matrix,
    numbered,
    permuted,
    picked,
    pointwise,
    recurrent,
    reduced,
    scaled,
    scanned,
    sliced,
    totalled,
    trusted,
    whole,
)

ADDED, SCALED = ("add", "sub", "rsub"), ("mul", "div")
KEPT = (
    "neg",
    "to",
    "_to_copy",
    "clone",
    "detach",
    "alias",
    "contiguous",
    "lift_fresh_copy",
    "lift_fresh",
    "type_as",
    "positive",
    "expand",
    "expand_as",
    "broadcast_to",
    "repeat",
    "dropout",
    "_conj",
    "real",
)
REDUCED = (
    "sum",
    "mean",
    "amax",
    "amin",
    "aminmax",
    "max",
    "min",
    "argmax",
    "argmin",
    "prod",
    "std",
    "var",
    "std_mean",
    "var_mean",
    "norm",
    "linalg_vector_norm",
    "logsumexp",
    "median",
    "nanmedian",
    "mode",
    "kthvalue",
    "quantile",
    "any",
    "all",
    "count_nonzero",
)
SCANNED = (
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "cummax",
    "cummin",
    "sort",
    "topk",
    "argsort",
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "_safe_softmax",
    "flip",
    "roll",
    "_fft_c2c",
    "_fft_r2c",
    "_fft_c2r",
)
NUMBERED = (
    "view",
    "reshape",
    "_unsafe_view",
    "_reshape_alias",
    "flatten",
    "unflatten",
    "view_as",
    "reshape_as",
    "squeeze",
    "unsqueeze",
    "ravel",
)
PERMUTED = (
    "permute",
    "transpose",
    "t",
    "movedim",
    "moveaxis",
    "swapdims",
    "swapaxes",
    "mT",
    "mH",
    "numpy_T",
    "matrix_H",
    "adjoint",
)
SLICED = ("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk")
PICKED = (
    "index",
    "_unsafe_index",
    "index_put",
    "gather",
    "index_select",
    "embedding",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "index_copy",
    "index_fill",
)
MATRIX = (
    "tril",
    "triu",
    "cholesky",
    "linalg_inv_ex",
    "linalg_cholesky_ex",
    "linalg_qr",
    "_linalg_det",
    "_linalg_slogdet",
    "_linalg_svd",
    "_linalg_eigh",
    "_linalg_solve_ex",
)
FILLED = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
MADE = (*FILLED, "rand_like", "randn_like")
LEADING = (
    "convolution",
    "_convolution",
    "avg_pool",
    "max_pool",
    "adaptive_",
    "_adaptive_",
    "upsample_",
    "fractional_max_pool",
)

_FAMILIES: tuple[tuple[Iterable[str], Rule], ...] = (
    (ADDED, added),
    (SCALED, scaled),
    (KEPT, kept),
    (REDUCED, reduced),
    (SCANNED, scanned),
    (NUMBERED, numbered),
    (PERMUTED, permuted),
    (SLICED, sliced),
    (("cat", "concat", "concatenate", "stack"), joined),
    (PICKED, picked),
    (MADE, made),
    (LETTERS, contracted),
    (("scaled_dot_product_attention",), attended),
    (MATRIX, matrix),
    (CLASSES, lost),
    (("copy",), copied),
    (("where", "masked_fill"), masked),
    (("diagonal",), diagonal),
    (("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    (("bincount",), counted),
    (("embedding_bag",), bagged),
)
_OWN: dict[str, Rule] = {
    "counter_dropout": dropped,
    "counter_draw": drawn,
    "batch_sums": totalled,
    "whole_sum": whole,
    "routed_linear": chosen,
    "routed_rows": chosen,
}
RULES: dict[str, Rule] = {name: rule for names, rule in _FAMILIES for name in names}


def name_of(target: Any) -> str:
    """`add` for `aten.add_.Tensor`: an in-place operator has the name of the operator that does not write."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(getattr(target, "__name__", target))
    name: str = schema.name.split("::")[-1]
    return name.removesuffix("_") if schema.is_mutable else name


def rule_of(target: Any) -> Rule | None:
    """None: the operator is decomposed, or judged by its shapes if it has no decomposition."""
    schema, name = getattr(target, "_schema", None), name_of(target)
    if schema is None or not schema.name.startswith("aten::"):
        return _OWN.get(name, trusted)
    if name in RULES:
        return RULES[name]
    if torch.Tag.pointwise in target.tags:
        return pointwise
    if any(argument.name == "reduction" for argument in schema.arguments):
        return lost
    return leading if name.startswith(LEADING) else None
