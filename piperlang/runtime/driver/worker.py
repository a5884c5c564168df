"""One device of a job: a Ray actor that holds its part of the model and runs its part of the plan, one call per
step."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from piperlang.capture.trace.build import build
from piperlang.capture.user.held import hold, refuse_use
from piperlang.capture.user.operators import functions_of_operators
from piperlang.capture.user.seeding import seed_all, seeded
from piperlang.capture.user.slices import Slice
from piperlang.capture.user.state import Frozen, TorchState
from piperlang.capture.user.tensors import named_tensors
from piperlang.capture.user.user_code import said
from piperlang.capture.user.watched import WatchedModel
from piperlang.capture.user.weight_files import InFiles, StoredWeights
from piperlang.capture.user.where import line_of, line_of_function
from piperlang.core.streams import StreamResources
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.plan.instructions import Collective, Instruction, Receive, Send
from piperlang.plan.plan import DevicePlan, Group, Pair, StageProgram
from piperlang.runtime.checkpoint.files import Folder
from piperlang.runtime.comm.interfaces import own_address, towards
from piperlang.runtime.comm.process_group import Meeting, ProcessBackend, ProcessComm, hidden
from piperlang.runtime.device import Device
from piperlang.runtime.device.compiled import compiled
from piperlang.runtime.device.failure import Failure, failure_of
from piperlang.runtime.driver import restoring
from piperlang.runtime.driver.assemble import Rest, fingerprint, rest_of
from piperlang.runtime.driver.initial import Created, Dropped, WeightFile, create, mapped
from piperlang.runtime.driver.loading import Feeds, Loaded, LoadedHere, Loader, Loading, Parts, keep_sockets_in
from piperlang.runtime.driver.output import print_to
from piperlang.runtime.driver.restoring import Restore
from piperlang.runtime.driver.saving import Assigned, Writer, WrittenPart, check_state, snapshot
from piperlang.runtime.driver.shapes import TRAIN, Mode, RunKey
from piperlang.runtime.hardware.kind import Captures, DeviceKind, Failed, StepTimes
from piperlang.runtime.optimizer.copies import WeightPart
from piperlang.runtime.optimizer.optimize import Optimizers
from piperlang.runtime.optimizer.saved import restore
from piperlang.runtime.optimizer.settings import Settings

if TYPE_CHECKING:
    from piperlang.runtime.device.measure import Measured


PORT = "tcp://"


@dataclass(frozen=True)
class Setup:
    """Everything a worker needs for setup."""

    plan: DevicePlan
    programs: list[StageProgram]
    pieces: bytes
    groups: list[Group]
    ranks: dict[int, int]
    store: str
    secret: str
    """What only workers of this start of the job know."""
    progress: str
    output: str
    """The file of what this process prints."""
    digest: str
    seed: int
    timeout: float
    loss_dtype: str
    pairs: list[Pair]
    streams: dict[str, StreamResources]
    backend: ProcessBackend
    compiles: bool
    graphs: bool
    """Whether steps may be CUDA graphs."""
    masters: bool
    make_model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    lr_schedule: Callable[[Any], Any] | None
    loss: Callable[[Any, Any], Any] | None
    ema: float | None
    updated: dict[str, str]
    """Weights that some device updates, with the script line that shards the update."""
    constants: dict[str, torch.Tensor]
    """Tensors that the program reads besides the batch and the model's own tensors."""
    known: frozenset[str] | None = None
    """For one worker: the names of weights that some device stores. This worker stores all others."""
    weights: StoredWeights | None = None
    """The files of the weights of a large model, if there are any."""
    restore: Restore | None = None
    """The checkpoint that a resumed run starts from."""
    large: bool = False
    """The model is never whole in a worker."""


WHOLE_STEP = -2
"""In place of the index of an instruction: the device runs them all, as one graph."""


@dataclass(frozen=True)
class Report:
    """The result of a step on one device."""

    loss: float
    seconds: float
    memory: int
    norm: float | None = None
    skipped: bool = False
    failed: Failure | None = None
    settings: str = ""
    """A digest of the options that a schedule has set."""
    coming: Loaded | None = None
    """The next batch, if the worker has loaded one."""
    not_captured: str = ""
    """Why the step cannot be a CUDA graph."""
    issued: float | None = None
    """Seconds that the host needed for a step that is a CUDA graph, until that was issued."""


class Started(NamedTuple):
    """What user code has made in one process: the same in all of them, or they would train different models."""

    weights: str
    """A fingerprint of the whole model."""
    settings: Settings


class DeviceRun:
    """A plan of this device: for training or for evaluation."""

    def __init__(
        self,
        device: Device,
        comm: ProcessComm,
        kind: DeviceKind,
        resources: Mapping[str, StreamResources],
        begun: Callable[[int], None],
        graphs: bool,
    ) -> None:
        """`resources`: of streams. `begun` is called with the index of every instruction before it runs, or with
        WHOLE_STEP. `graphs`: whether steps may be graphs."""
        self.device, self.comm = device, comm
        positions = {id(instruction): i for i, instruction in enumerate(device.plan.instructions)}
        self.positions = positions

        def execute(instruction: Instruction) -> None:
            begun(positions[id(instruction)])
            device.execute(instruction)

        limit = comm.limit.total_seconds() if _communicates(device) else None
        whole = partial(begun, WHOLE_STEP)
        self.captures = Captures(comm.settle, comm.forget, comm.check_alive, whole, limit) if graphs else None
        self.streams = kind.streams(device, execute, resources, self.captures)

    def step(self, step: int, feeds: dict[ValueId, torch.Tensor], times: StepTimes | None = None) -> float:
        """The device's contribution to the loss. Raises the exception of a failed instruction or send."""
        self.device.begin(step, feeds)
        if self.captures is not None:
            self.captures.issued = None
        with torch.no_grad():
            self.streams.step(times)
        self.comm.settle()
        return self.device.end()


def _communicates(device: Device) -> bool:
    return any(
        isinstance(x, Send | Receive) or (isinstance(x, Collective) and len(device.groups[x.group].members) > 1)
        for x in device.plan.instructions
    )


class Worker:
    """A plain class: the driver turns it into an actor, so that this file does not need Ray."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        os.environ.update(environment or {})
        torch.set_num_threads(1)
        self.runs: dict[RunKey, DeviceRun] = {}
        self.active: DeviceRun | None = None
        self.meeting: TCPStore | None = None
        self.file: WeightFile | None = None
        """Of a model that this worker creates for all workers of its node."""
        self.model: tuple[Setup, Any] | None = None
        """That model, until this worker is set up."""
        self.loader: Loader | None = None
        """Where workers load batches themselves, and this one reads some of them."""
        self.writer = Writer()
        self.between_steps: list[Callable[[], None]] = []
        """Checks that `data` leaves as it is what the program reads."""
        self.recorded: list[StepTimes] = []
        self.recording: frozenset[int] | None = None

    def where(self) -> tuple[str, int, str]:
        return (*process(), socket.gethostname())

    def host(self, peer: str) -> str:
        """Open a rendezvous for workers that share no file system, at the address under which `peer` reaches this
        worker."""
        address = own_address(peer)
        self.meeting = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return f"{PORT}{address}:{self.meeting.port}"

    def create(self, packed: bytes) -> Created:
        """Create the model for all workers of this node, in a file."""
        self.close()
        setup = _loaded(packed)
        print_to(setup.output)
        self.file = WeightFile.new()
        model, created = create(self.file, setup.make_model, setup.seed, fingerprint)
        self.model = setup, model
        return created

    def abort(self) -> None:
        """End the communication that a step waits for: another worker is lost. The step fails."""
        for run in list(self.runs.values()):
            run.comm.abort()

    def created(self) -> None:
        """All workers of this node have their parts of the model."""
        if self.file is not None:
            self.file.close()
        self.file = None

    def setup(self, packed: bytes, created: Created | None = None) -> Started:
        """Create the model and keep this device's part of it. `created`: by a worker of this node."""
        if self.model is None:
            self.close()
        setup = self.model[0] if self.model is not None else _loaded(packed)
        rank = setup.ranks[setup.plan.device]
        print_to(setup.output)
        where = setup.backend.device.claim(rank)
        self.comm = setup.backend.join(self._met(setup, rank)).connected(setup.groups, setup.pairs, setup.streams)
        try:
            return self._keep(setup, rank, where, created)
        except BaseException:
            self.comm.close()  # the worker may be reused for another job
            raise

    def _met(self, setup: Setup, rank: int) -> Meeting:
        """The rendezvous: a file of this machine, or a port of one of the workers."""
        if not setup.store.startswith(PORT):
            store: Store = FileStore(setup.store, len(setup.ranks))
            return Meeting(rank, setup.ranks, store, setup.timeout, setup.digest, setup.secret)
        host, _, port = setup.store.removeprefix(PORT).rpartition(":")
        store = self.meeting or TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        interface = towards(host) or ""
        return Meeting(
            rank, setup.ranks, hidden(store, setup.secret), setup.timeout, setup.digest, setup.secret, interface
        )

    def _keep(self, setup: Setup, rank: int, where: torch.device, created: Created | None) -> Started:
        """Keeps the tensors of the model that this device needs."""
        if created is not None:
            with self._file(created) as file:
                model = self.model[1] if self.model else mapped(created, file, setup.make_model, setup.seed)
                self.model = None
                return self._keep_of(setup, rank, where, model, created.fingerprint, file)
        if setup.large and (setup.restore is not None or setup.weights is not None):
            model = build(setup.make_model, setup.seed).model
            digest = setup.weights.digest if setup.weights is not None else str(setup.restore)
            return self._keep_of(setup, rank, where, model, digest)
        seed_all(setup.seed)
        model = setup.make_model()
        return self._keep_of(setup, rank, where, model, fingerprint(model))

    @contextmanager
    def _file(self, created: Created) -> Iterator[WeightFile]:
        file = self.file or WeightFile(os.open(created.path, os.O_RDWR))
        try:
            with file.dropped():
                yield file
        finally:
            if file is not self.file:
                file.close()

    def _keep_of(
        self,
        setup: Setup,
        rank: int,
        where: torch.device,
        model: Any,
        started_from: str,
        file: WeightFile | None = None,
    ) -> Started:
        hold(model)
        weights: Mapping[str, torch.Tensor] = named_tensors(model) | setup.constants
        if file is not None:
            weights = Dropped(weights, file)
        elif setup.weights is not None:
            weights = InFiles(model, setup.weights, setup.constants)
        kept = None
        if setup.restore is not None:
            kept = restoring.kept(setup.plan, weights, setup.restore.reader, where)
            weights = restoring.Restored(weights, setup.restore.reader)
        self.rest_of_model = rest_of(model, weights, setup.known) if setup.known is not None else None
        # After the model, because stage programs call operators that it defines.
        pieces = pickle.loads(setup.pieces)
        operators = {one for piece in pieces if piece is not None for one in functions_of_operators(piece.module.graph)}
        if setup.compiles:
            pieces = compiled(pieces, setup.programs)
        device = Device(setup.plan, setup.programs, setup.groups, pieces, weights, self.comm, where, setup.seed, kept)
        device.optimizers = Optimizers(
            model, setup.optimizer, setup.lr_schedule, device.updates(), setup.masters, setup.updated, setup.ema
        )
        device.loss_dtype = getattr(torch, setup.loss_dtype)
        self._open_progress(setup.progress, rank)
        self.setting, self.steps = setup, 0
        if setup.restore is not None:
            self.steps = setup.restore.step
            restore(device.optimizers, setup.restore.reader, setup.restore.new_options)
        self.program_reads = _program_reads(setup, model)
        run = DeviceRun(device, self.comm, setup.backend.device, setup.streams, self._begun, setup.graphs)
        self.runs[TRAIN] = self.last = run
        setup.backend.device.keep_memory(True)
        self.operators_read = Frozen("an operator of the program", operators, (), None).plain()
        return Started(started_from, self.settings())

    def settings(self) -> Settings:
        """What the user's functions have decided in this process."""
        found = dict(self.runs[TRAIN].device.optimizers.settings())
        return found | {"": {**found.get("", {}), **self.operators_read}}

    def prepare(self, packed: bytes) -> Loaded | None:
        """Set up another plan on the same weights. If a batch is waiting for it here, what has been loaded."""
        key, layout, plan, programs, packed_pieces, groups, pairs, streams = pickle.loads(packed)
        trained, setup = self.runs[TRAIN].device, self.setting
        comm = self.comm.connected(groups, pairs, streams)
        pieces = pickle.loads(packed_pieces)
        if setup.compiles:
            pieces = compiled(pieces, programs)
        device = Device(plan, programs, groups, pieces, {}, comm, trained.where, setup.seed, trained.kept)
        device.optimizers, device.loss_dtype = trained.optimizers, trained.loss_dtype
        self.runs[key] = DeviceRun(device, comm, setup.backend.device, streams, self._begun, setup.graphs)
        if self.loader is None or self.loader.unplanned is None:
            return None
        self.loader.add(key, layout, plan.feeds)
        return self._coming()

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

    # ----------------------------------------------------------------------------------------------------- batches

    def start_loading(self, packed: bytes) -> Loaded:
        """From now on, batches are loaded here. Loads the first one."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own tree specs
                loading: Loading = pickle.loads(packed)
            line = line_of_function(loading.data)
            loss = unwrap(self.setting.loss) if self.setting.loss is not None else None
            reads = [(name, vars(sys.modules[module])) for name, module in loading.reads if module in sys.modules]
            frozen = Frozen(
                "the traced program",
                [loss] if loss is not None else [],
                (),
                line,
                names=[*reads, ("max_norm", getattr(unwrap(loading.data), "__globals__", {}))],
                environment=loading.environment,
            )
            kept = [WatchedModel(model.named_modules()) for model in refuse_use()]
            kept += [WatchedModel(loss.named_modules())] if isinstance(loss, nn.Module) else []
            self.between_steps = [frozen.check, *(partial(model.check, "between steps", line) for model in kept)]
            feeds = {key: run.device.plan.feeds for key, run in self.runs.items()}
            pins = self.setting.backend.device.name == "cuda"
            if self.setting.progress:
                keep_sockets_in(Path(self.setting.progress).parent)
            self.loader = Loader(loading, self.setting.plan.device, feeds, pins)
        except BaseException as problem:
            return Loaded(failed=failure_of(problem))
        return self.load()

    def stop_loading(self) -> None:
        if self.loader is not None:
            self.loader.close()
        self.loader = None

    def validate(self) -> None:
        """A validation begins."""
        if self.loader is not None:
            self.loader.validate()

    def load(self, mode: Mode = "train") -> Loaded:
        """Load the next batch."""
        assert self.loader is not None
        self.loader.load(mode)
        return self._coming()

    def unplanned(self) -> tuple[tuple[Any, Any], Slice | None]:
        """A batch that fits no plan, and which part of it that is."""
        assert self.loader is not None
        assert self.loader.unplanned is not None
        return self.loader.unplanned

    def _coming(self) -> Loaded:
        assert self.loader is not None
        found = self.loader.loaded()
        try:
            for check in self.between_steps:
                check()
        except PiperError as problem:
            return found if found.failed is not None else found._replace(failed=failure_of(problem))
        return found

    def _parts(self, feeds: Feeds) -> Parts:
        if not isinstance(feeds, LoadedHere):
            return feeds
        return self.loader.take(feeds.whole) if self.loader is not None else {}

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self, key: RunKey, feeds: Feeds, gradients: bool = False, ahead: bool = False) -> Report:
        """`ahead`: load the next batch while this step runs."""
        self.last = self.runs[key]
        self.last.device.last_gradients = {} if gradients else None
        optimizers = self.last.device.optimizers
        parts = self._parts(feeds)
        ahead = ahead and self.loader is not None
        if self.loader is not None and ahead:
            self.loader.load()
        report = self._run(key, parts)
        if report.failed is None:
            try:
                optimizers.advance(report.skipped)
                if self.program_reads is not None:
                    self._check_program()
                report = replace(report, settings=optimizers.passed_on)
            except KeyboardInterrupt:
                raise
            except BaseException as problem:
                return _failed(problem)
        self.steps += 1
        return replace(report, coming=self._coming()) if ahead and report.failed is None else report

    def _check_program(self) -> None:
        """What the program reads must stay as it is."""
        when, line = "when the optimizer or its schedule steps", None
        if self.loader is not None:
            when, line = f"{when}, or while a batch is loaded", line_of_function(self.loader.loading.data)
        assert self.program_reads is not None
        self.program_reads.check(when, line)

    def evaluate(self, key: RunKey, feeds: Feeds) -> Report:
        return self._run(key, self._parts(feeds))

    def _run(self, key: RunKey, feeds: Parts) -> Report:
        started = time.perf_counter()
        run = self.active = self.runs[key]
        chosen = self.recording if key == TRAIN else None
        times = StepTimes(len(run.device.plan.instructions), chosen) if chosen is not None else None
        try:
            loss = run.step(self.steps, feeds, times)
        except Failed as failure:
            return _failed(failure.cause, run.positions[id(failure.instruction)])
        except RuntimeError as problem:  # the receiver of a message is gone
            (at,) = struct.unpack_from("<i", self.progress, self.slot)
            return _failed(problem, at)
        self._begun(-1)
        device, memory = run.device, self.setting.backend.device.memory()
        norm = None if device.norm is None else float(device.norm)
        if times is not None:
            times.begun, times.ended = started, time.perf_counter()
            self.recorded.append(times)
        why, issued = "", None
        if run.captures is not None:
            why, issued = run.captures.refused, run.captures.issued
        return Report(
            loss,
            time.perf_counter() - started,
            memory,
            norm,
            device.skipped,
            not_captured=why,
            issued=None if issued is None else issued - started,
        )

    def record(self, chosen: Collection[int] | None) -> list[StepTimes]:
        """From now on these instructions of steps are recorded, or none any more. What was recorded so far."""
        self.setting.backend.device.synchronize()  # the step that comes begins with a device that has nothing to do
        found, self.recorded = self.recorded, []
        self.recording = frozenset(chosen) if chosen is not None else None
        return found

    def running(self) -> dict[str, int]:
        """The current instruction of each stream, for messages about another device."""
        return dict(self.active.streams.running) if self.active is not None else {}

    def weights(self) -> dict[ValueId, torch.Tensor]:
        return {key: value.cpu() for key, value in self.runs[TRAIN].device.kept.items()}

    def snapshot(self, given: tuple[Folder, Assigned]) -> None:
        """Copy what this worker saves of a checkpoint to host memory, and begin to write it."""
        folder, mine = given
        device = self.runs[TRAIN].device
        found = snapshot([device], device.optimizers, mine, self.rest_of_model, self.writer.room)
        self.writer.write(folder, mine, found)

    def check_state(self, mine: Assigned) -> None:
        device = self.runs[TRAIN].device
        check_state([device], device.optimizers, mine)

    def written(self) -> WrittenPart:
        """Wait for the file, while steps run."""
        return self.writer.written()

    def averages(self) -> list[WeightPart]:
        """Moving averages of the weights that are updated here."""
        return self.runs[TRAIN].device.optimizers.averaged()

    def optimizer_reads(self) -> tuple[str, ...]:
        """Names of the globals that a step of the optimizer reads."""
        return tuple(name for reads in self.runs[TRAIN].device.optimizers.reads for name, _ in reads.names)

    def rest(self) -> Rest | None:
        return self.rest_of_model

    def gradients(self) -> dict[ValueId, Any]:
        return {key: value.cpu() for key, value in (self.last.device.last_gradients or {}).items()}

    def measure(self, feeds: dict[ValueId, torch.Tensor]) -> tuple[float, Measured]:
        """Runs a step and measures its memory."""
        from piperlang.runtime.device.measure import measured

        run = self.runs[TRAIN]
        found = measured(run.device, run.comm.settle, self.steps, feeds)
        run.device.optimizers.advance()
        self.steps += 1
        return found

    def reset_peak(self) -> dict[str, int]:
        return self.setting.backend.device.reset_peak()

    def close(self) -> None:
        self.stop_loading()
        self.model, self.writer = None, Writer()
        self.created()
        for run in self.runs.values():
            run.streams.close()
        if self.runs:
            self.runs, self.active = {}, None
            self.comm.close()
            del self.last, self.comm
            gc.collect()  # connections of process groups end with the last reference, and runs refer to themselves
            self.setting.backend.device.keep_memory(False)


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
    with seeded(setup.seed):  # as in the driver
        _ = getattr(setup.make_model, "__wrapped__", None)  # runs the model file
    return setup


def _program_reads(setup: Setup, model: Any) -> Frozen | None:
    """Globals and class attributes that the traced program has read: only the optimizer and its schedule run here."""
    if setup.loss is None:
        return None
    classes = {type(module) for module in model.modules()}
    line = line_of_function(setup.optimizer)
    return Frozen("the traced program", [unwrap(setup.loss)], classes, line, library=TorchState(model))


def _failed(problem: BaseException, position: int = -1) -> Report:
    return Report(0.0, 0.0, 0, failed=failure_of(problem, position))


def process() -> tuple[str, int]:
    """The identity of this process: its system with the namespaces of processes and of the network, and its PID."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    system = boot.read_text().strip() if boot.exists() else socket.gethostname()
    spaces = [path.stat().st_ino for path in map(Path, ("/proc/self/ns/pid", "/proc/self/ns/net")) if path.exists()]
    return "/".join(map(str, (system, *spaces))), os.getpid()
