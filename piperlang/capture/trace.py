"""A model and its loss as one aten graph, traced on fake tensors.

Private API, kept in this file: `torch._subclasses.fake_tensor.FakeTensorMode` (tried on torch 2.11 and 2.13). Fake tensors on the
device that will run, not meta ones, because operators such as attention choose their kernel by device while they are traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import traceback
from torch.utils import _pytree as pytree

from piperlang.capture.counted import take_count
from piperlang.capture.inline import drop_unread, inline_regions
from piperlang.capture.learning import learning
from piperlang.capture.random import make_counted, module_of
from piperlang.capture.where import line_of, line_of_function, line_of_operator
from piperlang.diagnostics import PiperError, error


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer. Tied weights are one Weight with several names."""

    name: str
    aliases: tuple[str, ...]
    fake: torch.Tensor
    trained: bool
    buffer: bool


@dataclass(frozen=True)
class Traced:
    """The whole training computation of one batch: weights and batch in, loss out."""

    graph: fx.Graph
    root: fx.GraphModule
    mode: FakeTensorMode
    weights: dict[str, Weight]
    """By the name of the graph's placeholder; tied weights share one Weight."""
    batch: tuple[str, ...]
    """Placeholders of the batch's tensors, in the order of the flattened (input, target)."""
    samples: int
    """The size of the batch it was traced at."""
    random: bool
    """Whether the graph reads `rng`."""
    count: fx.GraphModule | None
    """From the batch to what the sum that the graph gives is to be divided by; None where the loss is a number as it is."""

    def value(self, node: fx.Node) -> Any:
        return node.meta["val"]

    @cached_property
    def learning(self) -> set[fx.Node]:
        """Values that a gradient flows through."""
        return learning(self.graph, self.root, self.mode, {name for name, weight in self.weights.items() if weight.trained})


class _Training(nn.Module):
    """Model and loss as one module, so that one export sees both."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *flat: Any) -> Any:
        inputs, target = pytree.tree_unflatten(list(flat), self.layout)
        args = inputs if isinstance(inputs, tuple | list) else (inputs,)
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*args)
        return self.loss(output, target)

    layout: pytree.TreeSpec


def trace(make_model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], batch: tuple[Any, Any]) -> Traced:
    """Trace model and loss on the shapes of `batch`. No weight is allocated."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat, layout = pytree.tree_flatten(batch)
    device = next((t.device for t in flat if isinstance(t, torch.Tensor)), torch.device("cpu"))
    with mode, device:  # operators choose their kernels by device while they are traced
        model = make_model()
        inputs = tuple(torch.empty_like(t, device=t.device) for t in flat)
    training = _Training(model, loss)
    training.layout = layout
    program = _export(training, inputs)
    samples = next((t.shape[0] for t in flat if isinstance(t, torch.Tensor) and t.dim()), 1)
    return _traced(program, training, mode, samples, device)


def _export(training: _Training, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with traceback.preserve_node_meta():
            return torch.export.export(training, inputs, strict=False)
    except Exception as problem:
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        dependent = "data-dependent" in str(problem) or "GuardOnDataDependent" in type(problem).__name__
        raise error(
            "P0802", "the model cannot be traced", line_of(problem), notes=[f"torch.export: {reason}"],
            help="branch on shapes, not on values: torch.where, torch.cond" if dependent else "make the model pass torch.export.export(model, inputs, strict=False)",
        ) from problem  # fmt: skip


def _traced(program: torch.export.ExportedProgram, training: _Training, mode: FakeTensorMode, samples: int, device: torch.device) -> Traced:
    _refuse_changed_buffers(program)
    _refuse_numbers(program)
    tensors = dict(training.named_parameters(remove_duplicate=False)) | dict(training.named_buffers(remove_duplicate=False))
    shared: dict[int, list[str]] = {}
    for path, tensor in tensors.items():
        shared.setdefault(id(tensor), []).append(path)
    weights: dict[str, Weight] = {}
    made: dict[int, Weight] = {}
    batch: list[str] = []
    for spec in program.graph_signature.input_specs:
        place: str = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            batch.append(place)
            continue
        tensor = tensors[spec.target] if spec.target in tensors else program.constants[str(spec.target)]
        if id(tensor) not in made:
            first, *others = (path.removeprefix("model.") for path in shared.get(id(tensor), [str(spec.target)]))
            buffer = spec.kind != InputKind.PARAMETER
            made[id(tensor)] = Weight(first, tuple(others), tensor, not buffer and tensor.requires_grad, buffer)
        weights[place] = made[id(tensor)]
    with mode:
        rng = torch.empty(2, dtype=torch.int64, device=device)
    inline_regions(program.graph_module)
    try:
        count = take_count(program.graph_module, batch)
    except PiperError as problem:
        raise PiperError(*(replace(d, span=line_of_function(training.loss)) for d in problem.diagnostics)) from None
    graph = program.graph_module.graph
    drop_unread(graph)
    random = make_counted(graph, samples, rng)
    return Traced(graph, program.graph_module, mode, weights, tuple(batch), samples, random, count)


def _refuse_numbers(program: torch.export.ExportedProgram) -> None:
    """A number taken out of a tensor is known only when the model runs."""
    for node in program.graph.nodes:
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise error(
                "P0802", "the model takes a number out of a tensor", line_of_operator(node), "item() here", notes=[module_of(node)],
                help="compute with the tensor itself",
            )  # fmt: skip


def _refuse_changed_buffers(program: torch.export.ExportedProgram) -> None:
    """Running statistics and the like: what changes while it runs would depend on the order of the microbatches."""
    buffers = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.kind == InputKind.BUFFER}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        written = [arg for arg, info in zip(node.args, schema.arguments, strict=False) if info.alias_info is not None and info.alias_info.is_write]
        if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
            written += node.args[3:5]  # its schema does not say that it writes them
        for arg in written:
            if isinstance(arg, fx.Node) and arg.name in buffers:
                name = buffers[arg.name].removeprefix("model.")
                raise error("P0803", "the model changes a buffer while it runs", notes=[f"buffer {name}"], help="use a layer without running statistics, such as LayerNorm or GroupNorm")
