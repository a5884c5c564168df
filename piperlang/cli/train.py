"""Train a model under a schedule: piperc MODEL.py SCHEDULE.piper.

Compiles, checks the plan, starts one worker per device and trains. Leaves a run folder with metrics.jsonl, the script,
the plan, the versions and the trained weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.metrics import LOGGERS, Logger, check_installed, log, logging_to
from piperlang.cli.model import Batches, captured, doing, load_both, planned, scheduled
from piperlang.cli.report import add_parameters, open_script, report
from piperlang.diagnostics import PiperError, error
from piperlang.progress import Message, Row, emit, stepping
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.model_file import ModelFile
    from piperlang.capture.watched import WatchedModel
    from piperlang.elaborate.directive import Directive
    from piperlang.plan.instruction import Plan
    from piperlang.session import Scheduled


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper", help="`-` reads standard input")
    add_training(parser)
    add_parameters(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: runs/SCRIPT-N)")
    parser.add_argument(
        "--executor", choices=("ray", "inline"), default="ray", help="real workers, or threads of this process"
    )
    parser.add_argument("--address", help="of a Ray cluster to join; without it, Ray starts here and ends with the job")
    parser.add_argument("--devices", type=int, metavar="N", help="refuse a script that wants more")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a device waits for another (default: 300)",
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="gloo runs on CPU, nccl on CUDA (default: nccl where torch sees a GPU)",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile chunks with Inductor (default: on CUDA)"
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "compare the captured program with the eager model before the first step (default: yes, where the memory"
            " suffices)"
        ),
    )
    parser.add_argument("--masters", action="store_true", help="keep float32 masters of weights in half precision")
    parser.add_argument(
        "--validate-every",
        type=int,
        metavar="N",
        help="evaluate on `validation()` of the model file every N steps (default: after the last one)",
    )
    parser.add_argument(
        "--log-every",
        type=int,
        metavar="N",
        help="keep a line of every N-th step (default: about 20 of a run, at least one a minute)",
    )
    parser.add_argument(
        "--log",
        choices=tuple(LOGGERS),
        action="append",
        default=[],
        help="write metrics for this tool, too; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON a step, on standard output")


def run(options: argparse.Namespace) -> int:
    check_usage(options)
    file = load_both(options.model, options.script)
    batches = Batches(file, options.seed)
    found = scheduled(captured(file, options.seed, batches.first, runs_on_cuda(options)), options)
    if found.problems:
        report(found.problems, options.format)
        return 1
    with doing("building the graph"):
        graph = found.graph()
    plan = planned(graph, options, file.max_norm)
    return execute(options, file, found, plan, batches)


def check_usage(options: argparse.Namespace) -> None:
    """What can be refused before anything is loaded."""
    if options.steps < 1:
        raise error("P0902", f"`--steps {options.steps}` trains nothing", help="train at least 1")
    if options.log_every is not None and options.log_every < 1:
        raise error(
            "P0902",
            f"--log-every must be at least 1, not {options.log_every}",
            help="`--log-every 1` keeps a line of every step",
        )
    check_installed(options.log)


def execute(options: argparse.Namespace, file: ModelFile, found: Scheduled, plan: Plan, batches: Batches) -> int:
    """Train by a plan that has been checked."""
    if options.devices is not None and len(plan.devices) > options.devices:
        raise error(
            "P0902",
            f"the script wants {len(plan.devices)} devices, more than {options.devices}",
            help="use a smaller mesh, or raise --devices",
        )
    if options.validate_every is not None and (file.validation is None or options.validate_every < 1):
        why = (
            f"{Path(options.model).name} has no `validation`"
            if file.validation is None
            else "that is no number of steps"
        )
        raise error(
            "P0902",
            f"`--validate-every {options.validate_every}` cannot be done: {why}",
            help="define `def validation()` that yields (input, target) batches, and give a number from 1 on",
        )
    if options.backend == "nccl" and not runs_on_cuda(options):
        why = "threads of one process do not use it" if options.executor == "inline" else "torch sees no GPU"
        raise error("P0902", f"`--backend nccl` cannot be used: {why}", help="leave --backend out, or use gloo")
    folder = _folder(options)
    schedule = found.scheduler.schedule
    _write_about(folder, options, plan, schedule.directives)
    _train(options, file, schedule.captured, plan, schedule.model.tensors[schedule.model.loss].dtype, folder, batches)
    return 0


def runs_on_cuda(options: argparse.Namespace) -> bool:
    """Threads of this process and gloo compute on the CPU."""
    import torch

    return options.executor != "inline" and options.backend != "gloo" and torch.cuda.is_available()


def _folder(options: argparse.Namespace) -> Path:
    if options.out:
        folder = Path(options.out)
    else:
        stem = Path(options.script).stem if options.script != "-" else "stdin"
        folder = next(path for n in range(1, 1_000_000) if not (path := Path("runs") / f"{stem}-{n}").exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise error(
            "P0902", f"cannot make the run folder {folder}", notes=[str(problem)], help="choose another with --out"
        ) from None
    return folder


def _write_about(folder: Path, options: argparse.Namespace, plan: Any, directives: Sequence[Directive]) -> None:
    import platform

    import torch

    from piperlang import __version__
    from piperlang.elaborate.resolved import resolved
    from piperlang.plan.saved import dump

    source, _ = open_script(options.script)
    (folder / "schedule.piper").write_text(source.text, encoding="utf-8")
    (folder / "resolved.piper").write_text(resolved(directives), encoding="utf-8")
    (folder / "plan.json").write_text(dump(plan), encoding="utf-8")
    versions = {
        "piperlang": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": sys.argv[1:],
        "seed": options.seed,
        "parameters": options.parameters,
    }
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n", encoding="utf-8")


def _train(
    options: argparse.Namespace, file: ModelFile, cut: Any, plan: Any, loss_dtype: str, folder: Path, given: Batches
) -> None:
    with doing("importing the runtime"):  # Ray among it
        from piperlang.capture.held import refuse_use
        from piperlang.capture.model_file import shipped
        from piperlang.capture.watched import WatchedModel
        from piperlang.runtime.job import Training
        from piperlang.runtime.optimize import default_optimizer

    make = shipped(file, "model")
    assert make is not None
    training = Training(
        make,
        shipped(file, "optimizer") or default_optimizer,
        shipped(file, "lr_schedule"),
        options.seed,
        options.masters,
        shipped(file, "loss"),
    )
    batches = iter(given)
    first = next(batches)
    with ExitStack() as stack:
        loggers = stack.enter_context(_loggers(options, plan, folder))
        validation = _evaluation(options, file, plan, given.first)
        _verify(options, cut, plan, first, training, folder)
        metrics = stack.enter_context((folder / "metrics.jsonl").open("w", encoding="utf-8"))
        job = stack.enter_context(_started(options, plan, cut, training, loss_dtype, validation))

        def note(row: Row) -> None:
            metrics.write(json.dumps(row.record()) + "\n")
            metrics.flush()
            emit(row)
            log(loggers, row.record())
            if file.on_step is not None:
                file.on_step(row.record())

        # Models that the user's code keeps refuse to be used: what is trained is elsewhere.
        checks = _checks(file, [WatchedModel(model.named_modules()) for model in refuse_use()])
        started = time.perf_counter()
        with (
            _interruptible(folder) as done,
            _weights_kept(job, folder, done),
            stepping(options.steps, options.log_every),
        ):
            for row in _steps(options, file, job, plan, batches, first, validation is not None, checks):
                done.append(row.step)
                note(row)
        _save(job, folder)
    seconds = time.perf_counter() - started
    steps, devices = counted(options.steps, "step"), counted(len(plan.devices), "device")
    emit(Message(f"trained {steps} on {devices} in {seconds:.1f} s; {folder}"))


def _steps(
    options: argparse.Namespace,
    file: ModelFile,
    job: Any,
    plan: Any,
    batches: Iterator[Any],
    batch: Any,
    validates: bool,
    checks: Sequence[Callable[[], None]],
) -> Iterator[Row]:
    """Train step by step. The next batch is made while a step trains, but for files with `on_step`, whose data may
    depend on what it does."""
    from piperlang.capture.user_code import located
    from piperlang.capture.where import line_of_function

    ahead = file.on_step is None
    for step in range(options.steps):
        last = step + 1 == options.steps
        for check in checks:
            check()
        with doing("running the first step") if step == 0 else nullcontext():  # chunks may be compiled in it
            with located(line_of_function(file.data)):
                begun = job.begin(batch)
            problem = None
            try:
                batch = next(batches) if ahead and not last else batch
            except PiperError as raised:
                problem = raised
            done = job.finish(begun)
        row = Row(step, done.loss, round(done.seconds, 6), round(plan.samples / done.seconds, 2), done.memory)
        if validates and (last or (step + 1) % (options.validate_every or options.steps) == 0):
            row = replace(row, validation_loss=_validated(job, file))
        yield row
        if problem is not None:
            raise problem
        batch = batch if ahead or last else next(batches)


def _checks(file: ModelFile, kept: Sequence[WatchedModel]) -> list[Callable[[], None]]:
    """Called before every step: what data and `on_step` must leave as it is, besides what the traced program and the
    optimizer read. `kept`: models that the file keeps."""
    from piperlang.capture.state import Frozen
    from piperlang.capture.where import line_of_function

    line = line_of_function(file.data)
    norm = Frozen("the plan", [], [], line, {"max_norm": getattr(unwrap(file.data), "__globals__", {})})
    checks: list[Callable[[], None]] = [norm.check, *(partial(model.check, "between steps", line) for model in kept)]
    if file.lr_schedule is not None:
        schedule = Frozen("`lr_schedule`", [unwrap(file.lr_schedule)], [], line_of_function(file.lr_schedule))
        checks.append(schedule.check)
    return checks


@contextmanager
def _started(
    options: argparse.Namespace, plan: Any, cut: Any, training: Any, loss_dtype: str, validation: tuple[Any, Any] | None
) -> Iterator[Any]:
    """Workers, or threads, that end with the block."""
    from piperlang.plan.saved import digest
    from piperlang.runtime.job import Job
    from piperlang.runtime.threads import ThreadJob

    count, cuda = len(plan.devices), runs_on_cuda(options)
    what = "workers" if options.executor == "ray" else "threads"
    with doing(f"starting {count} {what}", f"{what} {count}/{count}"):
        if options.executor == "ray":
            job: Any = Job(
                plan,
                cut,
                training,
                digest(plan),
                address=options.address,
                timeout=options.timeout,
                loss_dtype=loss_dtype,
                cuda=cuda,
                compiles=options.compile,
            )
        else:
            job = ThreadJob(plan, cut, training, options.timeout, loss_dtype)
        if validation is not None:
            job.prepare(*validation)
    try:
        yield job
    finally:
        with doing(f"ending {count} {what}"):
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
def _interruptible(folder: Path) -> Iterator[list[int]]:
    """Ctrl-C says how far the job came. The block notes its steps in the list it is given."""
    done: list[int] = []
    try:
        yield done
    except KeyboardInterrupt:
        emit(Message(f"interrupted after {counted(len(done), 'step')}; {folder}"))
        raise


@contextmanager
def _weights_kept(job: Any, folder: Path, done: list[int]) -> Iterator[None]:
    """Code of the user's that fails between steps (data, validation, `on_step`) costs no weights: workers still have
    them."""
    try:
        yield
    except PiperError as problem:
        if done and job.alive and not any(diagnostic.code.startswith("P06") for diagnostic in problem.diagnostics):
            _save(job, folder)
        raise


def _save(job: Any, folder: Path) -> None:
    import torch

    with doing("saving the weights", "saved weights.pt") as saving:
        weights = job.weights()
        torch.save(weights, folder / "weights.pt")
        saving.detail = f"{sum(tensor.numel() for tensor in weights.values()):,} numbers"


def _verify(
    options: argparse.Namespace, cut: Any, plan: Any, batch: tuple[Any, Any], training: Any, folder: Path
) -> None:
    """The captured program beside the eager model, before anything is started."""
    from piperlang.runtime.guard import Verified, verify

    with doing("verifying against eager PyTorch"):
        verified = verify(cut, plan, batch, training) if options.verify else Verified(skipped="--no-verify")
    (folder / "verified.json").write_text(json.dumps(asdict(verified)) + "\n", encoding="utf-8")
    emit(Message(str(verified), warning=bool(verified.skipped and options.verify)))


def _evaluation(
    options: argparse.Namespace, file: ModelFile, plan: Any, batch: tuple[Any, Any]
) -> tuple[Any, Any] | None:
    """The plan for validation, if the model file has any, and the pieces it runs: of the model in evaluation mode."""
    if file.validation is None:
        return None

    from piperlang.capture.user_code import located
    from piperlang.capture.where import line_of_function
    from piperlang.runtime.api import Evaluated, evaluation_plan

    found = scheduled(
        captured(replace(file, model=Evaluated(file.model)), options.seed, batch, runs_on_cuda(options)), options
    )
    if found.problems:
        raise PiperError(*found.problems)
    cut: Any = found.scheduler.schedule.captured
    with located(line_of_function(file.validation)):  # before training, not after it
        cut.flatten(next(file.validation()))
    return evaluation_plan(found.graph(), plan), cut


def _validated(job: Any, file: ModelFile) -> float:
    """The mean loss over all batches of `validation`."""
    from piperlang.capture.user_code import located
    from piperlang.capture.where import line_of_function

    assert file.validation is not None
    with doing("validating"), located(line_of_function(file.validation)):
        losses = [job.evaluate(batch) for batch in file.validation()]
    return float(sum(losses) / len(losses))
