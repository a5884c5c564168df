"""Print the training graph of a model under a schedule: as text with one node per line, as JSON, or as a drawing.

A line shows a node, its devices, its weights and its outputs. With -v it also shows all values with their types and
placements, the stream, and the nodes that it waits for.

--after N stops after the first N directives (0: the plain model), to show the effect of each directive.
"""

from __future__ import annotations

import argparse
import json

from piperlang.cli.model import add_precision, captured, doing, load_both, scheduled
from piperlang.cli.parsing import POSITION
from piperlang.cli.report import add_parameters, check_output, write_output
from piperlang.diagnostics import PiperError
from piperlang.ir.text import as_json, brief, text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper", help="`-` reads standard input")
    parser.add_argument("--after", type=POSITION, metavar="N", help="print the graph after the first N directives")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-v", "--verbose", action="store_true", help="print all values, streams and waits of each node")
    how.add_argument("--json", action="store_true", help="print nodes, values and orders as JSON")
    how.add_argument("--svg", metavar="FILE", help="write a drawing to a file")
    add_parameters(parser)
    add_precision(parser)


def run(options: argparse.Namespace) -> int:
    output = check_output(options.svg, "--svg", options) if options.svg is not None else None
    found = scheduled(captured(load_both(options.model, options.script, options.precision)), options, options.after)
    if found.problems:
        raise PiperError(*found.problems)
    with doing("building the graph"):
        graph = found.graph()
    if output is not None:
        from piperlang.view.graph_svg import draw

        write_output(output, draw(graph), "--svg")
        print(f"{output}: {len(graph.nodes):,} nodes")
    elif options.json:
        print(json.dumps(as_json(graph)))
    else:
        print(text(graph) if options.verbose else brief(graph), end="")
    return 0
