"""Custom `torch.autograd.Function`s: the user's backward is kept.

torch.export traces through `Function.apply` and records only the operators of its forward; differentiating those would
drop the user's backward. So while a model is traced, every call of `apply` becomes one opaque operator, and afterwards
a node that calls the Function itself. Ahead-of-time autograd then runs forward and backward of the Function as they
were written, and the graphs of a chunk contain plain operators again.

Private API, kept in this file: `torch.autograd.function._SingleLevelFunction` (tried on torch 2.11 and 2.13). Every
`apply` calls its `apply`, also one that was bound to a name (`scale = Scale.apply`) long before the trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from piperlang.capture.trace.untraceable import differentiating
from piperlang.capture.user.state import GENERATORS, Snapshot, snapshot_of
from piperlang.capture.user.where import line_at
from piperlang.diagnostics import PiperError, error
from piperlang.source import Source, Span

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_HOLE = object()
"""Placeholder for a tensor among the arguments of a call."""


@dataclass(frozen=True)
class Applied:
    """A Function as the target of graph nodes. The node's arguments are the call's tensors and constants."""

    function: type
    arguments: pytree.TreeSpec

    def __call__(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        result = _apply(self.function, *pytree.tree_unflatten(flat, self.arguments))
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __str__(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


@dataclass
class FunctionCall:
    """A recorded call of a Function."""

    function: type
    arguments: pytree.TreeSpec
    flat: list[Any]
    """Constants, with placeholders in the positions of tensors."""
    result: Any = None
    """The result: structured as the Function returned it, with the tensors of the trace."""
    state: Snapshot | None = None
    """What the Function could read when it was called."""


_open: list[list[FunctionCall]] = []
"""The calls recorded by each open trace."""


def _apply(function: type, *arguments: Any) -> Any:
    """torch's own `function.apply`."""
    return _SingleLevelFunction.__mro__[1].__dict__["apply"].__get__(None, function)(*arguments)


@contextmanager
def recorded() -> Iterator[list[FunctionCall]]:
    """Inside the context, calls of autograd Functions become `piper::apply_function` operators. Their `call` argument
    is an index into the returned list."""
    calls: list[FunctionCall] = []
    _open.append(calls)
    _SingleLevelFunction.apply = classmethod(_record)  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        _open.pop()


def _record(function: type, *arguments: Any) -> Any:
    if function is CheckpointFunction:
        return _checkpointed(*arguments)
    if function.__module__.startswith(
        "torch."
    ):  # torch's own: part of a custom operator, which is traced as one operator, or without gradient
        return _apply(function, *arguments)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise _refused(
            function,
            "is called inside of torch.autocast",
            "call it in `with torch.autocast(x.device.type, enabled=False)`, on tensors of the dtype it computes in",
        )
    flat, layout = pytree.tree_flatten(arguments)
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    other = next((leaf for leaf in flat if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)
    if other is not None:
        raise _refused(
            function,
            f"has an argument of type {type(other).__name__}",
            "pass only tensors and numbers; pass the values it needs from other objects as separate arguments",
        )
    call = FunctionCall(function, layout, [_HOLE if isinstance(leaf, torch.Tensor) else leaf for leaf in flat])
    _open[-1].append(call)
    results = iter(torch.ops.piper.apply_function(tensors, len(_open[-1]) - 1))
    call.state = snapshot_of(function)
    return pytree.tree_map(lambda leaf: next(results) if isinstance(leaf, torch.Tensor) else leaf, call.result)


def _checkpointed(run: Any, preserve: bool, *arguments: Any) -> Any:
    """Reentrant checkpointing: recomputation only affects memory, but if no input requires gradients, nothing inside
    gets a gradient."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in arguments):
        return run(*arguments)
    with torch.no_grad():
        return run(*arguments)


_library = torch.library.Library("piper", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("apply_function(Tensor[] tensors, int call) -> Tensor[]")  # type: ignore[no-untyped-call]


@torch.library.register_fake("piper::apply_function", lib=_library)  # type: ignore[untyped-decorator]
def _shapes(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Runs the Function's forward on fake tensors, for the shapes of its outputs."""
    call = _open[-1][number]
    given = iter(tensors)
    versions = [tensor._version for tensor in tensors]
    with torch.no_grad():
        call.result = _apply(
            call.function,
            *pytree.tree_unflatten([next(given) if leaf is _HOLE else leaf for leaf in call.flat], call.arguments),
        )
    if versions != [tensor._version for tensor in tensors]:
        raise _refused(call.function, "changes an argument in place", "return a new tensor instead")
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(call.result) if isinstance(leaf, torch.Tensor)]


def restore(graph: fx.Graph, calls: Sequence[FunctionCall]) -> None:
    """Replaces every recorded call by a node that calls its Function."""
    for node in [node for node in graph.nodes if node.target is torch.ops.piper.apply_function.default]:
        tensors, number = node.args
        call, given = calls[number], iter(tensors)
        _refuse_other_state(call)
        with graph.inserting_before(node):
            applied = graph.call_function(
                Applied(call.function, call.arguments),
                tuple(next(given) if leaf is _HOLE else leaf for leaf in call.flat),
            )
        applied.meta = dict(node.meta)
        node.replace_all_uses_with(applied)
        graph.erase_node(node)


def _refuse_other_state(call: FunctionCall) -> None:
    """Refuse a Function that reads what the model sets for a call, and changes again afterwards: the program calls the
    Function later."""
    assert call.state is not None
    now = snapshot_of(call.function)
    changed = {name for name, print in call.state.items() if print != now.get(name) and name not in GENERATORS}
    if changed:
        raise error(
            "P0808",
            f"{min(changed)} changes after a call of `{call.function.__qualname__}`",
            _line_of_class(call.function),
            notes=["the program calls the Function with the value that is there after the forward"],
            help="pass it to `apply` as an argument",
        )


def backward_graph(node: fx.Node, mode: FakeTensorMode, table: Mapping[Any, Any]) -> fx.Graph:
    """The backward of a Function call as a graph: from the input tensors and the gradients of the outputs to the
    gradients of the inputs, None where an input has none."""
    tensors = [leaf.meta["val"] for leaf in node.args if isinstance(leaf, fx.Node)]
    results = list(pytree.tree_leaves(node.meta["val"]))

    def run(*given: torch.Tensor) -> list[torch.Tensor | None]:
        inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given[: len(tensors)]]
        rest = iter(inputs)
        outputs = node.target(*(next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in node.args))  # type: ignore[operator]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, given[len(tensors) :], strict=True)
            if output.requires_grad
        ]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
            )
            if pairs
            else [None] * len(wanted)
        )
        return [next(found) if tensor.requires_grad else None for tensor in inputs]

    with differentiating(node), mode, torch.enable_grad():
        graph: fx.Graph = make_fx(run, decomposition_table=dict(table))(
            *tensors, *(torch.empty_like(result) for result in results)
        ).graph
    return graph


def refuse_backward_state(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Refuse a backward that changes Python state: the program would keep the values from the time of tracing."""
    seen: set[type] = set()
    for node in graph.nodes:
        if not isinstance(node.target, Applied) or node.target.function in seen:
            continue
        function = node.target.function
        seen.add(function)
        before = snapshot_of(function)
        backward_graph(node, mode, {})
        evolving = {name for name, print in snapshot_of(function).items() if print != before.get(name)}
        if evolving:
            raise error(
                "P0808",
                f"{min(evolving)} changes every time the backward of `{function.__qualname__}` runs",
                _line_of_class(function),
                notes=["the traced program would keep the value from the first step"],
                help="pass it to `apply` as a tensor: a registered buffer, or a tensor that comes with the batch",
            )


def identity(target: object) -> object:
    """Distinguishes node targets that print alike: classes created by the same function are different Functions."""
    return id(target.function) if isinstance(target, Applied) else None


def _refused(function: type, what: str, help: str) -> PiperError:
    return error(
        "P0809",
        f"autograd function `{function.__qualname__}` {what}",
        _line_of_class(function),
        notes=["a Function that does this cannot be traced together with its backward"],
        help=help,
    )


def _line_of_class(function: type) -> Span | None:
    try:
        name, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
        return line_at(Source(name, Path(name).read_text(encoding="utf-8")), line) if name else None
    except (OSError, TypeError, UnicodeDecodeError):
        return None
