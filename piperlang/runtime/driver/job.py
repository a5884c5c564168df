"""A plan on real workers: set up once, one call per step, one clear error if something fails, and no processes or files
left behind."""

from __future__ import annotations

import dataclasses
import io
import pickle
import secrets
import struct
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from piperlang.capture.autodiff.pass_graph import PassGraph, TracedModel
from piperlang.capture.user.seeding import GeneratorStates
from piperlang.capture.user.user_code import said
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.plan.instructions import Compute, Send, Update
from piperlang.plan.plan import DevicePlan, Pair, Plan
from piperlang.plan.verify import check
from piperlang.progress.events import Notice, emit
from piperlang.runtime.box import take
from piperlang.runtime.checkpoint.files import Folder
from piperlang.runtime.checkpoint.manifest import MANIFEST
from piperlang.runtime.comm.process_group import ProcessBackend
from piperlang.runtime.comm.registry import for_workers
from piperlang.runtime.device.failure import Failure, failed
from piperlang.runtime.driver import initial
from piperlang.runtime.driver.assemble import Rest, assembled, known_to
from piperlang.runtime.driver.cluster import Cluster, Patience, pack
from piperlang.runtime.driver.loading import Feeds, Loaded, LoadedHere, Loading
from piperlang.runtime.driver.output import last_lines, output_file
from piperlang.runtime.driver.processes import KILLED
from piperlang.runtime.driver.restoring import Restore
from piperlang.runtime.driver.saving import WrittenPart, assigned
from piperlang.runtime.driver.shapes import TRAIN, Mode, OtherShapes, PlansByShape, RunKey
from piperlang.runtime.driver.training import CUT, DIED, Lost, StepResult, Training, piece_of
from piperlang.runtime.driver.worker import WHOLE_STEP, Setup, Started
from piperlang.runtime.driver.worker_batches import WorkerBatches
from piperlang.runtime.hardware.kind import StepTimes
from piperlang.runtime.optimizer.average import no_averages, set_averages
from piperlang.runtime.optimizer.optimize import updated_weights
from piperlang.runtime.optimizer.options_only import what_steps_read_elsewhere
from piperlang.runtime.optimizer.settings import Settings, difference


class WorkerInputs:
    """A plan, and what its workers receive for it: stage programs once, parts of the batch in every step."""

    def __init__(self, plan: Plan, captured: TracedModel) -> None:
        self.plan, self.captured = plan, captured
        self.packed: dict[tuple[int, ...], bytes] = {}

    def pairs(self) -> list[Pair]:
        """Those of all sends."""
        return sorted(
            {
                Pair(device.device, message.peer, self.plan.resources(i.stream))
                for device in self.plan.devices
                for i in device.instructions
                if isinstance(i, Send)
                for message in i.messages
            },
            key=lambda pair: (pair.source, pair.target, str(pair.resources)),
        )

    def pass_graphs(self, device: DevicePlan) -> bytes:
        """The stage programs that a device runs, at their indices in the plan's list of programs."""
        numbers = tuple(sorted({i.program for i in device.instructions if isinstance(i, Compute)}))
        if numbers not in self.packed:
            found: list[PassGraph | None] = [None] * len(self.plan.programs)
            for i in numbers:
                found[i] = piece_of(self.captured, self.plan.programs[i])
            buffer = io.BytesIO()
            pickle.dump(found, buffer)
            self.packed[numbers] = buffer.getvalue()
        return self.packed[numbers]

    def piece(self, worker: int, position: int) -> PassGraph | None:
        """The driver's copy of the stage program that an instruction runs: a pickled graph loses the source lines of
        its operators."""
        instruction = self.plan.devices[worker].instructions[position] if position >= 0 else None
        if not isinstance(instruction, Compute):
            return None
        return piece_of(self.captured, self.plan.programs[instruction.program])

    def feeds(self, batch: tuple[Any, Any]) -> list[dict[ValueId, torch.Tensor]]:
        """Every device's part of the batch."""
        named = self.captured.layout.named(batch)
        # Copies: a view would be sent with the whole batch that it is a view of.
        return [
            {key: take(named[name], box).clone() for key, name, box in device.feeds} for device in self.plan.devices
        ]


class Job:
    def __init__(
        self,
        plan: Plan,
        captured: TracedModel,
        training: Training,
        digest: str = "",
        address: str | None = None,
        timeout: float = 300.0,
        loss_dtype: str = "float32",
        cluster: Cluster | None = None,
        backend: ProcessBackend | None = None,
        compiles: bool | None = None,
        others: OtherShapes | None = None,
        patience: Patience | None = None,
        output: Path | None = None,
        graphs: bool | None = None,
    ) -> None:
        """`output`: the folder for what workers print; by default it ends with the job.
        `cluster`: existing workers, which stay when the job ends, with their backend. `compiles`: whether stage
        programs are compiled, and `graphs`: whether steps are graphs of the device; by default, where the device
        suggests it. `others`: how batches of other shapes are
        planned."""
        self.plan, self.captured = plan, captured
        self.training = self.active = WorkerInputs(plan, captured)
        self.shapes = PlansByShape(others, self._prepared)
        self.shapes.plans[TRAIN] = self.training
        self.sets_options = training.lr_schedule or training.optimizer
        self.batches: WorkerBatches | None = None
        """Where workers load batches themselves."""
        self.backend = cluster.backend if cluster is not None else backend or for_workers()
        self.compiles = self.backend.device.compiles if compiles is None else compiles
        self.graphs = self.backend.device.graphs if graphs is None else graphs
        self.not_captured: set[str] = set()
        """Why some steps are no graphs: said once."""
        if not self.backend.buffered:
            check(plan, buffered=False)
        self.borrowed, self.averages = cluster is not None, training.ema is not None
        self.ending: threading.Thread | None = None
        self.restartable, self.lost, self.replaced = False, False, list[int]()
        """Whether a lost worker ends the job; and whether one is lost, and the job waits to be started again."""
        self.complete = True
        """All workers are set up, or none is yet."""
        self.set_up_with = training, digest, timeout, loss_dtype
        self.progress: BinaryIO | None = None
        self.cluster = cluster or Cluster(len(plan.devices), address, self.backend, patience)
        self.output = output or Path(tempfile.mkdtemp(dir=self.cluster.folder))
        try:
            self.cluster.check_files(_read_by_workers(training))
            self._set_up(training, digest, timeout, loss_dtype)
        except BaseException:
            if not self.borrowed:
                self.cluster.close()
            raise

    def _set_up(self, training: Training, digest: str, timeout: float, loss_dtype: str) -> None:
        """Raises Lost if a worker is lost when the job starts again; at its first start that is an error."""
        try:
            self._set_up_workers(training, digest, timeout, loss_dtype)
        except Lost as lost:
            if not self.complete:
                raise
            raise self._told(lost, " during setup", []) from None

    def _set_up_workers(self, training: Training, digest: str, timeout: float, loss_dtype: str) -> None:
        progress = self._open_progress() if self.cluster.local else ""
        meeting, secret = self.cluster.meeting(), secrets.token_hex(32)
        ranks = {device.device: rank for rank, device in enumerate(self.plan.devices)}
        updated = updated_weights(self.plan)
        packed: list[bytes] = []
        for device in self.plan.devices:
            setup = Setup(
                device,
                self.plan.programs,
                self.training.pass_graphs(device),
                self.plan.groups,
                ranks,
                meeting,
                secret,
                progress,
                str(output_file(self.output, ranks[device.device])),
                digest,
                training.seed,
                timeout,
                loss_dtype,
                self.training.pairs(),
                self.plan.streams,
                self.backend,
                self.compiles,
                self.graphs,
                training.masters,
                training.make_model,
                training.optimizer,
                training.lr_schedule,
                training.loss,
                training.ema,
                updated,
                dict(self.captured.constants),
                known_to(self.plan, self.captured.aliases) if not packed else None,
                training.weights if self._large else None,
                training.restore,
                self._large,
            )
            packed.append(_packed(setup))
        started = self._setups(packed, stored=training.weights is not None or training.restore is not None)
        other = next((i for i, one in enumerate(started) if one.weights != started[0].weights), None)
        if other is not None:
            raise error(
                "P0607",
                f"devices {self.plan.devices[0].device} and {self.plan.devices[other].device} have different initial"
                " weights",
                line_of_function(training.make_model),
                "called in every worker, after seeding torch, `random` and NumPy",
                help="draw random numbers in `model()` only from these generators, or seed your own generator",
            )
        self._compare([one.settings for one in started], training.optimizer)
        (names,) = self.cluster.wait([self.cluster.call(0, "optimizer_reads")])
        self.optimizer_reads = what_steps_read_elsewhere(names, training.optimizer)

    @property
    def _large(self) -> bool:
        return self.captured.weight_bytes > initial.LARGE

    def _setups(self, packed: Sequence[bytes], stored: bool) -> list[Started]:
        """Sets up all workers. A large model is created once per node, unless its weights are `stored` in files."""
        call, wait = self.cluster.call, self.cluster.wait
        if not self._large or stored:
            return wait([call(i, "setup", one) for i, one in enumerate(packed)])
        nodes = [node for node, *_ in self.cluster.each("where", count=len(packed))]
        builders = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
        made = wait([call(i, "create", packed[i]) for i in builders.values()])
        created = dict(zip(builders, made, strict=True))
        started = wait([call(i, "setup", one, created[nodes[i]]) for i, one in enumerate(packed)])
        wait([call(i, "created") for i in builders.values()])
        return started

    def _open_progress(self) -> str:
        """A file in which every worker records its current instruction, read when the worker does not respond any
        more."""
        path = Path(tempfile.mkdtemp(dir=self.cluster.folder)) / "progress"
        path.write_bytes(struct.pack("<i", -1) * len(self.plan.devices))
        self.progress = path.open("rb")
        return str(path)

    def _prepared(self, key: RunKey, plan: Plan, captured: TracedModel) -> WorkerInputs:
        """Sets up another plan on the weights that are trained: of evaluation, or for batches of another shape."""
        if not self.backend.buffered:
            check(plan, buffered=False, forward=key.mode == "evaluate")
        inputs = WorkerInputs(plan, captured)
        batches, pairs = self.batches, inputs.pairs()
        for i, device in enumerate(plan.devices):
            if batches is not None and device.feeds and i not in batches.devices:
                raise error(
                    "P0801",
                    f"device {device.device} reads parts of a batch, but of no batch before it, so it loads none",
                    notes=[f"the batch has shape {captured.layout.written_shapes}"],
                    help="begin with the largest batch, or load batches in the driver: `--data driver`",
                )
        layout = captured.layout if batches is not None else None
        packed = [
            pack((key, layout, device, plan.programs, inputs.pass_graphs(device), plan.groups, pairs, plan.streams))
            for device in plan.devices
        ]
        loaded = [one for one in self.cluster.each("prepare", packed) if one is not None]
        if batches is not None and loaded:
            batches.compared_or_raised(loaded)
        return inputs

    # ------------------------------------------------------------------------------------------------- batches

    def load(self, loading: Loading, first: tuple[Any, Any], generators: GeneratorStates) -> Loaded | None:
        """From now on, workers load their batches themselves. None if they have loaded `first`, and generators have
        these states; otherwise what a worker has loaded, or why it has loaded nothing, and batches are still passed to
        `begin`."""
        plans = [one.plan for one in self.shapes.plans.values()]
        reading = {
            i: device.device
            for i, device in enumerate(self.plan.devices)
            if any(plan.devices[i].feeds for plan in plans)
        }
        batches = WorkerBatches(self.cluster, reading, loading)
        other = batches.start(first, generators)
        if other is None:
            self.batches = batches
        else:
            batches.stop()
        return other

    def _run_of_loaded(self, mode: Mode) -> RunKey:
        """The plan of the batch that workers have loaded."""
        assert self.batches is not None
        assert self.batches.coming is not None
        return self.batches.coming.run or self.shapes.fitting(mode, self.batches.unplanned())

    def has_loaded(self, batch: tuple[Any, Any]) -> bool:
        """Whether the parts that workers have loaded are parts of this batch."""
        assert self.batches is not None
        return self.batches.has_loaded(batch)

    def load_next(self) -> None:
        """Load the next batch. Raises what the user's code raises."""
        assert self.batches is not None
        self.batches.next()

    def validate(self) -> Iterator[float]:
        """The losses of the validation batches that workers load."""
        assert self.batches is not None
        self.cluster.each("validate", count=len(self.plan.devices))
        while not self.batches.next("evaluate").ended:
            yield self.finish(self._call_loaded("evaluate", self._run_of_loaded("evaluate"))).loss

    def pass_validation(self) -> None:
        """Loads the validation batches, and does not use them."""
        assert self.batches is not None
        self.cluster.each("validate", count=len(self.plan.devices))
        while not self.batches.next("evaluate").ended:
            pass

    # --------------------------------------------------------------------------------------------------- steps

    def _call(self, method: str, key: RunKey, feeds: Sequence[Feeds], *given: Any) -> list[Any]:
        """Start a step of one plan on all workers."""
        self.active = self.shapes[key]
        return [self.cluster.call(i, method, key, part, *given) for i, part in enumerate(feeds)]

    def _call_loaded(self, method: str, key: RunKey, *given: Any) -> list[Any]:
        """The same on the batch that they have loaded."""
        assert self.batches is not None
        loaded = LoadedHere(self.batches.whole_values(self.shapes[key].captured.layout))
        return self._call(method, key, [loaded] * len(self.plan.devices), *given)

    def step(self, batch: tuple[Any, Any], gradients: bool = False) -> StepResult:
        return self.finish(self.begin(batch, gradients))

    def begin_loaded(self, ahead: bool) -> list[Any]:
        """Start a step on the batch that workers have loaded. `ahead`: they load the next one meanwhile."""
        self._check_reads()
        return self._call_loaded("step", self._run_of_loaded("train"), False, ahead)

    def begin(self, batch: tuple[Any, Any], gradients: bool = False) -> list[Any]:
        """Start a step; the caller may prepare the next batch meanwhile."""
        self._check_reads()
        key = self.shapes.fitting("train", batch)
        return self._call("step", key, self.shapes[key].feeds(batch), gradients)

    def _check_reads(self) -> None:
        """Code that runs between steps must leave what the program and the optimizer read as it is."""
        for _, one in self.shapes.of("train"):
            one.captured.check_state()
        self.optimizer_reads.check()

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """The loss of a batch in evaluation mode."""
        key = self.shapes.fitting("evaluate", batch)
        return self.finish(self._call("evaluate", key, self.shapes[key].feeds(batch))).loss

    def measure(self, batch: tuple[Any, Any]) -> list[Any]:
        """Runs a slow step and returns its memory use on every device (device/measure.py)."""
        self.active = self.training
        feeds = self.training.feeds(batch)
        return [
            measured
            for _, measured in self.cluster.wait(
                [self.cluster.call(i, "measure", feed) for i, feed in enumerate(feeds)]
            )
        ]

    def record(self, chosen: Sequence[Collection[int]] | None) -> list[list[StepTimes]]:
        """From now on these instructions of every device are recorded, or none any more. The steps that were recorded
        so far, by device."""
        return self.cluster.each("record", chosen if chosen is not None else [None] * len(self.plan.devices))

    def finish(self, calls: list[Any]) -> StepResult:
        try:
            reports = self.cluster.wait(calls, enough=lambda report: report.failed is not None)
        except Lost as lost:
            raise self.gone(lost) from None
        except PiperError:  # Ray is gone
            self._end()
            raise
        for i, report in enumerate(reports):
            if report is not None and report.failed is not None:
                cause = self.cluster.cause() or self._cut_off(i, report.failed)
                raise self.gone(cause) if cause is not None else self._failed(i, report.failed)
        if len({report.settings for report in reports if report.settings}) > 1:
            self._compare(self.cluster.each("settings", count=len(self.plan.devices)), self.sets_options)
        result = StepResult(
            sum(r.loss for r in reports),
            max(r.seconds for r in reports),
            max(r.memory for r in reports),
            self.active.plan.counted,
            next((r.norm for r in reports if r.norm is not None), None),
            any(r.skipped for r in reports),
            issued=None if any(r.issued is None for r in reports) else max(r.issued for r in reports),
        )
        for why in {report.not_captured for report in reports} - {""} - self.not_captured:
            self.not_captured.add(why)
            emit(Notice(f"steps are issued one instruction at a time, not as one CUDA graph: {why}"))
        coming = [report.coming for report in reports if report.coming is not None]
        if coming:
            assert self.batches is not None
            loaded, problem = self.batches.compared(coming)
            result = replace(result, waited=loaded.waited, problem=problem)
        return result

    def _compare(self, settings: Sequence[Settings], by: Callable[..., Any]) -> None:
        """What the user's functions have decided must be the same in all workers."""
        for i, its in enumerate(settings):
            found = difference(settings[0], its)
            if found is not None:
                what, here, there = found
                first, other = self.plan.devices[0].device, self.plan.devices[i].device
                raise error(
                    "P0607",
                    f"devices {first} and {other} differ in {what}: {here} and {there}",
                    line_of_function(by),
                    "called in every worker",
                    help=(
                        "compute it from what is the same in every process: give a generator a seed, read a variable"
                        " of the environment, or write the number into the model file"
                    ),
                )

    def gone(self, lost: Lost) -> PiperError:
        """One error with the device, its instruction, the script line behind it, and what the other devices were
        waiting for."""
        worker = lost.worker
        notes = self._situation(worker, self._last(worker)) if self.complete else ["the job was starting again"]
        self._lose()
        return self._told(lost, "", notes[:8])

    def _told(self, lost: Lost, when: str, notes: Sequence[str]) -> PiperError:
        code, help = (
            ("P0602", KILLED)
            if lost.how == DIED
            else ("P0603", "its process is stopped or stuck: inspect it with a debugger")
        )
        if lost.why and "SIGKILL" not in lost.why and lost.how == DIED:
            help = f"what it printed is in {output_file(self.output, lost.worker)}"
        if lost.machine or lost.how == CUT:
            help = "look at the network, and at that machine; `ray status` lists the nodes of the cluster"
        notes = [lost.why, *notes] if lost.why else list(notes)
        said = last_lines(output_file(self.output, lost.worker))
        if said:
            notes += ["the last lines that it printed:", *said]
        return error(code, f"device {self._device(lost.worker)} {lost.how}{when}", notes=notes, help=help)

    def _device(self, worker: int) -> int:
        """A cluster that is borrowed may have more workers than the plan has devices."""
        return self.plan.devices[worker].device if worker < len(self.plan.devices) else worker

    def _lose(self) -> None:
        """A worker is gone."""
        if self.restartable:
            self.lost = True
        else:
            self._end()

    def _cut_off(self, worker: int, failure: Failure) -> Lost | None:
        """Communication that fails while all workers are alive: between machines, connections break."""
        instructions = self.active.plan.devices[worker].instructions
        at = failure.position
        computes = at == -1 or (at != WHOLE_STEP and isinstance(instructions[at], Compute | Update))
        if self.cluster.local or computes or failure.diagnostics:
            return None
        return Lost(worker, CUT, failure.said)

    def _failed(self, worker: int, failure: Failure) -> Exception:
        """The same for an instruction that raised, with the line of the user's code."""
        notes = self._situation(worker, failure.position)
        self._end()
        return failed(
            f"device {self.plan.devices[worker].device}", failure, self.active.piece(worker, failure.position), notes
        )

    def _situation(self, worker: int, at: int | None) -> list[str]:
        """The current instruction of a worker, and what the others were waiting for."""
        notes = []
        if at is not None:
            notes.append(f"it was running {self._named(worker, at)}" if at != -1 else "it was between two steps")
        for other, streams in self.cluster.ask(
            "running", [i for i in range(len(self.plan.devices)) if i != worker], 0.3
        ).items():
            waiting = [self._named(other, i) for i in streams.values()][:1]
            notes += [f"device {self.plan.devices[other].device} was running {name}" for name in waiting]
        return notes

    def halt(self) -> None:
        """After a worker was lost: the others end what they do. If some were not even set up, all are lost: they may
        wait for each other where nothing can end it."""
        if not self.complete:
            self.cluster.kill()
        self.replaced = self.cluster.halt()

    def restart(self, restore: Restore | None) -> None:
        """Starts again, after `halt`, from a checkpoint or from the beginning. Workers that are left stay. Raises Lost
        if one is lost meanwhile."""
        training, digest, timeout, loss_dtype = self.set_up_with
        self.complete = False
        self.cluster.replace(self.replaced)
        if self.progress is not None:
            self.progress.close()
        self.batches = None
        self._set_up(dataclasses.replace(training, restore=restore), digest, timeout, loss_dtype)
        for key, inputs in list(self.shapes.plans.items()):
            if key != TRAIN:
                self.shapes.plans[key] = self._prepared(key, inputs.plan, inputs.captured)
        self.complete, self.lost = True, False

    def _end(self) -> None:
        """Kill the workers now. Shutting down Ray takes longer, and the error does not wait for it."""
        self.cluster.kill()
        self.ending = threading.Thread(target=self.cluster.close)
        self.ending.start()

    def _last(self, worker: int) -> int | None:
        if self.progress is None:
            return None
        self.progress.seek(4 * worker)
        (at,) = struct.unpack("<i", self.progress.read(4))
        return int(at)

    def _named(self, worker: int, at: int) -> str:
        if at == WHOLE_STEP:
            return "its step as one CUDA graph: --no-cuda-graphs names the instruction"
        plan = self.active.plan
        instruction = plan.devices[worker].instructions[at]
        return f"{instruction.op} of {plan.nodes[instruction.node]}"

    @property
    def alive(self) -> bool:
        """Whether the workers are still there: they are ended when one of them fails."""
        return self.ending is None and not self.lost

    def weights(self, averaged: bool = False) -> dict[str, torch.Tensor]:
        """All weights, unsharded, as they are now, or their moving averages."""
        if averaged and not self.averages:
            raise no_averages()
        count = len(self.plan.devices)
        (rest,) = self.cluster.wait([self.cluster.call(0, "rest")])
        whole = assembled(self.plan, self.cluster.each("weights", count=count), self.captured.aliases)
        if averaged:
            for parts in self.cluster.each("averages", count=count):
                set_averages(whole, parts)
        found: dict[str, torch.Tensor] = rest.complete(whole)
        return found

    def check_state(self) -> None:
        """Raises P0610 if the state of training cannot be saved."""
        self.cluster.each("check_state", assigned(self.plan, self.captured.unsaved))

    def check_folder(self, folder: Path) -> None:
        """Raises P0615 if workers cannot write checkpoints of the run into its folder, because they are elsewhere."""
        if not self.cluster.local:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as file:
                self.cluster.check_files([Path(file.name)], meant=folder)

    def snapshot(self, folder: Folder) -> None:
        """Copies the state of training to the memory of the workers, which write it into the folder."""
        mine = assigned(self.plan, self.captured.unsaved)
        self.cluster.each("snapshot", [(folder, one) for one in mine])

    def written(self) -> list[WrittenPart]:
        """Waits for the files. Steps may run meanwhile."""
        return self.cluster.each("written", count=len(self.plan.devices))

    def model_entries(self) -> Rest:
        (rest,) = self.cluster.wait([self.cluster.call(0, "rest")])
        assert isinstance(rest, Rest)
        return rest

    def gradients(self) -> list[dict[ValueId, torch.Tensor]]:
        return self.cluster.each("gradients", count=len(self.plan.devices))

    def close(self) -> None:
        """Shut down the workers if they respond, and kill them otherwise."""
        if self.ending is not None:
            self.ending.join()
            return
        try:
            self.cluster.wait(
                [self.cluster.call(i, "close") for i in range(len(self.plan.devices))],
                timeout=30.0 if self.borrowed else 2.0,
            )
        except Exception:  # errors do not matter here: the workers are ended next
            self.borrowed = False
        if self.progress is not None:
            self.progress.close()
        if not self.borrowed:
            self.cluster.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_by_workers(training: Training) -> list[Path]:
    """Files that every node must have."""
    found = list(training.weights.files) if training.weights is not None else []
    if training.restore is not None and isinstance(training.restore.folder, Path):
        found.append(training.restore.folder / MANIFEST)
    return found


def _packed(setup: Setup) -> bytes:
    try:
        return pack(setup)
    except Exception as problem:
        if setup.loss is not None:  # needed for a check only, and the driver has it already
            return _packed(replace(setup, loss=None))
        for name, function in (
            ("model", setup.make_model),
            ("optimizer", setup.optimizer),
            ("lr_schedule", setup.lr_schedule),
        ):
            _refuse_unpackable(name, function, problem)
        raise


def _refuse_unpackable(name: str, function: Any, problem: Exception) -> None:
    try:
        pack(function)
    except Exception:
        raise error(
            "P0801",
            f"`{name}` cannot be sent to workers",
            line_of_function(function),
            notes=[said(problem)],
            help=(
                "define it at module level, without references to open files, locks, generators or other objects of"
                " this process"
            ),
        ) from problem
