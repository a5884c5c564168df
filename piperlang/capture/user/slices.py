"""Slices of batches: a worker loads only the samples that its device reads.

A torch DataLoader asks its sampler for the indices of a batch, reads these samples and stacks them. With fewer indices
it reads fewer samples. They are the same samples if a sample depends on its index alone: reading one leaves nothing
behind that another one is made from, a random number drawn, a position in a file, a count.

That is checked in two ways. What reading changes in the data set is looked for in the process that reads (`Watched`);
not everything can be seen there. And with every batch each worker reads some samples more, which another worker reads,
too: the driver compares them (runtime/driver/worker_batches.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from piperlang.capture.user.prints import Prints, is_users_own
from piperlang.capture.user.seeding import generator_states, same_states
from piperlang.capture.user.state import globals_of, labelled
from piperlang.capture.user.user_code import kind
from piperlang.capture.user.where import is_users
from piperlang.diagnostics import PiperError, error
from piperlang.source import Span

WHOLE = "load whole batches: `--data workers`"
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
    """Cuts what `data` or `validation` returns."""

    def __init__(
        self, rows: Callable[[int], Sequence[int]], many: bool, line: Span | None, cuts: Cuts, optional: bool = False
    ) -> None:
        """`rows`: the samples to load of a batch of so many samples. `many`: whether several are loaded to be compared.
        `cuts`: of earlier calls; the processes of a DataLoader may go on. `optional`: where batches cannot be cut, they
        are loaded whole."""
        self.rows, self.many, self.line, self.cuts, self.optional = rows, many, line, cuts, optional
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
        if loader not in self.cuts:
            self.cuts[loader] = CutLoader(loader)
        cut = self.cuts[loader]
        batches = cut.batches(self.rows, self.many)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except ReadsDiffer as problem:
                raise self._refused(problem) from None
            self.loaded = cut.asked.popleft()  # batches come in the order in which they were asked for
            yield batch

    def _refused(self, problem: ReadsDiffer) -> PiperError:
        return error(
            "P0902",
            f"cannot use `--data slices`: {problem.what}",
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
    if any(is_users(function) for part in _objects(every.dataset) if (function := _several(part)) is not None):
        return "`__getitems__` of the data set may make a sample from others of its batch"
    if every.worker_init_fn is not None:
        return "`worker_init_fn` of the DataLoader may make samples depend on the process that reads them"
    if not getattr(every, "in_order", True):
        return "the DataLoader yields batches in any order"
    return None


class CutLoader:
    """A DataLoader that loads some samples of every batch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.asked: deque[Slice] = deque()
        self.sampler = _CutBatches(loader.batch_sampler, self.asked)
        self.cut: DataLoader[Any] = DataLoader(
            Watched(loader.dataset),
            batch_sampler=self.sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def batches(self, rows: Callable[[int], Sequence[int]], many: bool) -> Iterator[Any]:
        self.asked.clear()
        self.sampler.rows, self.sampler.many = rows, many
        return iter(self.cut)


Cuts: TypeAlias = WeakKeyDictionary[DataLoader[Any], CutLoader]
"""By the DataLoaders of the user."""


class _CutBatches:
    """A batch sampler that keeps some samples of every batch. The other one draws as many random numbers as ever."""

    def __init__(self, whole: Any, asked: deque[Slice]) -> None:
        self.whole, self.asked = whole, asked
        self.rows: Callable[[int], Sequence[int]] = range
        self.many = False

    def __iter__(self) -> Iterator[Any]:
        for indices in self.whole:
            flat = list(indices)
            drawn = blake2b(repr(flat).encode(), digest_size=16).hexdigest()
            rows = _with_more(self.rows(len(flat)), len(flat), self.many, drawn)
            self.asked.append(Slice(len(flat), rows, drawn))
            # What the data set is given stays a tensor or an array, if it is one.
            yield indices[list(rows)] if hasattr(indices, "shape") else [flat[row] for row in rows]

    def __len__(self) -> int:
        return len(self.whole)


def _with_more(rows: Sequence[int], samples: int, many: bool, drawn: str) -> tuple[int, ...]:
    """With samples that another worker reads: others in every batch. Not as many in every worker, because what depends
    on the number of reads would be the same in all of them."""
    others = sorted(set(range(samples)).difference(rows))
    first = int(drawn, 16) % len(others) if others else 0
    count = max(2, len(rows) // 8) if many else 1
    return tuple(sorted([*rows, *(others[first:] + others[:first])[:count]]))


# ---------------------------------------------------------------------------------------- what reading samples may do


class ReadsDiffer(Exception):
    """Samples may depend on which others have been read."""

    @property
    def what(self) -> str:
        """A DataLoader raises an exception of its processes again: the traceback is in front of the message."""
        return str(self).strip().splitlines()[-1].removeprefix(f"{type(self).__module__}.{type(self).__qualname__}: ")


class Watched(Dataset[Any]):
    """A data set that must be the same after samples are read. It is watched in the process that reads them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.reads = 0
        self.before: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """For code that asks torch for the data set of the process that it runs in."""
        if name == "dataset":  # not there yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> list[Any]:
        """What a DataLoader calls."""
        drawn = generator_states()
        several = _several(self.dataset)
        found: list[Any] = several(indices) if several else [self.dataset[i] for i in indices]
        if not same_states(drawn, generator_states()):
            raise ReadsDiffer("reading samples draws random numbers")
        self.reads += 1
        if self.reads in (2, 3) or self.reads.bit_count() == 1:  # the first read may open files
            before, self.before = self.before, self._prints()
            changed = [name for name, print in self.before.items() if before and before.get(name) != print]
            if changed:
                raise ReadsDiffer(f"reading samples changes {changed[0]}")
        return found

    def _prints(self) -> dict[str, object]:
        """By names: attributes of the data set and of its parts, of their classes, and globals that they read. Each has
        a fingerprint of its own, because that of a long list is not finished."""
        parts = {id(part): part for part in _objects(self.dataset)}.values()
        found = {
            f"attribute `{name}` of a {type(part).__name__}": Prints(contents=True).of(value)
            for part in parts
            for scope in (*(vars(kind) for kind in type(part).__mro__ if is_users_own(kind)), *_attributes(part))
            for name, value in scope.items()
            if not name.startswith("__")
        }
        return found | {one.label: one.print(Prints(contents=True)) for one in labelled(globals_of(parts))}


def _several(dataset: Any) -> Callable[..., Any] | None:
    return getattr(dataset, "__getitems__", None)


def _attributes(value: Any) -> list[dict[str, Any]]:
    own = getattr(value, "__dict__", None)
    return [own] if isinstance(own, dict) and not isinstance(value, type) else []


def _objects(value: Any, depth: int = 4) -> Iterator[Any]:
    """A data set, those that it is made of, and its transforms."""
    yield value
    if depth:
        inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
        for one in islice(inside, _PARTS):
            if isinstance(one, list | tuple) or callable(one) or hasattr(one, "__getitem__"):
                yield from _objects(one, depth - 1)
