"""Loads, captures and schedules the model file and the script of a command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.report import open_script, parameters, say
from piperlang.diagnostics import error
from piperlang.diagnostics.files import unreadable
from piperlang.elaborate.modules import from_source
from piperlang.ir.graph import Graph
from piperlang.pipeline import Scheduled, planned, schedule
from piperlang.plan.plan import Plan
from piperlang.progress import phase
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.program import Program
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.runtime.comm.backend import Backend


doing = phase
"""`with doing("tracing model.py"):` reports a phase that may take long."""


def load(name: str, seed: int = 0) -> ModelFile:
    if not name.endswith(".py"):
        raise error("P0902", f"{name} is not a Python file", help="pass the model first: MODEL.py SCHEDULE.piper")
    try:
        Path(name).stat()  # before torch is imported, which takes seconds
    except OSError as problem:
        raise unreadable(Path(name), problem) from None
    with doing(f"loading {name}", f"loaded {Path(name).name}"):
        from piperlang.capture.user.model_file import load_model

        return load_model(Path(name), seed)


def load_both(
    model: str, script: str, precision: str | None = None, seed: int = 0, weights: Path | None = None
) -> ModelFile:
    """The model of `MODEL.py SCHEDULE.piper`. A script that does not parse is rejected first: loading a model takes
    seconds, tracing it may take minutes."""
    from_source(*open_script(script))
    return load(model, seed).at(precision, weights)


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("bf16-mixed", "bf16-true"),
        help="autocast to bfloat16, or bfloat16 weights with float32 masters (default: `precision` of the model file)",
    )


class Batches:
    """The batches of a job. The model is traced with the first one, which is also the first training batch."""

    def __init__(self, file: ModelFile, seed: int) -> None:
        from piperlang.capture.user.batches import DataReads, endless
        from piperlang.capture.user.seeding import generator_states, seed_all

        seed_all(seed)
        with doing("loading the first batch"):
            self.others = endless(file.data)
            self.first: tuple[Any, Any] = next(self.others)
        self.after_first = generator_states()
        self.reads = DataReads(file.data, file.validation)


def captured(
    file: ModelFile, seed: int = 0, batch: tuple[Any, Any] | None = None, backend: Backend | None = None
) -> Program:
    """`backend`: by default, that of worker processes."""
    with doing(f"tracing {file.path.name}", "traced") as tracing:
        from piperlang.capture.program import capture
        from piperlang.capture.user.batches import placed
        from piperlang.capture.user.seeding import seeded
        from piperlang.runtime.comm.registry import for_workers

        if batch is None:
            with seeded(seed):
                batch = next(iter(file.data()))
        device = (backend or for_workers()).device.name
        program = capture(file.model, file.loss, placed(batch, device), seed, file.copies)
        tracing.detail = f"{len(program.sizes.small.graph.nodes):,} nodes"
        return program


def scheduled(program: Program, options: argparse.Namespace, after: int | None = None) -> Scheduled:
    source, path = open_script(options.script)
    with doing(f"applying {options.script}"):
        return schedule(program, source, path, parameters(options), say, after)


def add_on_nan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-nan",
        choices=("stop", "skip", "continue"),
        default="stop",
        help=(
            "if the loss or the norm of the gradients is not finite: `stop` before anything is updated (the default),"
            " `skip` the step, or `continue` without looking at the norm"
        ),
    )


def recorded_plan(graph: Graph, options: argparse.Namespace, max_norm: float | None) -> Plan:
    """The verified plan of a graph, with a record of its sources."""
    from piperlang.plan.files import about

    with doing("planning", "planned") as planning:
        plan = planned(graph, max_norm, options.on_nan != "continue")
        source, path = open_script(options.script)
        made_from = about(Path(options.model), path, parameters(options), source.text if path is None else None)
        made_from["parameters"] |= {"--precision": options.precision} if options.precision else {}
        plan.about = {**made_from, "model": options.model, "script": options.script}
        instructions = sum(len(device.instructions) for device in plan.devices)
        planning.detail = f"{counted(len(plan.devices), 'device')}, {counted(instructions, 'instruction')}"
        return plan
