"""Train a model under a schedule: piperc MODEL.py SCHEDULE.piper.

Compiles, checks the plan, starts one worker per device and trains. Writes a run folder with metrics.jsonl, the script,
the plan, the versions and the trained weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from piperlang.cli.backend import add_backend, add_executor, chosen_backend
from piperlang.cli.elastic import add_elastic, alternatives, compiled, train
from piperlang.cli.metrics import LOGGERS, check_installed
from piperlang.cli.model import Batches, add_on_nan, add_precision, captured, load_both
from piperlang.cli.parsing import COUNT, MINUTES, POSITION, SECONDS, SEED
from piperlang.cli.report import add_parameters
from piperlang.cli.resume import Resumed, location, resumed
from piperlang.cli.run_folder import WEIGHTS, check_folder, may_be_used
from piperlang.diagnostics import error
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper", help="`-` reads standard input")
    add_training(parser)
    add_parameters(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=COUNT, default=10, help="number of training steps (default: 10)")
    parser.add_argument("--seed", type=SEED, help="random seed of weights, data and dropout (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: runs/SCRIPT-N)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in the folder of --out")
    add_checkpoints(parser)
    add_executor(parser)
    add_cluster(parser)
    add_elastic(parser)
    parser.add_argument("--devices", type=COUNT, metavar="N", help="reject a script that needs more devices")
    parser.add_argument(
        "--timeout",
        type=SECONDS,
        default=300.0,
        metavar="SECONDS",
        help="timeout of communication between devices (default: 300)",
    )
    add_backend(parser)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile chunks with Inductor (default: on CUDA)"
    )
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="capture the step of a device once and replay it (default: on CUDA)",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "compare the captured program with the eager model before the first step (default: yes, if memory suffices)"
        ),
    )
    parser.add_argument(
        "--data",
        choices=("workers", "slices", "driver"),
        help=(
            "where batches are loaded (default: in workers, unless that could make a difference); slices: every worker"
            " loads only the samples that it reads, from a DataLoader"
        ),
    )
    parser.add_argument(
        "--shapes",
        type=COUNT,
        default=8,
        metavar="N",
        help="plan for at most N shapes of batches; each one is compiled when it comes (default: 8)",
    )
    add_precision(parser)
    add_on_nan(parser)
    parser.add_argument("--masters", action="store_true", help="keep float32 master weights for half-precision weights")
    parser.add_argument(
        "--validate-every",
        type=COUNT,
        metavar="N",
        help="evaluate on `validation()` of the model file every N steps (default: after the last step)",
    )
    parser.add_argument(
        "--log-every",
        type=COUNT,
        metavar="N",
        help="print a line every N steps (default: about 20 lines per run, at least one per minute)",
    )
    parser.add_argument(
        "--log",
        choices=tuple(LOGGERS),
        action="append",
        default=[],
        help="also write metrics for this tool; may be repeated",
    )
    parser.add_argument(
        "--trace",
        type=COUNT,
        metavar="N",
        help="record N steps after the first few, and draw one of them beside what was estimated: RUN/trace.html",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per step on standard output")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="address of a Ray cluster; by default, a local Ray is started for the job")
    parser.add_argument(
        "--node-timeout",
        type=SECONDS,
        default=30.0,
        metavar="SECONDS",
        help="a machine of the cluster is lost if it has not answered for so long (default: 30)",
    )
    parser.add_argument(
        "--wait-devices",
        type=SECONDS,
        metavar="SECONDS",
        help="how long to wait for devices in place of lost ones (default: 600, with --elastic 60)",
    )


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--initial-weights",
        metavar="PATH",
        help="start from these safetensors, a file or a folder (default: `initial_weights` of the model file)",
    )
    parser.add_argument(
        "--checkpoints",
        metavar="URL",
        help="keep checkpoints in an object store, or wherever fsspec reaches: s3://bucket/run (default: run folder)",
    )
    parser.add_argument("--save-every", type=COUNT, metavar="N", help="save a checkpoint every N steps")
    parser.add_argument("--save-minutes", type=MINUTES, metavar="M", help="save a checkpoint every M minutes")
    parser.add_argument(
        "--keep", type=COUNT, default=3, metavar="K", help="keep the newest K checkpoints of the run (default: 3)"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help=(
            "continue the run in this folder from its newest checkpoint, under any schedule; `auto`: the run of --out,"
            " or the newest one of the script, if it has a checkpoint"
        ),
    )
    parser.add_argument(
        "--restart",
        type=POSITION,
        default=3,
        metavar="N",
        help="if a worker dies or hangs, start again from the newest checkpoint, at most N times (default: 3)",
    )
    parser.add_argument(
        "--new-options",
        action="store_true",
        help="resume with options of the optimizer that differ from those of the run",
    )


def run(options: argparse.Namespace) -> int:
    check_usage(options)
    run_before = start_of(options)
    if is_done(options, run_before):
        return 0
    file = load_both(options.model, options.script, options.precision, options.seed, weights_of(options))
    check_loaded(options, file)
    backend = chosen_backend(options)
    batches = Batches(file, options.seed)
    traced = captured(file, options.seed, batches.first, backend)
    first = compiled(options, traced, file.max_norm)
    batches.reads.check("when `model` is called")
    train([first, *alternatives(options, traced, file.max_norm)], file, batches, backend, run_before)
    return 0


def start_of(options: argparse.Namespace) -> Resumed | None:
    """The checkpoint that the job starts from, if there is one; it has the seed."""
    found = resumed(options)
    if options.seed is None:
        options.seed = found.manifest.seed if found is not None else 0
    return found


def is_done(options: argparse.Namespace, run_before: Resumed | None) -> bool:
    """Whether the run that is resumed has trained all steps, and has saved its weights."""
    if run_before is None or run_before.step < options.steps or not (run_before.run / WEIGHTS).exists():
        return False
    steps = counted(run_before.step, "step")
    emit(Notice(f"the run has trained {steps} already; --steps is the number of all steps; {run_before.run}"))
    return True


def check_usage(options: argparse.Namespace) -> None:
    """Checks of the options before anything is loaded."""
    check_installed(options.log)
    if options.out is not None:
        check_folder(Path(options.out), used=may_be_used(options))
    if options.overwrite and (options.resume is not None or options.out is None):
        raise error(
            "P0902",
            "cannot use `--overwrite` " + ("with `--resume`" if options.resume is not None else "without `--out`"),
            help="it replaces the run in the folder of --out",
        )
    if options.trace is not None and (options.executor == "inline" or options.backend == "threads"):
        raise error("P0902", "`--trace` records workers, and there are none", help="omit it, or use workers")
    if options.backend is not None:
        chosen_backend(options)
    if options.checkpoints is not None:
        check_store(options)


def check_store(options: argparse.Namespace) -> None:
    """`--checkpoints` must be a place that can be reached, and that has no other run."""
    from piperlang.runtime.checkpoint.store import ObjectStore

    url = options.checkpoints
    place = location(url)
    if isinstance(place, Path):
        raise error("P0902", f"`--checkpoints {url}` is no URL", help="name one: s3://bucket/run; for a folder, --out")
    try:
        used = ObjectStore(place).names()
    except OSError as problem:
        raise error(
            "P0902",
            f"cannot reach {url}",
            notes=[str(problem).partition("\n")[0]],
            help="check its name and your credentials",
        ) from None
    if used and options.resume is None and not options.overwrite:
        raise error(
            "P0902",
            f"{url} has the checkpoints of another run",
            help=f"continue that run with `--resume {url}`, or choose another place",
        )


def weights_of(options: argparse.Namespace) -> Path | None:
    """The files of `--initial-weights`."""
    return Path(options.initial_weights).absolute() if options.initial_weights is not None else None


def check_loaded(options: argparse.Namespace, file: ModelFile) -> None:
    """Checks of the options before anything is traced."""
    if options.validate_every is not None and file.validation is None:
        raise error(
            "P0902",
            f"cannot use `--validate-every {options.validate_every}`: {Path(options.model).name} has no `validation`",
            help="define `def validation()` that yields (input, target) batches",
        )
