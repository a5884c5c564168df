"""shard: the weights of chunks divided along device axes.

Before (dp divides the batch):       After `shard [expert=*] over gpu.dp with style=experts`:

    F[stage=0]                           F[stage=0]
    F[expert=0, stage=0]                 all_to_all.F[expert=0, stage=0] over dp     samples divided -> experts divided
                                         F[expert=0, stage=0]
                                         all_to_all.F[expert=0, stage=0] over dp     and back, for who reads it
    F[stage=1]                           F[stage=1]

`experts` divides dim 0 of weights with an expert in each entry; `columns` and `rows` divide output and input features;
`sequence` divides dim 1 of what goes through, weights stay whole. What is exchanged follows from how values lie on both
sides of an edge.

Preconditions: the chunks exist, none of them uses the axes otherwise, the divided dims come out even, and nothing
inside a chunk would have to communicate: the parts that would are chunks of their own."""

from __future__ import annotations

from piperlang.elaborate import directive as d
from piperlang.passes.divide import give_axes
from piperlang.passes.schedule import Schedule, Use


def shard(schedule: Schedule, directive: d.Shard) -> None:
    style = next((str(option.value) for option in directive.options if option.name == "style"), "experts")
    give_axes(schedule, directive, Use(directive, style=style))
