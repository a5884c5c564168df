"""Stage programs compiled by Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.plan.plan import StageProgram


def compiled(pieces: Sequence[PassGraph | None], programs: Sequence[StageProgram]) -> list[PassGraph | None]:
    """The stage programs compiled by Inductor, each distinct one once. Those with routed tokens are not compiled,
    because they would be compiled again for every number of tokens."""
    known: dict[int, PassGraph] = {}
    found: list[PassGraph | None] = []
    for piece, program in zip(pieces, programs, strict=True):
        if program.routed:
            found.append(piece)
            continue
        if piece is not None and id(piece) not in known:
            known[id(piece)] = replace(piece, compiled=torch.compile(piece.module, fullgraph=True, dynamic=False))
        found.append(known[id(piece)] if piece is not None else None)
    return found
