"""Chunks of a traced model, run one by one without a schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piperlang.capture.autodiff.cut import Subgraph
from piperlang.capture.autodiff.differentiate import value_name
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.trace.random import PLACE, mix
from piperlang.capture.trace.trace import Traced
from piperlang.directives.tag import ModulePath, Tag
from piperlang.source import Source

SPAN = Source("s.piper", "tag").span(0, 3)


def run(
    traced: Traced,
    chunks: list[Subgraph],
    pieces: list[PassGraphs],
    model: nn.Module,
    batch: Any,
    *,
    halves: bool,
    first: int = 0,
) -> tuple[float, dict[str, torch.Tensor]]:
    """One step, chunk by chunk: the loss, and the gradient of every weight by its first name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {place: tensors[weight.name].detach() for place, weight in traced.weights.items()}
    values |= dict(zip(traced.batch, torch.utils._pytree.tree_leaves(batch), strict=True))
    values[PLACE] = torch.tensor([mix(7, 0), first])

    def execute(chunk: Subgraph, piece: PassGraph) -> None:
        given = piece.run({slot: values[value_name(chunk, slot)] for slot in piece.inputs})
        for slot, value in given.items():
            name = value_name(chunk, slot)
            values[name] = values[name] + value if name.startswith("grad:") and name in values else value

    with torch.no_grad():
        for chunk, piece in zip(chunks, pieces, strict=True):
            execute(chunk, piece.F)
        loss = chunks[-1].outputs[0].name
        values[f"grad:{loss}"] = torch.ones(())
        for chunk, piece in reversed(list(zip(chunks, pieces, strict=True))):
            for part in (piece.I, piece.W) if halves else (piece.B,):
                if part is not None:
                    execute(chunk, part)
    grads: dict[str, torch.Tensor] = {}
    for place, weight in traced.weights.items():
        if f"grad:{place}" in values:
            grads[weight.name] = grads.get(weight.name, torch.zeros(())) + values[f"grad:{place}"]
    return float(values[loss]), grads


def tag(key: str, value: int, *paths: tuple[Any, ...]) -> Tag:
    return Tag(((key, value),), tuple(ModulePath(path, SPAN) for path in paths), span=SPAN)
