"""Train a model under a schedule: piperc MODEL.py SCHEDULE.piper.

Compiles, checks the plan, starts one worker per device and trains. Writes a run folder with metrics.jsonl, the script,
the plan, the versions and the trained weights."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.backend import add_backend, add_executor, chosen_backend
from piperlang.cli.feeding import Feeding, InWorkers, feeding
from piperlang.cli.metrics import LOGGERS, Logger, check_installed, log, logging_to
from piperlang.cli.model import Batches, add_precision, captured, doing, load_both, recorded_plan, scheduled
from piperlang.cli.parsing import COUNT, MINUTES, SECONDS, SEED
from piperlang.cli.report import add_parameters, report
from piperlang.cli.resume import Resumed, resumed
from piperlang.cli.run_folder import (
    AVERAGES,
    METRICS,
    WEIGHTS,
    check_folder,
    drop,
    open_folder,
    save,
    write_about,
    write_text,
    writing,
)
from piperlang.cli.saving import Saving
from piperlang.diagnostics import PiperError, error
from piperlang.interrupts import asked_first, end, uninterrupted, write
from piperlang.progress import Notice, StepMetrics, emit, stepping
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.capture.user.watched import WatchedModel
    from piperlang.pipeline import Scheduled
    from piperlang.plan.plan import Plan
    from piperlang.runtime.comm.backend import Backend
    from piperlang.runtime.driver.shapes import Mode


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
    parser.add_argument("--address", help="address of a Ray cluster; by default, a local Ray is started for the job")
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
    parser.add_argument("--json", action="store_true", help="print a line of JSON per step on standard output")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--initial-weights",
        metavar="PATH",
        help="start from these safetensors, a file or a folder (default: `initial_weights` of the model file)",
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
    found = scheduled(captured(file, options.seed, batches.first, backend), options)
    batches.reads.check("when `model` is called")
    if found.problems:
        report(found.problems, options.format)
        return 1
    with doing("building the graph"):
        graph = found.graph()
    plan = recorded_plan(graph, options, file.max_norm)
    return execute(options, file, found, plan, batches, backend, run_before)


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
        check_folder(Path(options.out), used=options.overwrite or options.resume is not None)
    if options.overwrite and (options.resume is not None or options.out is None):
        raise error(
            "P0902",
            "cannot use `--overwrite` " + ("with `--resume`" if options.resume is not None else "without `--out`"),
            help="it replaces the run in the folder of --out",
        )
    if options.backend is not None:
        chosen_backend(options)


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


def execute(
    options: argparse.Namespace,
    file: ModelFile,
    found: Scheduled,
    plan: Plan,
    batches: Batches,
    backend: Backend,
    run_before: Resumed | None,
) -> int:
    """Train with a checked plan."""
    if options.devices is not None and len(plan.devices) > options.devices:
        raise error(
            "P0902",
            f"the script needs {len(plan.devices)} devices, more than --devices {options.devices}",
            help="use a smaller mesh, or raise --devices",
        )
    cut: Any = found.captured
    if run_before is not None:
        from piperlang.runtime.driver.restoring import check_model, shapes_of

        check_model(run_before.manifest, shapes_of(plan, cut.constants))
    folder = open_folder(options, run_before)
    write_about(folder, options, plan, found.directives, run_before)
    model = cut.model
    _train(options, file, cut, plan, model.tensors[model.loss].dtype, folder, batches, backend, run_before)
    return 0


def _train(
    options: argparse.Namespace,
    file: ModelFile,
    cut: Any,
    plan: Any,
    loss_dtype: str,
    folder: Path,
    given: Batches,
    backend: Backend,
    run_before: Resumed | None,
) -> None:
    with doing("importing the runtime"):
        from piperlang.capture.user.held import refuse_use
        from piperlang.capture.user.model_file import shipped
        from piperlang.capture.user.seeding import generators_left_alone
        from piperlang.capture.user.watched import WatchedModel
        from piperlang.runtime.driver.shapes import OtherShapes
        from piperlang.runtime.driver.training import Training
        from piperlang.runtime.optimizer.optimize import default_optimizer
        from piperlang.runtime.shapes import PlanForShape

    make = shipped(file, "model")
    assert make is not None
    training = Training(
        make,
        shipped(file, "optimizer") or default_optimizer,
        shipped(file, "lr_schedule"),
        options.seed,
        options.masters or file.precision == "bf16-true",
        shipped(file, "loss"),
        file.ema,
        file.weights,
        run_before.restore(options.new_options) if run_before is not None else None,
    )
    at = folder.absolute()  # the user's code may change the working directory
    with ExitStack() as stack:
        loggers = stack.enter_context(_loggers(options, plan, folder))
        plan_for = PlanForShape(
            partial(_applied, options, file, backend), plan, cut, training, file.max_norm, options.verify
        )
        validation = plan_for("evaluate", _validation_batch(file, given)) if file.validation is not None else None
        _verify(options, cut, plan, given.first, training, folder)
        given.reads.check("when the optimizer or its schedule steps")
        rows = at / METRICS
        with writing(rows, "all rows of metrics"):
            metrics = stack.enter_context(rows.open("a", encoding="utf-8"))
        stack.callback(drop, metrics)
        others = OtherShapes(plan_for, options.shapes)
        job = stack.enter_context(_started(options, backend, plan, cut, training, loss_dtype, validation, others))

        def note(row: StepMetrics) -> None:
            with uninterrupted():  # what is said of an interrupted job is what metrics.jsonl has
                with writing(rows, f"the rows of metrics from step {row.step} on"):
                    metrics.write(json.dumps(row.record()) + "\n")
                    metrics.flush()
                with writing(rows, "the rows of metrics so far: the file was removed"):
                    rows.stat()  # it would take rows that nobody can read
                emit(row)
            log(loggers, row.record())
            if file.on_step is not None:
                with generators_left_alone(file.on_step) if isinstance(fed, InWorkers) else nullcontext():
                    file.on_step(row.record())

        fed = feeding(options.data, job, file, given, cut, options.seed)
        # Models that the user's code still holds cannot be used any more; the trained weights are elsewhere.
        checks = _checks(file, [WatchedModel(model.named_modules()) for model in refuse_use(traced_again=True)])
        samples = 0
        if run_before is not None:
            fed.resume(run_before.manifest)
            samples = run_before.manifest.data.samples
        saving = Saving(options, job, plan, at, run_before.step if run_before is not None else 0, samples)
        started = time.perf_counter()
        trained: list[int] = []
        showing = stepping(options.steps, options.log_every, str(folder))
        with _state_kept(job, saving, fed, trained), showing, asked_first(_last_step) as asked:
            for row in _steps(options, file, fed, validation is not None, checks, trained, saving, asked):
                note(row)
        saving.finish()
        save(job, at, WEIGHTS)
        if file.ema is not None:
            save(job, at, AVERAGES, averaged=True)
    seconds = time.perf_counter() - started
    steps, devices = counted(len(trained), "step"), counted(len(plan.devices), "device")
    emit(Notice(f"trained {steps} on {devices} in {seconds:.1f} s; {folder}"))


def _steps(
    options: argparse.Namespace,
    file: ModelFile,
    fed: Feeding,
    validates: bool,
    checks: Sequence[Callable[[], None]],
    trained: list[int],
    saving: Saving,
    asked: Callable[[], bool],
) -> Iterator[StepMetrics]:
    """Train step by step, and append the steps to `trained`, until it is `asked` to end. The next batch is loaded while
    a step runs, except before a validation, and for files with `on_step`: the data may depend on either."""
    start = saving.step
    for step in range(start, options.steps):
        last = step + 1 == options.steps
        validated = validates and (last or (step + 1) % (options.validate_every or options.steps) == 0)
        ahead = not last and not validated and (file.on_step is None or isinstance(fed, InWorkers))
        for check in checks:
            check()
        with doing("running the first step") if step == start else nullcontext():  # it may compile chunks
            done = fed.step(ahead)
            trained.append(step)
        row = StepMetrics(
            step,
            done.loss,
            round(done.seconds, 6),
            round(done.samples / done.seconds, 2),
            done.memory,
            waited_for_data=None if done.waited is None else round(done.waited, 6),
        )
        if validated:
            row = replace(row, validation_loss=_validated(fed, file))
            fed.validated.append(step)
        yield row
        saving.after(done.samples, fed, last)
        if asked() and not last:
            saving.save(fed)
            saving.finish()
            emit(Notice(f"continue with `--resume {saving.run}`"))
            end()
        if not last:
            fed.advance(ahead)


def _last_step(signal: str) -> None:
    write(f"{signal}: a checkpoint is saved after this step; a second signal ends the job at once")


def _checks(file: ModelFile, kept: Sequence[WatchedModel]) -> list[Callable[[], None]]:
    """Called before every step: what data and `on_step` must leave as it is, besides what the traced program and the
    optimizer read. `kept`: models that the file keeps."""
    from piperlang.capture.user.state import Frozen
    from piperlang.capture.user.where import line_of_function

    line = line_of_function(file.data)
    norm = Frozen("the plan", [], [], line, [("max_norm", getattr(unwrap(file.data), "__globals__", {}))])
    checks: list[Callable[[], None]] = [norm.check, *(partial(model.check, "between steps", line) for model in kept)]
    if file.lr_schedule is not None:
        schedule = Frozen("`lr_schedule`", [unwrap(file.lr_schedule)], [], line_of_function(file.lr_schedule))
        checks.append(schedule.check)
    return checks


@contextmanager
def _started(
    options: argparse.Namespace,
    backend: Backend,
    plan: Any,
    cut: Any,
    training: Any,
    loss_dtype: str,
    validation: tuple[Any, Any] | None,
    others: Any,
) -> Iterator[Any]:
    """Workers, or threads, that end with the block."""
    from piperlang.runtime.driver.start import start

    count = len(plan.devices)
    what = "workers" if options.executor == "ray" else "threads"
    with doing(f"starting {count} {what}", f"{what} {count}/{count}"):
        job = start(
            backend,
            plan,
            cut,
            training,
            loss_dtype,
            timeout=options.timeout,
            address=options.address,
            compiles=options.compile,
            others=others,
        )
        if validation is not None:
            job.shapes.add("evaluate", *validation)
    try:
        yield job
    finally:
        with doing(f"stopping {count} {what}"):
            job.close()


@contextmanager
def _loggers(options: argparse.Namespace, plan: Any, folder: Path) -> Iterator[list[Logger]]:
    settings = {
        "model": options.model,
        "script": options.script,
        "seed": options.seed,
        "steps": options.steps,
        "devices": len(plan.devices),
    }
    settings |= dict(text.split("=", 1) for text in options.parameters)
    with ExitStack() as stack:
        with doing(f"starting {', '.join(options.log)}") if options.log else nullcontext():
            loggers = stack.enter_context(logging_to(options.log, folder, settings))
        yield loggers


@contextmanager
def _state_kept(job: Any, saving: Saving, fed: Feeding, trained: list[int]) -> Iterator[None]:
    """If user code fails between steps (data, validation, `on_step`), save a checkpoint: the workers still have the
    state of training."""
    before = saving.step
    try:
        yield
    except PiperError as problem:
        worker_failed = any(d.code.startswith("P06") and d.code != "P0609" for d in problem.diagnostics)
        if not trained or not job.alive or worker_failed:
            raise
        saving.step = before + len(trained)
        steps = counted(saving.step, "step")
        try:
            saving.save(fed)
            saving.finish()
            kept = f"the state after {steps} is saved; when this is mended, continue: `--resume {saving.run}`"
        except PiperError as another:
            kept = f"the state after {steps} is lost: {another.diagnostics[0].message}"
        first, *others = problem.diagnostics
        raise PiperError(replace(first, notes=(*first.notes, kept)), *others) from problem


def _verify(
    options: argparse.Namespace, cut: Any, plan: Any, batch: tuple[Any, Any], training: Any, folder: Path
) -> None:
    """Compare the captured program with the eager model before workers start."""
    from piperlang.runtime.guard.program import Verified, verify

    with doing("verifying against eager PyTorch"):
        verified = verify(cut, plan, batch, training) if options.verify else Verified(skipped="--no-verify")
    write_text(folder / "verified.json", json.dumps(asdict(verified)) + "\n")
    emit(Notice(str(verified), warning=bool(verified.skipped and options.verify)))


def _validation_batch(file: ModelFile, given: Batches) -> tuple[Any, Any]:
    """The first batch of `validation`, so that one that cannot be used is reported before training, not after it; or
    one of `data`, if to call `validation` could change what `data` yields."""
    from piperlang.capture.user.batches import DATA, may_share_state
    from piperlang.capture.user.seeding import restored
    from piperlang.capture.user.user_code import located
    from piperlang.capture.user.where import line_of_function

    assert file.validation is not None
    if may_share_state(file.data, file.validation, DATA):
        return given.first
    with restored(), located(line_of_function(file.validation)):
        return next(file.validation())


def _applied(
    options: argparse.Namespace,
    file: ModelFile,
    backend: Backend,
    mode: Mode,
    batch: tuple[Any, Any],
    rows: tuple[int, ...],
) -> tuple[Any, Any]:
    """The graph of the script for batches of this shape, padded to these samples of it, and its stage programs."""
    from piperlang.runtime.shapes import InEvaluationMode

    if mode == "evaluate":
        file = replace(file, model=InEvaluationMode(file.model))
    found = scheduled(captured(file, options.seed, batch, backend).padded(rows), options)
    if found.problems:
        raise PiperError(*found.problems)
    return found.graph(), found.captured


def _validated(fed: Feeding, file: ModelFile) -> float:
    """The mean loss over all batches of `validation`."""
    from piperlang.capture.user.user_code import located
    from piperlang.capture.user.where import line_of_function

    assert file.validation is not None
    with doing("validating"), located(line_of_function(file.validation)):
        losses: list[float] = []
        late = time.monotonic() + ENDLESS
        for loss in fed.validate():
            losses.append(loss)
            if time.monotonic() > late:
                late = float("inf")
                emit(Notice(_endless(len(losses)), warning=True))
    return float(sum(losses) / len(losses))


ENDLESS = 30.0
"""Seconds after which a validation might be one that never ends."""


def _endless(count: int) -> str:
    return (
        f"`validation` has yielded {count:,} batches so far; if it never ends, bound it:"
        " `return itertools.islice(data(), 10)`"
    )
