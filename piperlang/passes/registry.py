"""All passes, in one list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piperlang.elaborate import directive as d
from piperlang.passes.offload import offload
from piperlang.passes.order import order
from piperlang.passes.place import place
from piperlang.passes.recompute import recompute
from piperlang.passes.replicate import replicate
from piperlang.passes.schedule import Schedule
from piperlang.passes.shard import shard
from piperlang.passes.split import split
from piperlang.passes.stream import stream
from piperlang.passes.tag import tag, use_mesh

PASSES: Mapping[type, Callable[[Schedule, Any], None]] = {
    d.UseMesh: use_mesh,
    d.Tag: tag,
    d.Place: place,
    d.Replicate: replicate,
    d.Shard: shard,
    d.Split: split,
    d.Stream: stream,
    d.Recompute: recompute,
    d.Offload: offload,
    d.Order: order,
}
