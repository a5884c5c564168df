"""The training loop of a job: steps, metrics, validation, checkpoints, and a new start when a worker is lost."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.feeding import Feeding, InWorkers, feeding
from piperlang.cli.metrics import Logger, log, logging_to
from piperlang.cli.model import Batches, captured, doing, scheduled
from piperlang.cli.resume import Resumed, newest_whole
from piperlang.cli.rows import MetricRows
from piperlang.cli.run_folder import AVERAGES, OUTPUT, WEIGHTS, note_restart, patiently, save, write_text
from piperlang.cli.saving import Saving
from piperlang.cli.tracing import Tracing
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.interrupts import asked_first, end, uninterrupted, write
from piperlang.progress import Notice, StepMetrics, emit, stepping
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.capture.user.watched import WatchedModel
    from piperlang.plan.plan import Plan
    from piperlang.runtime.comm.backend import Backend
    from piperlang.runtime.driver.restoring import Restore
    from piperlang.runtime.driver.shapes import Mode
    from piperlang.runtime.driver.training import StepResult, Training


_BETWEEN_STEPS = ("P0609", "P0613")
"""Errors after which workers still have the state of training."""


LOST = ("P0602", "P0603")
"""A worker died, or does not answer."""


class TrainingLoop:
    def __init__(
        self,
        options: argparse.Namespace,
        file: ModelFile,
        found: Any,
        plan: Plan,
        folder: Path,
        given: Batches,
        backend: Backend,
        run_before: Resumed | None,
    ) -> None:
        self.options, self.file, self.plan = options, file, plan
        self.cut, self.graph = found.captured, found.graph
        self.folder, self.given, self.backend, self.run_before = folder, given, backend, run_before
        self.at = folder.absolute()  # the user's code may change the working directory
        self.trained = 0
        """Steps since the last start, the one included whose row is not written yet."""
        self.restarts, self.strange = 0, False
        self.tracing: Tracing | None = None

    def run(self) -> None:
        with doing("importing the runtime"):
            from piperlang.runtime.driver.shapes import OtherShapes
            from piperlang.runtime.driver.training import Lost
            from piperlang.runtime.shapes import PlanForShape

        options, file, cut, plan, given = self.options, self.file, self.cut, self.plan, self.given
        restore = self.run_before.restore(options.new_options) if self.run_before is not None else None
        self.training = training_of(file, options.seed, options.masters, restore)
        with ExitStack() as stack:
            self.loggers = stack.enter_context(_loggers(options, plan, self.folder))
            plan_for = PlanForShape(
                partial(_applied, options, file, self.backend),
                plan,
                cut,
                self.training,
                file.max_norm,
                options.on_nan != "continue",
                options.verify,
            )
            validation = plan_for("evaluate", _validation_batch(file, given)) if file.validation is not None else None
            _verify(options, cut, plan, given.first, self.training, self.folder)
            given.reads.check("when the optimizer or its schedule steps")
            self.rows = stack.enter_context(MetricRows(self.at))
            others = OtherShapes(plan_for, options.shapes)
            dtype = cut.model.tensors[cut.model.loss].dtype
            self.job = self._start_workers(
                lambda: stack.enter_context(
                    _started(options, self.backend, plan, cut, self.training, dtype, validation, others, self.at)
                )
            )
            try:
                self._begin(given, self.run_before)
            except Lost as lost:
                self._handle(self.job.gone(lost))
            started = time.perf_counter()
            with stepping(options.steps, options.log_every, str(self.folder)), asked_first(_last_step) as asked:
                while not self._trained_all(asked):
                    pass
        seconds = time.perf_counter() - started
        before = self.run_before.step if self.run_before is not None else 0
        steps, devices = counted(self.saving.step - before, "step"), counted(len(plan.devices), "device")
        skipped = f" ({counted(self.saving.skipped, 'step')} of the run skipped)" if self.saving.skipped else ""
        emit(Notice(f"trained {steps}{skipped} on {devices} in {seconds:.1f} s; {self.folder}"))

    def _start_workers(self, start: Callable[[], Any]) -> Any:
        """A worker that is lost meanwhile is a fault like any other."""
        options = self.options
        while True:
            try:
                return start()
            except PiperError as problem:
                (first, *_), saves = problem.diagnostics, _saves(options) or self.run_before is not None
                if first.code not in LOST or not saves or self.restarts >= options.restart:
                    raise
                self.restarts += 1
                emit(Notice(f"{first.message}: starting again, {self.restarts} of {options.restart}", warning=True))

    def _finish(self) -> None:
        if self.saving.wanted:
            self.saving.finish(self.fed)
        save(self.job, self.at, WEIGHTS)
        if self.file.ema is not None:
            save(self.job, self.at, AVERAGES, averaged=True)

    def _begin(self, given: Batches, run_before: Resumed | None) -> None:
        """The state of a job that has its weights: `given` are batches from the first one on."""
        from piperlang.capture.user.held import refuse_use
        from piperlang.capture.user.watched import WatchedModel

        options, settings = self.options, _settings(self.options, self.file)
        self.job.restartable = self.restarts < options.restart and (_saves(options) or run_before is not None)
        before = run_before.manifest if run_before is not None else None
        self.saving = Saving(options, self.job, self.plan, self.at, settings, before)
        self._check_folder()
        self.trained = 0
        if options.trace is not None and (self.tracing is None or not self.tracing.done):
            self.tracing = Tracing(options.trace, options.steps - self.saving.step, self.at)
        self.fed: Feeding = feeding(options.data, self.job, self.file, given, self.cut, options.seed)
        # Models that the user's code still holds cannot be used any more; the trained weights are elsewhere.
        kept = [WatchedModel(model.named_modules()) for model in refuse_use(traced_again=True)]
        self.checks = _checks(self.file, kept)
        if before is not None:
            _warn_of_changes(before.about.get("settings", {}), settings)
            self.fed.resume(before)

    def _check_folder(self) -> None:
        """Workers write checkpoints, wherever they are: also the one of a job that is interrupted."""
        if isinstance(self.saving.checkpoints.store.folder, Path):
            try:
                self.job.check_folder(self.at)
            except PiperError as problem:
                if self.saving.wanted:
                    raise
                what = problem.diagnostics[0].message
                emit(Notice(f"{what}: no checkpoint can be saved when the job is interrupted", warning=True))

    # ------------------------------------------------------------------------------------------------------- steps

    def _trained_all(self, asked: Callable[[], bool]) -> bool:
        """Trains all steps, and saves the weights. False if a worker was lost, and the job has started again."""
        from piperlang.runtime.driver.training import Lost

        try:
            self._train(asked)
            self._finish()
            return True
        except PiperError as problem:
            self._handle(problem)
        except Lost as lost:  # between two steps, or after the last one
            self._handle(self.job.gone(lost))
        return False

    def _handle(self, problem: PiperError) -> None:
        """Starts again if a worker is lost, and again if another one is lost meanwhile. Otherwise the error is raised,
        with what became of the state."""
        another: PiperError | None = problem
        while another is not None:
            if not self.job.lost:
                raise self._kept(another) or another
            another = self._restart(another)

    def _train(self, asked: Callable[[], bool]) -> None:
        """Steps until the last one, or until it is `asked` to end. The next batch is loaded while a step runs, except
        before a validation, and for files with `on_step`: the data may depend on either."""
        from piperlang.capture.user.seeding import restored

        options, file, fed, saving = self.options, self.file, self.fed, self.saving
        start = saving.step
        for step in range(start, options.steps):
            last = step + 1 == options.steps
            due = options.validate_every is not None and (step + 1) % options.validate_every == 0
            validated = file.validation is not None and (last or due)
            ahead = not last and not validated and (file.on_step is None or isinstance(fed, InWorkers))
            for check in self.checks:
                check()
            with doing("running the first step") if step == start else nullcontext():  # it may compile chunks
                if self.tracing is not None:
                    self.tracing.before(self.trained, self.job)
                done = fed.step(ahead)
            if done.skipped:
                self._skipped(step, done)
            self.trained += 1
            if self.tracing is not None:
                self.tracing.after(self.trained, self.job, self.plan, self.graph, self.backend)
            row = _row(step, done)
            self._look_at(row)
            if validated:
                # A run with more steps has no validation here: it leaves no trace in what follows.
                with nullcontext() if due else restored():
                    row = replace(row, validation_loss=_validated(fed, file))
                fed.validated += [step] if due else []
            self._note(row)
            saving.after(done, fed, last)
            if asked() and not last:
                saving.finish(fed)
                emit(Notice(f"continue with `--resume {self.folder}`"))
                end()
            if not last:
                fed.advance(ahead)

    def _skipped(self, step: int, done: StepResult) -> None:
        """A step that has changed nothing, because its numbers are not finite."""
        from piperlang.runtime.driver.training import not_finite

        if self.options.on_nan == "stop":
            self.fed.take_back()
            raise not_finite(step, done, "`--on-nan skip` leaves out such steps, `--on-nan continue` trains on")
        count = self.saving.skipped + 1
        if count.bit_count() == 1:  # the first, and then ever fewer of them: training may never come back
            so_far = f" ({counted(count, 'step')} so far)" if count > 1 else ""
            emit(Notice(f"{done.strange(step)}: the step is skipped{so_far}", warning=True))

    def _look_at(self, row: StepMetrics) -> None:
        """Says once that training has left the numbers."""
        if not row.skipped and not math.isfinite(row.loss) and not self.strange:
            self.strange = True
            saved = counted(self.saving.saved, "step")
            after = f"; the newest checkpoint is that after {saved}" if self.saving.wanted else ""
            emit(Notice(f"the loss of step {row.step} is {row.loss}{after}", warning=True))

    def _note(self, row: StepMetrics) -> None:
        from piperlang.capture.user.seeding import generators_left_alone

        def write() -> None:
            with uninterrupted():  # what is said of an interrupted job is what metrics.jsonl has
                self.rows.flush(row.step)
                emit(row)

        self.rows.add(row)
        patiently(write)
        log(self.loggers, row.record())
        on_step = self.file.on_step
        if on_step is not None:
            with generators_left_alone(on_step) if isinstance(self.fed, InWorkers) else nullcontext():
                on_step(row.record())

    # ------------------------------------------------------------------------------------------------------ faults

    def _kept(self, problem: PiperError) -> PiperError | None:
        """If user code fails between steps (data, validation, `on_step`), save a checkpoint: the workers still have the
        state of training. The error, with what became of it."""
        from piperlang.runtime.driver.training import Lost

        saving = self.saving
        worker_failed = any(d.code.startswith("P06") and d.code not in _BETWEEN_STEPS for d in problem.diagnostics)
        if not self.trained or not self.job.alive or worker_failed:
            return _noted(problem, self._lost()) if worker_failed and self.trained else None
        saving.step = saving.start + self.trained
        steps = counted(saving.step, "step")
        try:
            saving.finish(self.fed)
            kept = f"the state after {steps} is saved; when this is mended, continue: `--resume {self.folder}`"
        except PiperError as another:
            kept = f"the state after {steps} is lost: {another.diagnostics[0].message}"
        except Lost as lost:
            kept = f"the state after {steps} is lost: {lost}"
        return _noted(problem, kept)

    def _lost(self) -> str:
        """What a worker that is gone has taken with it."""
        self.saving.abandon()
        found = newest_whole(self.at)
        if found is not None:
            lost = counted(self.saving.start + self.trained - found.step, "step")
            return f"lost: {lost}; the state after {counted(found.step, 'step')} is saved: `--resume {self.folder}`"
        steps = counted(self.trained, "step")
        return f"lost: {steps}; `--save-every N` or `--save-minutes M` saves checkpoints, from which a job starts again"

    def _restart(self, problem: PiperError) -> PiperError | None:
        """Starts again from the newest checkpoint, or from the beginning, after a worker was lost. The error of another
        worker that was lost meanwhile."""
        from piperlang.runtime.driver.training import Lost

        first = problem.diagnostics[0]
        at, started = self.saving.start + self.trained, time.perf_counter()
        try:
            self.job.halt()
        except PiperError as another:
            raise _noted(another, self._lost()) from None
        self.saving.abandon()
        found = newest_whole(self.at) or self.run_before
        self.restarts += 1
        self.job.restartable = self.restarts < self.options.restart
        step = found.step if found is not None else 0
        again = f"; {counted(at - step, 'step')} to train again" if at > step else ""
        said = f"{first.message} after {counted(at, 'step')}: starting again from step {step}{again}"
        for text in (said, *first.notes):
            emit(Notice(text, warning=True))
        try:
            with doing(f"starting again, {self.restarts} of {self.options.restart}"):
                self.job.restart(found.restore(self.options.new_options) if found is not None else None)
                patiently(partial(self.rows.cut, step))
                self._begin(Batches(self.file, self.options.seed), found)
        except Lost as lost:
            gone: PiperError = self.job.gone(lost)
            self._note_restart(first, at, step, started, failed=gone.diagnostics[0].message)
            return gone
        except PiperError as another:
            raise _noted(another, self._lost()) from None
        emit(Notice(f"started again in {time.perf_counter() - started:.1f} s"))
        self._note_restart(first, at, step, started)
        return None

    def _note_restart(self, why: Diagnostic, at: int, step: int, started: float, **more: str) -> None:
        seconds = round(time.perf_counter() - started, 3)
        record = {"step": at, "from": step, "seconds": seconds, "why": why.message, "notes": why.notes, **more}
        note_restart(self.at, record)


def _saves(options: argparse.Namespace) -> bool:
    return options.save_every is not None or options.save_minutes is not None


def _settings(options: argparse.Namespace, file: ModelFile) -> dict[str, Any]:
    """What a resumed run may change, and what then changes what follows."""
    return {
        "the model file": hashlib.sha256(file.text.encode()).hexdigest(),
        "`--validate-every`": options.validate_every if file.validation is not None else None,
        "`--masters`": options.masters,
        "the precision": file.precision,
        "`max_norm`": file.max_norm,
        "`ema`": file.ema,
    }


def _warn_of_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        was = before.get(name)
        if was != value:
            what = "has changed since the run" if name == "the model file" else f"is {value}, and was {was} in the run"
            emit(Notice(f"{name} {what}", warning=True))


def _noted(problem: PiperError, note: str) -> PiperError:
    first, *others = problem.diagnostics
    changed: Diagnostic = replace(first, notes=(*first.notes, note))
    return PiperError(changed, *others)


def _row(step: int, done: StepResult) -> StepMetrics:
    return StepMetrics(
        step,
        done.loss,
        round(done.seconds, 6),
        round(done.samples / done.seconds, 2),
        done.memory,
        waited_for_data=None if done.waited is None else round(done.waited, 6),
        gradient_norm=done.norm,
        skipped=done.skipped or None,
    )


def training_of(file: ModelFile, seed: int, masters: bool, restore: Restore | None = None) -> Training:
    """What workers train."""
    from piperlang.capture.user.model_file import shipped
    from piperlang.runtime.driver.training import Training
    from piperlang.runtime.optimizer.optimize import default_optimizer

    make = shipped(file, "model")
    assert make is not None
    return Training(
        make,
        shipped(file, "optimizer") or default_optimizer,
        shipped(file, "lr_schedule"),
        seed,
        masters or file.copies.masters,
        shipped(file, "loss"),
        file.ema,
        file.weights,
        restore,
    )


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


def _patience(options: argparse.Namespace) -> Any:
    if options.executor != "ray":
        return None
    from piperlang.runtime.driver.cluster import Patience

    return Patience(options.node_timeout, options.wait_devices or (60.0 if options.elastic else 600.0))


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
    folder: Path,
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
            graphs=options.cuda_graphs,
            others=others,
            patience=_patience(options),
            output=folder / OUTPUT,
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
