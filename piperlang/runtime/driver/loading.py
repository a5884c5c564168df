"""Batches that workers load themselves: every worker that reads parts of the batch calls `data` and keeps its parts.

The next batch is loaded by a thread while a step runs. All workers must load the same batches: they seed the
generators as the driver does, and the driver compares fingerprints of what they have loaded before a step uses it."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from piperlang.capture.batch.layout import BatchLayout, shapes_of
from piperlang.capture.user.batches import endless
from piperlang.capture.user.seeding import GeneratorStates, generator_states, restored, seed_all, set_generator_states
from piperlang.capture.user.user_code import located
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError
from piperlang.plan.plan import Feed
from piperlang.runtime.box import take
from piperlang.runtime.device.failure import Failure, failure_of
from piperlang.runtime.driver.shapes import Mode, RunKey

Batches = Callable[[], Iterator[tuple[Any, Any]]]
COMPARED = 4096
"""The most elements of a tensor that a fingerprint contains."""


@dataclass(frozen=True)
class Loading:
    """What workers load."""

    data: Batches
    layouts: Mapping[RunKey, BatchLayout]
    """Of the batches of each plan."""
    seed: int
    validation: Batches | None = None
    reads: Sequence[tuple[str, str]] = ()
    """Globals that the traced program has read: their names, and the names of their modules."""
    environment: Sequence[str] = ()
    """Environment variables that it has read."""


class Loaded(NamedTuple):
    """A batch that a worker has loaded."""

    run: RunKey | None = None
    """The plan that the batch fits; None if there is none yet."""
    shapes: str = ""
    fingerprint: str = ""
    waited: float = 0.0
    """Seconds between the end of the step before it and the end of loading."""
    printed: str = ""
    """What the user's code has printed."""
    ended: bool = False
    """There are no more batches."""
    failed: Failure | None = None

    @property
    def batch(self) -> tuple[str, str, bool]:
        """The same for all workers that have loaded the same batch."""
        return self.shapes, self.fingerprint, self.ended


def fingerprint(flat: Sequence[torch.Tensor], generators: GeneratorStates) -> str:
    """Equal for equal batches that leave the generators in the same states. Of large tensors, some elements count."""
    found = hashlib.blake2b(digest_size=16)
    of_torch, python, (kind, keys, *rest) = generators
    found.update(of_torch.numpy().data)
    found.update(np.asarray(python[1], np.int64).tobytes() + np.asarray(keys).tobytes())
    found.update(f"{python[0]} {python[2]} {kind} {rest}".encode())
    for tensor in flat:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // COMPARED)]
        found.update(some.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Loader:
    """Loads batches for one device, in a thread of its own, with generators of random numbers of its own: those of the
    process belong to the model and the optimizer."""

    def __init__(self, loading: Loading, feeds: Mapping[RunKey, Sequence[Feed]], pins: bool) -> None:
        """`feeds`: what each plan of the device reads of a batch. `pins`: copies are in pinned memory."""
        self.loading, self.pins = loading, pins
        self.plans = {key: (layout, feeds[key]) for key, layout in loading.layouts.items()}
        self.sources: dict[Mode, _Source] = {"train": _Source(endless(loading.data), loading.data)}
        self.thread = ThreadPoolExecutor(1, "piperlang-data")
        self.coming: Future[tuple[Loaded, dict[ValueId, torch.Tensor]]] | None = None
        self.unplanned: tuple[Any, Any] | None = None
        """A batch that fits no plan."""
        with restored():
            seed_all(loading.seed)
            self.generators = generator_states()

    def validate(self) -> None:
        """Begins with the batches of `validation`."""
        validation = self.loading.validation
        assert validation is not None
        self.sources["evaluate"] = _Source(validation(), validation)

    def load(self, mode: Mode = "train") -> None:
        """Begins to load the next batch."""
        self.coming = self.thread.submit(self._load, mode)

    def add(self, key: RunKey, layout: BatchLayout, feeds: Sequence[Feed]) -> None:
        """There is a plan for the batch that fits none."""
        self.plans[key] = layout, feeds
        batch, self.unplanned = self.unplanned, None
        if batch is not None:
            self.coming = self.thread.submit(self._fitted, key.mode, batch, "")

    def loaded(self) -> Loaded:
        """Waits for the batch that is being loaded."""
        assert self.coming is not None
        started = time.perf_counter()
        found, _ = self.coming.result()
        return found._replace(waited=time.perf_counter() - started)

    def take(self) -> dict[ValueId, torch.Tensor]:
        """The parts of the batch that this device reads."""
        assert self.coming is not None
        _, feeds = self.coming.result()
        self.coming = None
        return feeds

    def _load(self, mode: Mode) -> tuple[Loaded, dict[ValueId, torch.Tensor]]:
        source = self.sources[mode]
        with _printing() as printed, self._drawing():
            try:
                with located(line_of_function(source.function)):
                    batch = next(source.batches, None)
            except BaseException as problem:  # user code may raise anything; it is raised again in the driver
                return Loaded(failed=failure_of(problem), printed=printed.getvalue()), {}
        if batch is None:
            return Loaded(ended=True, printed=printed.getvalue()), {}
        return self._fitted(mode, batch, printed.getvalue())

    def _fitted(self, mode: Mode, batch: tuple[Any, Any], printed: str) -> tuple[Loaded, dict[ValueId, torch.Tensor]]:
        """The parts of a batch that this device reads, if there is a plan for it."""
        try:
            with located(line_of_function(self.sources[mode].function)):
                key = next((key for key, (one, _) in self.plans.items() if key.mode == mode and one.fits(batch)), None)
                if key is None:
                    self.unplanned = batch
                    return Loaded(shapes=shapes_of(batch), printed=printed), {}
                layout, wanted = self.plans[key]
                flat = layout.flatten(batch)
        except PiperError as problem:
            return Loaded(failed=failure_of(problem), printed=printed), {}
        named = dict(zip(layout.names, flat, strict=True))
        feeds = {value: self._own(take(named[name], box)) for value, name, box in wanted}
        return Loaded(key, shapes_of(batch), fingerprint(flat, self.generators), printed=printed), feeds

    def _own(self, part: torch.Tensor) -> torch.Tensor:
        """A copy: `data` may write the next batch into the same memory."""
        return part.contiguous().pin_memory() if self.pins else part.clone(memory_format=torch.contiguous_format)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """With the generators of `data`."""
        others = generator_states()
        set_generator_states(self.generators)
        try:
            yield
        finally:
            self.generators = generator_states()
            set_generator_states(others)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.sources.clear()  # a DataLoader ends its processes


@dataclass
class _Source:
    batches: Iterator[tuple[Any, Any]]
    function: Batches


# ----------------------------------------------------------------------------------------- what the user's code prints


class _ByThread(io.TextIOBase):
    """Standard output of the process; threads may have another one."""

    def __init__(self, usual: TextIO) -> None:
        self.usual = usual
        self.own: dict[int, io.StringIO] = {}

    def write(self, text: str) -> int:
        return self.own.get(threading.get_ident(), self.usual).write(text)

    def flush(self) -> None:
        self.own.get(threading.get_ident(), self.usual).flush()


@contextmanager
def _printing() -> Iterator[io.StringIO]:
    """What this thread prints goes to the driver: standard output of a worker is not shown."""
    if not isinstance(sys.stdout, _ByThread):
        sys.stdout = _ByThread(sys.stdout)
    by_thread, text = sys.stdout, io.StringIO()
    by_thread.own[threading.get_ident()] = text
    try:
        yield text
    finally:
        del by_thread.own[threading.get_ident()]
