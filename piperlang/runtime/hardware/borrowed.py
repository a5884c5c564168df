"""Memory that another stream reads than the one it belongs to. The allocator gives memory that is freed to what its own
stream issues next, whether or not others have read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piperlang.plan.instructions import Instruction

if TYPE_CHECKING:
    from piperlang.core.value_id import ValueId


class Owners:
    """The stream that each value's memory belongs to: that of the instruction which has allocated it, and not of one
    which returns a view of what it was given."""

    def __init__(self, sums: Mapping[ValueId, ValueId]) -> None:
        """`sums`: the values that are added up as they come, with their sums."""
        self.sums = sums
        self.streams: dict[int, str] = {}
        """By address. That of weights and of the batch is not here: it stays to the end of a step."""

    def borrowed(
        self, x: Instruction, values: Mapping[ValueId, Any], reads: Iterable[ValueId]
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors of other streams among those that an instruction reads, with the stream of each."""
        owned = [(self.streams.get(_address(tensor), x.stream), tensor) for tensor in _tensors(values, reads)]
        return [(owner, tensor) for owner, tensor in owned if owner != x.stream]

    def before(self, x: Instruction, values: Mapping[ValueId, Any], reads: Iterable[ValueId]) -> set[int]:
        """The addresses of what an instruction may return views of, or add to."""
        return set(map(_address, _tensors(values, (*reads, *self._written(x)))))

    def made(self, x: Instruction, values: Mapping[ValueId, Any], before: set[int]) -> None:
        """After an instruction."""
        for tensor in _tensors(values, self._written(x)):
            if _address(tensor) not in before:
                self.streams[_address(tensor)] = x.stream

    def _written(self, x: Instruction) -> Iterator[ValueId]:
        return (self.sums.get(key, key) for key in x.writes)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Mapping[ValueId, Any], keys: Iterable[ValueId]) -> Iterator[torch.Tensor]:
    todo = [values.get(key) for key in keys]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, tuple | list):
            todo += value


class Borrowed:
    """What keeps borrowed tensors in a capture, where the allocator cannot ask when a stream is done: until their own
    stream has waited for the one that reads them."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        self.known: dict[str, dict[str, int]] = {}
        """By stream: the last instruction of each other stream that it has waited for, directly or not."""
        self.then: dict[int, dict[str, int]] = {}
        """The same when an instruction ends, with itself."""
        self.kept: list[tuple[str, str, int, torch.Tensor]] = []

    def issue(self, i: int, borrowed: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`borrowed`: tensors that instruction i reads, with the stream that they belong to."""
        x = self.instructions[i]
        known = self.known.setdefault(x.stream, {})
        for earlier in x.waits:
            for stream, last in self.then.get(earlier, {}).items():
                known[stream] = max(known.get(stream, -1), last)
        self.then[i] = {**known, x.stream: i}
        self.kept += [(owner, x.stream, i, tensor) for owner, tensor in borrowed]
        self.kept = [one for one in self.kept if one[0] != x.stream or known.get(one[1], -1) < one[2]]
