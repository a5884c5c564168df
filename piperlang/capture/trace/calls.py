"""The calls of torch's functions that a module makes, written down so that those of two modules can be compared.

Private API, kept in this file: `FakeTensor` is called, and `no_dispatch` (tried on torch 2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

_NUMBERS: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
_CONSTANTS = (type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_OBJECTS = (type, FunctionType, BuiltinFunctionType, BuiltinMethodType)
_CONTEXTS = (fx.Node, torch.autocast)
"""What functions that turn gradients and autocast on and off give and take, with and without torch.export."""
_REFUSED = ("__set__", "requires_grad_", "set_", "detach_", "resize_", "resize_as_", "share_memory_", "register_hook")


class Unclear(BaseException):
    """A layer does something that cannot be written down. The layer's own code may catch it: `Calls.result` raises it
    again."""


class Given:
    """The arguments of a call. Only tuples are opened: a layer may write into a list, a dict or another object."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.flat, self.layout = pytree.tree_flatten(
            (args, tuple(kwargs.values())), is_leaf=lambda value: type(value) is not tuple
        )
        self.names = tuple(kwargs)
        self.tensors = list({id(leaf): leaf for leaf in self.flat if isinstance(leaf, Tensor)}.values())

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        others = dict(zip(map(id, self.tensors), tensors, strict=True))
        args, values = pytree.tree_unflatten([others.get(id(leaf), leaf) for leaf in self.flat], self.layout)
        return args, dict(zip(self.names, values, strict=True))


@dataclass(frozen=True)
class Returned:
    value: Any
    inputs: list[int | None]
    """Of every tensor in it, the input that it is; None for a new one."""
    new: list[Tensor]

    def replaced(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return _replaced(self.value, lambda: next(given))


def _leaves(value: Any) -> Iterator[Any]:
    """What tuples, lists and dicts contain. No other object is opened."""
    if type(value) in (tuple, list):
        for one in value:
            yield from _leaves(one)
    elif type(value) is dict:
        for one in value.values():
            yield from _leaves(one)
    else:
        yield value


def _replaced(value: Any, other: Callable[[], Tensor]) -> Any:
    """With other tensors. Lists and dicts stay the same objects: somebody else may have them."""
    if isinstance(value, Tensor):
        return other()
    if type(value) is tuple:
        return tuple(_replaced(one, other) for one in value)
    if type(value) is list:
        value[:] = [_replaced(one, other) for one in value]
    if type(value) is dict:
        value.update({key: _replaced(one, other) for key, one in value.items()})
    return value


class Calls(TorchFunctionMode):
    """Writes down the calls of torch's functions, with names for tensors that are the same in every layer of a kind.

    Most layers make the calls of an earlier one, on tensors with the same shapes: as long as they do, functions that
    return new tensors need not run again."""

    def __init__(
        self, known: Mapping[str, Tensor], read: Callable[[Tensor], None], earlier: Sequence[Calls] = ()
    ) -> None:
        """`read` is called with every tensor that the layer reads besides those that are known, before it does.
        `earlier`: calls of other layers, which ran on fake tensors."""
        super().__init__()
        self.read = read
        self.others: list[Tensor] = []
        self.names = {id(tensor): name for name, tensor in reversed(list(known.items()))}
        self.kept = list(known.values())
        self.given = len(known)
        self.tags = _tags()
        self.writes = False
        self.unclear: Unclear | None = None
        self.versions = {id(tensor): tensor._version for tensor in self.kept}
        """Of tensors that are not new."""
        self.objects: list[Hashable] = []
        """Types and functions in the arguments of the current call."""
        self.seen: list[tuple[Hashable, Hashable]] = [(name, looks(tensor)) for name, tensor in known.items()]
        self.results: dict[int, Any] = {}
        """By the number of the call: new tensors that it returned."""
        self.replayed = False
        self.alike = [one for one in earlier if not one.writes and one.seen[: one.given] == self.seen]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(function, "__name__", function))
        if name in _REFUSED:
            raise self._unclear(f"it calls {name}")
        self.writes = self.writes or _writes(function, name, args, kwargs or {})
        self.objects = []
        shown = self._shown((args, kwargs or {}))
        key = (function, shown, *self.objects, *_modes(), repr(changed(self.tags, _tags())))
        number, before = len(self.seen), len(self.kept)
        self.alike = [one for one in self.alike if number < len(one.seen) and one.seen[number][0] == key]
        result = self.alike[0].results.get(number) if self.alike else None
        if result is None:
            result = function(*args, **(kwargs or {}))
        else:  # other objects, about which the layer's code knows nothing
            result, self.replayed = pytree.tree_map_only(FakeTensor, _again, result), True
        self.seen.append((key, self._named(result)))
        if before < len(self.kept) == before + len(pytree.tree_leaves(result)):
            self.results[number] = result
        return result

    def _shown(self, value: Any) -> str:
        kind = type(value)
        if kind is tuple or kind is list:
            return f"{kind.__name__}({', '.join(map(self._shown, value))})"
        if kind is dict:
            return f"dict({', '.join(f'{self._shown(key)}: {self._shown(one)}' for key, one in value.items())})"
        return self._leaf(value)

    def _leaf(self, leaf: Any) -> str:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self.names:
                self.names[id(leaf)] = f"other {len(self.others)} {looks(leaf)}"
                self.others.append(leaf)
                self.versions[id(leaf)] = leaf._version
                self.read(leaf)
            return self.names[id(leaf)]
        if isinstance(leaf, tuple) and not isinstance(leaf, torch.Size):  # a named tuple
            return f"{type(leaf)} {self._shown(list(leaf))}"
        if isinstance(leaf, slice):
            return f"slice {self._shown([leaf.start, leaf.stop, leaf.step])}"
        for kind in _NUMBERS:
            if isinstance(leaf, kind):  # a class of its own may write it down in another way
                return f"{type(leaf)} {kind.__repr__(leaf)}"
        if isinstance(leaf, _CONSTANTS):
            return repr(leaf)
        if isinstance(leaf, _OBJECTS):
            self.objects.append(leaf)
            return "object"
        if isinstance(leaf, _CONTEXTS):
            return "context"
        raise self._unclear(f"it gives a {type(leaf).__name__} to a function of torch")

    def _unclear(self, why: str) -> Unclear:
        self.unclear = self.unclear or Unclear(why)
        return self.unclear

    def _named(self, result: Any) -> Hashable:
        flat = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        for leaf in flat:
            if isinstance(leaf, Tensor) and id(leaf) not in self.names:
                self.names[id(leaf)] = f"tensor {len(self.kept)}"
                self.kept.append(leaf)  # its id stays its own
        return tuple(
            (self.names[id(leaf)], looks(leaf)) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in flat
            if leaf is not None and not isinstance(leaf, _CONTEXTS)
        )

    def result(self, result: Any) -> Returned:
        """What the layer returned, whose tensors must be inputs, or computed from them."""
        if self.unclear is not None:
            raise self.unclear
        flat = list(_leaves(result))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.kept[: self.given])
        found: list[int | None] = []
        new: list[Tensor] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, (*_NUMBERS, *_CONSTANTS, *_OBJECTS)):
                    raise Unclear(f"it returns a {type(leaf).__name__}")
                continue
            name = self._leaf(leaf)
            if name.startswith("input "):
                found.append(int(name.removeprefix("input ")))
            elif name.startswith("tensor ") and leaf.requires_grad == (learns and leaf.is_floating_point()):
                found.append(None)
                new.append(leaf)
            else:
                raise Unclear("it returns one of its own tensors, or one without gradient")
        if len({id(leaf) for leaf in new}) < len(new):
            raise Unclear("it returns a tensor twice")
        shown = self._shown([leaf if isinstance(leaf, Tensor) else None for leaf in flat])
        self.seen.append((shown, repr(pytree.tree_structure(result))))
        return Returned(result, found, new)

    @property
    def written(self) -> bool:
        """Whether a tensor was written into that is not new."""
        tensors = (*self.kept[: self.given], *self.others)
        return any(tensor._version != self.versions[id(tensor)] for tensor in tensors)


def _modes() -> tuple[Hashable, ...]:
    """What a function does depends on it."""
    cast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return torch.is_grad_enabled(), *cast


def looks(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def alike(tensor: Tensor) -> Tensor:
    """A new tensor that looks the same."""
    return empty(tensor).requires_grad_(tensor.requires_grad)


def _again(tensor: FakeTensor) -> Tensor:
    """The same, in a third of the time: without a dispatch through the mode of fake tensors."""
    with no_dispatch():
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    found = FakeTensor(tensor.fake_mode, shape, tensor.device)
    found.requires_grad = tensor.requires_grad
    return found


def empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _writes(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write into a tensor."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        schemas = {"": function._schema} if isinstance(function, OpOverload) else function._schemas
        return any(schema.is_mutable for name, schema in schemas.items() if "out" not in name or "out" in kwargs)
    place = _place_of_inplace(function)
    return (
        kwargs.get("out") is not None
        or bool(kwargs.get("inplace", place is not None and len(args) > place and args[place]))
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__"))
    )


@cache
def _place_of_inplace(function: Any) -> int | None:
    """The position of the parameter `inplace`."""
    code = getattr(unwrap(function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index("inplace") if "inplace" in names else None


def _tags() -> dict[str, Any]:
    """Annotations at this point of a trace."""
    return dict(traceback.get_current_meta().get("custom") or {})


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if key not in before or before[key] != value}
