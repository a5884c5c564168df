"""A model and its loss as one aten graph, traced on fake tensors.

Private API, kept in this file: `torch._subclasses.fake_tensor.FakeTensorMode` and its shape environment (tried on torch
2.11 and 2.13). Fake tensors on the device that will run, not meta ones, because
operators such as attention choose their kernel by device while they are traced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import unwrap
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from piperlang.capture.trace.buffers import ancestors, make_functional, new_values
from piperlang.capture.trace.build import Built, Faked, build
from piperlang.capture.trace.causal import use_causal
from piperlang.capture.trace.dims import name_dims
from piperlang.capture.trace.functions import FunctionCall, recorded, refuse_backward_state, restore
from piperlang.capture.trace.hooks import only_forward, refuse_hooks
from piperlang.capture.trace.inline import drop_unread, inline_regions
from piperlang.capture.trace.learning import learning
from piperlang.capture.trace.names import name_modules
from piperlang.capture.trace.observed import Observed, refuse_replaced, refuse_shared_storage
from piperlang.capture.trace.random import make_counted, module_of, number_random
from piperlang.capture.trace.ratios import write_ratios
from piperlang.capture.trace.repeated import Apart, Layers, Repeated, Unlike
from piperlang.capture.trace.untraceable import quiet, refuse_mistraced, untraceable
from piperlang.capture.user.held import add_part, hold
from piperlang.capture.user.operators import functions_of_operators
from piperlang.capture.user.seeding import seeded
from piperlang.capture.user.state import GENERATORS, Frozen, TorchState, refuse_state
from piperlang.capture.user.tensors import named_tensors
from piperlang.capture.user.where import line_of_function, line_of_operator
from piperlang.diagnostics import PiperError, error


@dataclass(frozen=True)
class TracedWeight:
    """A parameter, a buffer or a constant. Tied weights are one TracedWeight with several names."""

    name: str
    aliases: tuple[str, ...]
    fake: torch.Tensor
    requires_grad: bool
    buffer: bool
    constant: bool
    """It belongs to the program, not to the model."""


@dataclass(frozen=True)
class Traced:
    """The training computation of one batch: weights and batch in, loss out."""

    graph: fx.Graph
    root: fx.GraphModule
    mode: FakeTensorMode
    weights: dict[str, TracedWeight]
    """By the name of the graph's placeholder; tied weights share one TracedWeight."""
    given: tuple[str, ...]
    """Placeholders of the batch's tensors, in the order of the flattened (input, target)."""
    samples: int
    """The batch size it was traced with."""
    random: bool
    """Whether the graph reads `rng`."""
    changes: dict[str, fx.Node]
    """Buffers that the model changes, by placeholder, and their new values, which are outputs of the graph after the
    loss."""
    loss: Callable[[Any, Any], Any]
    frozen: Frozen
    """Python state that the program has captured."""
    whole: Mapping[str, fx.Node] = field(default_factory=dict)
    """Values of the whole batch, by placeholder, and the nodes that compute them."""

    @property
    def batch(self) -> tuple[str, ...]:
        """Placeholders of the batch's tensors and of values of the whole batch."""
        return (*self.given, *self.whole)

    def value(self, node: fx.Node) -> Any:
        return node.meta["val"]

    @property
    def elsewhere(self) -> set[fx.Node]:
        """Operators that only values of the whole batch depend on. The program does not run them."""
        behind, found = ancestors(list(self.whole.values())), set[fx.Node]()
        for node in reversed(self.graph.nodes):
            if node in behind and node.op != "placeholder" and found.issuperset(node.users):
                found.add(node)
        return found

    @cached_property
    def learning(self) -> set[fx.Node]:
        """Values that receive a gradient."""
        return learning(
            self.graph, self.root, self.mode, {name for name, weight in self.weights.items() if weight.requires_grad}
        )

    @cached_property
    def trained(self) -> set[str]:
        """Names of weights that receive a gradient: only those are ever updated."""
        return {self.weights[node.name].name for node in self.learning if node.name in self.weights}

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors whose values are known: those that the forward creates from numbers in the code, and those of a model
        that the file keeps."""
        return {weight.name: weight.fake for weight in self.weights.values() if not isinstance(weight.fake, FakeTensor)}

    @property
    def output(self) -> fx.Node:
        output: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return output

    @property
    def result(self) -> fx.Node:
        """The loss."""
        loss: fx.Node = self.output.args[0][0]  # type: ignore[index, assignment]
        return loss


def trace(
    make_model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], batch: tuple[Any, Any], seed: int = 0
) -> Traced:
    """Trace model and loss on the shapes of `batch`. No weight is allocated. `seed`: for random numbers that the
    constructor draws."""
    apart = Apart()
    found, differs = _attempts(make_model, loss, batch, seed, apart)
    if differs and found.constants:  # a constant may hold numbers that the constructor drew
        found, _ = _attempts(make_model, loss, batch, seed, apart, storage=True)
    return found


def _attempts(
    make_model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any],
    batch: tuple[Any, Any],
    seed: int,
    apart: Apart,
    storage: bool = False,
) -> tuple[Traced, bool]:
    """The trace, and whether a real build draws other numbers. Layers that turn out not to be copies of others are
    traced in another attempt, with a new model: the one that was called may have changed."""
    while True:
        built = build(make_model, seed, storage)
        found = _trace(built, loss, batch, seed, apart)
        if found is not None:
            return found, built.differs


def _trace(
    built: Built, loss: Callable[[Any, Any], Any], batch: tuple[Any, Any], seed: int, apart: Apart
) -> Traced | None:
    """None where layers that are no copies were taken for copies. `apart` knows them afterwards."""
    mode = _fake_mode()
    flat, layout = pytree.tree_flatten(batch)
    device = next((t.device for t in flat if isinstance(t, torch.Tensor)), torch.device("cpu"))
    hold(built.model)
    built = built.on(device)
    refuse_hooks(built.model)
    faked = Faked(mode, device)  # operators choose their kernels by device while they are traced
    model = faked.model(built)
    with mode:
        inputs = tuple(torch.empty_like(t, device=t.device) for t in flat)
    if isinstance(loss, nn.Module):
        add_part(loss)
    training = Observed(model, loss)
    training.layout = layout
    samples = next((t.shape[0] for t in flat if isinstance(t, torch.Tensor) and t.dim()), 1)
    repeated = Repeated(training, mode, apart)
    try:
        return _recorded(training, inputs, faked, repeated, samples, seed)
    except Unlike as problem:
        apart.add(problem)
        if left := training.left_behind():
            raise refuse_state(left, training.model) from None
    except PiperError:  # without copies it is told where it happens, or does not happen
        if not repeated.copies or training.left_behind():
            raise
        apart.everything = True
    return None


def _recorded(
    training: Observed, inputs: tuple[Any, ...], faked: Faked, repeated: Repeated, samples: int, seed: int
) -> Traced:
    with seeded(seed), only_forward(), recorded() as calls:
        program, layers = _export(training, inputs, repeated)
        refuse_replaced(training)
        if training.seen.watch.changed:
            try:
                _refuse_state(program, training, inputs, faked.mode, repeated)
            except Unlike:  # in a later call: the programs of two calls are compared without copies
                repeated.apart.everything = True
                raise
    return _traced(program, training, faked, samples, calls, layers)


def _refuse_state(
    program: torch.export.ExportedProgram,
    training: Observed,
    inputs: tuple[Any, ...],
    mode: FakeTensorMode,
    repeated: Repeated,
) -> None:
    """Calls the model again, in the state in which a call left it. State that changes again, or that leads to a
    different program, would be frozen by the trace and is refused.

    These are two calls outside of export, which reverts some, but not all, of the changes of a forward."""
    watches = []
    for _ in range(2):
        with _user_errors(training), mode, _numbers_unknown(mode), torch.enable_grad():
            training(*inputs)
        watches.append(training.seen.watch)
    first, second = watches
    evolving = {name for name in first.changed if first.after.get(name) != second.after.get(name)} | (
        second.changed - first.changed
    )
    evolving |= first.changed.intersection(GENERATORS)  # which every call finds in the same state here
    if evolving or written(program.graph) != written(_export(training, inputs, repeated)[0].graph):
        raise refuse_state(evolving or first.changed, training.model)


def _fake_mode() -> FakeTensorMode:
    """A mode that copies of its fake tensors share. `copy.deepcopy` would copy the mode, too, with all tensors that it
    references, and memory is corrupted when those are freed (torch 2.13)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]
    return mode


@contextmanager
def _numbers_unknown(mode: FakeTensorMode) -> Iterator[None]:
    """`item()` returns a symbol, as it does in export."""
    old, mode.shape_env = mode.shape_env, ShapeEnv()
    try:
        yield
    finally:
        mode.shape_env = old


def written(graph: fx.Graph) -> list[str]:
    """A graph as text, equal for equal programs."""
    return [
        f"{node.op} {node.target if node.op != 'get_attr' else ''} {node.args} {node.kwargs}" for node in graph.nodes
    ]


def _export(
    training: Observed, inputs: tuple[Any, ...], repeated: Repeated
) -> tuple[torch.export.ExportedProgram, Layers]:
    with _user_errors(training), quiet(), traceback.preserve_node_meta(), repeated.traced_once() as layers:
        return torch.export.export(training, inputs, strict=False), layers


@contextmanager
def _user_errors(training: Observed) -> Iterator[None]:
    """An exception while the model is called is a diagnostic."""
    try:
        yield
    except PiperError:
        raise
    except Exception as problem:
        raise untraceable(problem, training.model, training.loss) from problem


def _traced(
    program: torch.export.ExportedProgram,
    training: Observed,
    faked: Faked,
    samples: int,
    calls: Sequence[FunctionCall],
    layers: Layers,
) -> Traced:
    _refuse_numbers(program)
    mode = faked.mode
    weights, batch = _inputs(program, training)
    with mode:
        rng = torch.empty(2, dtype=torch.int64, device=faked.device)
    graph = program.graph_module.graph
    inline_regions(program.graph_module, mode)
    layers.write(graph)
    restore(graph, calls)
    name_dims(graph)
    name_modules(graph, training.model)
    refuse_mistraced(graph)
    refuse_backward_state(graph, mode)
    changes = _changes(program, training, weights)
    try:
        constants = (p for p, w in weights.items() if not isinstance(w.fake, FakeTensor) and not w.requires_grad)
        write_ratios(program.graph_module, training.seen.leaves, {*batch, *constants})
    except PiperError as problem:
        raise PiperError(*(replace(d, span=line_of_function(training.loss)) for d in problem.diagnostics)) from None
    number_random(graph)
    use_causal(graph)
    drop_unread(graph)
    _refuse_strangers(graph, weights, named_tensors(training.model).keys(), faked)
    read = {
        weights[node.name].name: weights[node.name].fake
        for node in graph.nodes
        if node.op == "placeholder" and node.users and node.name in weights
    }
    refuse_shared_storage(training.model, read)
    if not read.keys().isdisjoint(training.seen.reassigned):
        raise refuse_state({f"tensor `{name}`" for name in training.seen.reassigned if name in read}, training.model)
    random = make_counted(graph, samples, rng)
    if random and training.seen.seeds:
        raise error(
            "P0804",
            "the model seeds torch's generator, and draws random numbers",
            line_of_function(type(training.model).forward),
            notes=["the numbers of a step depend on the job's seed, the step and the position in the batch alone"],
            help="remove the seeding; for the same numbers in every step, draw them in the constructor, as a buffer",
        )
    classes = {type(module) for module in training.model.modules()}
    own = named_tensors(training.model).keys()
    held = {id(w.fake): w.fake for place, w in weights.items() if w.name not in own and place not in changes}
    frozen = Frozen(
        "the traced program",
        [unwrap(training.loss), *functions_of_operators(program.graph_module.graph)],
        classes,
        line_of_function(training.loss),
        tensors=list(held.values()),
        environment=sorted(set(training.seen.environment)),
        library=TorchState(training.model),
    )
    return Traced(graph, program.graph_module, mode, weights, batch, samples, random, changes, training.loss, frozen)


def _inputs(
    program: torch.export.ExportedProgram, training: Observed
) -> tuple[dict[str, TracedWeight], tuple[str, ...]]:
    """The weights by placeholder, and the placeholders of the batch."""
    tensors = dict(training.named_parameters(remove_duplicate=False)) | dict(
        training.named_buffers(remove_duplicate=False)
    )
    shared: dict[int, list[str]] = {}
    for path, tensor in tensors.items():
        shared.setdefault(id(tensor), []).append(path)
    weights: dict[str, TracedWeight] = {}
    made: dict[int, TracedWeight] = {}
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
            learns, constant = not buffer and tensor.requires_grad, spec.target not in tensors
            made[id(tensor)] = TracedWeight(first, tuple(others), tensor, learns, buffer, constant)
        weights[place] = made[id(tensor)]
    return weights, tuple(batch)


def _changes(
    program: torch.export.ExportedProgram, training: Observed, weights: dict[str, TracedWeight]
) -> dict[str, fx.Node]:
    """The new values of buffers. Leaves the loss and these as outputs of the graph."""
    graph = program.graph_module.graph
    buffers = {
        place: weight.name
        for place, weight in weights.items()
        if weight.buffer and weight.name in training.seen.buffers
    }
    make_functional(graph, {place: weight.name for place, weight in weights.items()}, buffers)
    (output,) = (node for node in graph.nodes if node.op == "output")
    loss, now = output.args[0][: training.seen.leaves], output.args[0][training.seen.leaves :]
    places = {name: place for place, name in buffers.items()}
    values = {places[name]: node for name, node in zip(training.seen.buffers, now, strict=True) if name in places}
    changes = new_values(values, buffers)
    output.args = ((*loss, *changes.values()),)
    return changes


def _refuse_strangers(graph: fx.Graph, weights: dict[str, TracedWeight], known: Collection[str], faked: Faked) -> None:
    """Refuse a tensor that exists only in this trace, such as the `.data` of a parameter: workers could not create
    it."""
    for node in graph.nodes:
        weight = weights.get(node.name) if node.op == "placeholder" and node.users else None
        if weight is None or weight.name in known:
            continue
        if isinstance(weight.fake, torch.Tensor) and (  # not a generator, which is refused where it is used
            isinstance(weight.fake, FakeTensor) or weight.fake.is_meta or faked.stands_for(weight.fake)
        ):
            raise error(
                "P0802",
                "the model reads a tensor that is neither a parameter nor a buffer",
                line_of_operator(next(iter(node.users))),
                "reads it",
                notes=[module_of(next(iter(node.users)))],
                help=(
                    "use `.detach()` instead of `.data`; register tensors with `register_buffer`, or create them in the"
                    " forward"
                ),
            )


def _refuse_numbers(program: torch.export.ExportedProgram) -> None:
    """Refuse a Python number read from a tensor: it is known only when the model runs."""
    for node in program.graph.nodes:
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise error(
                "P0802",
                "the model reads a Python number from a tensor",
                line_of_operator(node),
                "item() here",
                notes=[module_of(node)],
                help="compute with the tensor itself",
            )
