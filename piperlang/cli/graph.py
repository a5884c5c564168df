"""Print the training graph of a model under a schedule: one node a line, as JSON, or as a drawing.

A line has a node, where it runs, and its weights and results. With -v it has all values by name with their types and
placements, the stream, and what it waits for.

--after N stops after the first N directives (0: the model as it is), to see what each of them does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from piperlang.cli.model import captured, doing, load_both, scheduled
from piperlang.cli.parsing import POSITION
from piperlang.cli.report import add_parameters, check_output
from piperlang.diagnostics import PiperError, error
from piperlang.ir.text import as_json, brief, text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper", help="`-` reads standard input")
    parser.add_argument("--after", type=POSITION, metavar="N", help="the graph after the first N directives")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-v", "--verbose", action="store_true", help="all values, streams and waits of each node")
    how.add_argument("--json", action="store_true", help="nodes, values and orders as JSON")
    how.add_argument("--svg", metavar="FILE", help="draw it to a file")
    add_parameters(parser)


def run(options: argparse.Namespace) -> int:
    if options.svg:
        check_output(Path(options.svg), "--svg")
    found = scheduled(captured(load_both(options.model, options.script)), options, options.after)
    if found.problems:
        raise PiperError(*found.problems)
    with doing("building the graph"):
        graph = found.graph()
    if options.svg:
        from piperlang.view.graph_svg import draw

        _write(Path(options.svg), draw(graph))
        print(f"{options.svg}: {len(graph.nodes):,} nodes")
    elif options.json:
        print(json.dumps(as_json(graph)))
    else:
        print(text(graph) if options.verbose else brief(graph), end="")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(
            "P0902",
            f"`--svg {path}` cannot be written",
            notes=[(problem.strerror or "").lower()],
            help="check the path",
        ) from None
