"""Selectors against the graph as it is now."""

from __future__ import annotations

from piperlang.build.graph import build
from piperlang.build.schedule import Schedule
from piperlang.core.selector import Conjunction, Selector
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.ir.graph import Graph, fits


def require_match(schedule: Schedule, selector: Selector) -> None:
    """Every alternative of a selector must match something; one microbatch of each kind of node is enough to tell."""
    graph: Graph | None = None
    for conjunction in selector.alternatives:
        if not any(c.key in ("comm", "update") for c in conjunction):
            list(schedule.meant(Selector((conjunction,), selector.span)))
            continue
        graph = graph or build(schedule, sketch=True)
        if not any(fits(template, conjunction) for template in graph.templates):
            raise _nothing(graph, conjunction, selector)


def _nothing(graph: Graph, conjunction: Conjunction, selector: Selector) -> PiperError:
    there = sorted({template.op for template in graph.templates if template.communicates})
    wanted = next((c for c in conjunction if c.key == "comm"), None)
    label = f"the communication so far is {', '.join(there)}" if there else "there is no communication so far"
    if wanted is None or set(wanted.values) & {*there, "p2p"}:
        label = "there is such communication, but not with these tags" if wanted else "no update has these tags"
    return error(
        "P0302",
        "selector matches no nodes",
        selector.span,
        label,
        help="`place`, `replicate` and `shard` insert communication: select it after them",
    )


def name_halves(schedule: Schedule, selector: Selector, directive: Directive) -> None:
    """`pass=I` or `pass=W` outside an order splits the backwards it names."""
    for group, conjunction in schedule.meant(selector) if _names_tags(selector) else ():
        if any(c.key == "pass" and c.test == "in" and {"I", "W"} & set(c.values) for c in conjunction) and not any(
            c.key == "comm" for c in conjunction
        ):
            schedule.halved.setdefault(group, directive)


def _names_tags(selector: Selector) -> bool:
    return not all(any(c.key in ("comm", "update") for c in conjunction) for conjunction in selector.alternatives)
