"""One step of a device as one CUDA graph: all streams of its plan with their waits, transfers and collectives included.
It is captured once, while nothing runs, and replayed for every step after that.

What a graph cannot do itself stays out of it. A step that needs the host in the middle is not captured at all; updates
by optimizers that count on the host, and gathers of the weights that they change, are issued after the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from piperlang.plan.instructions import Compute, Fetch, GatherParameters, Instruction, Offload, Routing, Update
from piperlang.runtime.hardware.feeds import Fixed
from piperlang.runtime.hardware.kind import Failed

if TYPE_CHECKING:
    from piperlang.core.value_id import ValueId
    from piperlang.runtime.device import Device
    from piperlang.runtime.optimizer.on_device import DeviceRates

WARM_UP = 2
"""Steps before the capture: they compile, choose kernels, and create the states of optimizers."""


class NotCaptured(Exception):
    """Why a step cannot be a graph."""


@cache
def _pool() -> Any:
    """Of all graphs of this process: no two run at once, and what one leaves for the host is read before the next."""
    return torch.cuda.graph_pool_handle()


# --------------------------------------------------------------------------------------------------- what is captured


def divided(device: Device) -> tuple[list[int], list[int]]:
    """The instructions that a graph can hold, and those to issue after it. Raises NotCaptured."""
    instructions = device.plan.instructions
    for x in instructions:
        _refuse(device, x)
    late = {
        i
        for i, x in enumerate(instructions)
        if isinstance(x, Update) and not device.optimizers.on_device(device.plan.device, x.writes[0])
    }
    if late:
        kept = set(device.plan.next.values())
        late |= {
            i for i, x in enumerate(instructions) if isinstance(x, GatherParameters) and not kept.isdisjoint(x.writes)
        }
        changed = {key for i in late for key in instructions[i].writes}
        for i, x in enumerate(instructions):
            if i not in late and (not late.isdisjoint(x.waits) or not changed.isdisjoint(x.reads)):
                raise NotCaptured(f"{device.plan.device}: {x.op} comes after an update that needs the host")
    return [i for i in range(len(instructions)) if i not in late], sorted(late)


def _refuse(device: Device, x: Instruction) -> None:
    if isinstance(x, Routing):
        raise NotCaptured("the host reads how many tokens go to each expert")
    if isinstance(x, Offload | Fetch):
        raise NotCaptured("activations are kept in host memory")
    if isinstance(x, Compute) and device.pieces[x.program].operators:
        name = min(device.pieces[x.program].operators)
        raise NotCaptured(f"operator `{name}` is Python code, which may do something else in every step")


# --------------------------------------------------------------------------------------------------------------- graph


@dataclass
class StepGraph:
    graph: Any
    values: Mapping[ValueId, Any]
    """What the graph leaves: losses, weights, and what is read after it."""
    left: Mapping[ValueId, int]
    norm: torch.Tensor | None
    skip: torch.Tensor | None
    rates: Sequence[DeviceRates]
    """Learning rates that its updates read."""

    def refresh(self) -> bool:
        """Sets them for the next step. False if another option has changed, which is part of the graph."""
        fresh = [one.refresh() for one in self.rates]
        return all(fresh)

    def replay(self, device: Device) -> None:
        self.graph.replay()
        device.values, device.left = dict(self.values), dict(self.left)
        device.norm, device.skip, device.known = self.norm, self.skip, None

    def close(self) -> None:
        self.graph.reset()


def captured(device: Device, issue: Callable[[], None]) -> StepGraph:
    """`issue`: issues what the graph is to hold, on the current stream and others that it waits for. Nothing of it
    runs. Raises NotCaptured; then the device is as it was before."""
    before = dict(device.values)
    rates = device.optimizers.device_rates() if device.plan.next else []
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with ExitStack() as stack:
            for one in rates:
                stack.enter_context(one.used())
            stack.enter_context(torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"))
            issue()
            move_back(device)
    except (RuntimeError, NotCaptured, Failed) as problem:
        torch.cuda.set_stream(stream)  # torch leaves its own one as it is if a capture fails
        _release_generator()
        device.optimizers.forget_updates()
        device.values, device.left = before, dict(device.uses)
        device.norm = device.skip = device.known = None
        graph.reset()
        _pool.cache_clear()  # it may still wait for the end of the capture
        if isinstance(problem, Failed) and not isinstance(problem.cause, Exception):
            raise  # an interrupt
        raise NotCaptured(_first(problem)) from problem
    device.fixed = {key: Fixed(before[key]) for key, _, _ in device.plan.feeds}
    return StepGraph(graph, device.values, device.left, device.norm, device.skip, rates)


def _release_generator() -> None:
    """After a capture that has failed, torch 2.11 believes its generator of random numbers to be in it still, and gives
    none to anybody, not even to Inductor while it compiles. The next capture that ends sets that right. If that fails,
    too, whoever asks for a random number is told."""
    token, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        token.zero_()
    graph.reset()


def _first(problem: BaseException) -> str:
    """What went wrong first: to end a capture that has failed is another error."""
    while not isinstance(problem, Failed) and isinstance(problem.__context__, RuntimeError | Failed):
        problem = problem.__context__
    where = f"{problem.instruction.op}: " if isinstance(problem, Failed) else ""
    return where + str(problem).partition("\n")[0]


def move_back(device: Device) -> None:
    """At the end of a step: weights and buffers that have got new memory, to where every step reads them; not if the
    step is to change nothing."""
    for old, new in device.plan.next.items():
        now, kept = device.values.get(new), device.kept[old]
        if now is not None and now.data_ptr() != kept.data_ptr():
            device.values[new] = kept.copy_(now if device.skip is None else torch.where(device.skip.bool(), kept, now))
