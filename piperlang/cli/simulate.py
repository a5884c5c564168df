"""Simulate a step of a model under a schedule, without devices and weights: its time, idle time, exposed communication,
memory and critical path."""

from __future__ import annotations

import argparse
import json

from piperlang.cli.model import add_on_nan, add_precision, captured, doing, load_both, scheduled
from piperlang.cli.report import add_parameters, report
from piperlang.pipeline import representative
from piperlang.progress.lines import counted
from piperlang.simulate.machine_files import load as load_machine
from piperlang.simulate.machine_files import names


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(names())}, or a TOML file that describes one (default: h100)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_parameters(parser)
    add_precision(parser)
    add_on_nan(parser)


def run(options: argparse.Namespace) -> int:
    machine = load_machine(options.machine)
    file = load_both(options.model, options.script, options.precision)
    found = scheduled(captured(file), options)
    if found.problems:
        report(found.problems, options.format)
        return 1
    with doing("building the graph"):
        graph = found.graph()
    with doing("planning", "planned") as planning:
        plan, classes = representative(graph, file.max_norm, options.on_nan != "continue")
        devices = counted(sum(map(len, classes)), "device")
        planning.detail = f"{devices}, {len(classes)} that differ"
    with doing("simulating", "simulated"):
        from piperlang.simulate.costs import MachineCosts
        from piperlang.simulate.result import as_json, simulated, text

        step = simulated(plan, graph, MachineCosts(plan, graph, machine), classes)
    print(json.dumps(as_json(step, machine.memory)) if options.json else text(step, machine.name, machine.memory))
    return 0
