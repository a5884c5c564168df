"""Draw a simulated step of a model under one schedule, or under two side by side. The ending of the file says how:
.html is a page to explore, .svg a picture for papers and talks, .json a trace for Perfetto or Chrome."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from piperlang.cli.model import captured, doing, load_both
from piperlang.cli.report import check_output, write_output
from piperlang.cli.simulate import SimulatedScript, add_costs, chosen_costs, options_of, simulate
from piperlang.diagnostics import error
from piperlang.progress import Notice, emit

KINDS = (".html", ".svg", ".json")
LARGEST_GRAPH = 400
"""Nodes of a graph that is still readable as a picture."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    parser.add_argument("other", metavar="OTHER.piper", nargs="?", help="a schedule to compare it with")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="timeline.html", help="the file (default: timeline.html)"
    )
    add_costs(parser)


def run(options: argparse.Namespace) -> int:
    output = check_output(options.output, "-o", options, KINDS)
    if options.other is not None and output.suffix.lower() != ".html":
        other = "use a .html file, or `piperc compare` for an .svg"
        raise error("P0902", f"`-o {output}` shows one schedule", help=other)
    each = options_of(options, [options.script, *([options.other] if options.other is not None else [])])
    chosen = chosen_costs(options)
    file = load_both(options.model, options.script, options.precision)
    traced = captured(file)
    found = [simulate(one, chosen, traced, file.max_norm) for one in each]
    write(found, output)
    return 0


def write(found: Sequence[SimulatedScript], output: Path) -> None:
    with doing(f"writing {output}"):
        write_output(output, drawn(found, output.suffix.lower()), "-o")
    emit(Notice(f"saved {output}"))


def drawn(found: Sequence[SimulatedScript], kind: str) -> str:
    timelines = [one.step.timeline for one in found]
    if kind == ".svg":
        from piperlang.view.gantt import stacked

        return stacked(timelines)
    if kind == ".json":
        from piperlang.view.trace import trace

        return trace(timelines[0])
    from piperlang.view.graph_svg import draw
    from piperlang.view.page import page

    graph = found[0].graph
    # The graph of one of several schedules would be taken for that of another.
    shown = len(found) == 1 and len(graph.nodes) <= LARGEST_GRAPH
    return page(timelines, graph=draw(graph) if shown else "", paths=[one.step.path for one in found])
