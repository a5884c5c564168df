"""Where batches are loaded: in the workers that read them, or in the driver, which sends every worker its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from piperlang.diagnostics import PiperError, error
from piperlang.progress import Notice, emit, phase
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.capture.user.model_file import ModelFile
    from piperlang.cli.model import Batches
    from piperlang.runtime.checkpoint.manifest import DataPosition, Manifest
    from piperlang.runtime.driver.training import StepResult


class Feeding(Protocol):
    """Steps on batches that follow each other."""

    validated: list[int]
    """Steps after which `validation` was called."""

    def step(self, ahead: bool) -> StepResult:
        """One step on the batch that is loaded. `ahead`: the next one is loaded while the step runs."""

    def advance(self, ahead: bool) -> None:
        """The next batch. Raises what the user's code has raised, after the row of the step is written."""

    def validate(self) -> Iterator[float]:
        """The loss of each batch of `validation`."""

    def take_back(self) -> None:
        """The last step does not count: its batch is the next one."""

    def position(self, samples: int, skipped: int) -> tuple[DataPosition, dict[str, Any]]:
        """How far `data` was read, after so many samples were trained with and so many steps skipped, and states of
        generators."""

    def resume(self, manifest: Manifest) -> None:
        """Reads as far as a run did, so that the next batch is the one that follows."""


class _Counted:
    """What both ways have in common: batches are counted, and read again when a run is resumed."""

    mode = ""

    def __init__(self, job: Any, file: ModelFile) -> None:
        self.job, self.file = job, file
        self.drawn = 0
        """Batches that `data` has yielded."""
        self.read = ""
        """A digest of all of them."""
        self.before, self.knows_states = (0, ""), True
        """Both, when the last step began; and whether the generators have the states of what counts as read."""
        self.validated: list[int] = []

    def take_back(self) -> None:
        self.knows_states = self.drawn == self.before[0]
        self.drawn, self.read = self.before

    def _drew(self) -> None:
        """Another batch was loaded."""
        self.drawn += 1
        self.read = hashlib.blake2b(f"{self.read} {self._digest()}".encode(), digest_size=16).hexdigest()

    def advance(self, ahead: bool) -> None:
        raise NotImplementedError

    def _pass_validation(self) -> None:
        """Goes through the batches of `validation`, without a result."""
        raise NotImplementedError

    def _digest(self) -> str:
        """Of the batch that was loaded last."""
        raise NotImplementedError

    def _states(self) -> dict[str, Any]:
        return {}

    def position(self, samples: int, skipped: int) -> tuple[DataPosition, dict[str, Any]]:
        from piperlang.runtime.checkpoint.manifest import DataPosition

        position = DataPosition(self.drawn, samples, self.read, self.mode, tuple(self.validated), skipped)
        return position, self._states() if self.knows_states else {}

    def resume(self, manifest: Manifest) -> None:
        """All of it is read again: what `data` draws, counts and remembers is then what it was."""
        was, step = manifest.data, manifest.step
        self.validated, validated = list(was.validated), set(was.validated)
        with phase(f"reading {counted(step, 'batch')} again") as reading:
            for i in range(step):
                if i in validated:
                    self._pass_validation()
                if self.drawn < was.batches:
                    self.advance(False)
                if i % 100 == 0:
                    reading.detail = f"{i:,} of {step:,}"
        if "slices" in (self.mode, was.mode) and self.mode != was.mode:
            emit(Notice(f"batches are not compared with those of the run, which read {was.mode}", warning=True))
        elif self.read != was.digest:
            raise _other_data(self.file, was.batches)
        self._set_states(manifest)
        if self.drawn == step:  # the next one had not been read
            self.advance(False)

    def _set_states(self, manifest: Manifest) -> None:
        pass


class InDriver(_Counted):
    """Batches are loaded in this process."""

    mode = "driver"

    def __init__(self, job: Any, file: ModelFile, batches: Batches) -> None:
        super().__init__(job, file)
        self.batch, self.others, self.reads = batches.first, batches.others, batches.reads
        self._drew()
        self.problem: PiperError | None = None

    def step(self, ahead: bool) -> StepResult:
        from piperlang.capture.user.user_code import located
        from piperlang.capture.user.where import line_of_function

        self.before = self.drawn, self.read
        with located(line_of_function(self.file.data)):
            begun = self.job.begin(self.batch)
        try:
            if ahead:
                self.batch = next(self.others)
                self._drew()
        except PiperError as raised:
            self.problem = raised
        result: StepResult = self.job.finish(begun)
        return result

    def advance(self, ahead: bool) -> None:
        if self.problem is not None:
            raise self.problem
        if not ahead:
            self.batch = next(self.others)
            self._drew()

    def validate(self) -> Iterator[float]:
        assert self.file.validation is not None
        for batch in self.file.validation():
            yield self.job.evaluate(batch)

    def _pass_validation(self) -> None:
        assert self.file.validation is not None
        for _ in self.file.validation():
            pass

    def _digest(self) -> str:
        from piperlang.runtime.driver.loading import content

        return content(self.batch)

    def _states(self) -> dict[str, Any]:
        from piperlang.capture.user.seeding import generator_states
        from piperlang.runtime.checkpoint.generators import written

        return {
            "generators": written(generator_states()),
            "globals": {"dict": list(map(list, self._globals().items()))},
        }

    def _globals(self) -> dict[str, str]:
        """What `data` reads, and `on_step` may have changed."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.reads.texts().items()}

    def _set_states(self, manifest: Manifest) -> None:
        """Code between steps draws from the same generators. Where there are no states, `data` alone has drawn."""
        from piperlang.capture.user.seeding import set_generator_states
        from piperlang.capture.user.where import line_of_function
        from piperlang.runtime.checkpoint import tree
        from piperlang.runtime.checkpoint.generators import read

        if manifest.data.mode != self.mode or "generators" not in manifest.trees:
            return
        was: dict[str, str] = tree.read(manifest.trees["globals"], tree.from_inline)
        now = self._globals()
        other = next((name for name in was if was[name] != now.get(name, was[name])), None)
        if other is not None:
            raise error(
                "P0612",
                f"{other}, which `data` reads, is not what it was in the run",
                line_of_function(self.file.data),
                notes=["a resumed run reads the batches again, and does not call `on_step` for the steps before it"],
                help="let `data` depend on the number of the batch instead, which it can count itself",
            )
        set_generator_states(read(manifest.trees["generators"]))


READ_WHOLE = 8
"""Batches that the driver loads, too, where workers load slices: as a plain loop does, one sample after the other."""


class InWorkers(_Counted):
    """Batches are loaded in the workers; the driver has none of them."""

    def __init__(self, job: Any, file: ModelFile, whole: Generator[tuple[Any, Any]] | None = None) -> None:
        """`whole`: the batches after the first, where workers load slices of them."""
        super().__init__(job, file)
        self.mode = "workers" if whole is None else "slices"
        self._drew()
        self.problem: PiperError | None = None
        self.whole = _first_of(whole) if whole is not None else iter(())

    def step(self, ahead: bool) -> StepResult:
        from piperlang.capture.user.user_code import located
        from piperlang.capture.user.where import line_of_function

        self.before = self.drawn, self.read
        with located(line_of_function(self.file.data)):
            begun = self.job.begin_loaded(ahead)
        whole, raised = None, None
        try:
            whole = next(self.whole, None) if ahead else None
        except PiperError as problem:
            raised = problem
        result: StepResult = self.job.finish(begun)
        self.problem = result.problem or raised or self._other(whole)
        if ahead and result.problem is None:
            self._drew()
        return result

    def advance(self, ahead: bool) -> None:
        if self.problem is not None:
            raise self.problem
        if not ahead:
            self.job.load_next()
            self._drew()
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

    def _pass_validation(self) -> None:
        self.whole = iter(())
        self.job.pass_validation()

    def _digest(self) -> str:
        digest: str = self.job.batches.digest()
        return digest


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


def _other_data(file: ModelFile, number: int) -> PiperError:
    from piperlang.capture.user.where import line_of_function

    return error(
        "P0612",
        f"the first {number} batches of `data` are not those that the run has read",
        line_of_function(file.data),
        notes=["a resumed run reads its batches again from the first one, so that none is lost or repeated"],
        help=(
            "make `data` yield the same batches in every run: give generators a seed, and do not change files; and"
            " leave what it reads alone in `on_step`"
        ),
    )
