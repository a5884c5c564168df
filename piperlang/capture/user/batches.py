"""Batches of the user's `data` and `validation`, each checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from inspect import unwrap
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from piperlang.capture.user.prints import Prints, text_of
from piperlang.capture.user.state import globals_assigned, globals_of, labelled
from piperlang.capture.user.user_code import Guarded, Wrong, kind, mistake
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import PiperError, error

_PAIRS = "yield (input, target) pairs"


class UserBatches(Guarded):
    """`data` or `validation`. A call returns an iterator over checked batches."""

    def __call__(self, cut: Callable[[Any], Iterator[Any]] = iter) -> Iterator[tuple[Any, Any]]:
        """`cut` is given what the function returns, and yields its batches."""
        first: Any = None
        for number, batch in enumerate(map(paired, self._batches(cut)), 1):
            wrong = wrong_batch(batch, f"a batch of `{self.name}`") or (
                wrong_change(batch, first, f"batch {number} of `{self.name}`") if number > 1 else None
            )
            if wrong is not None:
                raise PiperError(mistake("P0801", wrong, self.line))
            first = batch if first is None else first
            yield detached((batch[0], batch[1]))
        if first is None:
            raise PiperError(mistake("P0801", Wrong(f"`{self.name}` yields no batches", _PAIRS), self.line))

    def _batches(self, cut: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        with self.guarded():
            every = self.function()
            wrong = _no_batches(every, self.name)
            if wrong is not None:
                raise PiperError(mistake("P0801", wrong, self.line))
            yield from cut(every)


class DataReads:
    """Plain values of globals that `data` and `validation` read, after the first batch."""

    def __init__(self, data: Callable[..., Any], validation: Callable[..., Any] | None) -> None:
        self.line = line_of_function(data)
        functions = [unwrap(function) for function in (data, validation) if function is not None]
        self.entries = [one for one in labelled(globals_of(functions)) if _is_plain(one.scope.get(one.name))]
        self.prints = self._prints()

    def _prints(self) -> dict[str, object]:
        prints = Prints(contents=True)
        return {one.label: one.print(prints) for one in self.entries if _is_plain(one.scope.get(one.name))}

    def texts(self) -> dict[str, str]:
        """The values as text that is the same in every process."""
        return {one.label: text_of(one.scope[one.name]) for one in self.entries if one.name in one.scope}

    def check(self, when: str) -> None:
        """Refuses what other functions of the file change: they run in another order, or in other processes."""
        name = next((name for name, print in self._prints().items() if self.prints[name] != print), None)
        if name is not None:
            raise error(
                "P0808",
                f"{name} changes {when}, and `data` reads it",
                self.line,
                notes=["`data` is called before `model`, and may be called in another process than the optimizer"],
                help="set it where the file is loaded, or in `data` itself",
            )


def _is_plain(value: object) -> bool:
    """A number, a text or an array, or a container of such. Other objects change in ways that `data` need not see."""
    leaves = list(value) if isinstance(value, set) else pytree.tree_leaves(value)
    return all(
        isinstance(leaf, bool | int | float | complex | str | bytes | torch.Tensor | np.ndarray) for leaf in leaves
    )


def endless(data: Callable[[], Iterator[tuple[Any, Any]]]) -> Generator[tuple[Any, Any]]:
    """Data that ends starts over: a new epoch."""
    while True:
        yield from data()


_FIXED = (*(bool, int, float, complex, str, bytes, type(None), type), *(FunctionType, BuiltinFunctionType, ModuleType))
"""What a function does not change as long as it does not assign it. Of others, an iterator, a list or a data set, a
batch may leave something behind."""
DATA = (torch.Tensor, np.ndarray)
"""What functions that make batches read, as a rule, and do not change."""


def may_share_state(one: Callable[..., Any], other: Callable[..., Any], but: tuple[type, ...] = ()) -> bool:
    """Whether calls of one function may change what the other does, by a variable that both of them use: an iterator, a
    generator of random numbers, a count. Variables in closures may be shared. `but`: types of values that they do not
    change."""
    functions = unwrap(one), unwrap(other)
    if any(getattr(function, "__closure__", None) for function in functions):
        return True
    mine, theirs = ({(name, id(scope)): scope.get(name) for name, scope in globals_of([f])} for f in functions)
    kept = [
        {id(value) for value in found.values() if not isinstance(value, (*_FIXED, *but))} for found in (mine, theirs)
    ]
    assigned = globals_assigned(functions)
    return bool(kept[0] & kept[1]) or any(name in assigned for name, _ in mine.keys() & theirs.keys())


def placed(batch: Any, device: str) -> Any:
    """The batch on the device that runs the program: a trace records the device of its inputs."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, detached(batch))


def paired(batch: Any) -> Any:
    """A dict is the input, as keyword arguments of the model, and the target, as transformers' batches are."""
    return (dict(batch), dict(batch)) if isinstance(batch, Mapping) else batch


def detached(batch: Any) -> Any:
    """A batch without the autograd graph that it was made with. Training changes the model's parameters; the gradient
    of a batch changes nothing, and a graph can be gone through only once. Views that conjugate or negate lazily become
    plain tensors, which can be sent."""
    return pytree.tree_map_only(torch.Tensor, _plain, batch)


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.detach() if leaf.requires_grad else leaf
    return leaf.resolve_conj().resolve_neg() if leaf.is_conj() or leaf.is_neg() else leaf


def _no_batches(every: Any, name: str) -> Wrong | None:
    one = isinstance(every, torch.Tensor | Mapping) or (
        isinstance(every, tuple | list) and len(every) == 2 and any(isinstance(part, torch.Tensor) for part in every)
    )
    if one:
        return Wrong(
            f"`{name}` returned one batch instead of an iterator over batches",
            "write `yield input, target` instead of `return input, target`, in a loop if there are several batches",
        )
    if not isinstance(every, Iterable) or isinstance(every, str | bytes):
        return Wrong(
            f"`{name}` returned {kind(every)}, not an iterator over batches",
            f"{_PAIRS}, or return an iterator over them such as a torch DataLoader",
        )
    return None


def wrong_batch(batch: Any, where: str) -> Wrong | None:
    """Why a value is not an (input, target) pair of tensors whose first dimension is the batch dimension; None if it
    is.

    `where`: how messages name the value."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return Wrong(f"{where} is {kind(batch)}, not an (input, target) pair", _pairs_from(batch))
    leaves = pytree.tree_leaves(batch)
    other = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)), batch)
    if other is not batch:
        return Wrong(
            f"{where} contains {kind(other)}",
            "make every part of a batch a tensor whose first dimension is the batch dimension, with torch.as_tensor or"
            " torch.stack",
        )
    unusual = next((wrong for leaf in leaves if (wrong := _unusual(leaf, where)) is not None), None)
    if unusual is not None:
        return unusual
    counts = {leaf.shape[0]: leaf for leaf in leaves if leaf.dim()}
    if not counts:
        return Wrong(
            f"{where} has no tensor with a batch dimension",
            "make every part of a batch a tensor whose first dimension is the batch dimension",
        )
    if 0 in counts:
        return Wrong(f"{where} has no samples: it contains {kind(counts[0])}", "skip empty batches")
    if len(counts) > 1:
        shapes = " and ".join(str(list(leaf.shape)) for leaf in list(counts.values())[:2])
        return Wrong(
            f"tensors of {where} have different numbers of samples: shapes {shapes}",
            "make the first dimension of every tensor the batch dimension, with the same number of samples",
        )
    return None


def _unusual(leaf: torch.Tensor, where: str) -> Wrong | None:
    """A tensor that cannot be divided among devices and sent as a block of numbers."""
    if leaf.is_nested:
        return Wrong(f"{where} contains a nested tensor", "pad it: `torch.nested.to_padded_tensor(x, 0)`")
    if leaf.layout is not torch.strided:
        return Wrong(f"{where} contains a tensor of layout {leaf.layout}", "make it dense: `x.to_dense()`")
    if leaf.is_quantized:
        return Wrong(f"{where} contains a quantized tensor", "yield its numbers: `x.dequantize()` or `x.int_repr()`")
    if leaf.is_meta:
        return Wrong(f"{where} contains a tensor on device `meta`, which has no values", "yield a tensor with values")
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return Wrong(
            f"{where} contains a {type(leaf).__name__}, a subclass of torch.Tensor",
            "yield a plain tensor: `x.as_subclass(torch.Tensor)`",
        )
    return None


def _pairs_from(batch: Any) -> str:
    if isinstance(batch, tuple | list) and len(batch) == 1:
        return f"{_PAIRS}: `TensorDataset(inputs, targets)`, or `(x, x)` where the target is computed from the input"
    if isinstance(batch, tuple | list):
        return f"{_PAIRS}; put several inputs into one tuple: `(a, b), target`"
    return _PAIRS


def wrong_change(batch: Any, first: Any, where: str) -> Wrong | None:
    """How a batch differs from the first batch, which the model was traced with; None if it does not."""
    known, before = pytree.tree_flatten(tuple(first))
    try:
        leaves = before.flatten_up_to(tuple(batch))  # dict keys may come in another order
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise ValueError
    except ValueError:
        return Wrong(
            f"{where} has a different structure than the first batch",
            "give all batches the same tuples, lists and dict keys",
        )
    for leaf, other in zip(leaves, known, strict=True):
        if leaf.dtype != other.dtype:
            return Wrong(
                f"{where} has a tensor of dtype {leaf.dtype}, but the first batch had {other.dtype}",
                "give all batches the same dtype, with `.to(dtype)`",
            )
    return None
