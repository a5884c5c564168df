"""A kind of device: what the runtime needs from the hardware. cpu.py and cuda.py implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from piperlang.capture.user.user_code import said
from piperlang.core.streams import StreamResources
from piperlang.plan.instructions import Instruction

if TYPE_CHECKING:
    from piperlang.runtime.device import Device


class Failed(Exception):
    """An instruction that raised, and its exception."""

    def __init__(self, instruction: Instruction, cause: BaseException) -> None:
        super().__init__(said(cause))
        self.instruction, self.cause = instruction, cause


class StepTimes:
    """When the instructions of a step ran on a device: seconds of this machine's monotonic clock."""

    def __init__(self, instructions: int, chosen: Collection[int]) -> None:
        self.chosen = chosen
        """The instructions that are recorded."""
        self.begun = self.ended = 0.0
        """Of the step."""
        self.spans: dict[int, tuple[float, float]] = {}
        """Of those that are recorded."""
        self.issued = [0.0] * instructions
        """Seconds that the host needed to issue each; 0 where it runs them itself."""


class Captures:
    """What a device needs to run its steps as graphs that it captures once, where it can."""

    refused = ""
    """Why steps are not captured."""
    issued: float | None = None
    """When the host had issued the graph of the last step, by its clock; None: that was none."""

    def __init__(
        self,
        settle: Callable[[], None],
        forget: Callable[[], None],
        check: Callable[[], None],
        begun: Callable[[], None],
        limit: float | None,
    ) -> None:
        """`settle`: ends what communication is still under way at the end of a step; `forget`: that of a capture that
        has failed was never under way. `check`: raises if communication was ended from outside. `begun` is called
        before a graph runs, which may take `limit` seconds; None: it waits for nobody."""
        self.settle, self.forget, self.check, self.begun, self.limit = settle, forget, check, begun, limit


class Streams(Protocol):
    """Runs the instructions of one device: each stream in order, with waits across streams only where the plan has
    them."""

    running: dict[str, int]
    """The current instruction of each stream."""

    def step(self, times: StepTimes | None = None) -> None:
        """Raises Failed. `times`: to be noted."""

    def close(self) -> None: ...


class DeviceKind(ABC):
    name: ClassVar[str]
    """The type of its torch.device."""
    resource: ClassVar[str]
    """The resource that Ray counts it as: `CPU`, or `GPU` for every accelerator."""
    compiles: ClassVar[bool]
    """Whether stage programs are compiled by default."""
    graphs: ClassVar[bool]
    """Whether steps are captured as graphs of the device by default."""

    @abstractmethod
    def available(self) -> bool: ...

    @abstractmethod
    def model(self) -> str:
        """What the device of this machine is called by its maker; empty if there is none."""

    @abstractmethod
    def claim(self, rank: int) -> torch.device:
        """The device of a rank, made the current one of this process."""

    def sharing(self, ranks: int) -> tuple[int, int]:
        """How ranks on one machine share its devices, where there are fewer: how many devices there are, and how many
        passes run at full speed at once on each. 0 devices: each rank has one of its own."""
        return 0, 1

    @abstractmethod
    def streams(
        self,
        device: Device,
        execute: Callable[[Instruction], None],
        resources: Mapping[str, StreamResources],
        captures: Captures | None = None,
    ) -> Streams:
        """`resources`: of some streams, by their names. `captures`: if steps may be graphs."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything that was issued."""

    @abstractmethod
    def keep_memory(self, keeps: bool) -> None:
        """Whether what a step frees stays with this process, which does nothing else."""

    @abstractmethod
    def memory(self) -> int:
        """Bytes, as `Step.memory` reports them."""

    def reset_peak(self) -> dict[str, int]:
        """The peak memory since the last call, by kind, where the allocator counts it. Resets the peak, without memory
        that earlier jobs left."""
        return {}
