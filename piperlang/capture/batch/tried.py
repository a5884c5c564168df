"""Whether an operator processes each sample independently, by trial on numbers: for operators without a rule.

Two batches are concatenated. The result of the operator on both must be its result on the first followed by its result
on the second: then the results of the parts of a batch are the parts of the batch's result.

Private API, kept in this file: the list of operators that torch.library.custom_op made (tried on torch 2.11 and
2.13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from piperlang.capture.batch.mixing import Along, Free, Mixing, Operand, OperatorCall, Placed, Repair, State, growing
from piperlang.capture.user.operators import is_of_user

LARGEST = 5e7
"""An operator with more elements in an operand or a result is not tried, because it might take too long."""
SIZES = (1.0, 100.0)
"""Magnitudes of the numbers. User-defined operators are also tried with large ones, because they may have
thresholds."""
TOLERANCE = 1e-3


def objection(call: OperatorCall, states: Sequence[State]) -> Mixing | None:
    """Why the operator does not process each sample independently. None if it does, or if it cannot be tried; the
    guard's comparison with eager PyTorch before the first step covers that case."""
    own = _is_torchs_own(call)
    if not (own or _is_of_python(call)) or any(len(growing(*result)) > 1 for result in call.results):
        return None
    values = [(o.small, o.large) for o in call.operands] + list(call.results)
    if not all(isinstance(state, Along) for state in states) or any(large.numel() > LARGEST for _, large in values):
        return None
    problems = []
    for size in SIZES[:1] if own else SIZES:
        try:
            parts, together = _results(call, size)
        except Exception as problem:  # user-defined operators may fail on random numbers; torch's own should not
            problems.append(f"{type(problem).__name__}: {problem}".partition("\n")[0])
            continue
        pairs = [
            (state, i)
            for i, state in enumerate(states)
            if isinstance(state, Along) and _divides(parts[0][i], state, call)
        ]
        if not all(_equal([part[i] for part in parts], together[i], state, call) for state, i in pairs):
            kind = Placed if own else Mixing
            return kind(f"{call.shown} mixes samples or depends on their position in the batch", Repair.WITHIN)
    return (
        Mixing(f"{call.shown} has no rule, and trying it on two batches failed: {problems[0]}", Repair.KNOWN)
        if own and problems
        else None
    )


def uniform(call: OperatorCall) -> bool:
    """Whether an operator applied to constants that are the same for all samples returns a value that is the same for
    all samples; False where it cannot be tried."""
    if not _is_torchs_own(call) or any(small.numel() > LARGEST for small, _ in call.results):
        return False
    generator = torch.Generator().manual_seed(0)
    for whole_numbers in (True, False):
        try:
            numbers = {id(operand): _number(operand, call, generator, whole_numbers) for operand in call.operands}
            with torch.no_grad():
                made = _run(call, call.small, numbers)
        except Exception:
            continue
        return all(
            torch.equal(value.narrow(dim, 0, 1).expand_as(value), value)
            for value, result in zip(made, call.results, strict=True)
            for dim in growing(*result)
        )
    return False


def _is_torchs_own(call: OperatorCall) -> bool:
    """Whether the operator is torch's own: user-defined operators may have side effects."""
    schema = getattr(call.target, "_schema", None)
    return schema is not None and schema.name.startswith("aten::")


def _is_of_python(call: OperatorCall) -> bool:
    """Whether the operator was made by torch.library.custom_op. A C++ operator could end the process on an index that
    is out of range."""
    schema = getattr(call.target, "_schema", None)
    return schema is not None and is_of_user(schema.name) and not schema.is_mutable


def _results(call: OperatorCall, size: float) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """The results on every part, and on all parts concatenated. Integer operands are 0 and 1, or only 0 where 1 is not
    a valid index."""
    try:
        return _computed(call, True, size)
    except Exception:
        return _computed(call, False, size)


def _computed(
    call: OperatorCall, whole_numbers: bool, size: float
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[int, torch.Tensor]] = [{} for _ in range(call.times)]
    together: dict[int, torch.Tensor] = {}
    for operand in call.operands:
        made = [
            _number(operand, call, generator, whole_numbers, size)
            for _ in range(call.times if isinstance(operand.state, Along) else 1)
        ]
        for i, part in enumerate(parts):
            part[id(operand)] = made[i % len(made)]
        together[id(operand)] = _joined(made, operand, call)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return [_run(call, call.small, part) for part in parts], _run(call, call.large, together)


def _run(call: OperatorCall, arguments: dict[str, Any], numbers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    def filled(value: Any, small: Any) -> Any:
        if isinstance(small, Operand):
            return numbers[id(small)].clone()
        return [filled(v, s) for v, s in zip(value, small, strict=True)] if isinstance(small, list) else value

    found = call.target(**{name: filled(value, call.small[name]) for name, value in arguments.items()})
    found = list(found) if isinstance(found, tuple | list) else [found]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _number(
    operand: Operand, call: OperatorCall, generator: torch.Generator, whole_numbers: bool, size: float = 1.0
) -> torch.Tensor:
    """Random numbers in the shape of an operand of the small batch. A value that is the same for all samples gets one
    number for all of them."""
    value, grown = operand.small, growing(operand.small, operand.large)
    if isinstance(operand.state, Free) and operand.state.place:
        return (
            _numbered(operand.state, call.samples, value.dtype)
            .view([call.samples if i in grown else 1 for i in range(value.dim())])
            .expand(value.shape)
        )
    constant = isinstance(operand.state, Free)
    shape = [1 if constant and i in grown else size for i, size in enumerate(value.shape)]
    if value.dtype is torch.bool:
        numbers = torch.rand(shape, generator=generator) < 0.5
    elif value.is_floating_point() or value.is_complex():
        numbers = (
            torch.randn(shape, generator=generator, dtype=torch.promote_types(value.dtype, torch.float32))
            .mul(size)
            .to(value.dtype)
        )
    else:
        numbers = torch.randint(2 if whole_numbers else 1, shape, generator=generator).to(value.dtype)
    return numbers.expand(value.shape)


def _numbered(state: Free, samples: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(samples, dtype=dtype) * state.place


def _joined(made: list[torch.Tensor], operand: Operand, call: OperatorCall) -> torch.Tensor:
    state = operand.state
    if isinstance(state, Along):
        return _behind(made, state, call)
    if isinstance(state, Free) and state.place:
        return (
            _numbered(state, call.samples * call.times, made[0].dtype)
            .view([-1 if i in growing(operand.small, operand.large) else 1 for i in range(operand.small.dim())])
            .expand(operand.large.shape)
        )
    grown = growing(operand.small, operand.large)
    return made[0][tuple(slice(0, 1) if i in grown else slice(None) for i in range(made[0].dim()))].expand(
        operand.large.shape
    )


def _behind(parts: list[torch.Tensor], state: Along, call: OperatorCall) -> torch.Tensor:
    """The parts concatenated along the batch dimension."""
    shape = parts[0].shape
    outer = shape[state.dim] // (call.samples * state.inner)
    split = [
        part.reshape(*shape[: state.dim], outer, call.samples, state.inner, *shape[state.dim + 1 :]) for part in parts
    ]
    whole = torch.cat(split, state.dim + 1)
    return whole.reshape(*shape[: state.dim], shape[state.dim] * len(parts), *shape[state.dim + 1 :])


def _divides(part: torch.Tensor, state: Along, call: OperatorCall) -> bool:
    return part.shape[state.dim] % (call.samples * state.inner) == 0


def _equal(parts: list[torch.Tensor], together: torch.Tensor, state: Along, call: OperatorCall) -> bool:
    expected = _behind(parts, state, call)
    if expected.shape != together.shape:
        return False
    if not together.is_floating_point() and not together.is_complex():
        return torch.equal(expected, together)
    size = float(torch.nan_to_num(together.abs().float()).max()) if together.numel() else 0.0
    coarse = TOLERANCE if together.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128) else 0.05
    return torch.allclose(expected, together, rtol=coarse, atol=coarse * max(size, math.ulp(0.0)), equal_nan=True)
