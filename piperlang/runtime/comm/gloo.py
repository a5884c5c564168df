"""gloo, on CPU. It pairs messages by (source, destination, tag), and never says that a send is done: sends are waited
for at the end of a step."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from piperlang.runtime.comm.process_group import ProcessBackend, ProcessComm
from piperlang.runtime.hardware.cpu import Cpu


class GlooComm(ProcessComm):
    def send(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        work = dist.isend(tensor, self.ranks[device], tag=tag)
        self.pending.append((work, tensor))  # called by several threads, which only add to the list

    def recv(self, device: int, tag: int, tensor: torch.Tensor) -> None:
        work = dist.irecv(tensor, self.ranks[device], tag=tag)
        assert work is not None
        work.wait()


class Gloo(ProcessBackend):
    name = process_group = "gloo"
    device = Cpu()
    comm = GlooComm
    loopback: ClassVar = {"GLOO_SOCKET_IFNAME": "lo"}


BACKEND = Gloo()
