"""One device of a job: a Ray actor that holds its part of the model and runs its part of the plan, one call per
step."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import TCPStore

from piperlang.capture.seeding import seed_all
from piperlang.capture.state import Frozen
from piperlang.capture.tensors import named_tensors
from piperlang.capture.user_code import said
from piperlang.capture.where import line_of, line_of_function
from piperlang.diagnostics import error
from piperlang.plan.instructions import Instruction
from piperlang.plan.plan import DevicePlan, Group, StageProgram
from piperlang.runtime.assemble import Rest, fingerprint, rest_of
from piperlang.runtime.comm import Comm, opened
from piperlang.runtime.cuda import CudaStreams, compiled
from piperlang.runtime.device import Device
from piperlang.runtime.failure import Failure, failure_of
from piperlang.runtime.optimize import Optimizers
from piperlang.runtime.streams import Failed, Streams

if TYPE_CHECKING:
    from piperlang.runtime.measure import Measured


@dataclass(frozen=True)
class Setup:
    """Everything a worker needs for setup."""

    plan: DevicePlan
    programs: list[StageProgram]
    pieces: bytes
    groups: list[Group]
    ranks: dict[int, int]
    store: str
    progress: str
    digest: str
    seed: int
    timeout: float
    loss_dtype: str
    pairs: list[tuple[int, int]]
    cuda: bool
    compiles: bool
    masters: bool
    make_model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    lr_schedule: Callable[[Any], Any] | None
    loss: Callable[[Any, Any], Any] | None
    updated: dict[str, str]
    """Weights that some device updates, with the script line that shards the update."""
    constants: dict[str, torch.Tensor]
    """Tensors that the program reads besides the batch and the model's own tensors."""
    known: frozenset[str] | None = None
    """For one worker: the names of weights that some device stores. This worker stores all others."""


@dataclass(frozen=True)
class Report:
    """The result of a step on one device."""

    loss: float
    seconds: float
    memory: int
    failed: Failure | None = None


class Routine:
    """A plan of this device: for training or for evaluation."""

    def __init__(self, device: Device, comm: Comm, cuda: bool, begun: Callable[[int], None]) -> None:
        """`begun` is called with the index of every instruction before it runs."""
        self.device, self.comm = device, comm
        instructions = device.plan.instructions
        positions = self.positions = {id(instruction): i for i, instruction in enumerate(instructions)}

        def execute(instruction: Instruction) -> None:
            begun(positions[id(instruction)])
            device.execute(instruction)

        self.streams: Streams | CudaStreams = (CudaStreams if cuda else Streams)(
            instructions, execute, f"{device.plan.device}:"
        )
        if isinstance(self.streams, CudaStreams):
            self.streams.values = device

    def run(self, step: int, feeds: dict[str, torch.Tensor], count: float) -> float:
        """The device's contribution to the loss. Raises the exception of a failed instruction or send."""
        self.device.begin(step, feeds, count)
        with torch.no_grad():
            self.streams.step()
        self.comm.settle()
        return self.device.end()


class Worker:
    """A plain class: the driver turns it into an actor, so that this file does not need Ray."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        os.environ.update(environment or {})
        torch.set_num_threads(1)
        self.routines: dict[str, Routine] = {}
        self.active: Routine | None = None
        self.meeting: TCPStore | None = None

    def where(self) -> tuple[str, int]:
        return process()

    def host(self, peer: str) -> str:
        """Open a rendezvous for workers that share no file system, at the address under which `peer` reaches this
        worker."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            address: str = probe.getsockname()[0]
        self.meeting = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{address}:{self.meeting.port}"

    def ping(self) -> float:
        """Answered by a separate thread: a stopped process does not answer."""
        return time.time()

    def setup(self, packed: bytes) -> str:
        """Create the model and keep this device's part of it; returns the fingerprint of the whole model."""
        self.close()
        setup = _loaded(packed)
        rank = setup.ranks[setup.plan.device]
        where = torch.device("cuda", rank % torch.cuda.device_count()) if setup.cuda else torch.device("cpu")
        if setup.cuda:
            torch.cuda.set_device(where)
        meeting = (
            self.meeting
            if self.meeting is not None and setup.store.startswith("tcp:")
            else opened(setup.store, len(setup.ranks))
        )
        self.comm = Comm(
            rank,
            len(setup.ranks),
            meeting,
            setup.groups,
            setup.ranks,
            setup.timeout,
            setup.digest,
            setup.pairs,
            setup.cuda,
            loopback=not setup.store.startswith("tcp:"),
        )
        try:
            return self._keep(setup, rank, where)
        except BaseException:
            self.comm.close()  # the worker may be reused for another job
            raise

    def _keep(self, setup: Setup, rank: int, where: torch.device) -> str:
        """Keeps the tensors of the model that this device needs."""
        _ = getattr(setup.make_model, "__wrapped__", None)  # the model file runs before seeding, as in the driver
        seed_all(setup.seed)
        model = setup.make_model()
        started_from = fingerprint(model)
        weights = named_tensors(model) | setup.constants
        self.rest_of_model = rest_of(model, setup.known) if setup.known is not None else None
        # After the model, because stage programs call operators that it defines.
        pieces = pickle.loads(setup.pieces)
        if setup.compiles:
            pieces = compiled(pieces, setup.programs)
        device = Device(setup.plan, setup.programs, setup.groups, pieces, weights, self.comm, where, setup.seed)
        device.optimizers = Optimizers(
            model, setup.optimizer, setup.lr_schedule, device.updates(), setup.masters, setup.updated
        )
        device.loss_dtype = getattr(torch, setup.loss_dtype)
        self._open_progress(setup.progress, rank)
        self.setting, self.steps = setup, 0
        self.program_reads = _program_reads(setup, model)
        self.routines["train"] = Routine(device, self.comm, setup.cuda, self._begun)
        return started_from

    def prepare(self, packed: bytes) -> None:
        """Set up another plan on the same weights: evaluation."""
        plan, programs, packed_pieces, groups, pairs = pickle.loads(packed)
        trained, setup = self.routines["train"].device, self.setting
        comm = copy.copy(self.comm)
        comm.connect(groups, pairs)
        pieces = pickle.loads(packed_pieces)
        if setup.compiles:
            pieces = compiled(pieces, programs)
        device = Device(plan, programs, groups, pieces, {}, comm, trained.where, setup.seed, trained.kept)
        self.routines["evaluate"] = Routine(device, comm, setup.cuda, self._begun)

    def _open_progress(self, path: str, rank: int) -> None:
        """Opens the file of the instruction last begun, which the driver can read even when this process is dead, if
        they share a file system."""
        if path:
            with Path(path).open("r+b") as file:
                self.progress = mmap.mmap(file.fileno(), 0)
        else:
            self.progress = mmap.mmap(-1, 4 * (rank + 1))
        self.slot = 4 * rank

    def _begun(self, position: int) -> None:
        struct.pack_into("<i", self.progress, self.slot, position)

    def step(self, feeds: dict[str, torch.Tensor], count: float, gradients: bool = False) -> Report:
        self.routines["train"].device.last_gradients = {} if gradients else None
        report = self._run("train", feeds, count)
        if report.failed is None:
            try:
                self.routines["train"].device.optimizers.advance()
                if self.program_reads is not None:
                    self.program_reads.check("when the optimizer or its schedule steps")
            except KeyboardInterrupt:
                raise
            except BaseException as problem:
                return _failed(problem)
        self.steps += 1
        return report

    def evaluate(self, feeds: dict[str, torch.Tensor], count: float) -> Report:
        return self._run("evaluate", feeds, count)

    def _run(self, name: str, feeds: dict[str, torch.Tensor], count: float) -> Report:
        started = time.perf_counter()
        routine = self.active = self.routines[name]
        try:
            loss = routine.run(self.steps, feeds, count)
        except Failed as failure:
            return _failed(failure.cause, routine.positions[id(failure.instruction)])
        except RuntimeError as problem:  # the receiver of a message is gone
            (at,) = struct.unpack_from("<i", self.progress, self.slot)
            return _failed(problem, at)
        self._begun(-1)
        memory = torch.cuda.max_memory_allocated() if self.comm.cuda else _resident()
        return Report(loss, time.perf_counter() - started, memory)

    def running(self) -> dict[str, int]:
        """The current instruction of each stream, for messages about another device."""
        return dict(self.active.streams.running) if self.active is not None else {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {key: value.cpu() for key, value in self.routines["train"].device.kept.items()}

    def optimizer_reads(self) -> tuple[str, ...]:
        """Names of the globals that a step of the optimizer reads."""
        reads = self.routines["train"].device.optimizers.reads
        return tuple(reads.names) if reads is not None else ()

    def rest(self) -> Rest | None:
        return self.rest_of_model

    def gradients(self) -> dict[str, Any]:
        return {key: value.cpu() for key, value in (self.routines["train"].device.last_gradients or {}).items()}

    def measure(self, feeds: dict[str, torch.Tensor], count: float) -> tuple[float, Measured]:
        """Runs a step and measures its memory."""
        from piperlang.runtime.measure import measured

        routine = self.routines["train"]
        found = measured(routine.device, routine.comm.settle, self.steps, feeds, count)
        routine.device.optimizers.advance()
        self.steps += 1
        return found

    def reset_peak(self) -> dict[str, int]:
        """The peak CUDA memory since the last call, according to torch's allocator. Resets the peak, without memory
        that earlier jobs left."""
        if not self.comm.cuda:
            return {}
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        found = {name: int(stats[f"{name}_bytes.all.peak"]) for name in ("allocated", "active", "reserved")}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return found

    def close(self) -> None:
        for routine in self.routines.values():
            routine.streams.close()
        if self.routines:
            self.routines, self.active = {}, None
            self.comm.close()


def _loaded(packed: bytes) -> Setup:
    try:
        setup: Setup = pickle.loads(packed)
    except Exception as problem:
        raise error(
            "P0604",
            "a worker cannot unpickle the functions of the job",
            line_of(problem),
            notes=[said(problem)],
            help="make the module that defines them importable on every worker: install it, or set PYTHONPATH",
        ) from problem
    return setup


def _program_reads(setup: Setup, model: Any) -> Frozen | None:
    """Globals and class attributes that the traced program has read: only the optimizer and its schedule run here."""
    if setup.loss is None:
        return None
    classes = {type(module) for module in model.modules()}
    line = line_of_function(setup.optimizer)
    return Frozen("the traced program", [unwrap(setup.loss)], classes, line)


def _failed(problem: BaseException, position: int = -1) -> Report:
    return Report(0.0, 0.0, 0, failure_of(problem, position))


def process() -> tuple[str, int]:
    """The identity of this process: its system and PID namespace, and its PID there."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    system = boot.read_text().strip() if boot.exists() else socket.gethostname()
    namespace = Path("/proc/self/ns/pid")
    return f"{system}/{namespace.stat().st_ino if namespace.exists() else 0}", os.getpid()


def _resident() -> int:
    """Resident memory of this process in bytes."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
