"""Plans of one job for batches of different shapes, on the same weights. A plan is for batches of one shape; a batch
that no plan fits is planned when it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from piperlang.capture.autodiff.pass_graph import TracedModel
from piperlang.capture.batch.layout import shapes_of
from piperlang.diagnostics import error
from piperlang.plan.plan import Plan

Mode = Literal["train", "evaluate"]
MOST = 8


class RunKey(NamedTuple):
    """Which plan of a job."""

    mode: Mode
    number: int = 0
    """Of the shape, in the order in which they came."""


TRAIN = RunKey("train")


@dataclass(frozen=True)
class OtherShapes:
    """How batches of other shapes than the first are planned."""

    plan: Callable[[Mode, tuple[Any, Any]], tuple[Plan, TracedModel]]
    most: int = MOST
    """The number of shapes that are planned, to train and to evaluate."""


class HasLayout(Protocol):
    @property
    def captured(self) -> TracedModel: ...


P = TypeVar("P", bound=HasLayout)


class PlansByShape(Generic[P]):
    def __init__(self, others: OtherShapes | None, prepare: Callable[[RunKey, Plan, TracedModel], P]) -> None:
        """`prepare` sets up a plan on the devices. `others`: None if all batches must have the first shape."""
        self.others, self.prepare = others, prepare
        self.plans: dict[RunKey, P] = {}

    def __getitem__(self, key: RunKey) -> P:
        return self.plans[key]

    def of(self, mode: Mode) -> Iterator[tuple[RunKey, P]]:
        return ((key, plan) for key, plan in self.plans.items() if key.mode == mode)

    def add(self, mode: Mode, plan: Plan, captured: TracedModel) -> RunKey:
        key = RunKey(mode, len(list(self.of(mode))))
        self.plans[key] = self.prepare(key, plan, captured)
        return key

    def fitting(self, mode: Mode, batch: tuple[Any, Any]) -> RunKey:
        """The plan for batches of this shape, which is made if there is none."""
        known = list(self.of(mode))
        for key, plan in known:
            if plan.captured.layout.fits(batch):
                return key
        if self.others is None:
            known[0][1].captured.layout.flatten(batch)  # says what does not fit
            raise AssertionError("a batch that fits has its plan")
        if len(known) >= self.others.most:
            raise error(
                "P0801",
                f"a batch has another shape than the {len(known)} before it: {shapes_of(batch)}",
                notes=[f"batches of shape {plan.captured.layout.written_shapes} have come" for _, plan in known],
                help=(
                    "pad batches to a few shapes: each one is compiled; or allow more shapes:"
                    f" `--shapes {2 * self.others.most}`"
                ),
            )
        return self.add(mode, *self.others.plan(mode, batch))
