"""Every job proves itself: before the first step the captured program is compared with the plain model, run eagerly.

Two calls of the model, forward and backward, on slices of the first batch: in eager PyTorch on the whole slice, and by
the graphs that the plan's devices run, a microbatch after the other. The loss, every gradient (one that is missing
included) and every buffer must be the same. Two calls, because state that a model keeps from call to call shows only in
the second; and a third with other numbers than those of the first batch (varied.py), which may leave out what later
batches have. What the optimizer does is compared with the same gradients on both sides (guard_optimizer.py), so that an
optimizer cannot make much of a rounding error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.cut import Chunk
from piperlang.capture.differentiate import Piece, value_name
from piperlang.capture.eager import Eager, forward_and_backward
from piperlang.capture.held import hold, restore, saved
from piperlang.capture.program import Captured
from piperlang.capture.random import PLACE, mix
from piperlang.capture.seeding import seeded
from piperlang.capture.tensors import named_tensors
from piperlang.capture.where import line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.plan.instruction import Plan
from piperlang.runtime.guard_optimizer import optimizer_errors
from piperlang.runtime.job import Training
from piperlang.runtime.room import LITTLE, free_bytes, gigabytes, threads_for
from piperlang.runtime.varied import converts_to_indices, varied

CALLS = 2
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest difference that rounding explains, by the coarsest type that the program computes in. Wrong gradients are
wrong by far more."""
FLOOR = 1e-2
"""A gradient that is small beside the model's largest is rounding noise sooner: differences count relative to at least
this part of the largest."""
UPDATE_LIMIT = 1e-2
"""The same of an updated weight, relative to its change: both sides do the same operations on the same numbers."""
SHARE = 0.5
"""Of the free memory, what the comparison may take."""


@dataclass(frozen=True)
class Verified:
    """What came of the comparison."""

    difference: float = 0.0
    seconds: float = 0.0
    """What it took, without graphs that the job differentiates in any case."""
    skipped: str = ""
    """Why there was none."""
    first_batch_only: bool = False
    """The model computes with no other numbers than those of its first batch."""

    def __str__(self) -> str:
        if self.skipped:
            return f"not verified against eager PyTorch: {self.skipped}"
        return (
            "verified against eager PyTorch:"
            f" {self.difference:.0e}{', with the numbers of the first batch only' if self.first_batch_only else ''}"
        )


def verify(captured: Captured, plan: Plan, batch: tuple[Any, Any], training: Training) -> Verified:
    """Raises P0608 where the captured program is not the model."""
    for kind in plan.kinds:  # the job runs these graphs, whoever differentiates them first: no time of the guard's
        captured.pieces(kind["chunk"], kind["samples"], kind["arranged"])
    started = time.perf_counter()
    guard = Guard(captured, plan, batch, training)
    need, free = guard.bytes_needed(), free_bytes(guard.device)
    if need > SHARE * free:
        return Verified(skipped=f"it would take {gigabytes(need)} of memory here, and {gigabytes(free)} are free")
    try:
        with seeded(training.seed), threads_for(captured.model.flops):
            difference = max(guard.compare(call) for call in range(CALLS))
            other = guard.compare_varied()
            difference = max(difference, other or 0.0, guard.compare_optimizer())
    finally:
        guard.close()
    return Verified(difference, time.perf_counter() - started, first_batch_only=other is None)


class Guard:
    """The plain model beside the captured program."""

    def __init__(self, captured: Captured, plan: Plan, batch: tuple[Any, Any], training: Training) -> None:
        self.captured, self.plan, self.batch, self.training, self.seed = captured, plan, batch, training, training.seed
        self.traced = captured.program.sizes.small
        self.before: dict[str, torch.Tensor] | None = None
        self.samples = self._microbatch_size()
        self.microbatches = 2 if 2 * self.samples <= captured.model.samples else 1
        self.device = self.traced.value(self.traced.result).device

    def close(self) -> None:
        """`model()` may give the same object again: leave it as it was."""
        if self.before is not None:
            restore(self.model, self.before)

    def _microbatch_size(self) -> int:
        """As the plan has it, so that its graphs are there already. Where weights are divided, graphs of whole weights
        are there for the whole batch only: that is taken if it is small."""
        model = self.captured.model
        smallest = min((kind["samples"] for kind in self.plan.kinds), default=model.samples)
        there = {kind["chunk"] for kind in self.plan.kinds if kind["samples"] == smallest and not kind["arranged"][0]}
        return smallest if len(there) == len(model.chunks) or model.flops > LITTLE else model.samples

    @property
    def slice(self) -> int:
        return self.samples * self.microbatches

    def bytes_needed(self) -> int:
        """The model, its gradients three times, and the activations of a slice twice."""
        model = self.captured.model
        weights, trained = (
            sum(w.bytes for w in model.weights.values()),
            sum(w.bytes for w in model.weights.values() if w.trained),
        )
        activations = sum(chunk.saved_bytes for chunk in model.chunks) * self.slice // model.samples
        return weights + 3 * trained + 2 * activations

    def compare(self, call: int) -> float:
        """One call of the model both ways; the largest relative difference."""
        self.gradients: Mapping[str, torch.Tensor] = {}  # those of the call before need no memory any more
        if call == 0:
            self.model: nn.Module = self.training.make_model()
            hold(self.model)
            if sys.getrefcount(self.model) > 2:  # somebody besides us has it
                self.before = saved(self.model)
            self.model.to(self.device)
        before = self._buffers()
        batch = self._slice(call)
        versions = self._versions()
        plain = forward_and_backward(self.model, self.traced.loss, batch, self.seed, call, self.slice)
        for name, version in self._versions().items():
            if versions.get(name) != version:
                raise self._refused(f"the forward or the backward changes parameter {name} itself", name, call)
        ours = self._captured(before, pytree.tree_leaves(batch), call, plain)
        self.gradients = plain.gradients
        return self._difference(plain, ours, before, call)

    def compare_varied(self) -> float | None:
        """One more call, with other numbers; None where the model computes with none. Rounding may tip a choice of the
        model's (a rank, a sign), so a difference counts if other numbers show one, too."""
        try:
            return self._compare_other(CALLS)
        except PiperError as first:
            again = self._compare_other(CALLS + 1)
            if again is None:
                raise first
            return again

    def _compare_other(self, call: int) -> float | None:
        cpu = self.device.type == "cpu"  # an index out of range ends a process that uses CUDA
        for batch in varied(
            self._slice(call), self.seed + call, cpu or not converts_to_indices(self.traced.graph), cpu
        ):
            before = self._buffers()
            try:
                plain = forward_and_backward(self.model, self.traced.loss, batch, self.seed, call, self.slice)
            except PiperError:  # these numbers are not for this model
                continue
            if math.isfinite(plain.loss) and all(
                bool(gradient.isfinite().all()) for gradient in plain.gradients.values()
            ):
                return self._difference(
                    plain, self._captured(before, pytree.tree_leaves(batch), call, plain), before, call
                )
        return None

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers(remove_duplicate=False)}

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Changes where a parameter is written to, or gets other memory."""
        return {name: (parameter.data_ptr(), parameter._version) for name, parameter in self.model.named_parameters()}

    def compare_optimizer(self) -> float:
        """Updates of parts of weights beside those of whole ones. Masters are left out: plain training has none."""
        if self.training.masters or not self.gradients:
            return 0.0
        self.traced.frozen.check()
        errors = dict(optimizer_errors(self.model, self.plan, self.training, self.gradients))
        self.traced.frozen.check("when the optimizer or its schedule steps", line_of_function(self.training.optimizer))
        for name, difference in errors.items():
            if not difference <= UPDATE_LIMIT:
                raise error(
                    "P0608",
                    f"the optimizer treats weight {name} otherwise when it has only a part of the weights",
                    line_of_function(self.training.optimizer),
                    notes=[
                        f"after two updates from the same gradients the weight differs by {difference:.0e} of the"
                        " change"
                    ],
                    help=(
                        "an optimizer that declares `elementwise = True` or `per_parameter = True` must keep to it;"
                        " `--no-verify` trains all the same"
                    ),
                )
        return max(errors.values(), default=0.0)

    def _slice(self, call: int) -> tuple[Any, Any]:
        """Other samples in every call, as far as there are any."""
        whole = self.captured.model.samples
        first = (call * self.slice) % max(1, whole - self.slice + 1)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            part = tensor[first : first + self.slice] if tensor.dim() and tensor.shape[0] == whole else tensor
            return part.to(self.device)

        found: tuple[Any, Any] = pytree.tree_map(cut, self.batch)
        return found

    # ------------------------------------------------------------------------------------------------- the captured
    # program

    def _captured(self, buffers: Mapping[str, torch.Tensor], flat: list[torch.Tensor], call: int, plain: Eager) -> _Ran:
        tensors = named_tensors(self.model) | dict(buffers) | self.traced.constants
        weights = {
            place: tensors[weight.name].detach().to(self.device)
            for place, weight in self.traced.weights.items()
            if weight.name in tensors
        }
        combine, count = self.captured.model.combine, 1.0
        if combine == "count":
            counting = self.traced.count
            count = plain.count if plain.count is not None or counting is None else float(counting(*flat))  # type: ignore[assignment]
        share = 1.0 / self.microbatches if combine == "mean" else 1.0 / count
        ran = _Ran(0.0, {}, {})
        with torch.no_grad():
            for number in range(self.microbatches):
                self._microbatch(number, weights, flat, call, share, ran)
        return ran

    def _microbatch(
        self,
        number: int,
        weights: Mapping[str, torch.Tensor],
        flat: list[torch.Tensor],
        call: int,
        share: float,
        ran: _Ran,
    ) -> None:
        first = number * self.samples
        values: dict[str, Any] = dict(weights)
        parts = [
            tensor[first : first + self.samples] if tensor.dim() and tensor.shape[0] == self.slice else tensor
            for tensor in flat
        ]
        values |= dict(zip(self.traced.batch, parts, strict=True))
        values[PLACE] = torch.tensor([mix(self.seed, call), first], device=self.device)
        for chunk in self.captured.chunks:
            _run(chunk, self._pieces(chunk).F, values)
        loss = self.traced.result.name
        ran.loss += float(values[loss]) * share
        values[f"grad:{loss}"] = torch.full_like(values[loss], share)
        for chunk in reversed(self.captured.chunks):
            piece = self._pieces(chunk).B
            if piece is not None:
                _run(chunk, piece, values, zeros=True)
            # added up as they come, so that no more than one microbatch's gradients of a chunk are there besides the
            # sum
            for place in chunk.weights:
                if f"grad:{place}" in values:
                    ran.add(self.traced.weights[place].name, values.pop(f"grad:{place}"))
        if number == 0:
            ran.buffers = {
                self.traced.weights[place].name: values[node.name] for place, node in self.traced.changes.items()
            }

    def _pieces(self, chunk: Chunk) -> Any:
        return self.captured.pieces(chunk.number, self.samples)

    # ------------------------------------------------------------------------------------------------- comparing

    def _difference(self, plain: Eager, ours: _Ran, before: Mapping[str, torch.Tensor], call: int) -> float:
        limit = LIMITS[self._coarsest()]
        loss = (
            abs(ours.loss - plain.loss) / max(abs(plain.loss), 1e-12)
            if ours.loss == ours.loss or plain.loss == plain.loss
            else 0.0
        )
        errors = dict(self._gradient_errors(plain.gradients, ours.gradients))
        worst = [name for name in self._from_the_loss() if not errors.get(name, 0.0) <= limit]
        if worst:
            raise self._differs(worst[0], errors, call)
        if not loss <= limit:
            raise self._refused(f"its loss is {ours.loss:.7g}, and eager PyTorch's is {plain.loss:.7g}", "", call)
        buffers = dict(self._buffer_errors(before, ours.buffers))
        for name, difference in buffers.items():
            if not difference <= limit:
                raise self._refused(f"buffer {name} has another value after the forward", name, call)
        return max([loss, *errors.values(), *buffers.values()])

    def _coarsest(self) -> torch.dtype:
        found = {
            value.dtype
            for node in self.traced.graph.nodes
            for value in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(value, torch.Tensor)
        }
        return max(
            (dtype for dtype in LIMITS if dtype in found), key=lambda dtype: LIMITS[dtype], default=torch.float32
        )

    def _gradient_errors(
        self, plain: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, float]]:
        """Relative to the largest element; a gradient that only one side has is infinitely far off."""
        largest = {name: float(gradient.abs().max()) if gradient.numel() else 0.0 for name, gradient in plain.items()}
        floor = FLOOR * max(largest.values(), default=0.0)
        for name in {*plain, *ours}:
            if name not in plain or name not in ours:
                yield name, float("inf")
            elif plain[name].numel():
                yield name, float((ours[name] - plain[name]).abs().max()) / max(largest[name], floor, 1e-30)

    def _buffer_errors(
        self, before: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, float]]:
        for name, now in self.model.named_buffers(remove_duplicate=False):
            expected, got = now.detach().double(), ours.get(name, before.get(name))
            if got is None or got.shape != now.shape:
                yield name, float("inf")
            elif now.numel():
                yield name, float((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))

    def _from_the_loss(self) -> Iterator[str]:
        """Parameters by their last use, the last first: where gradients begin to differ is where the difference comes
        from."""
        order = {node: i for i, node in enumerate(self.traced.graph.nodes)}
        last: dict[str, int] = {}
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.weights:
                name = self.traced.weights[node.name].name
                last[name] = max(last.get(name, -1), *(order[user] for user in node.users), -1)
        unread = [name for name, _ in self.model.named_parameters() if name not in last]
        return iter([*sorted(last, key=lambda name: -last[name]), *unread])

    def _differs(self, name: str, errors: Mapping[str, float], call: int) -> PiperError:
        module = name.rpartition(".")[0] or "(the model itself)"
        if errors[name] == float("inf"):
            return self._refused(f"parameter {name} has a gradient in only one of the two", name, call)
        return self._refused(
            f"the gradient of {name} differs by {errors[name]:.0e}",
            name,
            call,
            f"module {module} is the first, from the loss on, whose gradient differs",
        )

    def _refused(self, what: str, name: str, call: int, *notes: str) -> PiperError:
        module = self.model.get_submodule(name.rpartition(".")[0]) if name else self.model
        later = {
            1: [
                "the first call of the model was the same, this one is the second: the model keeps state from call to"
                " call"
            ]
        }.get(call, [])
        if call >= CALLS:
            later = [
                "with the numbers of the first batch both are the same, with others of the same shapes they are not: a"
                " later batch would train wrongly"
            ]
        return error(
            "P0608",
            f"the captured program is not the model: {what}",
            line_of_function(type(module).forward),
            notes=[*notes, *later],
            help=(
                "look there for what a trace cannot see: state kept in Python, hooks, code that depends on values;"
                " `--no-verify` trains all the same"
            ),
        )


@dataclass
class _Ran:
    """What the captured program gave."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def add(self, name: str, gradient: torch.Tensor) -> None:
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = gradient


def _run(chunk: Chunk, piece: Piece, values: dict[str, Any], zeros: bool = False) -> None:
    """One pass of a chunk. Gradients of what several chunks read are added up; `zeros` stand for those that nobody
    gave."""
    given = {}
    for slot in piece.takes:
        name = value_name(chunk, slot)
        if zeros and slot[0] == "grad_output" and name not in values:
            values[name] = torch.zeros_like(values[name.removeprefix("grad:")])
        given[slot] = values[name]
    for slot, value in piece.run(given).items():
        name = value_name(chunk, slot)
        values[name] = values[name] + value if name.startswith("grad:") and name in values else value
