"""What an instruction of a plan takes: from FLOPs and bytes on a described machine. measured.py has times that were
measured instead."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod
from typing import NamedTuple, Protocol

from piperlang.diagnostics import error, listed
from piperlang.ir.graph import Graph
from piperlang.ir.model import Model
from piperlang.plan.estimate.machine import Interconnect, Machine
from piperlang.plan.estimate.memory import ValueSizes
from piperlang.plan.estimate.summary import SentBytes
from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Collective,
    Compute,
    Copy,
    Fetch,
    GradientNorm,
    Instruction,
    Offload,
    ReduceGradients,
    Routing,
    Send,
    Update,
    item_bytes,
)
from piperlang.plan.plan import DevicePlan, Plan

UPDATE_PASSES = 8
"""How often an optimizer like Adam reads or writes an element of each of its tensors: weight, gradient and two
moments, read and written."""

REDUCE_AND_GATHER = (AllReduce, ReduceGradients, GradientNorm)


class InstructionCost(NamedTuple):
    alone: float
    """Seconds that nothing makes longer: of a local operation, or until the first byte of a transfer arrives."""
    shared: float = 0.0
    """Seconds at the full rate of something that others may use at the same time."""
    of: str = ""
    """What that is: `compute`, `node` or `network`."""


NOTHING = InstructionCost(0.0)
COMPUTE = "compute"
"""What passes and updates share."""


class CostModel(Protocol):
    machine: Machine
    before: float
    """Seconds of a step before its first instruction, on every device."""
    after: float
    """Seconds after its last one."""

    def drawn(self) -> Sequence[CostModel]:
        """The same for several steps, where times differ from one to the next."""
        ...

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        """Of anything but a send or a receive."""

    def sending(self, device: DevicePlan, x: Send) -> float:
        """Seconds until a send that is buffered has ended."""

    def message(self, source: int, target: int, size: float) -> InstructionCost:
        """Of a message of `size` bytes between two devices."""

    def host(self, x: Instruction) -> float:
        """Seconds that the host needs to issue it."""


def check_rates(machine: Machine, model: Model) -> None:
    """That the machine has a rate for each dtype that the model computes in."""
    needed = dict.fromkeys(dtype for chunk in model.chunks for work in chunk.passes.values() for dtype in work.flops_in)
    for dtype in needed:
        if machine.known_rate(dtype) is None:
            raise error(
                "P0902",
                f"the model computes in {dtype}, and {machine.name} has no rate for it",
                notes=[f"its `flops` are those of {listed(machine.flops, 'and')}"],
                help=f"describe the machine in a file of your own, with `flops = {{ {dtype} = ... }}`",
            )


class MachineCosts:
    before = after = 0.0

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self.plan, self.graph, self.machine = plan, graph, machine
        self.sizes, self.sent = ValueSizes(plan, graph), SentBytes(plan)
        self._programs: dict[int, InstructionCost] = {}
        self._collectives: dict[tuple[str, int, float], InstructionCost] = {}
        self._taken: dict[tuple[int, int], float] = {}

    def drawn(self) -> Sequence[CostModel]:
        return [self]

    def host(self, x: Instruction) -> float:
        return self.machine.host

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        machine = self.machine
        match x:
            case Compute(program=program):
                if program not in self._programs:
                    self._programs[program] = self.of_pass(program)
                return self._programs[program]
            case Collective(group=group):
                key = (x.op, group, self._carried(device, x))
                if key not in self._collectives:
                    self._collectives[key] = self._collective(x, key[2], self.plan.groups[group].members)
                return self._collectives[key]
            case Update(parameters=parameters):
                touched = sum(self.sizes.of(one.old, device.device) for one in parameters)
                return InstructionCost(machine.launch, UPDATE_PASSES * touched / machine.memory_bandwidth, COMPUTE)
            case Copy(target=target) | Offload(target=target) | Fetch(target=target):
                return InstructionCost(
                    machine.launch + 2 * self.sizes.of(target, device.device) / machine.memory_bandwidth
                )
        return NOTHING

    def _carried(self, device: DevicePlan, x: Collective) -> float:
        """Bytes that keep a device busy: what it gives to others, or what it takes from them, if that is more."""
        sent = self.sent.of(device, x)
        if not isinstance(x, AllToAll):
            return sent
        key = (id(x.take), device.device)  # microbatches share the same blocks
        if key not in self._taken:
            elements = sum(prod(one.shape) for one in x.take if one.peer != device.device)
            self._taken[key] = float(elements * item_bytes(x.dtype))
        return max(sent, self._taken[key])

    def of_pass(self, number: int) -> InstructionCost:
        program, machine = self.plan.programs[number], self.machine
        chunk = self.graph.model.chunks[program.chunk]
        work = chunk.passes["F" if program.op == "R" else program.op]
        share = program.samples / self.graph.model.samples / prod(divide.size for divide in program.sharding[0])
        computing = sum(flops / machine.rate(dtype) for dtype, flops in work.flops_in.items())
        seconds = computing + work.moved_bytes / machine.memory_bandwidth
        return InstructionCost(machine.launch, share * seconds, COMPUTE)

    # ----------------------------------------------------------------------------------------------- communication

    def sending(self, device: DevicePlan, x: Send) -> float:
        return self.machine.launch

    def message(self, source: int, target: int, size: float) -> InstructionCost:
        name, link = self._link((source, target))
        return InstructionCost(link.latency, size / link.bandwidth, name)

    def _link(self, members: Sequence[int]) -> tuple[str, Interconnect]:
        nodes = {device // self.machine.devices_per_node for device in members}
        return ("node", self.machine.node) if len(nodes) == 1 else ("network", self.machine.network)

    def _collective(self, x: Instruction, size: float, members: Sequence[int]) -> InstructionCost:
        """`size`: bytes that one device sends in a ring. Between nodes, devices of a node divide what crosses the
        network among their adapters, as NCCL's rings do."""
        count = len(members)
        if count < 2:
            return InstructionCost(self.machine.launch)
        name, link = self._link(members)
        nodes = len({device // self.machine.devices_per_node for device in members})
        local = count / nodes
        if isinstance(x, AllToAll | Routing):
            within, across, hops = (local - 1) / (count - 1) * size, (count - local) / (count - 1) * size, 1
        else:
            whole = size * count / (count - 1)
            within, across = (local - 1) / local * whole, (nodes - 1) / nodes * whole / local
            hops = (2 if isinstance(x, REDUCE_AND_GATHER) else 1) * ceil(log2(count))  # small ones go along a tree
        seconds = max(within / self.machine.node.bandwidth, across / self.machine.network.bandwidth)
        return InstructionCost(self.machine.launch + hops * link.latency, seconds, name)
