"""Whether the resources that a script gives its streams can be used there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from piperlang.build.graph import build
from piperlang.core.streams import DEFAULT
from piperlang.diagnostics import Diagnostic, PiperError

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.ir.graph import Graph


def misused_streams(schedule: Schedule) -> Iterator[Diagnostic]:
    """At the end of a script: later lines may put communication on a stream, or take it away."""
    if not schedule.outline.streams:
        return
    try:
        graph = build(schedule)
    except PiperError:
        return  # reported by whoever builds the graph next
    yield from _without_communication(schedule, graph)
    yield from _torn_apart(schedule, graph)


def _without_communication(schedule: Schedule, graph: Graph) -> Iterator[Diagnostic]:
    busy = {node.stream for node in graph.nodes if node.template.communicates}
    for stream, given in schedule.outline.streams.items():
        if "ctas" in given and stream not in busy:
            by, option = given["ctas"]
            yield Diagnostic(
                "P0405",
                f'stream "{stream}" has `{option}` and no communication',
                option.span,
                "the thread blocks of its communication",
                helps=("remove `ctas`, or put communication on this stream, as in `stream [comm=p2p] on ...`",),
                trail=by.trail,
            )


def _torn_apart(schedule: Schedule, graph: Graph) -> Iterator[Diagnostic]:
    """A transfer has one communicator, for both of its ends. One of those that are wrong is enough to tell."""
    for node in graph.nodes:
        if node.op != "recv":
            continue
        sender = graph.nodes[graph.made[node.reads[0][0]]]
        ours, theirs = (graph.streams.get(one.stream, DEFAULT) for one in (node, sender))
        if ours == theirs:
            continue
        given = schedule.outline.streams.get(node.stream) or schedule.outline.streams[sender.stream]
        by, option = next(iter(given.values()))
        yield Diagnostic(
            "P0405",
            f'the ends of a transfer are on streams "{sender.stream}" and "{node.stream}", with different resources',
            option.span,
            "given here",
            notes=(f"they are {sender} and {node}",),
            helps=("put both ends on one stream: select transfers by `comm=p2p` and `pass`, not by tags of one end",),
            trail=by.trail,
        )
        return
