"""A plan on real workers: set up once, a call a step, one clear error when something goes wrong, nothing left
behind."""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from piperlang.capture.differentiate import Piece, Pieces
from piperlang.capture.user_code import said
from piperlang.capture.where import line_of_function
from piperlang.diagnostics import error
from piperlang.ir.model import Arrangement
from piperlang.plan.check import check
from piperlang.plan.instruction import DevicePlan, Plan
from piperlang.runtime.assemble import assembled, known_to
from piperlang.runtime.boxes import take
from piperlang.runtime.cluster import Cluster, Lost, pack
from piperlang.runtime.failure import Failure, failed
from piperlang.runtime.optimize import updated_weights
from piperlang.runtime.options_only import what_steps_read_elsewhere
from piperlang.runtime.worker import Setup


class Captured(Protocol):
    @property
    def batch_names(self) -> Sequence[str]: ...

    @property
    def constants(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]: ...

    def flatten(self, batch: tuple[Any, Any]) -> list[torch.Tensor]: ...

    def check_state(self) -> None: ...

    def count(self, batch: Sequence[torch.Tensor]) -> float: ...

    def pieces(self, chunk: int, samples: int, arranged: Arrangement = ((), ())) -> Pieces: ...


@dataclass(frozen=True)
class Training:
    """What to train, besides the plan: functions that every worker calls for itself."""

    make_model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    lr_schedule: Callable[[Any], Any] | None = None
    seed: int = 0
    masters: bool = False
    """Keep float32 masters of weights in half precision. Plain training does not, so it is asked for."""
    loss: Callable[[Any, Any], Any] | None = None
    """For workers, where the optimizer or its schedule may change what it reads."""


@dataclass(frozen=True)
class Step:
    loss: float
    seconds: float
    memory: int
    """Of the worker that has most."""


class Routine:
    """A plan, and what its workers get for it: pieces once, parts of a batch every time."""

    def __init__(self, plan: Plan, captured: Captured) -> None:
        self.plan, self.captured = plan, captured
        self.packed: dict[tuple[int, ...], bytes] = {}

    def pairs(self) -> list[tuple[int, int]]:
        """Who sends to whom."""
        return sorted(
            {
                (device.device, part[0])
                for device in self.plan.devices
                for i in device.instructions
                if i.do == "send"
                for part in i.args["parts"]
            }
        )

    def pieces(self, device: DevicePlan) -> bytes:
        """The pieces that a device runs, at their places in the plan's list of kinds."""
        kinds = tuple(sorted({i.args["kind"] for i in device.instructions if "kind" in i.args}))
        if kinds not in self.packed:
            found: list[Piece | None] = [None] * len(self.plan.kinds)
            for i in kinds:
                found[i] = self._piece(i)
            buffer = io.BytesIO()
            pickle.dump(found, buffer)
            self.packed[kinds] = buffer.getvalue()
        return self.packed[kinds]

    def piece(self, worker: int, position: int) -> Piece | None:
        """What an instruction runs, as it is here: a piece that has travelled has forgotten the lines that its
        operators come from."""
        args = self.plan.devices[worker].instructions[position].args if position >= 0 else {}
        return self._piece(args["kind"]) if "kind" in args else None

    def _piece(self, number: int) -> Piece | None:
        kind = self.plan.kinds[number]
        pieces = self.captured.pieces(kind["chunk"], kind["samples"], kind["arranged"])
        piece: Piece | None = getattr(pieces, "F" if kind["op"] == "R" else kind["op"])
        return piece

    def feeds(self, batch: tuple[Any, Any]) -> tuple[float, list[dict[str, torch.Tensor]]]:
        """What the losses of a batch are divided by, and every device's part of the batch."""
        flat = self.captured.flatten(batch)
        named = dict(zip(self.captured.batch_names, flat, strict=True))
        # Copies: a view would travel with all of the batch that it is a view of.
        return self.captured.count(flat), [
            {key: take(named[name], box).clone() for key, name, box in device.feeds} for device in self.plan.devices
        ]


class Job:
    def __init__(
        self,
        plan: Plan,
        captured: Captured,
        training: Training,
        digest: str = "",
        address: str | None = None,
        timeout: float = 300.0,
        loss_dtype: str = "float32",
        cluster: Cluster | None = None,
        cuda: bool | None = None,
        compiles: bool | None = None,
    ) -> None:
        """`cluster`: workers that are there already, and stay when the job ends. CUDA is used where it is, and chunks
        are compiled there."""
        self.plan, self.captured = plan, captured
        self.training = self.active = Routine(plan, captured)
        self.evaluation: Routine | None = None
        self.cuda = torch.cuda.is_available() if cuda is None else cuda
        self.compiles = self.cuda if compiles is None else compiles
        if self.cuda:
            check(plan, buffered=False)  # NCCL's sends wait for their receives, and know no tags
        self.borrowed = cluster is not None
        self.ending: threading.Thread | None = None
        self.progress: BinaryIO | None = None
        self.cluster = cluster or Cluster(len(plan.devices), address, self.cuda)
        try:
            self._set_up(training, digest, timeout, loss_dtype)
        except BaseException:
            if not self.borrowed:
                self.cluster.close()
            raise

    def _set_up(self, training: Training, digest: str, timeout: float, loss_dtype: str) -> None:
        progress = self._open_progress() if self.cluster.local else ""
        meeting = self.cluster.meeting()
        ranks = {device.device: rank for rank, device in enumerate(self.plan.devices)}
        updated = updated_weights(self.plan)
        packed: list[bytes] = []
        for device in self.plan.devices:
            setup = Setup(
                device,
                self.plan.kinds,
                self.training.pieces(device),
                self.plan.groups,
                ranks,
                meeting,
                progress,
                digest,
                training.seed,
                timeout,
                loss_dtype,
                self.training.pairs(),
                self.cuda,
                self.compiles,
                training.masters,
                training.make_model,
                training.optimizer,
                training.lr_schedule,
                training.loss,
                updated,
                dict(self.captured.constants),
                known_to(self.plan, self.captured.aliases) if not packed else None,
            )
            packed.append(_packed(setup))
        try:
            models = self.cluster.each("setup", packed)
        except Lost as lost:
            raise error(
                "P0602",
                f"device {self.plan.devices[lost.worker].device} died while it was set up",
                help="is there enough memory for the model on every worker?",
            ) from None
        other = next((i for i, model in enumerate(models) if model != models[0]), None)
        if other is not None:
            raise error(
                "P0607",
                f"devices {self.plan.devices[0].device} and {self.plan.devices[other].device} start from different"
                " weights",
                line_of_function(training.make_model),
                "called in every worker, after seeding torch, `random` and NumPy",
                help="let `model()` draw from these generators only, or give its own a seed",
            )
        (names,) = self.cluster.wait([self.cluster.call(0, "optimizer_reads")])
        self.optimizer_reads = what_steps_read_elsewhere(names, training.optimizer)

    def _open_progress(self) -> str:
        """A file in which every worker says which instruction it is at, read when it cannot say so any more."""
        path = Path(tempfile.mkdtemp(dir=self.cluster.folder)) / "progress"
        path.write_bytes(struct.pack("<i", -1) * len(self.plan.devices))
        self.progress = path.open("rb")
        return str(path)

    def prepare(self, plan: Plan, captured: Captured) -> None:
        """Take a plan for evaluation: forwards on the weights that are trained."""
        if self.cuda:
            check(plan, buffered=False, forward=True)
        self.evaluation = Routine(plan, captured)
        pairs = self.evaluation.pairs()
        packed = [
            pack((device, plan.kinds, self.evaluation.pieces(device), plan.groups, pairs)) for device in plan.devices
        ]
        self.cluster.each("prepare", packed)

    # --------------------------------------------------------------------------------------------------- steps

    def step(self, batch: tuple[Any, Any], gradients: bool = False) -> Step:
        return self.finish(self.begin(batch, gradients))

    def begin(self, batch: tuple[Any, Any], gradients: bool = False) -> list[Any]:
        """Start a step; the caller may prepare the next batch meanwhile."""
        self.captured.check_state()
        self.optimizer_reads.check()
        self.active = self.training
        count, feeds = self.training.feeds(batch)
        return [self.cluster.call(i, "step", feed, count, gradients) for i, feed in enumerate(feeds)]

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """The loss of a batch, by the plan that was prepared."""
        assert self.evaluation is not None, "prepare a plan for evaluation first"
        self.active = self.evaluation
        count, feeds = self.evaluation.feeds(batch)
        return self.finish([self.cluster.call(i, "evaluate", feed, count) for i, feed in enumerate(feeds)]).loss

    def measure(self, batch: tuple[Any, Any]) -> list[Any]:
        """A step, slowly, and what it took of memory on every device (runtime/measure.py)."""
        self.active = self.training
        count, feeds = self.training.feeds(batch)
        return [
            measured
            for _, measured in self.cluster.wait(
                [self.cluster.call(i, "measure", feed, count) for i, feed in enumerate(feeds)]
            )
        ]

    def finish(self, futures: list[Any]) -> Step:
        try:
            reports, hung = self.cluster.watch(futures)
        except Lost as lost:
            raise self._gone("P0602", "died", lost.worker) from None
        if hung is not None:
            raise self._gone("P0603", "does not answer", hung)
        for i, report in enumerate(reports):
            if report is not None and report.failed is not None:
                # The neighbour of a worker that died often notices first: its connection breaks.
                dead = self.cluster.dead()
                raise self._gone("P0602", "died", dead[0]) if dead else self._failed(i, report.failed)
        return Step(sum(r.loss for r in reports), max(r.seconds for r in reports), max(r.memory for r in reports))

    def _gone(self, code: str, what: str, worker: int) -> Exception:
        """One error that says who, at what, asked for by which line, and what the others were waiting for."""
        notes = self._situation(worker, self._last(worker))
        self._end()
        died, stuck = (
            "look for a lack of memory (dmesg), or who killed it",
            "its process is stopped or stuck: look at it with a debugger",
        )
        help = died if code == "P0602" else stuck
        return error(code, f"device {self.plan.devices[worker].device} {what}", notes=notes[:9], help=help)

    def _failed(self, worker: int, failure: Failure) -> Exception:
        """The same for an instruction that raised, with the user's line behind it."""
        notes = self._situation(worker, failure.position)
        self._end()
        return failed(
            f"device {self.plan.devices[worker].device}", failure, self.active.piece(worker, failure.position), notes
        )

    def _situation(self, worker: int, at: int | None) -> list[str]:
        """What a worker was at, and what the others were waiting for."""
        notes = []
        if at is not None:
            notes.append(f"it was at {self._named(worker, at)}" if at >= 0 else "it was between two steps")
        for other, streams in self.cluster.ask(
            "running", [i for i in range(len(self.plan.devices)) if i != worker], 0.3
        ).items():
            waiting = [self._named(other, i) for i in streams.values()][:1]
            notes += [f"device {self.plan.devices[other].device} was at {name}" for name in waiting]
        return notes

    def _end(self) -> None:
        """Workers end at once; Ray takes longer to leave, and the error need not wait for it."""
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
        plan = self.active.plan
        instruction = plan.devices[worker].instructions[at]
        line = plan.lines[instruction.node]
        return f"{instruction.do} of {plan.names[instruction.node]}" + (f" ({line})" if line else "")

    @property
    def alive(self) -> bool:
        """Whether the workers are still there: they are ended when one of them fails."""
        return self.ending is None

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, whole, as they are now."""
        (rest,) = self.cluster.wait([self.cluster.call(0, "rest")])
        whole: dict[str, torch.Tensor] = rest.complete(
            assembled(self.plan, self.cluster.each("weights", count=len(self.plan.devices)), self.captured.aliases)
        )
        return whole

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return self.cluster.each("gradients", count=len(self.plan.devices))

    def close(self) -> None:
        """Workers leave in order if they can, and are ended if not."""
        if self.ending is not None:
            self.ending.join()
            return
        try:
            self.cluster.wait(
                [self.cluster.call(i, "close") for i in range(len(self.plan.devices))],
                timeout=30.0 if self.borrowed else 2.0,
            )
        except Exception:  # whatever they say now: they are ended next
            self.borrowed = False
        if self.progress is not None:
            self.progress.close()
        if not self.borrowed:
            self.cluster.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
                "define it at the top of a module, and let it use no open file, lock, generator or other object of this"
                " process"
            ),
        ) from problem
