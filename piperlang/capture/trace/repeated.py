"""Layers that are alike are traced once.

torch.export needs a quarter of a second for a layer of a transformer, and a large model has a hundred of them that
differ in their weights alone. The first one is traced. The forward of every other one runs on fake tensors, and its
calls of torch's functions are compared with those of the first: where they are the same, on corresponding tensors, the
operators of the first are copied. That takes a tenth of the time. Where they are not, the layer is traced, too.

A traced layer stands in the exported graph between operators that say where it begins and ends, and one that is a copy
as one operator; `Layers.write` replaces them. Whatever this cannot describe (a layer that writes into its inputs, or
returns tensors in an object) is traced as if this file did not exist.

Private API, kept in this file: the stacks of dispatch modes and of function modes, which are emptied while a copy runs
(tried on torch 2.11 and 2.13)."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch import overrides as function_modes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from piperlang.diagnostics import error

LEAST = 6
"""Fewer layers of a kind are all traced."""
_KINDS = 4
"""Layers of one class and one structure may do different things, such as local and global attention."""
_ATTEMPTS = 8
"""How often tracing starts again, before all layers are traced."""
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), slice, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(type, FunctionType, BuiltinFunctionType, BuiltinMethodType),
)


_CONTEXTS = (fx.Node, torch.autocast)
"""What functions that turn gradients and autocast on and off give and take, with and without torch.export."""
_REFUSED = ("__set__", "requires_grad_", "set_", "detach_", "resize_", "resize_as_", "share_memory_", "register_hook")


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
        if problem.all_of_kind or sum(path in self.layers for path in kind.paths) == _KINDS:
            self.kinds.add(kind.paths[0])


@dataclass(eq=False)
class Kind:
    """Modules of the same class with the same parts."""

    paths: list[str] = field(default_factory=list)
    traced: list[Trace] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Layer:
    path: str
    module: nn.Module
    kind: Kind
    tensors: Mapping[str, Tensor]
    """Its fake parameters and buffers. While a model is exported, the module has others."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A layer that was traced, as the first that does what it does."""

    path: str
    calls: list[Hashable]
    results: list[int | None]
    """For every tensor that it returns, the input that it is; None for a new one."""
    tags: Mapping[str, Any]
    """Annotations around the call."""
    layer: Layer
    writes: bool
    """Whether it writes into tensors. Copies are known to write into new ones alone."""


@dataclass(frozen=True)
class Copy:
    number: int
    """The trace that it is a copy of."""
    path: str
    tags: Mapping[str, Any]


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
        self.traces: list[Trace] = []
        self.copies: list[Copy] = []
        self._inside = False

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        layer = self.layers.get(id(vars(module)))
        if layer is None or self._inside:
            return forward(module, *args, **kwargs)
        self._inside = True
        try:
            given = _Given(args, kwargs)
            if not given.tensors:
                raise Unlike(layer, "it has no inputs", all_of_kind=True)
            if layer.kind.traced and layer.path not in self.apart.layers:
                return self._copy(layer, forward, given)
            return self._trace(layer, module, forward, given)
        finally:
            self._inside = False

    def _trace(self, layer: Layer, module: nn.Module, forward: Callable[..., Any], given: _Given) -> Any:
        number = len(self.traces)
        weights = [_current(module, name) for name in layer.tensors]
        torch.ops.piper.layer_reads(weights, number)
        entered = [torch.ops.piper.layer_input(tensor, number) for tensor in given.tensors]
        calls = _Calls(
            {f"input {i}": tensor for i, tensor in enumerate(entered)} | dict(zip(layer.tensors, weights, strict=True)),
            lambda tensor: torch.ops.piper.layer_reads([tensor], number),
        )
        try:
            with calls:
                args, kwargs = given.replaced(entered)
                result = forward(module, *args, **kwargs)
            returned = calls.result(result)
        except _Unclear as problem:
            raise Unlike(layer, str(problem), all_of_kind=True) from None
        left = iter(torch.ops.piper.layer_outputs(returned.new, weights, number))
        trace = Trace(layer.path, calls.seen, returned.inputs, calls.tags, layer, calls.writes)
        self.traces.append(trace)
        layer.kind.traced.append(trace)
        return returned.replaced([next(left) if i is None else given.tensors[i] for i in returned.inputs])

    def _copy(self, layer: Layer, forward: Callable[..., Any], given: _Given) -> Any:
        with _no_modes(), self.mode, _current_tensors(layer):
            fakes = [_alike(tensor) for tensor in given.tensors]
            known = {f"input {i}": fake for i, fake in enumerate(fakes)} | dict(layer.tensors)
            calls = _Calls(known, lambda tensor: None)
            versions = [tensor._version for tensor in known.values()]
            try:
                with calls:
                    args, kwargs = given.replaced(fakes)
                    result = forward(layer.module, *args, **kwargs)
                returned = calls.result(result)
            except (Exception, _Unclear) as problem:
                raise Unlike(layer, str(problem)) from problem
            if versions != [tensor._version for tensor in known.values()]:
                raise Unlike(layer, "it writes into a tensor")
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
        self.copies.append(Copy(number, layer.path, calls.tags))
        weights = [_current(layer.module, name) for name in layer.tensors]
        _shapes.append(returned.new)
        try:
            made = iter(torch.ops.piper.copy_layer(given.tensors, [*weights, *calls.others], len(self.copies) - 1))
        finally:
            _shapes.pop()
        return returned.replaced([next(made) if i is None else given.tensors[i] for i in returned.inputs])

    def check(self) -> None:
        copied = {copy.number for copy in self.copies}
        for number, trace in enumerate(self.traces):
            if trace.writes and number not in copied:
                raise Unlike(trace.layer, "it writes into a tensor", all_of_kind=True)

    # ----------------------------------------------------------------------------------------------------- the graph

    def write(self, graph: fx.Graph) -> None:
        """Replaces the operators that stand for layers."""
        bounds = {node.args[2]: _Bounds(node) for node in graph.nodes if node.target is _OUTPUTS}
        for node in graph.nodes:
            if node.target is _READS:
                bounds[node.args[1]].reads.append(node)
            elif node.target is _INPUT:
                bounds[node.args[1]].inputs.append(node)
        for node in [node for node in graph.nodes if node.target is _COPY]:
            copy = self.copies[node.args[2]]
            first, trace = bounds[copy.number], self.traces[copy.number]
            read = [one for reads in first.reads for one in _nodes(reads)]
            copied: dict[fx.Node, fx.Node] = dict(
                zip((*first.inputs, *read), (*node.args[0], *node.args[1]), strict=True)
            )
            with graph.inserting_before(node):
                for one in first.body:
                    copied[one] = graph.node_copy(one, lambda n, copied=copied: copied.get(n, n))  # type: ignore[misc]
                    copied[one].meta = _moved(one.meta, trace, first.reads[0], copy, node)
            _replace(node, [copied.get(one, one) for one in _nodes(first.outputs)])
        for bound in bounds.values():
            _replace(bound.outputs, _nodes(bound.outputs))
            for node in bound.reads:
                graph.erase_node(node)
            for node in bound.inputs:
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)


class _Bounds:
    """Where a traced layer begins and ends in the graph."""

    def __init__(self, outputs: fx.Node) -> None:
        self.outputs = outputs
        self.inputs: list[fx.Node] = []
        self.reads: list[fx.Node] = []
        """Its weights, and after that other tensors, one by one."""

    @cached_property
    def body(self) -> list[fx.Node]:
        known = {*self.inputs, *(one for reads in self.reads for one in _nodes(reads))}
        found: list[fx.Node] = []
        node = self.inputs[-1].next
        while node is not self.outputs:
            if node.op == "call_function" and node.target is not _READS:
                if any(one not in known and one.op == "call_function" for one in node.all_input_nodes):
                    raise error("P0802", "a layer reads a tensor that it was not seen to read")  # traced without copies
                found.append(node)
                known.add(node)
            node = node.next
        return found


def _nodes(call: fx.Node) -> Sequence[fx.Node]:
    """The tensors that an operator at the bounds of a layer is given."""
    found: Any = call.args[0]
    return cast("Sequence[fx.Node]", found)


def _replace(node: fx.Node, results: Sequence[fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _moved(meta: dict[str, Any], old: Trace, entry: fx.Node, new: Copy, call: fx.Node) -> dict[str, Any]:
    """Metadata of an operator in another layer, which is called elsewhere."""
    old_stack, stack = entry.meta.get("nn_module_stack") or {}, dict(call.meta.get("nn_module_stack") or {})
    for key, (path, kind) in list((meta.get("nn_module_stack") or {}).items())[len(old_stack) :]:
        moved = new.path + path.removeprefix(old.path) if f"{path}.".startswith(f"{old.path}.") else path
        stack[key.removesuffix(path) + moved] = moved, kind
    above, below = entry.meta.get("stack_trace") or "", meta.get("stack_trace") or ""
    lines = (call.meta.get("stack_trace") or "") + below.removeprefix(above) if below.startswith(above) else below
    custom = {**new.tags, **_changed(old.tags, meta.get("custom") or {})}
    return {**meta, "nn_module_stack": stack, "stack_trace": lines, "custom": custom}


def _tags() -> dict[str, Any]:
    """Annotations at this point of a trace."""
    return dict(traceback.get_current_meta().get("custom") or {})


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


# ----------------------------------------------------------------------------------------------------------- operators

_shapes: list[list[Tensor]] = []
"""The results of the copy that is being made."""
_library = torch.library.Library("piper", "FRAGMENT")  # type: ignore[no-untyped-call]
for _declared in (
    "layer_reads(Tensor[] tensors, int trace) -> ()",
    "layer_input(Tensor input, int trace) -> Tensor",
    "layer_outputs(Tensor[] outputs, Tensor[] weights, int trace) -> Tensor[]",
    "copy_layer(Tensor[] inputs, Tensor[] weights, int copy) -> Tensor[]",
):
    _library.define(_declared)  # type: ignore[no-untyped-call]
_READS, _INPUT, _OUTPUTS, _COPY = BOUNDS = (
    *(torch.ops.piper.layer_reads.default, torch.ops.piper.layer_input.default),
    *(torch.ops.piper.layer_outputs.default, torch.ops.piper.copy_layer.default),
)
"""Operators that say where layers begin and end."""


@torch.library.register_fake("piper::layer_reads", lib=_library)  # type: ignore[untyped-decorator]
def _reads(tensors: Sequence[Tensor], trace: int) -> None:
    pass


_library.impl("layer_reads", _reads, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch computes with constants while it traces


@torch.library.register_fake("piper::layer_input", lib=_library)  # type: ignore[untyped-decorator]
def _input(input: Tensor, trace: int) -> Tensor:
    return _empty(input)


@torch.library.register_fake("piper::layer_outputs", lib=_library)  # type: ignore[untyped-decorator]
def _outputs(outputs: Sequence[Tensor], weights: Sequence[Tensor], trace: int) -> list[Tensor]:
    return [_empty(tensor) for tensor in outputs]


@torch.library.register_fake("piper::copy_layer", lib=_library)  # type: ignore[untyped-decorator]
def _copy(inputs: Sequence[Tensor], weights: Sequence[Tensor], copy: int) -> list[Tensor]:
    return [_empty(tensor) for tensor in _shapes[-1]]


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _alike(tensor: Tensor) -> Tensor:
    return _empty(tensor).requires_grad_(tensor.requires_grad)


# ------------------------------------------------------------------------------------------------- calls and arguments


class _Unclear(BaseException):
    """A layer does something that cannot be written down."""


def _is_leaf(value: object) -> bool:
    """An object that is neither a tuple, a list nor a dict is passed on as it is, even where torch could open it."""
    return type(value) not in (tuple, list, dict)


class _Given:
    """The arguments of a call."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.flat, self.layout = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)
        self.tensors = list({id(leaf): leaf for leaf in self.flat if isinstance(leaf, Tensor)}.values())

    def replaced(self, tensors: Sequence[Tensor]) -> Any:
        others = dict(zip(map(id, self.tensors), tensors, strict=True))
        return pytree.tree_unflatten([others.get(id(leaf), leaf) for leaf in self.flat], self.layout)


@dataclass(frozen=True)
class _Returned:
    flat: list[Any]
    layout: pytree.TreeSpec
    inputs: list[int | None]
    """Of every tensor in it, the input that it is; None for a new one."""
    new: list[Tensor]

    def replaced(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        flat = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.flat]
        return pytree.tree_unflatten(flat, self.layout)


class _Calls(TorchFunctionMode):
    """Writes down the calls of torch's functions, with names for tensors that are the same in every layer of a kind."""

    def __init__(self, known: Mapping[str, Tensor], read: Callable[[Tensor], None]) -> None:
        """`read` is called with every tensor that the layer reads besides those that are known, before it does."""
        super().__init__()
        self.read = read
        self.others: list[Tensor] = []
        self.names = {id(tensor): name for name, tensor in reversed(list(known.items()))}
        self.kept = list(known.values())
        self.given = len(known)
        self.tags = _tags()
        self.writes = False
        self.seen: list[Hashable] = [(name, _looks(tensor)) for name, tensor in known.items()]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = str(getattr(function, "__name__", function)), self._shown((args, kwargs or {}))
        if called[0] in _REFUSED:
            raise _Unclear(f"it calls {called[0]}")
        self.writes = self.writes or _writes(called[0], kwargs or {})
        result = function(*args, **(kwargs or {}))
        tags = repr(_changed(self.tags, _tags()))
        self.seen.append((function, *called, torch.is_grad_enabled(), tags, self._named(result)))
        return result

    def _shown(self, value: Any) -> str:
        flat, layout = pytree.tree_flatten(value, is_leaf=_is_leaf)
        return f"{layout} {[self._leaf(leaf) for leaf in flat]}"

    def _leaf(self, leaf: Any) -> str:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self.names:
                self.names[id(leaf)] = f"other {len(self.others)} {_looks(leaf)}"
                self.others.append(leaf)
                self.read(leaf)
            return self.names[id(leaf)]
        if isinstance(leaf, tuple):  # a named tuple
            return self._shown(list(leaf))
        if isinstance(leaf, _CONSTANTS):
            return repr(leaf)
        if isinstance(leaf, _CONTEXTS):
            return "context"
        raise _Unclear(f"it gives a {type(leaf).__name__} to a function of torch")

    def _named(self, result: Any) -> Hashable:
        flat, _ = pytree.tree_flatten(result)
        for leaf in flat:
            if isinstance(leaf, Tensor) and id(leaf) not in self.names:
                self.names[id(leaf)] = f"tensor {len(self.kept)}"
                self.kept.append(leaf)  # its id stays its own
        return tuple(
            (self.names[id(leaf)], _looks(leaf)) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in flat
            if leaf is not None and not isinstance(leaf, _CONTEXTS)
        )

    def result(self, result: Any) -> _Returned:
        """What the layer returned, whose tensors must be inputs, or computed from them."""
        flat, layout = pytree.tree_flatten(result, is_leaf=_is_leaf)
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.kept[: self.given])
        found: list[int | None] = []
        new: list[Tensor] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _CONSTANTS):
                    raise _Unclear(f"it returns a {type(leaf).__name__}")
                continue
            name = self._leaf(leaf)
            if name.startswith("input "):
                found.append(int(name.removeprefix("input ")))
            elif name.startswith("tensor ") and leaf.requires_grad == (learns and leaf.is_floating_point()):
                found.append(None)
                new.append(leaf)
            else:
                raise _Unclear("it returns one of its own tensors, or one without gradient")
        self.seen.append(("returned", self._shown([leaf for leaf in flat if isinstance(leaf, Tensor)]), repr(layout)))
        return _Returned(flat, layout, found, new)


def _looks(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write into a tensor."""
    return (
        kwargs.get("out") is not None
        or kwargs.get("inplace") is True
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__", "__invert__"))
    )


# -------------------------------------------------------------------------------------------------------------- layers


def _layers(model: nn.Module) -> Iterator[Layer]:
    """Modules of which one module has several that look alike. Modules of a model that the file has built have real
    tensors, and the state of earlier calls: they are traced."""
    kinds: dict[Hashable, Kind] = {}
    for path, module in model.named_modules():
        looks = {name: _look(child) for name, child in module.named_children()}
        counts = Counter(looks.values())
        for name, look in looks.items():
            child, tensors = module.get_submodule(name), _tensors(module.get_submodule(name))
            if counts[look] >= LEAST and all(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
                layer = Layer(f"{path}.{name}".lstrip("."), child, kinds.setdefault(look, Kind()), tensors)
                layer.kind.paths.append(layer.path)
                yield layer


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
def _current_tensors(layer: Layer) -> Iterator[None]:
    """The module with its fake tensors."""
    current = {name: _current(layer.module, name) for name in layer.tensors}
    _set(layer.module, layer.tensors)
    try:
        yield
    finally:
        _set(layer.module, current)


def _set(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        part = module.get_submodule(path)
        (part._parameters if last in part._parameters else part._buffers)[last] = tensor  # type: ignore[assignment]
