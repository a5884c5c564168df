"""Show the order of passes on every device, without a model or devices.

The grid simulates the order with unit costs (F=I=W=1, B=2, free communication, stages in a chain; what is recomputed
takes F again in its backward); `.` is idle time, in which a device computes nothing, `&` joins passes that may overlap.
--json and --csv print the order as plain data."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from piperlang.cli.report import add_parameters, check_output, open_script, paint, parameters, say, write_output
from piperlang.diagnostics import PiperError, error, listed
from piperlang.directives.order import Order
from piperlang.elaborate.lanes import Lane
from piperlang.pipeline import outline
from piperlang.simulate.timeline import Timeline
from piperlang.simulate.unit import UnitCosts, live, parse_costs, simulate
from piperlang.view.grid import MOST_ROWS, chain_text, grid, plain, summary


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="FILE.piper", help="`-` reads standard input")
    add_parameters(parser)
    parser.add_argument(
        "--cost",
        metavar="F=1,W=2,stage3=2",
        default="",
        help="units that passes take (default: F=I=W=1, B=2), and factors of tags",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help='{"devices": [{"device": 0, "order": [[item, ...], ...]}]}')
    shape.add_argument("--csv", action="store_true", help="print a row per item: device, step, stage, pass, mb")
    shape.add_argument("--svg", metavar="FILE", help="draw it, width is duration: a picture for papers and talks")


def run(options: argparse.Namespace) -> int:
    output = check_output(options.svg, "--svg", options, (".svg",)) if options.svg is not None else None
    plain_data = next((flag for flag in ("json", "csv") if getattr(options, flag)), None)
    if options.cost and plain_data is not None:
        raise error(
            "P0902",
            f"`--cost` and `--{plain_data}` cannot be combined",
            help=f"leave out --cost: --{plain_data} prints the order, and no times",
        )
    try:
        costs = parse_costs(word.strip() for word in options.cost.split(",") if word.strip())
    except ValueError as problem:
        raise error("P0902", f"`--cost {options.cost}`: {problem}", help="write `--cost F=1,B=2,stage3=2`") from None
    source, path = open_script(options.script)
    found = outline(source, path, parameters(options), say=say)
    if found.problems:
        raise PiperError(*found.problems)
    lanes = found.outline.orders()
    if not any(lane.steps for lane in lanes) and not found.outline.chains:
        raise error(
            "P0502",
            "this script has no order",
            source.span(0, 0),
            "no `order` statement was reached",
            help="call a schedule, such as `one_f_one_b(gpu, 4, 8)`",
        )
    _check_factors(options.cost, costs, lanes)
    costs = replace(costs, recomputed=found.outline.recomputed)
    timeline = simulate(lanes, costs)
    if options.json:
        _json(lanes, found.outline.chains)
    elif options.csv:
        _csv(lanes)
    elif output is not None:
        _svg(output, timeline, Path(source.name).name)
    else:
        width = shutil.get_terminal_size((140, 24)).columns
        if timeline.ran:
            print(grid(lanes, timeline, width, paint(sys.stdout)))
            print(f"\n{summary(lanes, timeline, costs)}")
            print(f"live activations: {_kept(timeline)}")
        for chain in found.outline.chains:
            print(f"also: {chain_text(chain)}")
    return 0


def _check_factors(given: str, costs: UnitCosts, lanes: Sequence[Lane]) -> None:
    ordered = {tag for lane in lanes for work in lane.steps for item in work.items for tag in item.items()}
    for key, value in costs.factors:
        if (key, value) not in ordered:
            there = [str(other) for name, other in sorted(ordered, key=str) if name == key]
            raise error(
                "P0902",
                f"`--cost {given}`: no pass in an order has {key}={value}",
                notes=[f"{key} is {listed(there, 'or')}"] if there else [],
                help="name a tag of passes that the script orders",
            )


def _kept(timeline: Timeline) -> str:
    """`4, 3, 2, 1 at most, by device`"""
    most = live(timeline)
    shown = ", ".join(map(str, most[:MOST_ROWS])) + (", ..." if len(most) > MOST_ROWS else "")
    return f"{shown} at most, by device; one is a stage's of a microbatch"


def _json(lanes: Sequence[Lane], chains: Sequence[Order]) -> None:
    data: dict[str, object] = {"devices": [{"device": device, "order": steps} for device, steps in plain(lanes)]}
    if chains:
        data["chains"] = [[[str(item) for item in step.items] for step in chain.steps] for chain in chains]
    json.dump(data, sys.stdout)
    print()


def _svg(path: Path, timeline: Timeline, title: str) -> None:
    from piperlang.view.gantt import gantt

    write_output(path, gantt(timeline, title), "--svg")
    print(f"{path}: {len(timeline.rows)} devices, {timeline.length:g} units")


def _csv(lanes: Sequence[Lane]) -> None:
    rows = list(plain(lanes))
    keys = list(dict.fromkeys(key for _, steps in rows for step in steps for item in step for key in item))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["device", "step", *keys])
    for device, steps in rows:
        for number, step in enumerate(steps):
            writer.writerows([device, number, *(item.get(key, "") for key in keys)] for item in step)
