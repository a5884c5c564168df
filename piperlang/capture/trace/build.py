"""The user's model without storage for its parameters.

A parameter becomes a meta tensor when a module registers it. Buffers, other tensors and Python numbers of the
constructor are real, so constructors may read them (`torch.linspace(0, p, depth).tolist()`), convert modules, copy them
and load state dicts. Where a constructor needs the values of a parameter, the model is built again for real.

Private API, kept in this file: torch's conversion to meta tensors, which keeps shared memory shared, and the
constructor of fake tensors (tried on torch 2.11 and 2.13)."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import MetaConverter
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piperlang.capture.user.seeding import seeded
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import error

_READ = (torch.Tensor.tolist, torch.Tensor.numpy)
_READ_BY_OPERATOR = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


@dataclass(frozen=True)
class Built:
    model: nn.Module
    created: Mapping[int, torch.Tensor]
    """The tensors that the constructor created, by id. Others existed before: those of a model that the file builds
    when it is loaded. Calls of `model` in other processes give others, so they belong to the program, with their
    values."""
    differs: bool
    """Whether the constructor drew random numbers after those that a parameter without storage did not draw: a real
    build draws others."""

    def on(self, device: torch.device) -> Built:
        """The same for a trace on a device. Tensors that existed before are used as they are; where they are on another
        device, a copy of the model is traced."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if all(id(one) in self.created or one.is_meta or one.device.type == device.type for one in tensors):
            return self
        model = copy.deepcopy(self.model)
        made = [value for module in model.modules() for _, value in _own_tensors(module)]
        return Built(model, {id(value): value for value in made}, self.differs)


def build(make_model: Callable[[], nn.Module], seed: int, storage: bool = False) -> Built:
    """The model, without storage for parameters unless `storage`, or unless it cannot be built without."""
    if not storage:
        drawn = Drawn()
        try:
            with seeded(seed), _creations() as created, _without_storage(), drawn, _Reads(drawn):
                model = make_model()
        except Exception:
            drawn.read = True  # a value was needed; or the mistake is the user's, and the real build shows it
        if not drawn.read:
            return _new(Built(model, created, drawn.differs), make_model)
    with seeded(seed), _creations() as created:
        model = make_model()
    return _new(Built(model, created, False), make_model)


def _new(built: Built, make_model: Callable[[], nn.Module]) -> Built:
    """Refuse a model that an earlier call has built, which is without storage."""
    if any(isinstance(parameter, FakeTensor) for parameter in built.model.parameters()):
        raise error(
            "P0801",
            "`model` returns a module that an earlier call has built",
            line_of_function(make_model),
            notes=["`model` is called several times, and builds modules without storage for their weights, too"],
            help="build a new module in every call, without a cache; or build it once, at the top level of the file",
        )
    return built


@contextmanager
def _creations() -> Iterator[dict[int, torch.Tensor]]:
    """The tensors that the body creates, by id, at its end. The garbage collector lists only objects that are younger
    than the last freeze. A copy of an older tensor counts as older: it has the same values."""
    created: dict[int, torch.Tensor] = {}
    frozen = gc.get_freeze_count() > 0  # a prompt excludes what it has from collection
    gc.freeze()
    try:
        with _copies() as copies:
            yield created
        kinds = _subclasses(torch.Tensor)  # by type, since `isinstance` runs code of proxies
        created.update((id(value), value) for value in gc.get_objects() if type(value) in kinds)
        for original, copied in copies:
            if id(original) not in created:
                created.pop(id(copied), None)
    finally:
        gc.unfreeze()
        if frozen:
            gc.freeze()


@contextmanager
def _copies() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Tensors and their copies, in the order in which they are made."""
    deepcopy = torch.Tensor.__deepcopy__
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        made: torch.Tensor = deepcopy(tensor, memo)  # type: ignore[no-untyped-call]
        copies.append((tensor, made))
        return made

    torch.Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        yield copies
    finally:
        torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]


def _subclasses(kind: type) -> set[type]:
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*(_subclasses(one) for one in below))


class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows random numbers while a model is built without storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.skipped = False
        """A parameter without storage was initialised at random, which draws nothing."""
        self.differs = False
        """Numbers were drawn afterwards."""
        self.read = False
        """A value was read after that. It may have decided anything."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in pytree.tree_leaves((args, result))):
                self.skipped = True
            else:
                self.differs |= self.skipped
        elif function in _READ_BY_OPERATOR:
            self.read |= self.differs
        return result


class _Reads(TorchFunctionMode):
    """Methods that read values without an operator."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READ:
            self.drawn.read |= self.drawn.differs
        return function(*args, **(kwargs or {}))


@contextmanager
def _without_storage() -> Iterator[None]:
    """Parameters that the body creates lose their storage when a module registers them."""
    convert: MetaConverter[Any] = MetaConverter()
    with on_registration(lambda parameter: _on_meta(parameter, convert)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")  # load_state_dict
        yield


@contextmanager
def on_registration(replaced: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
    """Parameters that the body creates are exchanged for others when a module registers them."""
    create, register = nn.Parameter.__new__, nn.Module.register_parameter
    created: dict[int, nn.Parameter] = {}

    def create_parameter(kind: type, *args: Any, **kwargs: Any) -> nn.Parameter:
        made: nn.Parameter = create(kind, *args, **kwargs)
        created[id(made)] = made
        return made

    def register_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not (parameter.is_meta or is_lazy(parameter)) and id(parameter) in created:
            with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
                exchange(parameter, replaced(parameter))

    nn.Parameter.__new__ = staticmethod(create_parameter)  # type: ignore[assignment, method-assign]
    nn.Module.register_parameter = register_parameter  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = staticmethod(create)  # type: ignore[method-assign]
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(tensor: torch.Tensor, convert: MetaConverter[Any]) -> torch.Tensor:
    """A tensor of the same class and attributes. Tensors that share memory share it on meta, too."""
    data = tensor.detach() if tensor.is_meta else convert(tensor.detach())
    made = torch.Tensor._make_subclass(type(tensor), data.detach(), tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Exchanges the contents of two tensors, so that all references to the one see the other. False where that cannot
    be done: something holds a weak reference, or a view exists."""
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


@dataclass
class Faked:
    """Gives a model fake tensors."""

    mode: FakeTensorMode
    device: torch.device
    convert: MetaConverter[Any] = field(default_factory=MetaConverter)
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Tensors that could not be exchanged, with the fakes that modules have instead."""

    def model(self, built: Built) -> nn.Module:
        for module in built.model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                for name, value in _tensors(place, built.created):
                    place[name] = self._fake(value)
        return built.model

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.replaced:
            return self.replaced[id(tensor)][1]
        meta = tensor.detach() if tensor.is_meta else self.convert(tensor.detach())
        fake = FakeTensor(self.mode, meta, self.device)
        fake.__dict__.update(tensor.__dict__)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True
        if tensor.requires_grad:
            fake.requires_grad_()
        if exchange(tensor, fake):
            return tensor
        self.replaced[id(tensor)] = tensor, fake
        return fake

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is, or shares the memory of, one that modules have a fake for."""
        return any(tensor.untyped_storage()._cdata == old.untyped_storage()._cdata for old, _ in self.replaced.values())


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
    return [(name, one) for place in places for name, one in place.items() if isinstance(one, torch.Tensor)]


def _tensors(place: dict[str, Any], created: Mapping[int, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    return [
        (name, value)
        for name, value in place.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and id(value) in created
    ]
