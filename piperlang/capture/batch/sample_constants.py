"""Constants with a dimension of the batch size: whether they are the same for every sample, number the samples, or
depend on the batch size."""

from __future__ import annotations

from piperlang.capture.batch.mixing import Along, Free, Operand, OperatorCall, growing
from piperlang.capture.batch.sample_rules import (
    added,
    attended,
    contracted,
    dims_of,
    joined,
    kept,
    matrix,
    numbered,
    permuted,
    pointwise,
    reduced,
    scaled,
    scanned,
    sliced,
)
from piperlang.capture.batch.sample_table import FILLED, PICKED, rule_of
from piperlang.capture.batch.tried import uniform as uniform_by_numbers

CONSTANT = ("zeros", "ones", "full", "empty", "scalar_tensor", *FILLED)


def loses_samples(call: OperatorCall) -> bool:
    """Whether an operator on constants with a dimension of the batch size may operate along that dimension, so that its
    result depends on the batch size."""
    made = max((len(growing(*result)) for result in call.results), default=0)
    given = [len(growing(operand.small, operand.large)) for operand in call.operands]
    rule = rule_of(call.target)
    if rule in (pointwise, added, scaled, kept, numbered, permuted, sliced, joined) or call.name in CONSTANT:
        return False
    return sum(given) - made >= 2 if rule is contracted else any(count > made for count in given)


def place_of(call: OperatorCall) -> int:
    """1 for `arange(len(batch))`, the position of each sample; 5 for `arange(0, 5 * len(batch), 5)`; 0 for everything
    else."""
    start, step = call.small.get("start", 0), call.small.get("step", 1)
    found = (
        call.name == "arange"
        and start == 0
        and call.small.get("end") == call.samples * step
        and not call.results[0][0].is_floating_point()
    )
    return int(step) if found else 0


def finds_its_sample(call: OperatorCall, place: int) -> bool:
    if call.name != "embedding_bag":
        return place == 1 and call.name in PICKED
    indices = call.small["indices"]
    return isinstance(indices.state, Along) and indices.state.inner == place and indices.small.dim() == 1


def _is_uniform(operand: Operand) -> bool:
    return isinstance(operand.state, Free) and operand.state.uniform


def stays_uniform(call: OperatorCall) -> bool:
    """Whether the result of an operator on constants that are the same for all samples is the same for all samples,
    too. `call` has no operands that depend on data, and a result that grows with the batch size."""
    if call.name in CONSTANT:
        return True
    operands = call.operands
    wide = [operand for operand in operands if growing(operand.small, operand.large)]
    uniform = all(map(_is_uniform, operands))
    if call.name in PICKED and "self" in call.small and isinstance(call.small["self"], Operand):
        source, indices = call.small["self"], call.small.get("indices", call.small.get("index"))
        places = [index for index in indices if isinstance(index, Operand)] if isinstance(indices, list) else [indices]
        reads = call.name in ("index", "_unsafe_index", "gather", "index_select", "embedding")
        # If all samples are the same, any of them may be selected in any order.
        found = uniform or (
            source in wide
            and all(
                isinstance(index, Operand) and (_is_uniform(index) or index.state == Free(uniform=False, place=1))
                for index in places
            )
        )
        return reads and _is_uniform(source) and found
    if not uniform or (call.changed and not wide):
        return False
    rule = rule_of(call.target)
    if rule in (pointwise, added, scaled, kept, numbered, permuted):
        return not call.changed or rule in (kept, numbered, permuted)
    if rule in (reduced, scanned, sliced) and len(operands) == 1:
        (operand,) = operands
        named = dims_of(call, operand.small.dim()) if rule is not sliced else {call.small["dim"] % operand.small.dim()}
        return not named & set(growing(operand.small, operand.large))
    if rule in (matrix, contracted, attended):
        return all(dim < operand.small.dim() - 2 for operand in wide for dim in growing(operand.small, operand.large))
    if rule is joined:
        dim = call.small["dim"] % call.rank
        return call.name == "stack" or not any(dim in growing(operand.small, operand.large) for operand in wide)
    return uniform_by_numbers(call)
