"""`--elastic B.piper,C.piper`: what a run continues under when there are not enough devices for its script any more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from piperlang.cli.loop import TrainingLoop
from piperlang.cli.model import Batches, doing, recorded_plan, scheduled
from piperlang.cli.resume import Resumed, newest_whole
from piperlang.cli.run_folder import note_restart, open_folder, owned, removed_if_interrupted, write_about
from piperlang.diagnostics import PiperError, error
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.pipeline import Scheduled
    from piperlang.plan.plan import Plan
    from piperlang.runtime.comm.backend import Backend

NO_ROOM = "P0616"
"""Not enough devices."""


class CompiledScript(NamedTuple):
    """A script that is compiled."""

    options: argparse.Namespace
    """With its path."""
    found: Scheduled
    plan: Plan


def add_elastic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--elastic",
        metavar="B.piper,...",
        help="scripts for fewer devices: if there are not enough for one, the run continues under the next that fits",
    )


def compiled(options: argparse.Namespace, traced: Any, max_norm: float | None) -> CompiledScript:
    """Raises the problems of the script."""
    found = scheduled(traced, options)
    if found.problems:
        raise PiperError(*found.problems)
    with doing("building the graph"):
        graph = found.graph()
    return CompiledScript(options, found, recorded_plan(graph, options, max_norm))


def alternatives(options: argparse.Namespace, traced: Any, max_norm: float | None) -> list[CompiledScript]:
    """The scripts of `--elastic`. They are compiled before training: a mistake is found at once."""
    if options.elastic is None:
        return []
    paths = [path.strip() for path in options.elastic.split(",")]
    if not all(paths):
        raise error("P0902", f"`--elastic {options.elastic}` names no script", help="name some: `B.piper,C.piper`")
    found = []
    for path in paths:
        try:
            found.append(compiled(argparse.Namespace(**{**vars(options), "script": path}), traced, max_norm))
        except PiperError as problem:
            first, *others = problem.diagnostics
            note = f"{path} is one of the scripts of --elastic; all have the same parameters"
            raise PiperError(replace(first, notes=(*first.notes, note)), *others) from None
    return found


def train(
    schedules: Sequence[CompiledScript], file: ModelFile, batches: Batches, backend: Backend, run_before: Resumed | None
) -> None:
    """Trains under the first schedule that there are enough devices for, and goes on under the next if that changes."""
    for schedule in schedules:
        _check(schedule, run_before)
    for larger, smaller in pairwise(schedules):
        if len(smaller.plan.devices) >= len(larger.plan.devices):
            needs = counted(len(smaller.plan.devices), "device")
            raise error(
                "P0902",
                f"`--elastic`: {smaller.options.script} needs {needs}, not fewer than {larger.options.script}",
                help="name scripts for fewer and fewer devices",
            )
    folder, new = open_folder(schedules[0].options, run_before)
    with removed_if_interrupted(folder) if new else nullcontext(), owned(folder):
        for schedule, following in zip(schedules, [*schedules[1:], None], strict=True):
            options, found, plan = schedule
            write_about(folder, options, plan, found.directives, run_before)
            try:
                TrainingLoop(options, file, found, plan, folder, batches, backend, run_before).run()
                return
            except PiperError as problem:
                (first, *_) = problem.diagnostics
                if first.code != NO_ROOM or following is None:
                    raise
            run_before, batches = newest_whole(folder.absolute()) or run_before, Batches(file, options.seed)
            step = run_before.step if run_before is not None else 0
            needs = counted(len(following.plan.devices), "device")
            to = f"continuing after {counted(step, 'step')} under {following.options.script}, on {needs}"
            emit(Notice(f"{first.message}: {to}", warning=True))
            note_restart(folder, {"from": step, "why": first.message, "script": following.options.script})


def _check(schedule: CompiledScript, run_before: Resumed | None) -> None:
    options, found, plan = schedule
    if options.devices is not None and len(plan.devices) > options.devices:
        raise error(
            "P0902",
            f"{options.script} needs {len(plan.devices)} devices, more than --devices {options.devices}",
            help="use a smaller mesh, or raise --devices",
        )
    if run_before is not None:
        from piperlang.runtime.driver.restoring import check_model, shapes_of

        cut: Any = found.captured
        check_model(run_before.manifest, shapes_of(plan, cut.unsaved))
