"""The guard: before the first step, the captured program is compared with the plain model, run eagerly.

The model is called twice, forward and backward, on slices of the first batch: in eager PyTorch on the whole slice, and
with the graphs that the plan's devices run, one microbatch after the other. The loss, every gradient (including missing
ones) and every buffer must be equal. Two calls, because state that a model keeps between calls shows only in the
second. A third call uses different numbers than the first batch (varied.py), which may not trigger everything that
later batches do. Sharded chunks are compared with whole ones (sharded.py). The optimizer is compared with the same
gradients on both sides (optimizer.py), so that it cannot amplify rounding errors."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.autodiff.cut import Subgraph
from piperlang.capture.autodiff.differentiate import value_name
from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.capture.program import CutProgram
from piperlang.capture.trace.eager import Eager, forward_and_backward
from piperlang.capture.trace.random import PLACE, mix
from piperlang.capture.user.held import hold, restore, saved
from piperlang.capture.user.seeding import seeded
from piperlang.capture.user.tensors import named_tensors
from piperlang.capture.user.where import line_of_function, line_of_operator
from piperlang.diagnostics import PiperError, error, listed
from piperlang.plan.plan import Plan
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard.optimizer import optimizer_errors
from piperlang.runtime.guard.rounding import FACTOR, Rounding, rounding_of
from piperlang.runtime.guard.sharded import ShardedDifference, differences
from piperlang.runtime.guard.varied import converts_to_indices, varied
from piperlang.runtime.hardware.room import LITTLE, free_bytes, gigabytes, threads_for

CALLS = 2
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest difference that rounding explains, by the least precise dtype that the program computes in. Wrong
gradients differ by far more."""
FLOOR = 1e-2
"""A gradient that is small relative to the model's largest gradient may be rounding noise: differences are relative to
at least this fraction of the largest."""
UPDATE_LIMIT = 1e-2
"""The same for an updated weight, relative to its change: both sides run the same operations on the same numbers."""
SHARE = 0.5
"""The fraction of the free memory that the comparison may use."""


@dataclass(frozen=True)
class Verified:
    """The result of the comparison."""

    difference: float = 0.0
    seconds: float = 0.0
    """Seconds it took, without differentiating graphs that the job needs anyway."""
    skipped: str = ""
    """Why the comparison was skipped."""
    first_batch_only: bool = False
    """The model does not accept other numbers than those of its first batch, so only those were compared."""

    def __str__(self) -> str:
        if self.skipped:
            return f"not verified against eager PyTorch: {self.skipped}"
        return (
            "verified against eager PyTorch:"
            f" {self.difference:.0e}{', with the numbers of the first batch only' if self.first_batch_only else ''}"
        )


def verify(
    captured: CutProgram, plan: Plan, batch: tuple[Any, Any], training: Training, whole: bool = False
) -> Verified:
    """Raises P0608 if the captured program differs from the model. `whole`: compares on the whole batch."""
    captured.check_state()
    for program in plan.programs:  # the job needs these graphs anyway, so their time is not the guard's
        captured.pass_graphs(program.chunk, program.samples, program.sharding)
    started = time.perf_counter()
    guard = Guard(captured, plan, batch, training, whole)
    need, free = guard.bytes_needed(), free_bytes(guard.device)
    if need > SHARE * free:
        usable = f"{gigabytes(SHARE * free)}, {SHARE:.0%} of what is free"
        return Verified(skipped=f"it would need {gigabytes(need)} of memory, and may use {usable}")
    try:
        with seeded(training.seed), threads_for(captured.model.flops):
            difference = max(guard.compare(call) for call in range(CALLS))
            other = guard.compare_varied()
            difference = max(difference, other or 0.0, guard.compare_shards(), guard.compare_optimizer())
    except NotFinite as problem:
        if guard.slice < captured.given:  # a slice may have no target that counts
            return verify(captured, plan, batch, training, whole=True)
        raise problem.error from None
    finally:
        guard.close()
    return Verified(difference, time.perf_counter() - started, first_batch_only=other is None)


class NotFinite(Exception):
    """Plain PyTorch has no numbers to compare with."""

    def __init__(self, error: PiperError) -> None:
        super().__init__()
        self.error = error


class Guard:
    """Compares the plain model with the captured program."""

    def __init__(
        self, captured: CutProgram, plan: Plan, batch: tuple[Any, Any], training: Training, whole: bool
    ) -> None:
        self.captured, self.plan, self.batch, self.training, self.seed = captured, plan, batch, training, training.seed
        self.traced = captured.program.sizes.small
        self.before: dict[str, torch.Tensor] | None = None
        self.samples = captured.given if whole else self._microbatch_size()
        self.microbatches = 2 if 2 * self.samples <= captured.given else 1
        self.device = self.traced.value(self.traced.result).device
        self.whole = captured.program.sizes.whole(self.slice)

    def close(self) -> None:
        """`model()` may return the same object again, so it is restored."""
        if self.before is not None:
            restore(self.model, self.before)

    def _microbatch_size(self) -> int:
        """The plan's microbatch size, so that its graphs exist already. Where weights are sharded, unsharded graphs
        exist only for the whole batch: its size is used if it is small. A model that mixes samples needs the whole
        batch. A batch that is padded is compared as it is: code may depend on its size."""
        model = self.captured.model
        if self.captured.program.rows or model.combines_samples:
            return self.captured.given
        smallest = min((program.samples for program in self.plan.programs), default=model.samples)
        there = {
            program.chunk for program in self.plan.programs if program.samples == smallest and not program.sharding[0]
        }
        return smallest if len(there) == len(model.chunks) or model.flops > LITTLE else model.samples

    @property
    def slice(self) -> int:
        return self.samples * self.microbatches

    def bytes_needed(self) -> int:
        """Bytes for the model, three sets of gradients, and two sets of activations of a slice."""
        model = self.captured.model
        weights, trained = (
            sum(w.bytes for w in model.weights.values()),
            sum(w.bytes for w in model.weights.values() if w.trained),
        )
        activations = sum(chunk.saved_bytes for chunk in model.chunks) * self.slice // model.samples
        return weights + 3 * trained + 2 * activations

    def compare(self, call: int) -> float:
        """One call of the model both ways. Returns the largest relative difference."""
        self.gradients: Mapping[str, torch.Tensor] = {}  # free those of the previous call
        if call == 0:
            self.model: nn.Module = self.training.make_model()
            hold(self.model)
            if sys.getrefcount(self.model) > 2:  # other code has a reference to it
                self.before = saved(self.model)
            self.model.to(self.device)
        before = self._buffers()
        batch = self._slice(call)
        versions = self._versions()
        plain = self._eager(batch, call)
        for name, version in self._versions().items():
            if versions.get(name) != version:
                raise self._refused(f"the forward or the backward changes parameter {name} in place", name, call)
        self._check_finite(plain)
        ours = self._captured(before, pytree.tree_leaves(batch), call)
        self.gradients = plain.gradients
        return self._difference(plain, ours, before, batch, call)

    def _eager(self, batch: tuple[Any, Any], call: int) -> Eager:
        return forward_and_backward(self.model, self.traced.loss, batch, self.seed, call, self.slice)

    def _check_finite(self, plain: Eager) -> None:
        """Where plain PyTorch has no numbers, there is nothing to compare."""
        infinite = [name for name, gradient in plain.gradients.items() if not gradient.isfinite().all()]
        if math.isfinite(plain.loss) and not infinite:
            return
        what = f"the gradient of {infinite[0]} is" if math.isfinite(plain.loss) else "the loss is"
        raise NotFinite(
            error(
                "P0608",
                f"on the first batch {what} not finite, so the captured program cannot be compared with the model",
                line_of_function(self.traced.loss),
                help="begin with a batch and weights that give finite numbers; `--no-verify` skips this check",
            )
        )

    def compare_varied(self) -> float | None:
        """One more call, with different numbers; None if the model accepts no others. Rounding may flip a decision of
        the model (a rank, a sign), so a difference counts only if a second set of numbers shows one, too."""
        try:
            return self._compare_other(CALLS)
        except PiperError as first:
            again = self._compare_other(CALLS + 1)
            if again is None:
                raise first
            return again

    def _compare_other(self, call: int) -> float | None:
        cpu = self.device.type == "cpu"  # on CUDA, an index out of range ends the process
        for batch in varied(
            self._slice(call), self.seed + call, cpu or not converts_to_indices(self.traced.graph), cpu
        ):
            before = self._buffers()
            try:
                plain = self._eager(batch, call)
            except PiperError:  # the model does not accept these numbers
                continue
            if math.isfinite(plain.loss) and all(
                bool(gradient.isfinite().all()) for gradient in plain.gradients.values()
            ):
                ours = self._captured(before, pytree.tree_leaves(batch), call)
                return self._difference(plain, ours, before, batch, call)
        return None

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers(remove_duplicate=False)}

    def _versions(self) -> dict[str, tuple[int, int]]:
        """A version that changes when a parameter is written to or gets other memory."""
        return {name: (parameter.data_ptr(), parameter._version) for name, parameter in self.model.named_parameters()}

    def compare_shards(self) -> float:
        """Compares what the devices of sharded chunks compute, put together, with what the whole chunks do."""
        coarsest, errors = self._coarsest(), [0.0]
        limit, epsilon = LIMITS[coarsest], torch.finfo(coarsest).eps / 2
        for found in differences(self.captured, self.plan, self._weights(self._buffers()), limit, epsilon):
            if not found.error <= limit:
                raise self._shards_differ(found)
            errors.append(found.error)
        return max(errors)

    def _shards_differ(self, found: ShardedDifference) -> PiperError:
        (kind, i), chunk = found.slot, self.captured.chunks[found.program.chunk]
        name = value_name(chunk, (kind.removeprefix("grad_"), i))
        name = self.traced.weights[name].name if kind == "grad_weight" else name
        styles = listed((f"style={divide.style}" for divide in found.program.sharding[0]), "and")
        tags = ", ".join(f"{tag}={value}" for tag, value in sorted(chunk.tags)) or "untagged"
        return error(
            "P0608",
            f"chunk {tags} does not compute the same when it is sharded with {styles}",
            line_of_operator(chunk.nodes[0]),
            notes=[f"{'the gradient of ' if kind != 'output' else ''}{name} differs by {found.error:.0e}"],
            help="shard this chunk with another style or not at all, and report its operators: torch's rule for how one"
            " of them is sharded is wrong; `--no-verify` skips this check",
        )

    def compare_optimizer(self) -> float:
        """Compares updates of sharded weights with updates of whole weights. Master weights are not used: plain
        training has none."""
        if self.training.masters or not self.gradients:
            return 0.0
        self.traced.frozen.check()
        errors = dict(optimizer_errors(self.model, self.plan, self.training, self.gradients))
        self.traced.frozen.check("when the optimizer or its schedule steps", line_of_function(self.training.optimizer))
        for name, difference in errors.items():
            if not difference <= UPDATE_LIMIT:
                raise error(
                    "P0608",
                    f"the optimizer updates weight {name} differently on the devices than in plain training",
                    line_of_function(self.training.optimizer),
                    notes=[
                        f"after two updates with the same gradients, the weight differs by {difference:.0e} of its"
                        " change"
                    ],
                    help=(
                        "if the optimizer declares `elementwise = True` or `per_parameter = True`, make sure that it"
                        " complies; `step` and the learning rate schedule must give the same numbers in every copy of"
                        " the optimizer: no random numbers, and options changed in one of them only;"
                        " `--no-verify` skips this check"
                    ),
                )
        return max(errors.values(), default=0.0)

    def _slice(self, call: int) -> tuple[Any, Any]:
        """The samples of a call: different ones in every call, if the batch has enough."""
        whole = self.captured.model.samples
        first = (call * self.slice) % max(1, whole - self.slice + 1)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            part = tensor[first : first + self.slice] if tensor.dim() and tensor.shape[0] == whole else tensor
            return part.to(self.device)

        found: tuple[Any, Any] = pytree.tree_map(cut, self.batch)
        return found

    # ----------------------------------------------------------------------------------------- the captured program

    def _captured(self, buffers: Mapping[str, torch.Tensor], flat: list[torch.Tensor], call: int) -> _Ran:
        weights = self._weights(buffers)
        flat = flat if self.whole is None else flat + self.whole.of(flat)
        share = 1.0 / self.microbatches if self.captured.model.combine == "mean" else 1.0
        ran = _Ran(0.0, {}, {})
        with torch.no_grad():
            for number in range(self.microbatches):
                self._microbatch(number, weights, flat, call, share, ran)
        return ran

    def _weights(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By place."""
        tensors = named_tensors(self.model) | dict(buffers) | self.traced.constants
        return {
            place: tensors[weight.name].detach().to(self.device)
            for place, weight in self.traced.weights.items()
            if weight.name in tensors
        }

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
            tensor[first : first + self.samples] if self.captured.model.tensors[name].batch is not None else tensor
            for name, tensor in zip(self.traced.batch, flat, strict=True)
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
            # accumulated immediately, so that memory holds at most one microbatch's gradients of a chunk besides the
            # sum
            for place in chunk.weights:
                if f"grad:{place}" in values:
                    ran.add(self.traced.weights[place].name, values.pop(f"grad:{place}"))
        if number == 0:
            ran.buffers = {
                self.traced.weights[place].name: values[node.name] for place, node in self.traced.changes.items()
            }

    def _pieces(self, chunk: Subgraph) -> Any:
        return self.captured.pass_graphs(chunk.number, self.samples)

    # ------------------------------------------------------------------------------------------------- comparing

    def _difference(
        self, plain: Eager, ours: _Ran, before: Mapping[str, torch.Tensor], batch: tuple[Any, Any], call: int
    ) -> float:
        coarsest = self._coarsest()
        limit = LIMITS[coarsest]
        loss = (
            abs(ours.loss - plain.loss) / max(abs(plain.loss), 1e-12)
            if ours.loss == ours.loss or plain.loss == plain.loss
            else 0.0
        )
        errors = dict(self._gradient_errors(plain.gradients, ours.gradients))
        worst = [name for name in self._from_the_loss() if not errors.get(name, 0.0) <= limit]
        rounding = None
        if worst or not loss <= limit:
            epsilon = torch.finfo(coarsest).eps / 2
            rounding = rounding_of(self.model, partial(self._eager, batch, call), plain, before, epsilon)
        if rounding is not None:
            worst = [name for name in worst if not self._is_rounding(name, plain, ours, rounding)]
            loss = 0.0 if abs(ours.loss - plain.loss) <= FACTOR * rounding.loss else loss
        if worst:
            raise self._differs(worst[0], errors, call)
        if not loss <= limit:
            raise self._refused(
                f"its loss is {ours.loss:.7g}, but the loss of eager PyTorch is {plain.loss:.7g}", "", call
            )
        buffers = dict(self._buffer_errors(before, ours.buffers))
        for name, difference in buffers.items():
            if not difference <= limit:
                raise self._refused(f"buffer {name} has a different value after the forward", name, call)
        return max([loss, *(error for error in errors.values() if error <= limit), *buffers.values()])

    def _is_rounding(self, name: str, plain: Eager, ours: _Ran, rounding: Rounding) -> bool:
        if name not in rounding.gradients or name not in ours.gradients:
            return False
        difference = float((ours.gradients[name] - plain.gradients[name]).abs().max())
        return difference <= FACTOR * rounding.gradients[name]

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
        """Errors relative to the largest element. A gradient that only one side has is infinitely far off."""
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
        """Parameters ordered by their last use, the latest first: the first gradient that differs is where the
        difference originates."""
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
            return self._refused(f"parameter {name} has a gradient in only one of them", name, call)
        return self._refused(
            f"the gradient of {name} differs by {errors[name]:.0e}",
            name,
            call,
            f"going backward from the loss, module {module} is the first whose gradient differs",
        )

    def _refused(self, what: str, name: str, call: int, *notes: str) -> PiperError:
        module = self.model.get_submodule(name.rpartition(".")[0]) if name else self.model
        later = {
            1: ["the first call of the model agreed, the second does not: the model keeps state between calls"]
        }.get(call, [])
        if call >= CALLS:
            later = [
                "both agree on the first batch, but not on other numbers of the same shapes: a later batch would be"
                " trained incorrectly"
            ]
        return error(
            "P0608",
            f"the captured program differs from the model: {what}",
            line_of_function(type(module).forward) or line_of_function(type(self.model).forward),
            notes=[*notes, *later],
            help=(
                "look there for code that a trace cannot record: Python state, hooks, code that depends on values;"
                " `--no-verify` skips this check"
            ),
        )


@dataclass
class _Ran:
    """The results of the captured program."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def add(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient


def _run(chunk: Subgraph, piece: PassGraph, values: dict[str, Any], zeros: bool = False) -> None:
    """Runs one graph of a chunk. Gradients of values that several chunks read are summed; `zeros` replace gradients
    that no chunk computed."""
    given = {}
    for slot in piece.inputs:
        name = value_name(chunk, slot)
        if zeros and slot[0] == "grad_output" and name not in values:
            values[name] = torch.zeros_like(values[name.removeprefix("grad:")])
        given[slot] = values[name]
    for slot, value in piece.run(given).items():
        name = value_name(chunk, slot)
        values[name] = values[name] + value if name.startswith("grad:") and name in values else value
