"""One habit under one schedule, beside plain training."""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from piperlang.capture.program import capture
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.runtime import api
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.start import start
from piperlang.runtime.reference.numerics import gradient_errors
from tests.habits.habit import EITHER, REFUSED, SAME, SUMMED, Habit
from tests.habits.plain import SEED, Reference, copied, plain

WRONG, CRASH = "WRONG", "CRASH"
CAUGHT = "caught"
"""Not refused by the compiler, but by the comparison with eager PyTorch that comes before the first step."""
_VERIFIES = "verify" in inspect.signature(api.compile).parameters
PATIENCE = 120
"""Seconds for one habit under one schedule."""
FAILURES = ("P0602", "P0603", "P0604", "P0605")
"""Codes for a worker in trouble: no refusal, nobody has looked at the habit."""

DATA = "from std.data import {name}\nmesh gpu = dp: 2\nplace [pass=*] on gpu\n{name}(gpu.dp)\n"
PIPELINE = """mesh gpu = pp: 2
{split}place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
"""
ONE_F_ONE_B = """
def F(s): [stage=s, pass=F, mb=next?]
def B(s): [stage=s, pass=B, mb=next?]

order on gpu[pp=0]:
    repeat 2: F(0), F(1)
    repeat 2: B(1), B(0)
order on gpu[pp=1]:
    repeat 2: F(2), F(3), B(3), B(2)
"""
SCHEDULES = {
    "ddp": DATA.format(name="ddp"),
    "zero1": DATA.format(name="zero1"),
    "zero3": DATA.format(name="zero3"),
    "pp": PIPELINE.format(split="split batch into 2 as mb\n") + ONE_F_ONE_B,
    "pp-part": PIPELINE.format(split="split [stage=1] into 2 as mb\n"),
    "pp-whole": PIPELINE.format(split=""),
}
TITLES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero3": "ZeRO-3",
    "pp": "1F1B",
    "pp-part": "pipeline, one stage split",
    "pp-whole": "pipeline, batch not split",
}


@dataclass(frozen=True)
class Outcome:
    kind: str
    """`same`, `refused`, `caught`, `WRONG` or `CRASH`."""
    code: str = ""
    reason: str = ""
    """What was refused, what differs, or what was raised."""
    place: str = ""
    """The file and line that a refusal points at."""
    seconds: float = 0.0
    differs: str = ""
    """For what is caught: what would differ without the comparison that caught it."""

    @property
    def cell(self) -> str:
        return f"{self.kind} {self.code}".strip()


def schedules(habit: Habit) -> list[str]:
    """Those that a habit is tried under: the pipeline without microbatches only where it says so."""
    return [name for name in SCHEDULES if (name in habit.only if habit.only else name != "pp-whole" or habit.whole)]


def is_expected(habit: Habit, schedule: str, outcome: Outcome) -> bool:
    wanted = habit.whole if schedule == "pp-whole" and habit.whole else habit.expected
    if wanted == SUMMED:
        wanted = REFUSED if schedule == "pp" else SAME
    found = REFUSED if outcome.kind == CAUGHT else outcome.kind
    # Between a stage that is split and one that is not, some tensors cannot be cut; or only that stage mixes samples.
    either = wanted == EITHER or schedule == "pp-part"
    return found == wanted or (either and found in (SAME, REFUSED))


class Runner:
    """Threads, or Ray workers that all habits share."""

    def __init__(self, executor: str = "threads") -> None:
        assert executor in ("threads", "ray")
        self.executor = executor
        self.cluster: Cluster | None = None
        self.habit = ""
        self.captured: tuple[object, Any] = (None, None)
        """The model captured last: capturing takes most of the time, and is the same for all schedules."""
        self.folder = tempfile.TemporaryDirectory(prefix="habits-")
        for name, script in SCHEDULES.items():
            self.script(name).write_text(script, encoding="utf-8")

    def script(self, schedule: str) -> Path:
        return Path(self.folder.name) / f"{schedule}.piper"

    def run(self, habit: Habit, schedule: str, reference: Reference | None = None) -> Outcome:
        started = time.perf_counter()
        if habit.name != self.habit:  # habits may share a model, and differ in their batches
            self.habit, self.captured = habit.name, (None, None)
        with clean():
            reference = reference or plain(habit)
            outcome = self._outcome(habit, schedule, reference)
        if outcome.kind == WRONG and _VERIFIES:
            with clean():
                found = self._outcome(habit, schedule, reference, verify=True)
            if found.kind == REFUSED:
                outcome = replace(found, kind=CAUGHT, differs=outcome.reason)
        return replace(outcome, seconds=time.perf_counter() - started)

    def _outcome(self, habit: Habit, schedule: str, reference: Reference, verify: bool = False) -> Outcome:
        try:
            with _deadline(PATIENCE):
                worst = self._trained(habit, schedule, reference, verify)
        except PiperError as problem:
            first = problem.diagnostics[0].seen_by_user()
            if first.code in FAILURES:
                self._restart()
                return Outcome(CRASH, first.code, " ".join([first.message, *first.notes[:1]]))
            return Outcome(REFUSED, first.code, _reason(first), _place(first))
        except BaseException as problem:
            if isinstance(problem, KeyboardInterrupt):
                raise
            self._restart()
            return Outcome(CRASH, type(problem).__name__, _raised(problem))
        wrong = {name: error for name, error in worst.items() if not error <= habit.limit}
        if wrong:
            return Outcome(WRONG, "", ", ".join(f"{name} {error:.1e}" for name, error in list(wrong.items())[:4]))
        return Outcome(SAME)

    def _trained(self, habit: Habit, schedule: str, reference: Reference, verify: bool) -> dict[str, float]:
        """How far everything is from plain training, by what it is."""
        worst: dict[str, float] = {}

        def see(name: str, error: float) -> None:
            worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))

        options: dict[str, Any] = {"verify": verify} if _VERIFIES else {}
        start_job = partial(start, cluster=self._workers()) if self.executor == "ray" else start
        with (
            mock.patch.object(api, "start_job", start_job),
            mock.patch.object(api, "capture", self._capture),
            api.compile(
                habit.model,
                self.script(schedule),
                loss=habit.loss,
                example=copied(reference.batches[0]),
                optimizer=habit.optimizer,
                lr_schedule=habit.lr_schedule,
                max_norm=habit.max_norm,
                seed=SEED,
                executor="ray" if self.executor == "ray" else "inline",
                timeout=30,
                **options,
            ) as trainer,
        ):
            devices = [device.device for device in trainer.plan.devices]
            for step, batch in enumerate(reference.batches):
                torch.manual_seed(1000 + step)  # nobody may count on the numbers that eager training has drawn
                done = trainer.job.step(copied(batch), gradients=True)
                loss, gradients = reference.losses[step], reference.gradients[step]
                see("loss", abs(done.loss - loss) / max(abs(loss), 1e-12))
                for name, error in gradient_errors(trainer.graph, devices, trainer.job.gradients(), gradients).items():
                    if (
                        name in gradients
                    ):  # where plain training has no gradient, the weights say whether something was trained
                        see(f"gradient of {name}", error)
            state = trainer.state_dict()
        for name, error in state_errors(state, reference.state, habit.floor).items():
            see(name, error)
        return worst

    def _capture(self, make: Any, loss: Any, example: Any, *others: Any, **named: Any) -> Any:
        if self.captured[0] != (make, loss, others, named):
            self.captured = (None, None)
            before = settings()
            found = capture(make, loss, example, *others, **named)
            if settings() != before:
                return found  # the settings are reset after this run, and the program would notice it
            self.captured = (make, loss, others, named), found
        return self.captured[1]

    def _workers(self) -> Cluster:
        if self.cluster is not None and self.cluster.dead(0):  # a job that failed on workers takes them down with it
            self._restart()
        if self.cluster is None:
            self.cluster = Cluster(2)
        return self.cluster

    def _restart(self) -> None:
        """Workers that were left in the middle of something are no use to the next."""
        if self.cluster is not None:
            cluster, self.cluster = self.cluster, None
            with contextlib.suppress(Exception):
                cluster.close()

    def close(self) -> None:
        self._restart()
        self.folder.cleanup()


def state_errors(found: Mapping[str, Any], wanted: Mapping[str, Any], floor: float = 1e-12) -> dict[str, float]:
    """How far weights and buffers are from the plain ones; a name that only one side has is infinitely far off.
    `floor`: numbers below it are no more than rounding."""
    errors = dict.fromkeys(found.keys() ^ wanted.keys(), float("inf"))
    for name in found.keys() & wanted.keys():
        got, value = found[name], wanted[name]
        if not isinstance(got, torch.Tensor) or not isinstance(value, torch.Tensor):
            errors[name] = 0.0 if type(got) is type(value) and got == value else float("inf")
        elif got.shape != value.shape or got.dtype != value.dtype:
            errors[name] = float("inf")
        elif value.numel():
            wide = torch.complex128 if value.is_complex() else torch.float64
            largest = float(value.to(wide).abs().max())
            errors[name] = float((got.to(wide) - value.to(wide)).abs().max()) / max(largest, floor)
    return {name: errors[name] for name in sorted(errors)}


# ------------------------------------------------------------------------------------------------------------ helpers


def settings() -> tuple[object, ...]:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Global settings as they were, whatever a habit does to them."""
    tables = vars(torch.nn.modules.module)
    hooks = [value for name, value in tables.items() if name.startswith("_global_") and hasattr(value, "clear")]
    before = [dict(table) for table in hooks]
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_grad_enabled(True)
            torch.autograd.set_detect_anomaly(False)
            for table, old in zip(hooks, before, strict=True):
                table.clear()
                table.update(old)


@contextlib.contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def _reason(diagnostic: Diagnostic) -> str:
    return "; ".join([diagnostic.message, *diagnostic.notes[:1]])


def _place(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    return "" if span is None else f"{Path(span.source.name).name}:{span.first.line}"


def _raised(problem: BaseException) -> str:
    """Its first line, and the innermost line of piperlang that it came through."""
    text = str(problem).strip().splitlines()
    ours = [frame for frame in traceback.extract_tb(problem.__traceback__) if "/piperlang/" in frame.filename]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else ""
    return (text[0][:160] if text else "") + where
