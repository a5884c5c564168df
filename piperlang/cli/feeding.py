"""Where batches are loaded: in the workers that read them, or in the driver, which sends every worker its parts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from piperlang.diagnostics import PiperError, error
from piperlang.progress import Notice, emit

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.cli.model import Batches
    from piperlang.runtime.driver.training import StepResult


class Feeding(Protocol):
    """Steps on batches that follow each other."""

    def step(self, ahead: bool) -> StepResult:
        """One step on the batch that is loaded. `ahead`: the next one is loaded while the step runs."""

    def advance(self, ahead: bool) -> None:
        """The next batch. Raises what the user's code has raised, after the row of the step is written."""

    def validate(self) -> Iterator[float]:
        """The loss of each batch of `validation`."""


class InDriver:
    """Batches are loaded in this process."""

    def __init__(self, job: Any, file: ModelFile, batches: Batches) -> None:
        self.job, self.file = job, file
        self.batch, self.others = batches.first, batches.others
        self.problem: PiperError | None = None

    def step(self, ahead: bool) -> StepResult:
        from piperlang.capture.user.user_code import located
        from piperlang.capture.user.where import line_of_function

        with located(line_of_function(self.file.data)):
            begun = self.job.begin(self.batch)
        try:
            self.batch = next(self.others) if ahead else self.batch
        except PiperError as raised:
            self.problem = raised
        result: StepResult = self.job.finish(begun)
        return result

    def advance(self, ahead: bool) -> None:
        if self.problem is not None:
            raise self.problem
        self.batch = self.batch if ahead else next(self.others)

    def validate(self) -> Iterator[float]:
        assert self.file.validation is not None
        for batch in self.file.validation():
            yield self.job.evaluate(batch)


READ_WHOLE = 8
"""Batches that the driver loads, too, where workers load slices: as a plain loop does, one sample after the other."""


class InWorkers:
    """Batches are loaded in the workers; the driver has none of them."""

    def __init__(self, job: Any, file: ModelFile, whole: Generator[tuple[Any, Any]] | None = None) -> None:
        """`whole`: the batches after the first, where workers load slices of them."""
        self.job, self.file = job, file
        self.problem: PiperError | None = None
        self.whole = _first_of(whole) if whole is not None else iter(())

    def step(self, ahead: bool) -> StepResult:
        from piperlang.capture.user.user_code import located
        from piperlang.capture.user.where import line_of_function

        with located(line_of_function(self.file.data)):
            begun = self.job.begin_loaded(ahead)
        whole, raised = None, None
        try:
            whole = next(self.whole, None) if ahead else None
        except PiperError as problem:
            raised = problem
        result: StepResult = self.job.finish(begun)
        self.problem = result.problem or raised or self._other(whole)
        return result

    def advance(self, ahead: bool) -> None:
        if self.problem is not None:
            raise self.problem
        if not ahead:
            self.job.load_next()
            problem = self._other(next(self.whole, None))
            if problem is not None:
                raise problem

    def _other(self, whole: tuple[Any, Any] | None) -> PiperError | None:
        """Whether workers have loaded something else than the driver."""
        return None if whole is None or self.job.has_loaded(whole) else _read_otherwise(self.file)

    def validate(self) -> Iterator[float]:
        self.whole = iter(())  # the generators of the driver do not know what a validation draws
        losses: Iterator[float] = self.job.validate()
        return losses


def feeding(where: str | None, job: Any, file: ModelFile, batches: Batches, cut: Any, seed: int) -> Feeding:
    """`where`: the option `--data`. By default, batches are loaded in workers unless code that runs elsewhere may
    change them."""
    from piperlang.capture.user.where import line_of_function
    from piperlang.runtime.driver.thread_job import ThreadJob

    if where == "driver" or isinstance(job, ThreadJob):
        return InDriver(job, file, batches)
    reason = _may_differ(file)
    if reason is None and where is None and file.on_step is not None:
        reason = "`on_step` may change what `data` reads (if not: `--data workers`)"
    if reason is not None and where is not None:
        raise error(
            "P0902",
            f"cannot use `--data {where}`: {reason}",
            line_of_function(file.data),
            help="load them in the driver: `--data driver`",
        )
    if reason is None:
        reason = _started(job, file, batches, cut, seed, sliced=where == "slices")
    if reason is None:
        if where == "slices":
            return InWorkers(job, file, batches.others)
        batches.others.close()
        return InWorkers(job, file)
    emit(Notice(f"the driver loads the batches: {reason}"))
    return InDriver(job, file, batches)


def _may_differ(file: ModelFile) -> str | None:
    """Code that runs elsewhere may change what `data` yields, or the other way around."""
    from piperlang.capture.user.batches import may_share_state

    yields = [(name, one) for name in ("data", "validation") if (one := getattr(file, name)) is not None]
    for name in ("on_step", "optimizer", "lr_schedule"):
        other = getattr(file, name)
        for mine, function in yields if other is not None else ():
            if may_share_state(function, other):
                return f"`{mine}` and `{name}` may share variables"
    return None


def _started(job: Any, file: ModelFile, batches: Batches, cut: Any, seed: int, sliced: bool) -> str | None:
    """Lets workers load. A reason why they cannot even begin; a batch that they load differently is an error, because
    `data` may have left something behind, such as a position in a file."""
    from piperlang.capture.user.model_file import shipped
    from piperlang.capture.user.where import line_of_function
    from piperlang.runtime.driver.loading import Loading
    from piperlang.runtime.driver.worker_batches import NotSent

    data = shipped(file, "data")
    assert data is not None
    frozen = cut.program.sizes.small.frozen
    loading = Loading(
        data,
        {key: one.captured.layout for key, one in job.shapes.plans.items()},
        seed,
        shipped(file, "validation"),
        [(name, scope["__name__"]) for name, scope in frozen.names if "__name__" in scope],
        frozen.environment,
        sliced,
    )
    try:
        other = job.load(loading, batches.first, batches.after_first)
    except NotSent as problem:
        return f"they cannot be described to workers ({problem})"
    if other is None:
        return None
    help = "load them in the driver: `--data driver`"
    if other.failed is not None and other.failed.diagnostics:
        helps = () if sliced else (help,)
        raise PiperError(*(replace(one, helps=(*one.helps, *helps)) for one in other.failed.diagnostics))
    if sliced and other.failed is None:
        raise _read_otherwise(file)
    raise error(
        "P0607",
        "`data` yields other batches in other processes",
        line_of_function(file.data),
        notes=[] if other.failed is None else [other.failed.said],
        help=f"give generators a seed, and leave nothing behind that the next call reads, such as a file; or {help}",
    )


def _first_of(whole: Generator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    with closing(whole):  # its processes end
        yield from islice(whole, READ_WHOLE - 1)


def _read_otherwise(file: ModelFile) -> PiperError:
    from piperlang.capture.user.slices import WHOLE
    from piperlang.capture.user.where import line_of_function

    return error(
        "P0607",
        "workers read other values of samples than the driver, which reads whole batches",
        line_of_function(file.data),
        help=f"make a sample depend on its index alone, or {WHOLE}",
    )
