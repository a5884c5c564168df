"""State that a model keeps in Python: attributes, globals and generators that change from call to call.

A traced program keeps the values from the time of tracing, so training would continue with the first of them. State
that changes in every call is refused. State that the first call sets and later calls do not change (a cached mask, a
flag) is allowed, if the program of the second call is the same."""

from __future__ import annotations

import builtins
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dis import get_instructions
from functools import cached_property, partial
from inspect import unwrap
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from piperlang.capture.user.prints import Prints, is_users_own, tensor_print, text_of
from piperlang.capture.user.where import is_users, line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.source import Span

STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has. Of these only `training` is state, and a call of `eval()` in a forward is detected
elsewhere."""

HELP = (
    "let the forward compute it: register a buffer and change it there, an average of weights too"
    " (`self.average.lerp_(self.layer.weight.detach(), 0.01)`); pass what depends on the step alone in with the batch"
)
OF_TORCH = "set it once, where the model is made, or in its forward (`with torch.autocast(...)`), and leave it so"
GENERATORS = ("the generator of Python's `random`", "NumPy's global generator")
"""Names of the state that `seeded` restores."""
Global: TypeAlias = tuple[str, Mapping[str, Any]]
"""A name, and the scope that has it: two modules may have the same."""
Snapshot: TypeAlias = Mapping[str, object]
"""Fingerprints of state, by the name that the user knows."""


def snapshot(model: nn.Module, loss: Callable[..., Any]) -> Snapshot:
    """All Python state that the model and its loss could read."""
    prints = Prints()
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in STANDARD}
        found |= {f"attribute `{name}` of {module_name(path)}": prints.of(value) for name, value in own.items()}
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            found[f"forward hook `{getattr(hook, '__name__', type(hook).__name__)}` of {module_name(path)}"] = (
                prints.of(hook)
            )
        if is_users(type(module).forward):
            shared = {name: value for name, value in vars(type(module)).items() if not name.startswith("__")}
            found |= {
                f"class attribute `{type(module).__qualname__}.{name}`": prints.of(value)
                for name, value in shared.items()
            }
    functions = _functions_of(model, loss)
    found |= {one.label: one.print(prints) for one in labelled(globals_of(functions)) if one.name in one.scope}
    found |= {one.label: one.print(prints) for one in attributes_of(functions)}
    found |= {f"environment variable `{name}`": value for name, value in os.environ.items()}
    found["a variable of the loss"] = prints.of(_closed_over(unwrap(loss)))
    found |= {one.label: one.print(prints) for one in attributes_read_by(unwrap(loss))}
    return found | generators()


def snapshot_of(kind: type) -> Snapshot:
    """Python state that methods of a class could read: class attributes and globals."""
    prints = Prints()
    found = {
        f"class attribute `{kind.__qualname__}.{name}`": prints.of(value)
        for name, value in vars(kind).items()
        if not name.startswith("__")
    }
    return found | {one.label: one.print(prints) for one in labelled(globals_of(vars(kind).values()))} | generators()


def generators() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state()
    return dict(zip(GENERATORS, (hash(random.getstate()), (kind, np.asarray(keys).tobytes(), *rest)), strict=True))


@dataclass
class StateChange:
    """What a call of the model changed."""

    before: Snapshot = field(default_factory=dict)
    after: Snapshot = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        return {name for name in {*self.before, *self.after} if self.before.get(name) != self.after.get(name)}


class Frozen:
    """What code reads that runs on workers, or was traced, as it is now: globals, class attributes, tensors. Code that
    runs between steps (data, `on_step`) may change them."""

    def __init__(
        self,
        reader: str,
        functions: Iterable[Any],
        classes: Iterable[type],
        line: Span | None,
        names: Iterable[Global] = (),
        tensors: Sequence[torch.Tensor] = (),
        environment: Iterable[str] = (),
        library: TorchState | None = None,
        help: str = "pass what changes from step to step in with the batch, as a tensor that `data` yields",
    ) -> None:
        """`reader`: the code that reads them, for messages. `names`: additional globals that it reads, with their
        scopes. `tensors` and `environment`: tensors, and keys of `os.environ`, that it has read. `library`: code of
        others that it has run."""
        self.reader, self.line, self.help = reader, line, help
        self.tensors, self.environment = tensors, tuple(environment)
        self.classes = list(dict.fromkeys(base for kind in classes for base in kind.__mro__ if is_users_own(base)))
        functions = list(functions)
        self.closures = [one for one in functions if _closed_over(one) is not None]
        every = [*functions, *(item for kind in self.classes for item in vars(kind).values())]
        self.names = [*names, *globals_of(every)]
        self.attributes = labelled(self.names) + attributes_of(every)
        self.attributes += [one for function in functions for one in attributes_read_by(function)]
        self.library = library
        self.renew()

    def renew(self) -> None:
        """From now on, compare with the present values."""
        self.prints = self._prints()

    def _prints(self) -> dict[str, object]:
        prints = Prints(contents=True)
        found: dict[str, object] = {}
        for kind in self.classes:
            found |= {
                f"class attribute `{kind.__qualname__}.{name}`": prints.of(value)
                for name, value in list(vars(kind).items())
                if not name.startswith("__")
            }
        found |= {one.label: one.print(prints) for one in self.attributes}
        # Tensors after their names: a message is of use if it has a name.
        found |= {f"a variable in the closure of `{_name(one)}`": prints.of(one) for one in self.closures}
        found |= {
            f"a tensor of shape {list(tensor.shape)} (number {number})": tensor_print(tensor)
            for number, tensor in enumerate(self.tensors)
        }
        return found | {f"environment variable `{name}`": os.environ.get(name) for name in self.environment}

    def plain(self) -> dict[str, str]:
        """Numbers, strings and tensors among them, as text: equal in two processes that read the same."""
        found = {
            f"class attribute `{kind.__qualname__}.{name}`": value
            for kind in self.classes
            for name, value in vars(kind).items()
            if not name.startswith("__")
        }
        found |= {one.label: one.scope.get(one.name) for one in self.attributes}
        return {label: text_of(value) for label, value in found.items() if isinstance(value, _VALUES)}

    def changed(self) -> str | None:
        """The first that has changed."""
        now = self._prints()
        return next((name for name in {**self.prints, **now} if now.get(name) != self.prints.get(name)), None)

    def check(self, when: str = "", line: Span | None = None) -> None:
        """Raises P0808 if one of them has changed. `when`: what changed it, if that is known, with its line."""
        replaced = self.library.changed() if self.library is not None else None
        name = replaced or self.changed()
        if name is not None:
            raise error(
                "P0808",
                f"{name} changes {when}" if when else f"{name} has changed since training was set up",
                line or self.line,
                notes=[f"{self.reader} reads it and keeps the value from then"],
                help=OF_TORCH if replaced else HELP if when else self.help,
            )


def _functions_of(model: nn.Module, loss: Callable[..., Any]) -> list[Any]:
    classes = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    return [unwrap(loss), *(item for kind in classes for item in vars(kind).values())]


def _closed_over(function: Any) -> Any:
    """A callable that holds its variables itself: in a closure, or as arguments."""
    return function if isinstance(function, FunctionType | partial) else None


def attributes_read_by(function: Any) -> list[ScopeEntry]:
    """Attributes of its object that a method reads, or what an object that can be called reads of itself: those that
    it names. The object may have others that change, such as a count of steps."""
    owner = getattr(function, "__self__", function)
    if isinstance(function, FunctionType | partial) or not isinstance(getattr(owner, "__dict__", None), dict):
        return []
    called = "forward" if isinstance(owner, nn.Module) else "__call__"
    todo, names = [getattr(function, "__func__", None) or getattr(type(owner), called, None)], set[str]()
    while todo:
        method = _function_in(todo.pop())
        method = unwrap(method) if isinstance(method, FunctionType) else method  # torch wraps `step`
        if isinstance(method, FunctionType) and is_users(method):
            new = set(_names(method.__code__)) - names
            names |= new
            todo += [getattr(type(owner), name, None) for name in new]
    scope = vars(owner)
    return [ScopeEntry(f"attribute `{name}` of `{_name(owner)}`", scope, name) for name in scope if name in names]


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def globals_of(functions: Iterable[Any]) -> Iterator[Global]:
    """The global names that user functions, and the functions they call, read, with their scopes; also those that do
    not exist yet. Values that are not functions are skipped."""
    for function in _called(functions):
        scope, code = function.__globals__, function.__code__
        for name in dict.fromkeys((*(one for one in _names(code) if one in scope), *_globals_named(code))):
            yield name, vars(builtins) if name not in scope and hasattr(builtins, name) else scope


def globals_assigned(functions: Iterable[Any]) -> set[str]:
    """The global names that user functions, and the functions they call, assign."""
    return {name for function in _called(functions) for name in _stored(function.__code__, "STORE_GLOBAL")}


def labelled(names: Iterable[Global]) -> list[ScopeEntry]:
    """Globals by the names that the user knows; one of another module, with the same name, says which."""
    found: dict[str, ScopeEntry] = {}
    for name, scope in names:
        label = f"global `{name}`"
        if label in found and found[label].scope is not scope:
            label += f" of module `{scope.get('__name__')}`"
        found[label] = ScopeEntry(label, scope, name)
    return list(found.values())


def _called(functions: Iterable[Any]) -> Iterator[FunctionType]:
    """User functions, and the functions they name in globals and closures, methods of classes and instances
    included."""
    todo = list(functions)
    seen: set[int] = set()
    while todo:
        value = _function_in(todo.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType) and is_users(value):
            yield value
            todo += [value.__globals__.get(name) for name in _names(value.__code__)]
            todo += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        elif not isinstance(value, FunctionType):
            kinds = (value if isinstance(value, type) else type(value)).__mro__
            todo += [item for kind in kinds if is_users_own(kind) for item in vars(kind).values()]


def _function_in(value: Any) -> Any:
    """The function behind a method, a static method, a property, a partial, and behind one of piperlang's that stands
    in for it: what that one reads is no state of the model."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        return value.__func__
    if isinstance(value, FunctionType) and value.__globals__.get("__name__", "").startswith("piperlang."):
        return getattr(value, "__wrapped__", value)
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, partial | cached_property) else value


class ScopeEntry(NamedTuple):
    """An attribute of an object, or of a module or class that is not the user's: `torch.count`."""

    label: str
    scope: Mapping[str, Any]
    name: str

    def print(self, prints: Prints) -> object:
        value = self.scope.get(self.name)
        # A library's function has no state that could change, but another one may take its place.
        own = isinstance(value, FunctionType) and is_users(value)
        return value if isinstance(value, _FUNCTIONS) and not own else prints.of(value)


_VALUES = (bool, int, float, complex, str, torch.Tensor, np.ndarray)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)


def attributes_of(functions: Iterable[Any]) -> list[ScopeEntry]:
    """Attributes of other modules that functions name: values, functions, and those that are not there yet."""
    found: dict[tuple[int, str], ScopeEntry] = {}
    for function in _called(functions):
        names, later = set(_names(function.__code__)), set(_set_later(function.__code__))
        for module in _modules_named(function, names):
            scope = vars(module)
            for name in names | later:
                if isinstance(scope.get(name), _VALUES + _FUNCTIONS) or (name in later and name not in scope):
                    label = f"attribute `{name}` of module `{module.__name__}`"
                    found[id(module), name] = ScopeEntry(label, scope, name)
        methods = vars(torch.Tensor)
        for name in names & methods.keys():
            if isinstance(methods[name], _FUNCTIONS):
                found[id(torch.Tensor), name] = ScopeEntry(f"method `torch.Tensor.{name}`", methods, name)
    return list(found.values())


def _modules_named(function: FunctionType, names: set[str]) -> list[ModuleType]:
    """Modules of others that a function names: `F`, and of `torch.nn.functional` all three."""
    todo: list[Any] = [function.__globals__.get(name) for name in names]
    found: dict[int, ModuleType] = {}
    while todo:
        module = todo.pop()
        if isinstance(module, ModuleType) and not is_users_own(module) and id(module) not in found:
            found[id(module)] = module
            todo += [vars(module).get(name) for name in names]
    return list(found.values())


class TorchState:
    """torch as a model has used it: attributes of the classes of its modules, torch.nn.functional, and global settings.
    There are hundreds of them, so they are compared by identity, without a loop in Python."""

    def __init__(self, model: nn.Module) -> None:
        kinds = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
        scopes = [(kind.__qualname__, vars(kind)) for kind in kinds if not is_users_own(kind)]
        self.scopes: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
            (label, scope, {name: value for name, value in scope.items() if name not in _BUILDING})
            for label, scope in [*scopes, ("torch.nn.functional", vars(nn.functional))]
        ]
        self.settings = _settings()

    def changed(self) -> str | None:
        """The first attribute that is another object now, or setting that has changed."""
        for label, scope, values in self.scopes:
            if not all(map(is_, map(scope.get, values), values.values())):
                return next(f"`{label}.{name}`" for name, was in values.items() if scope.get(name) is not was)
        now = _settings()
        return next((name for name, was in self.settings.items() if now[name] != was), None)


_BUILDING = ("__init__", "__setstate__")
"""Methods that no forward calls. Dynamo replaces those of nn.Module when it compiles for the first time."""


def _settings() -> dict[str, object]:
    """Settings of torch that code may ask for."""
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "`torch.use_deterministic_algorithms`": torch.are_deterministic_algorithms_enabled(),
        "`torch.set_float32_matmul_precision`": torch.get_float32_matmul_precision(),
        "autocast on the CPU": torch.is_autocast_enabled("cpu"),
        "autocast on CUDA": torch.is_autocast_enabled("cuda"),
        "`torch.inference_mode`": torch.is_inference_mode_enabled(),
    }


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _globals_named(code: CodeType) -> Iterator[str]:
    """Globals that code reads by name, or may look up in `globals()`, whether they exist or not."""
    yield from (one.argval for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    looks_up = "globals" in code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_named(constant)
        elif looks_up and isinstance(constant, str) and constant.isidentifier():
            yield constant


def _set_later(code: CodeType) -> Iterator[str]:
    """Attributes that code sets, or may ask for with `getattr`."""
    yield from _stored(code, "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _set_later(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _stored(code: CodeType, operation: str) -> Iterator[str]:
    yield from (one.argval for one in get_instructions(code) if one.opname == operation)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant, operation)


def refuse_state(names: set[str], model: nn.Module) -> PiperError:
    if not names:
        return error(
            "P0808",
            "the model runs different operators every time it is called",
            line_of_function(type(model).forward),
            notes=["two traces with the same batch differ"],
            help="look for state that the code keeps besides its weights: a cache of masks, a counter, a list",
        )
    first, *others = sorted(names)
    generator = "generator" in first
    what = f"the model draws random numbers from {first}" if generator else f"{first} changes every time the model runs"
    help = (
        "use nn.Dropout, whose masks do not depend on the schedule, or draw the numbers outside of the model and pass"
        " them with the batch"
        if generator
        else (
            "register it as a buffer (`self.register_buffer(...)`) and compute with that tensor; compute values that"
            " depend only on the step in `data()` and pass them with the batch; count calls outside of the model"
        )
    )
    notes = [
        "the traced program would keep the value from the first step",
        *(f"{name} changes, too" for name in others[:3]),
    ]
    return error("P0808", what, line_of_function(type(model).forward), notes=notes, help=help)


def module_name(path: str) -> str:
    return f"module {path}" if path else "the model"


def is_attribute_of_model(name: str) -> bool:
    """Whether a name in a snapshot is that of an attribute of the model, not of the loss or another object."""
    what, _, owner = name.rpartition("` of ")
    return what.startswith("attribute `") and (owner == module_name("") or owner.startswith("module "))
