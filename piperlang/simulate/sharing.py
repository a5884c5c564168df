"""Ranks that share devices: how long what they compute takes where nothing else does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from piperlang.simulate.timeline import Place, Ran


class Sharing(NamedTuple):
    """How the ranks of a machine share its devices."""

    devices: int = 0
    """That they share, rank by rank in turn; 0: each has one of its own."""
    side_by_side: int = 1
    """How many passes run at full speed at once on each; more slow each other down, all in the same way."""


def undisturbed(ran: Mapping[Place, Ran], sharing: Sharing) -> dict[Place, float]:
    """Seconds of instructions that compute, had each its device for itself: while n do so at once on a device for one,
    each gets on at an n-th of its speed."""
    if not sharing.devices:
        return {place: one.end - one.start for place, one in ran.items()}
    edges: dict[int, list[tuple[float, bool, Place]]] = defaultdict(list)
    for place, one in ran.items():
        if one.end == one.start:
            continue  # it would begin after its end
        edges[place[0] % sharing.devices] += [(one.start, True, place), (one.end, False, place)]
    found = dict.fromkeys(ran, 0.0)
    for its in edges.values():
        running: set[Place] = set()
        before = 0.0
        for time, begins, place in sorted(its):
            for other in running:
                found[other] += (time - before) * min(1.0, sharing.side_by_side / len(running))
            before = time
            if begins:
                running.add(place)
            else:
                running.discard(place)
    return found
