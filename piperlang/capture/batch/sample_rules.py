"""How operators treat the samples of a batch: one rule per group of operators. A rule returns the state of the result,
or raises."""

from __future__ import annotations

import math

import torch

from piperlang.capture.batch.mixing import Along, Free, Mixed, Mixing, Operand, OperatorCall, Repair, State, growing
from piperlang.capture.batch.tried import objection
from piperlang.capture.trace.keep import is_batch

# ------------------------------------------------------------------------------------------------- elementwise


def pointwise(call: OperatorCall) -> State:
    operands = call.plain()
    if call.changed:
        raise call.sized()
    return call.aligned(operands)


def masked(call: OperatorCall) -> State:
    """A masked value: elements of a combination of samples where the mask does not depend on data, and 0 elsewhere.
    That is linear."""
    mask = call.small.get("condition", call.small.get("mask"))
    mixed = {o.state for o in call.data if isinstance(o.state, Mixed)}
    numbers = [
        call.small[name]
        for name in ("self", "other", "value")
        if name in call.small and not isinstance(call.small[name], Operand)
    ]
    others = [o for o in call.operands if o is not mask and o.state not in mixed]
    if (
        len(mixed) == 1
        and mask is not None
        and isinstance(mask.state, Free)
        and not any(numbers)
        and all(o.state == Free(zero=True) for o in others)
    ):
        return mixed.pop()
    return pointwise(call)


def kept(call: OperatorCall) -> State:
    """Elementwise linear operators with one operand; or operators that only repeat data, which adds to `outer`."""
    operand, *_ = call.operands
    state = operand.state
    if operand.small.is_floating_point() and not call.results[0][0].is_floating_point():  # rounded
        call.plain()
    return call.aligned([operand], state.degree) if isinstance(state, Along) else state


def copied(call: OperatorCall) -> State:
    """The result of a copy; the overwritten values do not matter."""
    state = call.operands[1].state
    return call.aligned(call.operands[1:], state.degree) if isinstance(state, Along) else state


def _summed(call: OperatorCall, operands: list[Operand], constant: bool) -> State:
    """Values that are added or concatenated: all must have the same kind of state and the same degree. A value that
    does not depend on data is like a sum of one such value per sample, if it is proportional to the batch size; and
    like a mean, if it does not depend on the batch size."""
    data = [o.state for o in operands if not isinstance(o.state, Free)]
    free = [o.state for o in operands if isinstance(o.state, Free) and not o.state.zero]
    mixed = [state for state in data if isinstance(state, Mixed)]
    if mixed and len(mixed) < len(data):
        raise Mixing(f"{call.shown} combines a {mixed[0]} over the samples with individual samples", Repair.BALANCE)
    degrees = {state.degree for state in data if isinstance(state, Mixed | Along)}
    degree = min(degrees)
    if len(degrees) > 1 or any(state.degree not in (0, degree + 1 if mixed else 0) for state in free):
        raise Mixing(f"{call.shown} combines values that scale differently with the batch size", Repair.THROUGHOUT)
    if (any(state.degree == 0 for state in free) or constant) and degree != (-1 if mixed else 0):
        raise (
            Mixing(f"{call.shown} adds a constant to a {mixed[0]} over the samples", Repair.MEAN)
            if mixed
            else call.sized()
        )
    return Mixed(degree) if mixed else call.aligned(operands, degree)


def added(call: OperatorCall) -> State:
    numbers = [
        value for name, value in call.small.items() if name in ("self", "other") and isinstance(value, int | float)
    ]
    if call.changed:
        raise call.sized()
    return _summed(call, call.operands, any(numbers))


def scaled(call: OperatorCall) -> State:
    """Products and quotients; degrees add up."""
    divides = call.name == "div"
    if divides and call.small.get("rounding_mode") is not None:
        return pointwise(call)
    data, (first, *second) = call.data, call.operands
    mixed = [operand.state for operand in data if isinstance(operand.state, Mixed)]
    if mixed and len(data) > 1:
        raise Mixing(
            f"{call.shown} {'divides by' if divides else 'multiplies'} a {mixed[0]} over the samples",
            Repair.RATIO if divides else Repair.BALANCE,
        )
    if divides and second and second[0] in data and (mixed or _degree(second[0])):
        raise call.nonlinear(second[0].state)
    own, other = _degree(first), _degree(second[0]) if second else call.degree("other")
    if own is None or other is None:
        raise call.sized()
    degree = own - other if divides else own + other
    return Mixed(degree) if mixed else call.aligned(data, degree)


def _degree(operand: Operand) -> int | None:
    assert not isinstance(operand.state, Mixing)
    return operand.state.degree


# -------------------------------------------------------------------------------------------- along a dimension


def dims_of(call: OperatorCall, rank: int) -> set[int]:
    """The dimensions in an operator's `dim` argument; all of them where it has none."""
    given = next((call.small[name] for name in ("dim", "dims", "dimension") if name in call.small), None)
    dims = [given] if isinstance(given, int) else list(given or range(rank))
    return {dim % rank for dim in dims} if rank else set()


def _less(state: Along, gone: set[int], keep: bool) -> Along:
    return state if keep else Along(state.dim - sum(dim < state.dim for dim in gone), state.inner, state.degree)


def reduced(call: OperatorCall) -> State:
    operand, *_ = call.operands
    state, linear = operand.state, call.name in ("sum", "mean")
    if "other" in call.small:  # max and min of two tensors
        return pointwise(call)
    if not linear:
        call.plain()
    if not isinstance(state, Along):
        return state
    dims = dims_of(call, operand.small.dim())
    if state.dim not in dims:
        return _less(state, dims, bool(call.small.get("keepdim")))
    if not linear:
        raise Mixing(
            f"{call.shown} over the samples is neither a sum nor a mean",
            Repair.NORM if "norm" in call.shown else Repair.PER_SAMPLE,
        )
    return Mixed(state.degree - (call.name == "mean"))


def scanned(call: OperatorCall) -> State:
    """Operators that combine elements along a dimension and keep that dimension (softmax, cumsum, sort)."""
    operand, *_ = call.operands
    if call.name not in ("cumsum", "flip", "roll"):
        call.plain()
    if isinstance(operand.state, Along) and operand.state.dim in dims_of(call, operand.small.dim()):
        raise call.through()
    return operand.state


def matrix(call: OperatorCall) -> State:
    """Operators on matrices in the last two dimensions."""
    operand, *_ = call.plain()
    assert isinstance(operand.state, Along)
    if operand.state.dim >= operand.small.dim() - 2:
        raise call.through()
    return operand.state


def diagonal(call: OperatorCall) -> State:
    operand, *_ = call.operands
    dims = {call.small[name] % operand.small.dim() for name in ("dim1", "dim2")}
    if not isinstance(operand.state, Along):
        return operand.state
    if operand.state.dim in dims:
        raise call.through()
    return _less(operand.state, dims, False)


# ----------------------------------------------------------------------------------------------- where things go


def numbered(call: OperatorCall) -> State:
    """Reshapes. They keep the row-major order of elements, so the distance between two samples stays the same."""
    operand, *_ = call.operands
    state, (small, large) = operand.state, call.results[0]
    if not isinstance(state, Along):
        return state
    step = state.inner * math.prod(operand.small.shape[state.dim + 1 :])
    for dim in growing(small, large):
        tail = math.prod(small.shape[dim + 1 :])
        if step % tail == 0 and small.shape[dim] % (step // tail * call.samples) == 0:
            return Along(dim, step // tail, state.degree)
    raise Mixing(f"{call.shown} splits the batch dimension into several dimensions", Repair.WITHIN)


def permuted(call: OperatorCall) -> State:
    """Permutations of dimensions, determined with a tensor whose sizes are all different."""
    operand, *_ = call.operands
    state = operand.state
    if not isinstance(state, Along):
        return state
    probe = torch.empty([i + 2 for i in range(operand.small.dim())], device="meta")
    moved = call.target(probe, *list(call.small.values())[1:])
    return Along(list(moved.shape).index(state.dim + 2), state.inner, state.degree)


def sliced(call: OperatorCall) -> State:
    """A slice of a dimension. A slice of the batch dimension is allowed only where it consists of whole batches,
    because an outer dimension was merged into it."""
    operand, *_ = call.operands
    state = operand.state
    if not isinstance(state, Along):
        return state
    dim = call.small["dim"] % operand.small.dim()
    if dim != state.dim:
        return _less(state, {dim}, call.name not in ("select", "unbind"))
    batches = []
    for arguments, value, samples in (
        (call.small, operand.small, call.samples),
        (call.large, operand.large, call.samples * call.times),
    ):
        if call.name == "slice":
            start, stop, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(value.shape[dim])
            one = samples * state.inner
            batches.append((start // one, stop // one) if step == 1 and not start % one and not stop % one else None)
    if not batches or batches[0] is None or batches[0] != batches[1]:
        raise Mixing(f"{call.shown} selects some of the samples", Repair.EACH)
    return state


def joined(call: OperatorCall) -> State:
    dim = call.small["dim"] % call.rank
    shift = (
        [Operand(_shifted(o.state, dim), o.small.unsqueeze(dim), o.large.unsqueeze(dim)) for o in call.operands]
        if call.name == "stack"
        else call.operands
    )
    state = _summed(call, shift, False)
    if (
        isinstance(state, Along)
        and state.dim == dim
        and any(o.small.shape[dim] % (call.samples * state.inner) for o in shift)
    ):
        raise Mixing(f"{call.shown} concatenates other data along the batch dimension", Repair.EACH)
    return state


def _shifted(state: State, dim: int) -> State:
    return Along(state.dim + (dim <= state.dim), state.inner, state.degree) if isinstance(state, Along) else state


def picked(call: OperatorCall) -> tuple[State, ...]:
    """Indexing. An index that does not depend on data must select from its own sample, which is tested with numbers; an
    index that depends on data may select anything within the sample."""
    _refuse_frequencies(call)
    source = call.small.get("self", call.small.get("weight"))
    assert isinstance(source, Operand)
    if (
        call.name == "index_put"
        and isinstance(source.state, Mixed)
        and call.data == [source]
        and call.small["values"].state == Free(zero=True)
    ):
        return (source.state,)
    through = [source.state.dim] if isinstance(source.state, Along) else growing(source.small, source.large)
    indices = call.small["indices"] if "indices" in call.small else call.small["index"]
    if isinstance(indices, Operand):
        dims = {call.small.get("dim", 0) % max(source.small.dim(), 1)} if isinstance(indices.state, Along) else set()
    else:
        dims = {i for i, index in enumerate(indices) if isinstance(index, Operand) and isinstance(index.state, Along)}
    if dims & set(through):
        raise Mixing(f"{call.shown} indexes the batch dimension with values that depend on the data", Repair.WITHIN)
    if call.name in ("scatter_add", "index_add") and source.state == Free(zero=True) and not growing(*call.results[0]):
        call.plain()
        return (Mixed(0),)
    return trusted(call) if through else _by_sizes(call)  # rows of a table, indexed by the data of a sample


def _refuse_frequencies(call: OperatorCall) -> None:
    if call.small.get("scale_grad_by_freq"):
        raise Mixing(f"{call.shown} scales gradients by how often an index occurs in the batch", Repair.FREQUENCIES)


def counted(call: OperatorCall) -> State:
    call.plain()
    return Mixed(0)


def trusted(call: OperatorCall) -> tuple[State, ...]:
    """An operator without a rule: the dimension that grows is assumed to be the batch dimension, and a trial on numbers
    has to confirm it."""
    states = _by_sizes(call)
    found = objection(call, states)
    if found is not None:
        raise found
    return states


def _by_sizes(call: OperatorCall) -> tuple[State, ...]:
    operands = call.plain()
    return tuple(_by_size(call, operands, small, large) for small, large in call.results)


def unknown(call: OperatorCall) -> tuple[State, ...]:
    """The same for an operator that may have a `dim` argument: refused where that is the batch dimension."""
    state, value = call.operands[0].state, call.operands[0].small
    named = call.small.keys() & {"dim", "dims", "dimension"}
    if isinstance(state, Along) and named and state.dim in dims_of(call, value.dim()):
        raise call.through()
    return trusted(call)


def _by_size(call: OperatorCall, operands: list[Operand], small: torch.Tensor, large: torch.Tensor) -> State:
    grown = growing(small, large)
    if not grown:
        return Mixing(
            f"{call.shown} reduces all samples to a value that is neither a sum nor a mean", Repair.PER_SAMPLE
        )
    known = (
        o.state.inner
        for o in operands
        if isinstance(o.state, Along) and o.small.shape[o.state.dim] == small.shape[grown[0]]
    )
    return Along(grown[0], next(known, max(1, small.shape[grown[0]] // call.samples)))


def made(call: OperatorCall) -> State:
    """A constant with the shape of another tensor."""
    return Free(call.degree("fill_value") if "fill_value" in call.small else 0, zero="zeros" in call.name)


# ------------------------------------------------------------------------------------------------------ products

LETTERS = {
    "mm": "ik kj ij",
    "bmm": "bik bkj bij",
    "mv": "ik k i",
    "dot": "k k ",
    "addmm": "ik kj ij",
    "baddbmm": "bik bkj bij",
    "addmv": "ik k i",
}


def contracted(call: OperatorCall) -> State:
    """Matrix products. A contraction over the batch dimension, of two values of the same samples, is a sum over the
    samples."""
    *_, a, b = call.operands
    *letters, out = LETTERS[call.name].split(" ")
    product = Operand(_product(call, a, b, letters, out), *call.results[0])
    if len(call.operands) == 2:
        return product.state
    if call.changed:
        raise call.sized()
    return _summed(call, [call.operands[0], product], False) if not isinstance(product.state, Free) else kept(call)


def _product(call: OperatorCall, a: Operand, b: Operand, letters: list[str], out: str) -> State:
    factors = [o.state for o in (a, b) if not isinstance(o.state, Free)]
    mixed = [state for state in factors if isinstance(state, Mixed)]
    if any(isinstance(o.state, Free) and o.state.degree != 0 for o in (a, b)):
        raise call.sized()
    if not factors or (mixed and len(factors) == 1):
        return mixed[0] if mixed else Free()
    if mixed:
        raise Mixing(f"{call.shown} multiplies a {mixed[0]} over the samples", Repair.BALANCE)
    found = {
        (names[o.state.dim], o.state.inner)
        for o, names in zip((a, b), letters, strict=True)
        if isinstance(o.state, Along)
    }
    degree = sum(state.degree for state in factors if isinstance(state, Along))
    if len(found) > 1:
        raise call.against()
    ((letter, inner),) = found
    return Along(out.index(letter), inner, degree) if letter in out else Mixed(degree)


def attended(call: OperatorCall) -> State:
    """Attention: the batch dimension is one of those before the last two, the same one in all operands."""
    state = call.aligned(call.plain())
    if state.dim >= call.rank - 2:
        raise call.through()
    return state


def leading(call: OperatorCall) -> State:
    """Convolutions and pooling: the batch dimension is the first, and the weights do not depend on data."""
    operand, *others = call.plain()
    if operand is not call.operands[0] or others or not isinstance(operand.state, Along) or operand.state.dim != 0:
        raise call.through()
    return operand.state


def recurrent(call: OperatorCall) -> tuple[State, ...]:
    """Recurrent networks: the batch dimension is the second of the states, and of the sequence unless `batch_first` is
    set."""
    operands, first = call.plain(), 0 if call.small.get("batch_first") else 1
    wanted = [(first if operand is call.operands[0] else 1, operand.state) for operand in operands]
    inner = next(state.inner for _, state in wanted if isinstance(state, Along))
    if any(state != Along(dim, inner) for dim, state in wanted):
        raise call.through()
    return Along(first, inner), *(Along(1, inner) for _ in call.results[1:])


# -------------------------------------------------------------------------------------------------------- losses

CLASSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
"""Losses over classes: dimension 1 of the input is the classes, and the target has no such dimension."""
_OTHER_LOSSES = {
    "ctc_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "cosine_embedding_loss",
    "triplet_margin_loss",
    "_ctc_loss",
}


def lost(call: OperatorCall) -> State | tuple[State, ...]:
    """Losses with a reduction argument: 0 is none, 1 mean, 2 sum."""
    operands, reduction = call.plain(), call.small["reduction"]
    if call.name in CLASSES:
        operands = [_without_classes(call, operand) for operand in operands]
    if call.name not in _OTHER_LOSSES:
        state = call.aligned(operands, rank=max(operand.small.dim() for operand in operands))
        if not reduction:
            return state
    return Mixed(-1 if reduction == 1 else 0) if reduction else trusted(call)


def _without_classes(call: OperatorCall, operand: Operand) -> Operand:
    """The input of a loss without its class dimension, so that it has the dimensions of the target."""
    classes = min(1, operand.small.dim() - 1)
    scores, target = call.small["self"], call.small["target"]
    assert isinstance(operand.state, Along)
    if operand is not scores and target.small.dim() < scores.small.dim():
        return operand
    if operand.state.dim == classes:
        raise call.through()
    return Operand(
        _less(operand.state, {classes}, False), operand.small.select(classes, 0), operand.large.select(classes, 0)
    )


def totalled(call: OperatorCall) -> State:
    """Sums over the samples."""
    (operand,) = call.plain()
    assert isinstance(operand.state, Along)
    if operand.state.dim not in call.small["dims"]:
        raise call.through()
    return Mixed(0)


def whole(call: OperatorCall) -> State:
    """A sum over the samples that is added up over all parts of the batch: every part reads the same value."""
    (operand,) = call.operands
    if operand.state != Mixed(0):
        raise call.nonlinear(operand.state)
    return Free()


def chosen(call: OperatorCall) -> State:
    """Routed tokens: each token is processed independently of the others, and the experts' weights do not depend on
    data."""
    operands = call.plain()
    states = {operand.state for operand in operands}
    state, *others = states
    if (
        others
        or not isinstance(state, Along)
        or state.dim != 0
        or any(operand.small.dim() == 3 for operand in operands)
    ):
        raise call.through()
    return state


def bagged(call: OperatorCall) -> tuple[State, ...]:
    """Embedding bags, one per sample. The other results are only for the backward."""
    _refuse_frequencies(call)
    if not any(isinstance(o.state, Free) and o.state.place for o in call.operands):
        raise call.through()
    call.plain()
    return Along(0, 1), *(call.placed() for _ in call.results[1:])


def dropped(call: OperatorCall) -> State:
    """piperlang's dropout: its masks depend on the position in the batch, which must be the first dimension."""
    state, value = call.operands[0].state, call.operands[0].small
    if not isinstance(state, Along) or state.dim != 0 or value.shape[0] != call.samples * state.inner:
        raise Mixing("the masks of dropout would depend on how the batch is divided", Repair.FIRST)
    return state


def drawn(call: OperatorCall) -> State:
    """piperlang's random numbers: a sample has its own where the first dimension is that of the batch; otherwise the
    whole batch has the same."""
    (small, large), *_ = call.results
    batch = is_batch(small.shape, call.samples)
    data = [operand.state for operand in call.data]
    if batch != is_batch(large.shape, call.samples * call.times) or (batch and small.shape[0] == large.shape[0]):
        raise Mixing("random numbers would depend on how the batch is divided", Repair.FIRST)
    inner = small.shape[0] // call.samples if batch else 0
    if any(not isinstance(state, Along) or (state.dim, state.inner) != (0, inner) for state in data):
        raise Mixing("random numbers would depend on how the batch is divided", Repair.FIRST)
    return Along(0, inner) if batch else Free()
