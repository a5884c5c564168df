"""replicate: data parallelism. Shards the batch along device axes; gradients are reduced once a step.

    mesh gpu = dp: 2
    place [stage=*] on gpu
    replicate [stage=*] over gpu.dp with grads=sharded

Before:

    F[stage=0]  gpu  4 weights -> [8, 16]
    F[stage=1]  gpu  4 weights -> []
    B[stage=1]  gpu  2 weights -> [8, 16], 4 gradients
    B[stage=0]  gpu  1 weight -> 4 gradients
    update[stage=0:2]  gpu  8 weights

After:

    F[stage=0]  gpu  4 weights -> [8, 16]
    F[stage=1]  gpu  4 weights -> []
    B[stage=1]  gpu  2 weights -> [8, 16], 4 gradients
    B[stage=0]  gpu  1 weight -> 4 gradients
    reduce_scatter[stage=0:2]  gpu over dp  8 gradients
    update[stage=0:2]  gpu  8 weights
    all_gather[stage=0:2]  gpu over dp  8 weights

`states=sharded` is ZeRO-1: each device updates its shard, then all_gather. `grads=sharded` is ZeRO-2: reduce_scatter
instead of all_reduce. `params=sharded` is ZeRO-3: weights are gathered before the passes that read them. Each level
includes those before it. `bucket` limits the bytes of one reduction, `prefetch` the number of gathers that are made
ahead. `keep` says how long gathered weights stay: for one pass (`pass`), through forwards, or backwards, of a chunk
that follow each other on its devices (`stage`, the default), or also through the turn between both (`turn`).
`accumulate=sharded` reduces the gradients of every microbatch and accumulates shards: more messages, and no device ever
holds all gradients. `partition=weights` gives each weight to one device, which updates all of it, instead of a part to
every device: for optimizers that need whole matrices, such as Muon.

Preconditions: the chunks exist, none of them uses the axes for something else, and none of them mixes samples. At
the end of the script, the batch size must be divisible by the number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from piperlang.build.divide import give_axes, refuse_mixing, use_axes
from piperlang.build.schedule import BUCKET, Keep, Use
from piperlang.core.mesh import Axis
from piperlang.core.selector import Selector
from piperlang.diagnostics import error, listed
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import Count, Kind, Option, Words
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline

LEVELS = {"states": 1, "grads": 2, "params": 3}
"""Levels of ZeRO."""
SHARDED = Words(("sharded", "replicated"))


@dataclass(frozen=True)
class Replicate(Directive):
    """replicate SELECTOR over MESH.AXIS [with states=sharded, grads=sharded, params=sharded, bucket=25MB]
    Divide the batch along the axis, with a replica of the weights on each device;
    sharded states, grads and params are ZeRO-1, 2 and 3."""

    nodes = (tree.ReplicateOver,)
    legal: ClassVar[Mapping[str, Kind]] = {
        "accumulate": Words(("whole", "sharded")),
        "bucket": tree.Size,
        "grads": SHARDED,
        "keep": Words(tuple(keep.name.lower() for keep in Keep)),
        "params": SHARDED,
        "partition": Words(("elements", "weights")),
        "prefetch": Count(),
        "reduce": Words(("mean",), note="a sum would change the result of training"),
        "states": SHARDED,
    }

    selector: Selector
    axes: tuple[Axis, ...]

    @classmethod
    def read(cls, script: Interpreter, node: tree.ReplicateOver) -> Replicate:
        axes = tuple(script.axis(axis) for axis in node.axes)
        return cls(script.settled(node.selector), axes, **script.written(node))

    def __str__(self) -> str:
        return f"replicate {self.selector} over {', '.join(map(str, self.axes))}{self.with_options}"

    def apply_to_outline(self, outline: Outline) -> None:
        use_axes(outline, self)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        groups = [group for group, _ in schedule.meant(self.selector)]
        refuse_mixing(schedule, self, prod(axis.size for axis in self.axes), groups)
        give_axes(schedule, self, self._use())

    def _use(self) -> Use:
        given = {option.name: option for option in self.options}
        level = max((LEVELS[name] for name, x in given.items() if name in LEVELS and x.value == "sharded"), default=0)
        for option in self.options:
            if option.value == "replicated" and LEVELS[option.name] < level:
                higher = next(name for name, number in LEVELS.items() if number == level)
                raise error(
                    "P0405",
                    f"`{option.name}=replicated` contradicts `{higher}=sharded`",
                    option.span,
                    "each level of ZeRO includes the levels below it",
                    help=f"remove `{option.name}=replicated`",
                )
        accumulate, bucket, keep, partition, prefetch = map(
            given.get, ("accumulate", "bucket", "keep", "partition", "prefetch")
        )
        by_shards = accumulate is not None and accumulate.value == "sharded"
        by_weight = partition is not None and partition.value == "weights"
        _require("grads", level, accumulate if by_shards else None, "here every device holds all gradients")
        _require("params", level, keep, "here every device holds all weights")
        _require("params", level, prefetch, "here every device holds all weights")
        _require("states", level, partition if by_weight else None, "here every device updates all weights")
        return Use(
            self,
            divides_batch=True,
            level=level,
            bucket=bucket.value.bytes if bucket is not None and isinstance(bucket.value, tree.Size) else BUCKET,
            prefetch=prefetch.value if prefetch is not None and isinstance(prefetch.value, int) else 1,
            keep=Keep[str(keep.value).upper()] if keep is not None else Keep.STAGE,
            in_parts=by_shards,
            by_weight=by_weight,
        )


def _require(sharded: str, level: int, option: Option | None, here: str) -> None:
    """An option that means something only where `sharded`, or what includes it, is sharded."""
    if option is None or level >= LEVELS[sharded]:
        return
    enough = [f"{name}=sharded" for name, number in LEVELS.items() if number >= LEVELS[sharded]]
    what = option if isinstance(option.value, str) and option.name != "keep" else option.name
    named = {"params": "weights", "grads": "gradients"}.get(sharded, sharded)
    raise error("P0405", f"`{what}` requires sharded {named}", option.span, here, help=f"add {listed(enough)}")
