"""What a backend is: the operations that plans use for communication, and the kind of device that they run on.

The ranks of a backend are processes (ProcessBackend in process_group.py) or threads of one process (Threads in
threads.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from piperlang.runtime.hardware.kind import DeviceKind


class Comm(ABC):
    """The communication of one device. Devices and groups have the numbers of the plan."""

    @abstractmethod
    def send(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None:
        """The host does not wait until the message is received: no order of large messages may deadlock. `stream`: of
        the instruction."""

    @abstractmethod
    def recv(self, device: int, tag: int, tensor: torch.Tensor, stream: str) -> None: ...

    @abstractmethod
    def all_reduce(self, group: int, tensor: torch.Tensor) -> None:
        """The sum, in place."""

    @abstractmethod
    def reduce(self, group: int, tensor: torch.Tensor, member: int) -> None:
        """The sum, in place, on one member; on the others the tensor may be overwritten."""

    @abstractmethod
    def broadcast(self, group: int, tensor: torch.Tensor, member: int) -> None:
        """The tensor of one member."""

    @abstractmethod
    def exchange(
        self, group: int, give: torch.Tensor, give_sizes: list[int], take: torch.Tensor, take_sizes: list[int]
    ) -> None:
        """All-to-all of rows; sizes are in the order of the group."""

    @abstractmethod
    def gather_into(self, group: int, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Equal parts of all members, one after the other, in the order of the group."""

    @abstractmethod
    def scatter_into(self, group: int, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """The sum over all members of the part with this member's number."""


class Backend(ABC):
    """Stateless: workers receive a copy."""

    name: ClassVar[str]
    device: ClassVar[DeviceKind]
    buffered: ClassVar[bool] = True
    """Whether a send completes before its receive is posted, and tags tell messages apart. If not, the plan must pair
    sends and receives in order, which its check verifies."""
