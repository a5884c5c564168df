"""Selectors against the graph as it is now."""

from __future__ import annotations

from piperlang.diagnostics import PiperError, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.selector import Conjunction, Selector
from piperlang.ir.graph import Graph, fits
from piperlang.passes.build import build
from piperlang.passes.schedule import Schedule


def require_match(schedule: Schedule, selector: Selector) -> None:
    """Every alternative of a selector must match something; one microbatch of each kind of node is enough to tell."""
    graph: Graph | None = None
    for conjunction in selector.alternatives:
        if not any(c.key in ("comm", "update") for c in conjunction):
            list(schedule.meant(Selector((conjunction,), selector.span)))
            continue
        graph = graph or build(schedule, sketch=True)
        if not any(fits(family, conjunction) for family in graph.families):
            raise _nothing(graph, conjunction, selector)


def _nothing(graph: Graph, conjunction: Conjunction, selector: Selector) -> PiperError:
    there = sorted({family.op for family in graph.families if family.communicates})
    wanted = next((c for c in conjunction if c.key == "comm"), None)
    label = f"the graph communicates by {', '.join(there)} so far" if there else "nothing communicates so far"
    if wanted is None or set(wanted.values) & {*there, "p2p"}:
        label = (
            "there is such communication so far, but not with these tags"
            if wanted
            else "nothing is updated with these tags"
        )
    return error(
        "P0302",
        "selector matches no nodes",
        selector.span,
        label,
        help="communication appears with `place`, `replicate` and `shard`: name it after them",
    )


def name_halves(schedule: Schedule, selector: Selector, directive: d.Directive) -> None:
    """`pass=I` or `pass=W` outside an order splits the backwards it names."""
    for group, conjunction in schedule.meant(selector) if _names_tags(selector) else ():
        if any(c.key == "pass" and c.test == "in" and {"I", "W"} & set(c.values) for c in conjunction) and not any(
            c.key == "comm" for c in conjunction
        ):
            schedule.halved.setdefault(group, directive)


def _names_tags(selector: Selector) -> bool:
    return not all(any(c.key in ("comm", "update") for c in conjunction) for conjunction in selector.alternatives)
