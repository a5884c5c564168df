"""Stage programs compiled by Inductor, without Dynamo, which would look at every call again, and would hold what a pass
has saved until its end. Where PIPER_CACHE names a folder, what has been compiled is kept there (artifacts.py): the next
start loads it, without tracing or lowering.

Private API, kept in this file, tried on torch 2.11 and 2.13: `torch._inductor.compile_fx.compile_fx`; entries of
AOTAutograd's cache that contain the code (`bundled_autograd_cache`), as torch._inductor.standalone_compile makes them,
and that such an entry becomes a function of a list of the inputs, which it empties; and `steal_arg`, by which a graph
says the same of its first input: compiled autograd passes saved activations in this way. A CompiledArtifact, as
standalone_compile returns it, would hold its inputs to the end."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter, getitem
from typing import Any, Self, TypeAlias

import torch
from torch import fx

from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.plan.plan import StageProgram
from piperlang.runtime.device import artifacts
from piperlang.runtime.device.grouped import with_groups
from piperlang.runtime.device.program_key import key_of

Call = Callable[[list[Any]], Sequence[Any]]
"""Empties the list of what it is given."""
Look: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def compiled(pieces: Sequence[PassGraph | None], programs: Sequence[StageProgram]) -> list[PassGraph | None]:
    """The stage programs compiled by Inductor, each distinct one once. Those with routed tokens are not compiled,
    because they would be compiled again for every number of tokens."""
    known: dict[int, PassGraph] = {}
    found: list[PassGraph | None] = []
    for piece, program in zip(pieces, programs, strict=True):
        if piece is None or program.routed:
            found.append(piece)
            continue
        if id(piece) not in known:
            known[id(piece)] = replace(piece, compiled=_Compiled(with_groups(piece.module)))
        found.append(known[id(piece)])
    return found


class _Compiled:
    """Compiled when it is called, for tensors as it is given them: the code knows their shapes and strides."""

    lock = threading.Lock()

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.known: dict[tuple[Look | None, ...], Call] = {}

    def __call__(self, taken: list[Any]) -> Sequence[Any]:
        looks = tuple(None if _is_number(one) else _look(one) for one in taken)
        function = self.known.get(looks)
        if function is None:
            with self.lock:
                function = self.known[looks] = _made(self.module, taken)
        return function(taken)


def _made(module: fx.GraphModule, taken: Sequence[torch.Tensor]) -> Call:
    """Loaded, or compiled and kept, where there is a folder for that."""
    if artifacts.place() is None:
        return _by_inductor(module, taken)
    lifted, constants = _without_constants(module)
    given = [*taken, *constants]
    key = key_of(lifted.graph, [_look(one) for one in given])
    if key is None:
        return _by_inductor(module, taken)
    with _Compiling():
        function = _loaded(artifacts.read(key))
        if function is None:
            content = _packed(lifted, given)
            function = _loaded(content)
            if function is not None and content is not None:
                artifacts.write(key, content)
    if function is None:
        return _by_inductor(module, taken)
    return function if not constants else _with(function, constants)


def _look(tensor: torch.Tensor) -> Look:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_number(tensor: torch.Tensor) -> bool:
    """The kernels of attention give the state of their random numbers as two of these, for its backward, which reads
    them if there is dropout: on the GPU in a capture, and on the host otherwise. Code that a capture compiles cannot be
    captured."""
    return tensor.dim() == 0 and tensor.dtype == torch.int64


def _with(function: Call, constants: Sequence[torch.Tensor]) -> Call:
    def call(taken: list[Any]) -> Sequence[Any]:
        taken.extend(constants)
        return function(taken)

    return call


def _packed(module: fx.GraphModule, given: list[torch.Tensor]) -> bytes | None:
    """The compiled program, or None if it cannot be pickled."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx  # imports a compiler, which CPU workers do not need

    if config.force_disable_caches or not config.fx_graph_cache:  # AOTAutograd makes no entry then
        return None
    compiled: Any = compile_fx(module, given)
    try:
        return None if compiled.serialize is None else pickle.dumps(compiled.serialize())
    except Exception:  # whatever an operator of the user holds
        return None


def _loaded(content: bytes | None) -> Call | None:
    """None if it cannot be loaded: then it is compiled again."""
    if content is None:
        return None
    try:
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.utils import BoxedBool

        entry = pickle.loads(content)
        entry.guards_expr = None  # shapes are part of the key
        settings = {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": BoxedDeviceIndex(None)}
        function: Call = entry.wrap_post_compile([], entry.sanitized_aot_config, settings)
    except Exception as problem:
        warnings.warn(
            f"a compiled stage program of PIPER_CACHE could not be loaded, and is compiled again:"
            f" {type(problem).__name__}: {problem}",
            stacklevel=2,
        )
        return None
    return function


def _by_inductor(module: fx.GraphModule, taken: Sequence[torch.Tensor]) -> Call:
    """Compiled for this process alone."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return compile_fx(_of_a_list(module), [list(taken)])  # type: ignore[list-item, return-value]


def _of_a_list(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with one input: a list of what were its inputs."""
    graph = fx.Graph()
    given = graph.placeholder("taken")
    given.meta["steal_arg"] = True
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.call_function(getitem, (given, len(copies)))
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    return fx.GraphModule(module, graph)


class _Compiling(ExitStack):
    """What Inductor compiles in here is code for these shapes, without gradients, and can be pickled."""

    def __enter__(self) -> Self:
        import torch._functorch.config as settings
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        super().__enter__()
        self.enter_context(torch.no_grad())
        self.enter_context(settings.patch({"bundled_autograd_cache": True, "enable_autograd_cache": True}))
        context = torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
        self.enter_context(torch._guards.tracing(context))
        return self


def _without_constants(module: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The same graph with its constants as further inputs: its code does not depend on what they are."""
    graph, constants = fx.Graph(), list[torch.Tensor]()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        copies[node] = graph.node_copy(node)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            copies[node] = graph.placeholder(f"constant_{len(constants)}")
            constants.append(attrgetter(str(node.target))(module))
    graph.output(graph.graph_copy(module.graph, copies))
    return fx.GraphModule(torch.nn.Module(), graph), constants
