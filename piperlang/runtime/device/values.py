"""The values and weights of one device during a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.capture.trace.random import mix
from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import Instruction
from piperlang.plan.plan import DevicePlan, Group, ParameterShard, StageProgram
from piperlang.plan.sums import reads, sums
from piperlang.runtime.box import take
from piperlang.runtime.comm.backend import Comm
from piperlang.runtime.hardware.feeds import Fixed
from piperlang.runtime.optimizer.copies import without_overlap
from piperlang.runtime.optimizer.optimize import Optimizers, added

F = TypeVar("F", bound=Callable[..., None])
Execute = Callable[["DeviceValues", Any], None]
EXECUTE: dict[type[Instruction], Execute] = {}
"""How each instruction is executed."""


def executes(*kinds: type[Instruction]) -> Callable[[F], F]:
    """Register the function that executes some instructions."""

    def register(function: F) -> F:
        EXECUTE.update(dict.fromkeys(kinds, function))
        return function

    return register


class DeviceValues:
    optimizers: Optimizers
    """Of the process; only a plan with updates needs any."""
    loss_dtype = torch.float32

    def __init__(
        self,
        plan: DevicePlan,
        programs: Sequence[StageProgram],
        groups: Sequence[Group],
        pieces: Sequence[PassGraph],
        weights: Mapping[str, torch.Tensor],
        comm: Comm,
        where: torch.device,
        seed: int,
        kept: dict[ValueId, torch.Tensor] | None = None,
    ) -> None:
        """`kept`: weights of another device's plan in the same process, to work on those."""
        self.plan, self.programs, self.groups, self.pieces = plan, programs, groups, pieces
        self.comm, self.where, self.seed = comm, where, seed
        self.kept: dict[ValueId, torch.Tensor] = (
            {key: self._part(weights[shard.weight], shard) for key, shard in plan.weights.items()}
            if kept is None
            else kept
        )
        self.values: dict[ValueId, Any] = {}
        self.fixed: dict[ValueId, Fixed] = {}
        """Where the parts of every batch are put, if steps are a graph that reads them there."""
        self.draws = any(slot[0] == "rng" for program in programs for slot in program.inputs)
        self.drawn = torch.zeros(1, dtype=torch.int64, device=where)
        """Seed and step, mixed."""
        self.places: dict[tuple[int, ...], torch.Tensor] = {}
        self.sums = sums(plan)
        self.reads = {id(instruction): reads(instruction, self.sums) for instruction in plan.instructions}
        """What each instruction reads, sums in place of their parts."""
        self.uses: dict[ValueId, int] = {}
        for keys in self.reads.values():
            for key in keys:
                self.uses[key] = self.uses.get(key, 0) + 1
        self.permanent = set(plan.next.values()) | set(plan.losses)
        stays = self.kept.keys() | {key for key, _, _ in plan.feeds} | self.permanent
        self.made_reads = {
            number: [(key, times) for key, times in Counter(keys).items() if key not in stays]
            for number, keys in self.reads.items()
        }
        """Of these, what other instructions have made, and how often each is read."""
        self.before = {new: old for old, new in plan.next.items()}
        self.left: dict[ValueId, int] = {}
        self.last_gradients: dict[ValueId, Any] | None = None
        self.norm: torch.Tensor | None = None
        """Of all gradients, where the plan computes it."""
        self.skip: torch.Tensor | None = None
        """1 if the norm is not finite and the step is to change nothing, otherwise 0; where the plan skips."""
        self.known: bool | None = None

    def _part(self, weight: torch.Tensor, shard: ParameterShard) -> torch.Tensor:
        local = take(weight, shard.box)
        if shard.interval is not None:
            local = local.flatten()[slice(*shard.interval)]
        return local.detach().clone(memory_format=torch.contiguous_format).to(self.where)

    def begin(self, step: int, feeds: dict[ValueId, torch.Tensor]) -> None:
        """`feeds` is emptied: its tensors are freed after their last read, so the caller must not keep them."""
        self.values = {**self.kept, **{key: self._arrived(key, value) for key, value in feeds.items()}}
        feeds.clear()
        self.left = dict(self.uses)
        if self.draws:
            self.drawn.fill_(mix(self.seed, step))
        self.step, self.norm, self.skip, self.known = step, None, None, None

    def _arrived(self, key: ValueId, value: torch.Tensor) -> torch.Tensor:
        fixed = self.fixed.get(key)
        return value.to(self.where, non_blocking=True) if fixed is None else fixed.put(value)

    def random_state(self, first_sample: int, coordinates: tuple[int, ...]) -> torch.Tensor:
        """What the random numbers of a pass depend on."""
        place = (first_sample, *coordinates)
        if place not in self.places:
            self.places[place] = torch.tensor(place, device=self.where)
        return torch.cat([self.drawn, self.places[place]])

    @property
    def skipped(self) -> bool:
        """Whether the step changes nothing. The host waits for the device to know."""
        if self.known is None:
            self.known = self.skip is not None and bool(self.skip)
        return self.known

    def end(self) -> float:
        """What this device's losses count for; keeps the new weights."""
        loss = sum(float(self.values[key]) * share for key, share in self.plan.losses.items())
        if not self.skipped:
            for old, new in self.plan.next.items():
                self.kept[old] = self.values[new]
        self.values = {}
        return loss

    def release(self, instruction: Instruction) -> None:
        """Forget what other instructions have made and nothing reads after this one, which has taken it."""
        for key, times in self.made_reads[id(instruction)]:
            if self.left[key] == times:
                self.values.pop(key, None)

    def rank(self, group: int) -> int:
        return self.groups[group].members.index(self.plan.device)

    def put(self, key: ValueId, value: Any, shared: bool = False) -> None:
        """Keep a value if an instruction reads it. `shared`: whether something else reads its memory."""
        if key in self.sums:
            self._accumulate(self.sums[key], value, shared)
        elif key in self.plan.losses:
            # Kept to the end of the step: torch may return a scalar as a view of a buffer as large as what was reduced.
            self.values[key] = value.clone()
        elif key in self.uses or key in self.permanent:
            self.values[key] = value

    def _accumulate(self, total: ValueId, value: torch.Tensor, shared: bool) -> None:
        """Gradients of microbatches are added up as they come, in float32 where they are in half precision."""
        known = self.values.get(total)
        if known is None:
            half = value.dtype in (torch.bfloat16, torch.float16)
            own = value.to(torch.float32) if half else value.clone() if shared else value
            self.values[total] = without_overlap(own)
        else:
            known += value

    def is_added(self, key: ValueId) -> bool:
        """Whether a value is added to a sum that is there."""
        return key in self.sums and self.sums[key] in self.values

    def add(self, values: Sequence[tuple[ValueId, torch.Tensor]]) -> None:
        """Adds values to sums that are there: in one call for many, since a GPU takes longer to begin most of them."""
        alike: dict[ValueId, torch.Tensor] = {}
        for key, value in values:
            total = self.sums[key]
            known = self.values[total]
            if total not in alike and (known.dtype, known.stride()) == (value.dtype, value.stride()):
                alike[total] = value
            else:
                known += value
        if alike:
            torch._foreach_add_([self.values[total] for total in alike], list(alike.values()))

    def total(self, keys: Sequence[ValueId]) -> torch.Tensor:
        """A gradient: what has been added up already, or its parts."""
        return self.values[self.sums[keys[0]]] if keys[0] in self.sums else added([self.values[key] for key in keys])
