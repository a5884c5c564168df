"""Batches that workers load themselves: every worker that reads parts of the batch calls `data` and keeps its parts.

The next batch is loaded by a thread while a step runs. All workers must load the same batches: they seed the
generators as the driver does, and the driver compares fingerprints of what they have loaded before a step uses it.

Where `Loading.sliced` says so, a worker loads only the samples that it reads (capture/user/slices.py).

Private API, kept in this file: the folder of `multiprocessing` (tried on Python 3.11 and 3.12)."""

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils import _pytree as pytree

from piperlang.capture.batch.layout import BatchLayout, shapes_of
from piperlang.capture.user.batches import endless
from piperlang.capture.user.seeding import GeneratorStates, generator_states, restored, seed_all, set_generator_states
from piperlang.capture.user.slices import Cuts, Slice, Slices
from piperlang.capture.user.user_code import located
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError
from piperlang.ir.layout import Box
from piperlang.plan.plan import Feed
from piperlang.runtime.box import take
from piperlang.runtime.device.failure import Failure, failure_of
from piperlang.runtime.driver.shapes import Mode, RunKey

Batches = Callable[..., Iterator[tuple[Any, Any]]]
"""`data` or `validation`; `Slices` may be passed to it."""
COMPARED = 4096
"""About the most elements of a tensor that a fingerprint contains."""


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
    sliced: bool = False
    """Workers load only the samples that they read."""


class Part(NamedTuple):
    """What the driver is told of the part of a batch that a worker has loaded."""

    slice: Slice
    digests: tuple[bytes, ...]
    """Of the samples that are in it."""
    read: tuple[torch.Tensor, ...]
    """Of these samples, the tensors that the values of the whole batch are computed from."""


Parts: TypeAlias = dict[ValueId, torch.Tensor]
"""What a device reads of a batch."""


class LoadedHere(NamedTuple):
    """Instead of parts: the worker has loaded them."""

    whole: dict[str, torch.Tensor]
    """Values of the whole batch, where workers have loaded slices of it."""


Feeds: TypeAlias = Parts | LoadedHere


class Fingerprint(NamedTuple):
    """Equal for equal batches that leave the generators in the same states."""

    batch: str = ""
    generators: str = ""


class Loaded(NamedTuple):
    """A batch that a worker has loaded."""

    run: RunKey | None = None
    """The plan that the batch fits; None if there is none yet."""
    shapes: str = ""
    fingerprint: Fingerprint = Fingerprint()
    waited: float = 0.0
    """Seconds between the end of the step before it and the end of loading."""
    printed: str = ""
    """What the user's code has printed."""
    ended: bool = False
    """There are no more batches."""
    failed: Failure | None = None
    part: Part | None = None
    """None if the whole batch was loaded."""

    @property
    def batch(self) -> tuple[str, Fingerprint, bool, str]:
        """The same for all workers that have loaded the same batch."""
        return self.shapes, self.fingerprint, self.ended, self.part.slice.indices if self.part is not None else ""


def fingerprint(batch: Any, generators: GeneratorStates) -> Fingerprint:
    """Of large tensors, some elements count. The order of the keys of a dict does not."""
    of_torch, python, (kind, keys, *rest) = generators
    drawn = hashlib.blake2b(of_torch.numpy().data, digest_size=16)
    drawn.update(np.asarray(python[1], np.int64).tobytes() + np.asarray(keys).tobytes())
    drawn.update(f"{python[0]} {python[2]} {kind} {rest}".encode())
    return Fingerprint(content(batch), drawn.hexdigest())


def content(batch: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(batch)}
    for path in sorted(leaves):
        tensor = leaves[path]
        found.update(f"{path} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(_some(tensor))
    return found.hexdigest()


def digests(flat: Sequence[torch.Tensor]) -> tuple[bytes, ...]:
    """One for each sample."""
    return tuple(
        hashlib.blake2b(b"".join(map(_some, sample)), digest_size=16).digest() for sample in zip(*flat, strict=True)
    )


def _some(tensor: torch.Tensor) -> memoryview:
    some = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // COMPARED)]
    return some.cpu().contiguous().view(torch.uint8).numpy().data


class Loader:
    """Loads batches for one device, in a thread of its own, with generators of random numbers of its own: those of the
    process belong to the model and the optimizer."""

    def __init__(self, loading: Loading, device: int, feeds: Mapping[RunKey, Sequence[Feed]], pins: bool) -> None:
        """`feeds`: what each plan of the device reads of a batch. `pins`: copies are in pinned memory."""
        self.loading, self.device, self.pins = loading, device, pins
        self.plans = {key: (layout, feeds[key]) for key, layout in loading.layouts.items()}
        self.cuts: Cuts = WeakKeyDictionary()
        self.sources: dict[Mode, _Source] = {"train": self._source("train", loading.data)}
        self.thread = ThreadPoolExecutor(1, "piperlang-data")
        self.coming: Future[tuple[Loaded, Parts]] | None = None
        self.unplanned: tuple[tuple[Any, Any], Slice | None] | None = None
        """A batch that fits no plan."""
        with restored():
            seed_all(loading.seed)
            self.generators = generator_states()

    def validate(self) -> None:
        """Begins with the batches of `validation`."""
        validation = self.loading.validation
        assert validation is not None
        self.sources["evaluate"] = self._source("evaluate", validation)

    def _source(self, mode: Mode, function: Batches) -> _Source:
        slices = None
        if self.loading.sliced:
            rows, line = partial(self._rows, mode), line_of_function(function)
            slices = Slices(rows, self.device % 2 == 1, line, self.cuts, optional=mode == "evaluate")
        make = function if slices is None else partial(function, slices)
        return _Source(endless(make) if mode == "train" else make(), function, slices)

    def _rows(self, mode: Mode, samples: int) -> Sequence[int]:
        """The samples that plans for batches of so many read here; all of them, if there is no plan yet."""
        plans = [plan for key, plan in self.plans.items() if key.mode == mode and plan[0].samples == samples]
        return sorted({row for plan in plans for row in rows_read(*plan)} or [0]) if plans else range(samples)

    def load(self, mode: Mode = "train") -> None:
        """Begins to load the next batch."""
        self.coming = self.thread.submit(self._load, mode)

    def add(self, key: RunKey, layout: BatchLayout, feeds: Sequence[Feed]) -> None:
        """There is a plan for the batch that fits none."""
        self.plans[key] = layout, feeds
        batch, self.unplanned = self.unplanned, None
        if batch is not None:
            self.coming = self.thread.submit(self._fitted, key.mode, *batch, "")

    def loaded(self) -> Loaded:
        """Waits for the batch that is being loaded."""
        assert self.coming is not None
        started = time.perf_counter()
        found, _ = self.coming.result()
        return found._replace(waited=time.perf_counter() - started)

    def take(self, whole: Mapping[str, torch.Tensor]) -> Parts:
        """The parts of the batch that this device reads. `whole`: values of the whole batch, where it is loaded in
        slices."""
        assert self.coming is not None
        found, feeds = self.coming.result()
        self.coming = None
        assert found.run is not None
        _, wanted = self.plans[found.run]
        return feeds | {value: take(whole[name], box) for value, name, box in wanted if name in whole}

    def _load(self, mode: Mode) -> tuple[Loaded, Parts]:
        source = self.sources[mode]
        with _printing() as printed, self._drawing():
            try:
                with located(line_of_function(source.function)):
                    batch = next(source.batches, None)
            except BaseException as problem:  # user code may raise anything; it is raised again in the driver
                return Loaded(failed=failure_of(problem), printed=printed.getvalue()), {}
        if batch is None:
            return Loaded(ended=True, printed=printed.getvalue()), {}
        loaded = source.slices.loaded if source.slices is not None else None
        return self._fitted(mode, batch, loaded, printed.getvalue())

    def _fitted(self, mode: Mode, batch: tuple[Any, Any], loaded: Slice | None, printed: str) -> tuple[Loaded, Parts]:
        """The parts of a batch that this device reads, if there is a plan for it. `loaded`: the part of the batch that
        is here; None if it is whole."""
        samples = loaded.samples if loaded is not None else None
        try:
            with located(line_of_function(self.sources[mode].function)):
                plans = ((key, one) for key, (one, _) in self.plans.items() if key.mode == mode)
                key = next((key for key, one in plans if one.fits(batch, samples)), None)
                if key is None:
                    self.unplanned = batch, loaded
                    return Loaded(shapes=shapes_of(batch, samples), printed=printed), {}
                layout, wanted = self.plans[key]
                flat = layout.flatten(batch) if loaded is None else layout.leaves(batch)
        except PiperError as problem:
            return Loaded(failed=failure_of(problem), printed=printed), {}
        found = Loaded(key, shapes_of(batch, samples), printed=printed)
        if loaded is None:
            named = dict(zip(layout.names, flat, strict=True))
            feeds = {value: self._own(take(named[name], box)) for value, name, box in wanted}
            return found._replace(fingerprint=fingerprint(batch, self.generators)), feeds
        named = dict(zip(layout.names, flat, strict=False))  # without values of the whole batch
        feeds = {
            value: self._own(_rows_of(named[name], box, loaded, layout)) for value, name, box in wanted if name in named
        }
        read = tuple(flat[i] for i in layout.whole.reads) if layout.whole is not None else ()
        part = Part(loaded, digests(flat), read)
        return found._replace(fingerprint=fingerprint([], self.generators), part=part), feeds

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


def keep_sockets_in(folder: Path) -> None:
    """Processes of a DataLoader are reached by sockets in a folder that this process removes when it ends by itself. A
    worker may be killed; the folder of the job is removed in any case."""
    current_process()._config["tempdir"] = tempfile.mkdtemp(dir=folder)  # type: ignore[attr-defined]


@dataclass
class _Source:
    batches: Iterator[tuple[Any, Any]]
    function: Batches
    slices: Slices | None


# ---------------------------------------------------------------------------------------------------- parts of batches


def rows_read(layout: BatchLayout, feeds: Sequence[Feed]) -> set[int]:
    """The samples of the batch that a device reads."""
    tensors = layout.names[: len(layout.shapes)]
    return {row for _, name, box in feeds if box and name in tensors for row in _rows_in(box, layout)}


def _rows_in(box: Box, layout: BatchLayout) -> Sequence[int]:
    low, high = box[0]
    return layout.rows[low:high] if layout.rows else range(low, high)


def _rows_of(part: torch.Tensor, box: Box, loaded: Slice, layout: BatchLayout) -> torch.Tensor:
    """A box of a tensor of the batch, of which a part is here."""
    position = {row: i for i, row in enumerate(loaded.rows)}
    rows = [position[row] for row in _rows_in(box, layout)]
    return take(part[torch.tensor(rows)], ((0, len(rows)), *box[1:]))


# ----------------------------------------------------------------------------------------- what the user's code prints


class _ByThread(io.TextIOBase):
    """Standard output of the process; threads may have another one besides."""

    def __init__(self, usual: TextIO) -> None:
        self.usual = usual
        self.own: dict[int, io.StringIO] = {}

    def write(self, text: str) -> int:
        own = self.own.get(threading.get_ident())
        if own is not None:
            own.write(text)
        return self.usual.write(text)

    def flush(self) -> None:
        self.own.get(threading.get_ident(), self.usual).flush()


@contextmanager
def _printing() -> Iterator[io.StringIO]:
    """What this thread prints goes to the driver, too: standard output of a worker is not shown."""
    if not isinstance(sys.stdout, _ByThread):
        sys.stdout = _ByThread(sys.stdout)
    by_thread, text = sys.stdout, io.StringIO()
    by_thread.own[threading.get_ident()] = text
    try:
        yield text
    finally:
        del by_thread.own[threading.get_ident()]
