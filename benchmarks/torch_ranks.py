"""Processes for torch's own pipelines: started once, asked often, started again after one of them has failed."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

Serve = Callable[[int, torch.device, Any], Any]
"""What a rank does with a request: rank, device, request -> answer."""


class Ranks:
    def __init__(self, count: int, serve: Serve, cuda: bool, limit: float = 120.0) -> None:
        """`limit`: seconds for one request, after which the ranks count as stuck."""
        self.count, self.serve, self.cuda, self.limit = count, serve, cuda, limit
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.processes: list[Any] = []
        self.lines: list[Connection] = []

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        start = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            ours, theirs = start.Pipe()
            process = start.Process(
                target=_live,
                args=(rank, self.count, self.folder.name, self.cuda, self.limit, self.serve, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(ours)

    def pids(self) -> list[int]:
        if not self.processes:
            self._start()
        return [process.pid for process in self.processes]

    def ask(self, request: Any) -> list[Any]:
        """What each rank answers; the first failure of any ends them all."""
        self.pids()
        answers: list[Any] = [None] * self.count
        waiting = set(range(self.count))
        until = time.monotonic() + self.limit
        try:
            for line in self.lines:
                line.send(request)
            while waiting:
                for rank in [rank for rank in waiting if self.lines[rank].poll(0.01)]:
                    good, answers[rank] = self.lines[rank].recv()
                    if not good:
                        raise RuntimeError(f"rank {rank}: {answers[rank]}")
                    waiting.discard(rank)
                if waiting and time.monotonic() > until:
                    raise RuntimeError(f"no answer of ranks {sorted(waiting)} in {self.limit:.0f} s")
        except BaseException as problem:
            self.close()
            if isinstance(problem, EOFError | OSError):
                raise RuntimeError("a rank died") from None
            raise
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for line in self.lines:
            line.close()
        self.processes, self.lines = [], []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def _live(rank: int, count: int, folder: str, cuda: bool, limit: float, serve: Serve, line: Connection) -> None:
    logging.disable(logging.WARNING)  # a line per schedule built
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if cuda:
        # Ranks share the GPU: NCCL must take them for different hosts, as it does with our workers.
        os.environ.update({"NCCL_HOSTID": f"torch-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"})
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=limit),
    )
    with contextlib.suppress(EOFError):
        while True:
            request = line.recv()
            try:
                line.send((True, serve(rank, device, request)))
            except Exception as problem:
                line.send((False, f"{type(problem).__name__}: {problem}"[:500]))
