"""replicate: the batch divided along device axes, a copy of the weights on each device, gradients reduced once a step.

Before:                              After `replicate [stage=0] over gpu.dp`:

    F[stage=0]                           F[stage=0]                each device has its part of the samples
    B[stage=0]                           B[stage=0]
    update[stage=0]                      all_reduce[stage=0] over dp
                                         update[stage=0]

`states=sharded` (ZeRO-1): each device updates its part, all_gather follows. `grads=sharded` (ZeRO-2): reduce_scatter
instead of all_reduce. `params=sharded` (ZeRO-3): weights are gathered before each pass that reads them, and kept in
parts otherwise. Each level includes those before it. `bucket` bounds the bytes of one reduction, `prefetch` says how
many passes ahead weights may be gathered. `accumulate=sharded` reduces the gradients of every microbatch by themselves
and adds up the parts: more messages, and no device ever has all gradients whole.

Preconditions: the chunks exist, none of them uses the axes otherwise, the model does not mix samples. That every part
of the batch comes out even is checked once all is placed."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from piperlang.diagnostics import error
from piperlang.elaborate import directive as d
from piperlang.passes.divide import give_axes, refuse_mixing
from piperlang.passes.schedule import Schedule, Use
from piperlang.syntax.tree import Size

LEVELS = {"states": 1, "grads": 2, "params": 3}


def replicate(schedule: Schedule, directive: d.Replicate) -> None:
    refuse_mixing(schedule, directive, prod(axis.size for axis in directive.axes))
    give_axes(schedule, directive, _use(directive))


def _use(directive: d.Replicate) -> Use:
    given = {option.name: option.value for option in directive.options}
    level = max((LEVELS[name] for name, value in given.items() if name in LEVELS and value == "sharded"), default=0)
    for option in directive.options:
        if option.value == "replicated" and LEVELS[option.name] < level:
            raise error(
                "P0405",
                f"`{option.name}=replicated` does not fit what else is sharded",
                option.span,
                "each level of ZeRO includes those before it",
                help="leave it out",
            )
    if given.get("accumulate") == "sharded" and level < LEVELS["grads"]:
        span = next(option.span for option in directive.options if option.name == "accumulate")
        raise error(
            "P0405",
            "`accumulate=sharded` needs gradients in parts",
            span,
            "and here every device has all of them",
            help="add `grads=sharded` or `params=sharded`",
        )
    bucket, prefetch = given.get("bucket"), given.get("prefetch")
    use = Use(directive, level)
    return replace(
        use,
        bucket=bucket.bytes if isinstance(bucket, Size) else use.bucket,
        prefetch=prefetch if isinstance(prefetch, int) else use.prefetch,
        in_parts=given.get("accumulate") == "sharded",
    )
