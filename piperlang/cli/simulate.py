"""Simulate a step of a model under a schedule, without devices and weights: its time, idle time, exposed communication,
memory and critical path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from piperlang.cli.model import add_on_nan, add_precision, captured, doing, load_both, scheduled
from piperlang.cli.report import add_parameters, report
from piperlang.pipeline import representative
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted
from piperlang.simulate.machine_files import load as load_machine
from piperlang.simulate.machine_files import names
from piperlang.simulate.measured import load as load_profile

NAMED = 3
"""How many of a long list are named."""


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(names())}, or a TOML file that describes one (default: h100, and cpu with --profile)",
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    add_machine(parser)
    parser.add_argument("--profile", metavar="FILE", help="use the times that `piperc profile` has measured")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_parameters(parser)
    add_precision(parser)
    add_on_nan(parser)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
    return ", ".join(names[:NAMED]) + more


def run(options: argparse.Namespace) -> int:
    profile = load_profile(Path(options.profile)) if options.profile is not None else None
    machine = load_machine(options.machine or ("h100" if profile is None else "cpu"))
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
        from piperlang.simulate.costs import CostModel, MachineCosts
        from piperlang.simulate.measured import MeasuredCosts
        from piperlang.simulate.result import as_json, simulated, text

        costs: CostModel = MachineCosts(plan, graph, machine)
        where = machine.name
        if profile is not None:
            costs = measured = MeasuredCosts(plan, graph, profile, machine)
            where = f"{profile.about.get('device', 'a device')}, as measured under {profile.about.get('script')}"
        step = simulated(plan, graph, costs, classes)
    if profile is not None and measured.unknown:
        emit(Notice(f"not measured, and estimated from what was: {_some(sorted(measured.unknown))}", warning=True))
    memory = machine.memory if profile is None else 0.0
    print(json.dumps(as_json(step, memory)) if options.json else text(step, where, memory))
    return 0
