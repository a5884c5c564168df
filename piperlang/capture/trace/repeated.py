"""Layers that are alike are traced once.

torch.export needs a quarter of a second for a layer of a transformer, and a large model has a hundred of them that
differ in their weights alone. The first one is traced. The forward of every other one runs on fake tensors, and its
calls of torch's functions are compared with those of the first: where they are the same, on corresponding tensors, the
operators of the first are copied. Where they are not, the layer is traced, too.

Whatever this cannot describe (a layer that writes into its inputs, or returns tensors in an object) is traced as if
this file did not exist. `calls.py` has the comparison, and `layer_graph.py` the operators that stand for layers until
they are copied.

Private API, kept in this file: the stacks of dispatch modes and of function modes, which are emptied while a copy runs
(tried on torch 2.11 and 2.13)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch import overrides as function_modes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from piperlang.capture.trace.calls import Calls, Given, Unclear, alike, looks
from piperlang.capture.trace.layer_graph import LayerCall, begin, copy_layers, end, read_too, stand_in

LEAST = 6
"""Fewer layers of a kind are all traced."""
_KINDS = 4
"""Layers of one class and one structure may do different things, such as local and global attention. If this many are
unlike earlier ones, all layers of the kind are traced."""
_WITHOUT_COPIES = 3
"""The same, where none was a copy."""
_ATTEMPTS = 5
"""How often tracing starts again, before all layers are traced."""


class Unlike(BaseException):
    """A layer cannot be traced as a copy. The model's own code must not catch it."""

    def __init__(self, layer: Layer, why: str, all_of_kind: bool = False) -> None:
        """`all_of_kind`: no layer of this kind can be the original of copies, either."""
        super().__init__(f"{layer.path}: {why}")
        self.layer, self.all_of_kind = layer, all_of_kind


@dataclass
class Apart:
    """What is traced, and not copied, as earlier attempts have shown."""

    layers: set[str] = field(default_factory=set)
    """Paths of layers that do other things than earlier layers of their kind."""
    kinds: set[str] = field(default_factory=set)
    """Paths of the first layers of kinds."""
    everything: bool = False
    attempts: int = 0

    def add(self, problem: Unlike) -> None:
        kind = problem.layer.kind
        self.attempts += 1
        self.everything = self.everything or self.attempts == _ATTEMPTS
        self.layers.add(problem.layer.path)
        differing = sum(path in self.layers for path in kind.paths)
        if problem.all_of_kind or differing >= (_KINDS if kind.copies else _WITHOUT_COPIES):
            self.kinds.add(kind.paths[0])


@dataclass(eq=False)
class LayerKind:
    """Modules of the same class with the same parts."""

    paths: list[str] = field(default_factory=list)
    traced: list[TracedLayer] = field(default_factory=list)
    ran: list[Calls] = field(default_factory=list)
    """The calls of layers that ran on fake tensors."""
    copies: int = 0


@dataclass(frozen=True, eq=False)
class Layer:
    path: str
    module: nn.Module
    kind: LayerKind
    tensors: Mapping[str, Tensor]
    """Its fake parameters and buffers. While a model is exported, the module has others."""


@dataclass(frozen=True, eq=False)
class TracedLayer:
    """The first that does what it does."""

    layer: Layer
    call: LayerCall
    calls: list[tuple[Hashable, Hashable]]
    results: list[int | None]
    """For every tensor that it returns, the input that it is; None for a new one."""
    writes: bool
    """Whether it writes into tensors. Copies are known to write into new ones alone."""


class Repeated:
    """The layers of a model of which there are several of a kind."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, apart: Apart) -> None:
        self.mode, self.apart = mode, apart
        found = [] if apart.everything else list(_layers(model))
        self.layers = {id(vars(one.module)): one for one in found if one.kind.paths[0] not in apart.kinds}

    @property
    def copies(self) -> bool:
        return bool(self.layers)

    @contextmanager
    def traced_once(self) -> Iterator[Layers]:
        """Inside the context, only the first layer that does what it does is traced."""
        found = Layers(self.layers, self.mode, self.apart)
        for layer in self.layers.values():
            layer.kind.traced.clear()
        _open.append(found)
        try:
            with ExitStack() as stack:
                for kind in {type(layer.module) for layer in self.layers.values()}:
                    stack.enter_context(_forward_replaced(kind))
                yield found
            found.check()
        finally:
            _open.pop()


_open: list[Layers] = []
"""The layers of each open export."""


class Layers:
    """The layers of an exported program: which were traced, and which are copies."""

    def __init__(self, layers: Mapping[int, Layer], mode: FakeTensorMode, apart: Apart) -> None:
        self.layers, self.mode, self.apart = layers, mode, apart
        self.traces: list[TracedLayer] = []
        self.copies: list[LayerCall] = []
        self.problem: Unlike | None = None
        """The first one; the model's own code may have caught it."""
        self._inside = False

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        layer = self.layers.get(id(vars(module)))
        if layer is None or self._inside or self.problem is not None:
            return forward(module, *args, **kwargs)
        self._inside = True
        try:
            given = Given(args, kwargs)
            if not given.tensors:
                raise Unlike(layer, "it has no inputs", all_of_kind=True)
            if layer.kind.traced and layer.path not in self.apart.layers:
                return self._copy(layer, forward, given)
            return self._trace(layer, module, forward, given)
        except Unlike as problem:
            self.problem = problem
            raise
        except Exception:  # the model may go on with something else
            self.problem = Unlike(layer, "it raises an exception", all_of_kind=True)
            raise
        finally:
            self._inside = False

    def _trace(self, layer: Layer, module: nn.Module, forward: Callable[..., Any], given: Given) -> Any:
        number = len(self.traces)
        weights = [_current(module, name) for name in layer.tensors]
        entered = begin(given.tensors, weights, number)
        calls = Calls(
            {f"input {i}": tensor for i, tensor in enumerate(entered)} | dict(zip(layer.tensors, weights, strict=True)),
            lambda tensor: read_too([tensor], number),
        )
        try:
            with calls:
                args, kwargs = given.replaced(entered)
                result = forward(module, *args, **kwargs)
            returned = calls.result(result)
        except Unclear as problem:
            raise Unlike(layer, str(problem), all_of_kind=True) from None
        left = iter(end(returned.new, weights, number))
        call = LayerCall(layer.path, calls.tags)
        trace = TracedLayer(layer, call, calls.seen, returned.inputs, calls.writes)
        self.traces.append(trace)
        layer.kind.traced.append(trace)
        return returned.replaced([next(left) if i is None else given.tensors[i] for i in returned.inputs])

    def _copy(self, layer: Layer, forward: Callable[..., Any], given: Given) -> Any:
        with _no_modes(), self.mode, _current_tensors(layer) as current:
            fakes = [alike(tensor) for tensor in given.tensors]
            known = {f"input {i}": fake for i, fake in enumerate(fakes)} | dict(layer.tensors)
            if any(looks(one) != looks(layer.tensors[name]) for name, one in current.items()):
                raise Unlike(layer, "it is called with other weights")
            calls = Calls(known, lambda tensor: None, layer.kind.ran)
            try:
                with calls:
                    args, kwargs = given.replaced(fakes)
                    result = forward(layer.module, *args, **kwargs)
                returned = calls.result(result)
            except (Exception, Unclear) as problem:
                raise Unlike(layer, str(problem)) from problem
            if all(one.seen != calls.seen for one in layer.kind.ran):
                layer.kind.ran.append(calls)
            if calls.written or (calls.writes and (calls.others or calls.replayed)):
                raise Unlike(layer, "it writes into a tensor that is not new")
            if _share_memory(returned.new, known.values()):
                raise Unlike(layer, "it returns several views of a tensor", all_of_kind=True)
        number = next(
            (
                number
                for number, trace in enumerate(self.traces)
                if trace in layer.kind.traced and (trace.calls, trace.results) == (calls.seen, returned.inputs)
            ),
            None,
        )
        if number is None:
            raise Unlike(layer, "it calls other functions")
        self.copies.append(LayerCall(layer.path, calls.tags, number))
        layer.kind.copies += 1
        weights = [_current(layer.module, name) for name in layer.tensors]
        made = iter(stand_in(given.tensors, [*weights, *calls.others], returned.new, len(self.copies) - 1))
        return returned.replaced([next(made) if i is None else given.tensors[i] for i in returned.inputs])

    def write(self, graph: fx.Graph) -> None:
        copy_layers(graph, [trace.call for trace in self.traces], self.copies)

    def check(self) -> None:
        """Raises what the model's own code has caught. Refuses a layer without copies that may have written into its
        inputs: it has written into those that it was given instead."""
        if self.problem is not None:
            raise self.problem
        copied = {copy.original for copy in self.copies}
        for number, trace in enumerate(self.traces):
            if trace.writes and number not in copied:
                raise Unlike(trace.layer, "it writes into a tensor", all_of_kind=True)


# -------------------------------------------------------------------------------------------------------------- layers


def _layers(model: nn.Module) -> Iterator[Layer]:
    """Modules of which one module has several that look alike, without those inside of them. A model that the file has
    built has real tensors, and the state of earlier calls: all of it is traced."""
    kinds: dict[Hashable, LayerKind] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        children = {name: _look(child) for name, child in module.named_children() if _worth_it(child)}
        counts = Counter(children.values())
        for name, look in children.items():
            child, tensors = module.get_submodule(name), _tensors(module.get_submodule(name))
            if counts[look] >= LEAST and all(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
                layer = Layer(f"{path}.{name}".lstrip("."), child, kinds.setdefault(look, LayerKind()), tensors)
                layer.kind.paths.append(layer.path)
                inside |= set(child.modules())
                yield layer


def _share_memory(returned: Iterable[Tensor], given: Iterable[Tensor]) -> bool:
    """Who writes into one of the returned tensors writes into another tensor, too."""
    places = [tensor.untyped_storage()._cdata for tensor in returned]
    return len({*places}) < len(places) or not {*places}.isdisjoint(t.untyped_storage()._cdata for t in given)


def _worth_it(module: nn.Module) -> bool:
    """A module without parts calls few functions."""
    return any(True for _ in module.children())


def _look(module: nn.Module) -> Hashable:
    """Equal for modules that may be alike."""
    first: dict[int, str] = {}
    return (
        tuple((name, type(part), part.training) for name, part in module.named_modules()),
        tuple(
            (name, tuple(t.shape), t.dtype, t.requires_grad, first.setdefault(id(t), name))
            for name, t in _tensors(module).items()
        ),
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def _current(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), last)
    return found


# ---------------------------------------------------------------------------------------------------------------- modes


@contextmanager
def _forward_replaced(kind: type[nn.Module]) -> Iterator[None]:
    forward, own = kind.forward, "forward" in vars(kind)

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _open[-1].call(self, forward, args, kwargs)

    kind.forward = call
    try:
        yield
    finally:
        if own:
            kind.forward = forward
        else:
            del kind.forward


@contextmanager
def _no_modes() -> Iterator[None]:
    """Nothing that is called is recorded."""
    functions = [function_modes._pop_mode() for _ in range(len(function_modes._get_current_function_mode_stack()))]  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(functions):
            function_modes._push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def _current_tensors(layer: Layer) -> Iterator[Mapping[str, Tensor]]:
    """The module with its fake tensors. Yields those that it has otherwise."""
    current = {name: _current(layer.module, name) for name in layer.tensors}
    _set(layer.module, layer.tensors)
    try:
        yield current
    finally:
        _set(layer.module, current)


def _set(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        (part._parameters if last in part._parameters else part._buffers)[last] = tensor  # type: ignore[assignment]
