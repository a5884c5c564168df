"""Slices of batches: a worker loads only the samples that its device reads.

A torch DataLoader asks its sampler for the indices of a batch, reads these samples and stacks them. With fewer indices
it reads fewer samples. They are the same samples if reading one leaves nothing behind that another one is made from: a
random number drawn, a position in a file, a count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from piperlang.capture.user.prints import Prints
from piperlang.capture.user.seeding import generator_states, same_states
from piperlang.capture.user.state import globals_of, labelled
from piperlang.capture.user.user_code import kind
from piperlang.diagnostics import PiperError, error
from piperlang.source import Span

WHOLE = "load whole batches: `--data workers`"
_WATCHED = 3
"""Reads after which the whole data set is compared. The first one may open files."""
_PARTS = 100
"""The most parts of an object that are looked at: a list of transforms is short, a list of samples is not."""


class Slice(NamedTuple):
    """Which part of a batch was loaded."""

    samples: int
    """Of the whole batch."""
    rows: tuple[int, ...]
    """The samples that were loaded, in rising order."""
    indices: str
    """A digest of the indices of all its samples in the data set."""


class Slices:
    """Cuts what `data` returns. `rows`: the samples to load of a batch of so many samples."""

    def __init__(self, rows: Callable[[int], Sequence[int]], line: Span | None, optional: bool = False) -> None:
        """`optional`: where batches cannot be cut, they are loaded whole."""
        self.rows, self.line, self.optional = rows, line, optional
        self.loaded: Slice | None = None
        """Of the batch that came last; None if it is whole."""

    def __call__(self, every: Any) -> Iterator[Any]:
        reason = why_whole(every)
        if reason is None:
            return self._cut(every)
        if self.optional:
            return iter(every)
        raise error("P0902", f"cannot use `--data slices`: {reason}", self.line, help=WHOLE)

    def _cut(self, loader: DataLoader[Any]) -> Iterator[Any]:
        asked: deque[Slice] = deque()
        cut: DataLoader[Any] = DataLoader(
            Watched(loader.dataset),
            batch_sampler=_CutBatches(loader.batch_sampler, self.rows, asked),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        batches = iter(cut)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except ReadsDiffer as problem:
                raise self._refused(problem) from None
            self.loaded = asked.popleft()  # batches come in the order in which they were asked for
            yield batch

    def _refused(self, problem: ReadsDiffer) -> PiperError:
        return error(
            "P0902",
            f"cannot use `--data slices`: reading samples {problem.what}",
            self.line,
            notes=["a sample could depend on which others the worker has read before it"],
            help=f"make a sample depend on its index alone, or {WHOLE}",
        )


def why_whole(every: Any) -> str | None:
    """Why batches are loaded whole; None if parts of them can be loaded."""
    if type(every) is not DataLoader:
        return f"`data` returns {kind(every)}, not a torch.utils.data.DataLoader"
    if isinstance(every.dataset, IterableDataset):
        return "the data set of the DataLoader has no samples with an index"
    if every.batch_sampler is None:
        return "the data set of the DataLoader yields whole batches"
    if every.collate_fn is not default_collate:
        return "`collate_fn` of the DataLoader may need the whole batch"
    if every.worker_init_fn is not None:
        return "`worker_init_fn` of the DataLoader may make samples depend on the process that reads them"
    if not getattr(every, "in_order", True):
        return "the DataLoader yields batches in any order"
    return None


class _CutBatches:
    """A batch sampler that keeps some samples of every batch. The other one draws as many random numbers as ever."""

    def __init__(self, whole: Any, rows: Callable[[int], Sequence[int]], asked: deque[Slice]) -> None:
        self.whole, self.rows, self.asked = whole, rows, asked

    def __iter__(self) -> Iterator[list[Any]]:
        for indices in map(list, self.whole):
            rows = tuple(self.rows(len(indices)))
            self.asked.append(Slice(len(indices), rows, blake2b(repr(indices).encode()).hexdigest()))
            yield [indices[row] for row in rows]

    def __len__(self) -> int:
        return len(self.whole)


# ---------------------------------------------------------------------------------------- what reading samples may do


class ReadsDiffer(Exception):
    """Samples may depend on which others have been read. A DataLoader raises an exception of its processes again with a
    longer message: the class alone says what happened."""

    what = ""


class Draws(ReadsDiffer):
    what = "draws random numbers"


class Changes(ReadsDiffer):
    what = "changes the data set, or a global that it uses"


class Watched(Dataset[Any]):
    """A data set that must be the same after samples are read. It is watched in the process that reads them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.reads = 0
        self.before: object = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """What a DataLoader calls."""
        drawn = generator_states()
        several = getattr(self.dataset, "__getitems__", None)
        found = several(indices) if several else [self.dataset[i] for i in indices]
        if not same_states(drawn, generator_states()):
            raise Draws
        self.reads += 1
        if self.reads <= _WATCHED:
            before, self.before = self.before, self._print()
            if self.reads > 1 and before != self.before:
                raise Changes
        return found

    def _print(self) -> object:
        prints = Prints(contents=True)
        read = labelled(globals_of(_objects(self.dataset)))
        return prints.of(self.dataset), [one.print(prints) for one in read]


def _objects(value: Any, depth: int = 4) -> Iterator[Any]:
    """A data set, those that it is made of, and its transforms."""
    yield value
    if depth:
        inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
        for one in islice(inside, _PARTS):
            if isinstance(one, list | tuple) or callable(one) or hasattr(one, "__getitem__"):
                yield from _objects(one, depth - 1)
