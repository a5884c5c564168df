"""Plans for batches of another shape than the first, and for evaluation: of the same script, on the weights that
another plan trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from piperlang.capture.batch.layout import shapes_of, size_of
from piperlang.capture.program import CutProgram
from piperlang.capture.trace.functions import Applied
from piperlang.capture.user.held import usable
from piperlang.capture.user.operators import is_of_user
from piperlang.capture.user.seeding import restored
from piperlang.capture.user.user_code import Guarded
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import PiperError, error
from piperlang.ir.graph import Graph
from piperlang.ir.model import Model
from piperlang.pipeline import planned
from piperlang.plan.instructions import Update
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.plan.rewrite.forward import forward
from piperlang.plan.rewrite.pad import Padding, padded
from piperlang.plan.rewrite.pad import padding as padding_of
from piperlang.plan.verify import check
from piperlang.progress import Notice, emit
from piperlang.runtime.driver.shapes import Mode
from piperlang.runtime.driver.training import Training
from piperlang.runtime.guard.program import Verified, verify


@dataclass(frozen=True)
class InEvaluationMode:
    """Creates a model in evaluation mode: without dropout, and with everything else the model does differently then."""

    make: Callable[[], Any]

    @property
    def __wrapped__(self) -> Callable[[], Any]:
        """For inspect: the line is that of the function itself."""
        return self.make

    def __call__(self) -> Any:
        with Guarded(self.make, "model").guarded():
            return self.make().eval()


@dataclass(frozen=True)
class PlanForShape:
    """Traces the model again with a batch of another shape, applies the script and plans it."""

    applied: Callable[[Mode, tuple[Any, Any], tuple[int, ...]], tuple[Graph, CutProgram]]
    """Traces the model with a batch, and applies the script for these samples of it, or for all."""
    trained: Plan
    """The plan for the first batch."""
    captured: CutProgram
    """Its stage programs."""
    training: Training
    max_norm: float | None
    skips: bool
    verifies: bool

    def __call__(self, mode: Mode, batch: tuple[Any, Any]) -> tuple[Plan, CutProgram]:
        first = self.captured.layout
        if first.fits(batch):
            return self._planned(mode, batch)
        emit(Notice(f"a batch of another shape: {shapes_of(batch)}"))
        try:
            with usable(), restored():
                return self._planned(mode, batch)
        except PiperError as problem:
            notes = [f"for a batch of shape {shapes_of(batch)}; the first one has shape {first.written_shapes}"]
            why = self._unpadded(mode, self.captured.model) or (
                "the model draws random numbers" if self.captured.program.random else ""
            )
            if why and any(one.code == "P0412" for one in problem.diagnostics):
                notes.append(f"it is not padded with copies of its samples: {why}")
            raise PiperError(*(replace(one, notes=(*one.notes, *notes)) for one in problem.diagnostics)) from problem

    def _planned(self, mode: Mode, batch: tuple[Any, Any]) -> tuple[Plan, CutProgram]:
        evaluates = mode == "evaluate"
        padding = None
        if evaluates or not self._unpadded(mode, self.captured.model):
            padding = self._padding(size_of(pytree.tree_leaves(batch)))
        graph, captured = self.applied(mode, batch, padding.rows if padding is not None else ())
        if padding is not None and self._unpadded(mode, captured.model):  # a model may differ in evaluation
            padding = None
            graph, captured = self.applied(mode, batch, ())
        plan = (
            evaluation_plan(graph, self.trained, captured) if evaluates else planned(graph, self.max_norm, self.skips)
        )
        if padding is not None:
            plan = padded(plan, padding.weights)
            check(plan, forward=evaluates)
        training = self.training
        if evaluates:
            training = replace(training, make_model=InEvaluationMode(training.make_model))
        else:
            _check_same_weights(plan, self.trained)
        found = verify(captured, plan, batch, training) if self.verifies else Verified(skipped="--no-verify")
        if not evaluates or found.skipped:
            emit(Notice(str(found), warning=bool(found.skipped and self.verifies)))
        return plan, captured

    def _padding(self, samples: int) -> Padding | None:
        return padding_of(self.trained, samples, repeats=not self.captured.program.random)

    def _unpadded(self, mode: Mode, model: Model) -> str:
        """Why batches are not padded: something would see that samples are repeated."""
        if model.combines_samples:
            return "the model mixes samples"
        if any(not change.free for chunk in model.chunks for change in chunk.changes):
            return "buffers of the model depend on the samples"
        if mode == "train" and any(map(_differentiates_itself, self.captured.program.sizes.small.graph.nodes)):
            return "the model has a backward of its own, whose gradient may not be in proportion to the loss"
        return ""


def _differentiates_itself(node: fx.Node) -> bool:
    """Whether the user wrote the backward of an operator: an autograd Function, or an operator of torch.library."""
    schema = getattr(node.target, "_schema", None)
    return isinstance(node.target, Applied) or (schema is not None and is_of_user(schema.name))


def _check_same_weights(plan: Plan, trained: Plan) -> None:
    """Both plans must keep and update the same parts of the same weights on the same devices."""
    for device, other in zip(plan.devices, trained.devices, strict=True):
        if device.weights != other.weights or _updated(device) != _updated(other):
            names = {held.weight for held in device.weights.values()} ^ {held.weight for held in other.weights.values()}
            raise error(
                "P0606",
                f"device {device.device} stores or updates other weights than for the first batch",
                notes=[f"such as {', '.join(sorted(names)[:3])}"] if names else [],
                help="use the same weights for batches of all shapes, or give all batches the same shape",
            )


def _updated(device: DevicePlan) -> set[tuple[object, ...]]:
    return {
        (update.writes[0], change.weight, change.old, change.new, change.part)
        for update in device.instructions
        if isinstance(update, Update)
        for change in update.parameters
    }


def evaluation_plan(graph: Graph, trained: Plan, captured: CutProgram) -> Plan:
    """The plan of a graph's forward, on the weights that another plan trains."""
    traced = captured.program.sizes.small
    if traced.changes:
        place, new = next(iter(traced.changes.items()))
        raise error(
            "P0606",
            f"buffer {traced.weights[place].name} changes in evaluation mode",
            line_of_operator(new),
            notes=["training would depend on how often the model is evaluated"],
            help="change it in training only: `if self.training: ...`",
        )
    plan = forward(planned(graph))
    check(plan, forward=True)
    for device, other in zip(plan.devices, trained.devices, strict=True):
        missing = sorted({held.weight for key, held in device.weights.items() if other.weights.get(key) != held})
        if missing:
            raise error(
                "P0606",
                f"in evaluation mode device {device.device} needs {missing[0]}, which it does not have in training",
                notes=["the model uses different weights in evaluation mode"],
                help="use the same weights in the same chunks in both modes",
            )
    return plan
