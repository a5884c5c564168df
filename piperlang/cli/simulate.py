"""Simulate a step of a model under a schedule, without devices and weights: its time, idle time, exposed communication,
memory and critical path."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from piperlang.cli.model import add_on_nan, add_precision, captured, doing, load_both, scheduled
from piperlang.cli.report import add_parameters, open_script, paint, parameters
from piperlang.core.collector import uncollected
from piperlang.diagnostics import PiperError, did_you_mean, error, listed
from piperlang.elaborate.modules import from_source
from piperlang.ir.graph import Graph
from piperlang.pipeline import representative
from piperlang.plan.estimate.machine import Machine
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted
from piperlang.simulate.execute import SimulatedStep
from piperlang.simulate.machine_files import load as load_machine
from piperlang.simulate.machine_files import names
from piperlang.simulate.profile import Profile
from piperlang.simulate.profile import load as load_profile
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.capture.program import Program
    from piperlang.runtime.comm.backend import Backend
    from piperlang.simulate.timeline import Timeline

NAMED = 3
"""How many of a long list are named."""


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Options that say what instructions take."""
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help=f"{', '.join(names())}, or a TOML file that describes one (default: h100); beside --profile it"
        " is for what was not measured (default: cpu for a profile of gloo)",
    )
    parser.add_argument("--profile", metavar="FILE", help="use the times that `piperc profile` has measured")
    add_parameters(parser)
    add_precision(parser)
    add_on_nan(parser)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_costs(parser)


MEASURED = 64
"""Up to so many devices, all of them are simulated with measured times."""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
    return ", ".join(names[:NAMED]) + more


class ChosenCosts(NamedTuple):
    """What the options say that instructions take."""

    machine: Machine
    profile: Profile | None


def chosen_costs(options: argparse.Namespace) -> ChosenCosts:
    """Read before a model is loaded and traced, which may take minutes."""
    profile = load_profile(Path(options.profile)) if options.profile is not None else None
    default = "cpu" if profile is not None and profile.about.get("backend") == "gloo" else "h100"
    return ChosenCosts(load_machine(options.machine if options.machine is not None else default), profile)


def machine_of(backend: Backend) -> Machine:
    """That a job runs on, as far as its name tells."""
    kind = backend.device
    model = kind.model().lower()
    known = (name for name in names() if name in model)
    return load_machine("cpu" if kind.name == "cpu" else next(known, "h100"))


class SimulatedScript(NamedTuple):
    """A step of a script that was simulated."""

    step: SimulatedStep
    graph: Graph
    where: str
    """What it was simulated on."""
    memory: float
    """Of a device there, in bytes; 0 if unknown."""
    estimated: tuple[str, ...] = ()
    """What the profile does not have, and is estimated from what it has."""


def run(options: argparse.Namespace) -> int:
    chosen = chosen_costs(options)
    file = load_both(options.model, options.script, options.precision)
    found = simulate(options, chosen, captured(file), file.max_norm)
    from piperlang.simulate.result import as_json, text

    if options.json:
        print(json.dumps({**as_json(found.step, found.memory), "estimated": found.estimated}))
    else:
        print(_drawn(found.step.timeline))
        print(text(found.step, found.where, found.memory))
    return 0


def _drawn(timeline: Timeline) -> str:
    from piperlang.view.bars import bars, glyphs

    width = shutil.get_terminal_size((140, 24)).columns
    return bars(timeline, width, paint(sys.stdout), glyphs(sys.stdout.encoding))


def options_of(options: argparse.Namespace, scripts: Sequence[str]) -> list[argparse.Namespace]:
    """Those of each script. A parameter goes to the scripts that have it, which at least one must."""
    if len(scripts) == 1:
        return [options]
    given = parameters(options)
    known = {script: _parameters_of(script) for script in scripts}
    every = sorted({name for names in known.values() for name in names})
    unknown = next((name for name in given if name not in every), None)
    if unknown is not None:
        raise error(
            "P0903",
            f"no script has a parameter `{unknown}`",
            notes=[f"{script} has {listed(names, 'and') if names else 'none'}" for script, names in known.items()],
            help=did_you_mean(unknown, every) or "name a parameter of at least one of them",
        )
    found = []
    for script in scripts:
        its = [f"{name}={value}" for name, value in given.items() if name in known[script]]
        found.append(argparse.Namespace(**{**vars(options), "script": script, "parameters": its}))
    return found


def _parameters_of(script: str) -> list[str]:
    module = from_source(*open_script(script))
    return [one.name.text for one in module.script.statements if isinstance(one, tree.Param)]


def simulate(
    options: argparse.Namespace, chosen: ChosenCosts, traced: Program, max_norm: float | None
) -> SimulatedScript:
    """Raises the problems of the script."""
    with uncollected():
        return _simulate(options, chosen, traced, max_norm)


def _simulate(
    options: argparse.Namespace, chosen: ChosenCosts, traced: Program, max_norm: float | None
) -> SimulatedScript:
    machine, profile = chosen
    found = scheduled(traced, options)
    if found.problems:
        raise PiperError(*found.problems)
    with doing("building the graph"):
        graph = found.graph()
    with doing("planning", "planned") as planning:
        # What devices that do the same were measured to take is not the same.
        most = MEASURED if profile is not None else 0
        plan, classes = representative(graph, max_norm, options.on_nan != "continue", most)
        devices = counted(sum(map(len, classes)), "device")
        planning.detail = f"{devices}, {len(classes)} that differ"
    with doing("simulating", "simulated"):
        from piperlang.simulate.costs import CostModel, MachineCosts, check_rates
        from piperlang.simulate.measured import MeasuredCosts
        from piperlang.simulate.result import simulated

        if profile is None:
            check_rates(machine, graph.model)
            costs: CostModel = MachineCosts(plan, graph, machine)
            step = simulated(plan, graph, costs, classes, Path(options.script).name)
            return _from(step, graph, machine.name, machine.memory)
        costs = measured = MeasuredCosts(plan, graph, profile, machine)
        step = simulated(plan, graph, costs, classes, Path(options.script).name)
    estimated = tuple(sorted(measured.unknown))
    if estimated:
        emit(Notice(f"not measured, and estimated from what was: {_some(estimated)}", warning=True))
    how = "as measured" if not estimated else "some of it estimated, the rest as measured"
    where = f"{profile.about.get('device', 'a device')}, {how} under {profile.about.get('script')}"
    return _from(step, graph, f"{where} ({Path(options.profile).name})", 0.0)._replace(estimated=estimated)


def _from(step: SimulatedStep, graph: Graph, where: str, memory: float) -> SimulatedScript:
    timeline = replace(step.timeline, source=f"simulated on {where}")
    return SimulatedScript(step._replace(timeline=timeline), graph, where, memory)
