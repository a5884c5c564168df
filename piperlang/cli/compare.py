"""Compare schedules of one model in simulated steps: time, idle time, exposed communication, memory and bytes.
`-o FILE` draws them one above the other with one time axis: .html is a page to explore, .svg a figure for a paper."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from piperlang.cli.model import captured, load_both
from piperlang.cli.report import check_output
from piperlang.cli.simulate import SimulatedScript, add_costs, chosen_costs, options_of, simulate
from piperlang.cli.view import write
from piperlang.diagnostics import error
from piperlang.diagnostics.printable import printable
from piperlang.plan.estimate.summary import bytes_text, time_text
from piperlang.view.names import columns, shortened

KINDS = (".html", ".svg")
APART = "  "
"""Between columns of the table."""
UNLIMITED = 10_000
"""Columns of what is no terminal."""
NARROWEST = 16
"""Columns that a name has at least, in however narrow a terminal."""
MOST = 8
"""Schedules in one drawing: more of them cannot be read."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scripts", metavar="SCHEDULE.piper", nargs="+")
    parser.add_argument("--model", metavar="MODEL.py", required=True)
    parser.add_argument("-o", "--output", metavar="FILE", help=f"draw up to {MOST} schedules: .html or .svg")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    add_costs(parser)


def run(options: argparse.Namespace) -> int:
    if len(options.scripts) < 2:
        raise error("P0902", "one schedule cannot be compared", help="name at least two scripts")
    output = _checked_drawing(options) if options.output is not None else None
    each = options_of(options, options.scripts)
    chosen = chosen_costs(options)
    file = load_both(options.model, options.scripts[0], options.precision)
    traced = captured(file)
    found = [simulate(one, chosen, traced, file.max_norm) for one in each]
    rows = [_row(script, one) for script, one in zip(options.scripts, found, strict=True)]
    print(json.dumps(rows) if options.json else f"{_table(rows)}\n{found[0].step.timeline.source}")
    if output is not None:
        write(_told_apart(found, options.scripts), output)
    return 0


def _checked_drawing(options: argparse.Namespace) -> Path:
    output = check_output(options.output, "-o", options, KINDS)
    if len(options.scripts) > MOST:
        raise error(
            "P0902",
            f"`-o {output}` draws at most {MOST} schedules, and there are {len(options.scripts)}",
            help="name fewer schedules, or leave out `-o`: the table has no limit",
        )
    return output


def _told_apart(found: Sequence[SimulatedScript], scripts: Sequence[str]) -> list[SimulatedScript]:
    """Named by their files, with as many folders as tell them apart."""
    paths = [Path(script).parts for script in scripts]
    depth = next(k for k in count(1) if len({path[-k:] for path in paths}) == len(set(paths)))
    return [
        one._replace(step=one.step._replace(timeline=replace(one.step.timeline, title=str(Path(*path[-depth:])))))
        for one, path in zip(found, paths, strict=True)
    ]


def _row(script: str, found: SimulatedScript) -> dict[str, Any]:
    from piperlang.simulate.result import as_json

    data, timeline = as_json(found.step, found.memory), found.step.timeline
    return {
        "script": script,
        "on": found.where,
        "estimated": found.estimated,
        "devices": data["devices"],
        "seconds": data["seconds"],
        "idle": data["idle"]["mean"],
        "exposed": timeline.exposed_at_most(),
        "memory": data["memory"]["peak"],
        "bytes": round(sum(len(timeline.rows[one.row]) * one.what.bytes for one in timeline.ran)),
    }


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1e4 else f"{ratio:.1e}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    best = min(row["seconds"] for row in rows)
    lines = [["schedule", "devices", "step", "of the best", "idle", "exposed", "memory", "sent"]]
    for row in rows:
        lines.append(
            [
                printable(row["script"]),
                f"{row['devices']:,}",
                time_text(row["seconds"]),
                _times(row["seconds"] / best if best else 1.0),
                f"{100 * row['idle']:.0f}%",
                time_text(row["exposed"]),
                bytes_text(row["memory"]),
                bytes_text(row["bytes"]),
            ]
        )
    widths = [max(len(line[k]) for line in lines) for k in range(1, len(lines[0]))]
    room = shutil.get_terminal_size((UNLIMITED, 24)).columns - sum(width + len(APART) for width in widths)
    names = [shortened(name, max(NARROWEST, room)) for name, *_ in lines]
    widest = max(map(columns, names))
    shown = []
    for name, (_, *figures) in zip(names, lines, strict=True):
        cells = [f"{cell:>{width}}" for cell, width in zip(figures, widths, strict=True)]
        shown.append(APART.join([name + " " * (widest - columns(name)), *cells]))
    return "\n".join(shown)
