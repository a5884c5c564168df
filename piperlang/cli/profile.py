"""Measure what each instruction of a step takes on workers, and save it: `piperc simulate --profile FILE` then uses
these times, also for other schedules of the same model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.backend import OF_WORKERS, add_backend, chosen_backend
from piperlang.cli.model import Batches, add_on_nan, add_precision, captured, doing, load_both, recorded_plan, scheduled
from piperlang.cli.parsing import COUNT, SEED
from piperlang.cli.report import add_parameters, check_output, report, write_output
from piperlang.cli.simulate import machine_of
from piperlang.diagnostics import error
from piperlang.plan.estimate.summary import time_text
from piperlang.progress import Notice, emit

if TYPE_CHECKING:
    from piperlang.capture.program import CutProgram
    from piperlang.capture.user.model_file import ModelFile


OTHERS = 100
"""Batches of other shapes that are left out, one after the other."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where the times are saved (default: MODEL.profile.json)"
    )
    parser.add_argument("--steps", type=COUNT, default=10, help="how many steps are recorded (default: 10)")
    parser.add_argument("--seed", type=SEED, default=0, help="random seed of weights, data and dropout (default: 0)")
    parser.add_argument("--address", metavar="HOST:PORT", help="use the Ray cluster at this address")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile passes with Inductor (default: on CUDA)"
    )
    add_backend(parser, OF_WORKERS)
    add_parameters(parser)
    add_precision(parser)
    add_on_nan(parser)
    parser.set_defaults(executor="ray")


def run(options: argparse.Namespace) -> int:
    name = options.output if options.output is not None else f"{Path(options.model).stem}.profile.json"
    output = check_output(name, "-o", options)
    file = load_both(options.model, options.script, options.precision, options.seed)
    backend = chosen_backend(options)
    batches = Batches(file, options.seed)
    found = scheduled(captured(file, options.seed, batches.first, backend), options)
    if found.problems:
        report(found.problems, options.format)
        return 1
    graph = found.graph()
    plan = recorded_plan(graph, options, file.max_norm)
    with doing("importing the runtime"):
        from piperlang.capture.program import CutProgram
        from piperlang.cli.loop import training_of
        from piperlang.runtime.driver.job import Job
        from piperlang.runtime.driver.profiling import measured, profiled
        from piperlang.simulate.disagree import text
        from piperlang.simulate.measured import MeasuredCosts
        from piperlang.simulate.result import simulated

    cut = found.captured
    assert isinstance(cut, CutProgram)
    dtype = cut.model.tensors[cut.model.loss].dtype
    with doing(f"starting {len(plan.devices)} workers"):
        job = Job(
            plan,
            cut,
            training_of(file, options.seed, masters=False),
            address=options.address,
            loss_dtype=dtype,
            backend=backend,  # type: ignore[arg-type]
            compiles=options.compile,
        )
    with job, doing(f"measuring {options.steps} steps", "measured"):
        result = profiled(job, graph, measured(job, _of_one_shape(file, batches, cut), options.steps))
    result.found.about |= {"model": options.model, "script": options.script, "seconds": result.seconds}
    write_output(output, result.found.dump(), "-o")
    costs = MeasuredCosts(plan, graph, result.found, machine_of(backend))
    print(text(result.typical, simulated(plan, graph, costs).timeline))
    shared = result.found.shared_devices * result.found.side_by_side
    if shared:
        what = f"{len(plan.devices)} workers share {shared} {backend.device.resource}{'s' if shared > 1 else ''}"
        emit(
            Notice(f"{what}: times are those of one alone, and steps simulated with them share the same", warning=True)
        )
    slower = _slower(result.recording / result.seconds)
    emit(Notice(f"a step takes {time_text(result.seconds)}; {slower}; saved {output}"))
    return 0


def _of_one_shape(file: ModelFile, batches: Batches, cut: CutProgram) -> Iterator[tuple[Any, Any]]:
    """Batches of the shapes of the first one: a profile is of one plan."""
    from piperlang.capture.user.where import line_of_function

    others = 0
    for batch in batches.others:
        if cut.layout.fits(batch):
            others = 0
            yield batch
        elif others == OTHERS:
            raise error(
                "P0801",
                f"of {OTHERS} batches none has the shapes of the first one, {cut.layout.written_shapes}",
                line_of_function(file.data),
                notes=["a profile is of one plan, and so of batches of one shape: the others are left out"],
                help="let `data` begin with a batch of the most frequent shape",
            )
        else:
            others += 1


def _slower(ratio: float) -> str:
    """Of a step that was recorded to one that was not."""
    if ratio <= 1:
        return "what recording adds is less than the noise"
    return f"recording made it {100 * (ratio - 1):.1f}% longer"
