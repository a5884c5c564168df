"""Passes of chunks: their inputs and outputs are what the stage program says.

Ids say which tensor a value is, of which chunk and of which microbatch. So it can be seen without a graph that the
passes of a chunk read the same tensors in every microbatch, and that all they read is of one microbatch."""

from __future__ import annotations

from piperlang.core.value_id import Kind, Point, ValueId
from piperlang.ir.model import Slot
from piperlang.plan.instructions import Compute
from piperlang.plan.plan import BUNDLES, StageProgram
from piperlang.plan.verify.report import At, Checked
from piperlang.plan.verify.samples import placed, samples_seen

CODE = "P0504"


def compute(checked: Checked) -> None:
    names = _Names(checked)
    seen: dict[int, tuple[At, Compute]] = {}
    programs, last = checked.plan.programs, checked.plan.samples
    plan = checked.plan
    shares = [program.samples / plan.samples if plan.combine == "mean" else 1.0 for program in programs]
    parts = [(program.samples, program.sharding[0]) for program in programs]
    firsts: list[list[int]] = [[] for _ in programs]
    for at, x in checked.each(Compute):
        number = x.program
        if not 0 <= number < len(programs):
            checked.wrong(CODE, f"a pass of program {number}, and there are {len(programs)}", at)
            continue
        other, theirs = seen.setdefault(x.node, (at, x))
        if other is at or theirs.inputs != x.inputs or theirs.outputs != x.outputs:
            checked.steps += len(x.reads) + len(x.writes)
            if _fits(checked, at, x, programs[number]):
                names.learn(at, x, programs[number])
            if other is not at:
                checked.wrong(CODE, "devices of one node do not read and write the same", other, at)
        if theirs.program != number or theirs.stream != x.stream:
            what = "stage programs" if theirs.program != number else "streams"
            checked.wrong(CODE, f"devices of one node run different {what}", other, at)
        elif other.device == at.device and other is not at:
            checked.wrong(CODE, "a device does the same twice", other, at)
        firsts[number].append(x.first_sample)
        samples, divides = parts[number]
        share = plan.share(x) if plan.weights else shares[number]  # there are as many as passes
        expected = share if x.loss_share is None else x.loss_share
        if not 0 <= x.first_sample <= last - samples or expected != share or divides or x.coordinates:
            placed(checked, at, x, programs[number], share)
    samples_seen(checked, firsts)


def _fits(checked: Checked, at: At, x: Compute, program: StageProgram) -> bool:
    """The right number of everything."""
    single = [slot for slot in program.outputs if slot[0] not in BUNDLES]
    least, most = (1, 1) if x.op == "R" else (len(single), len(single) + (x.op in ("F", "I")))
    if x.op != program.op:
        return _no(checked, f"{x.op} of a stage program that is a {program.op}", at)
    if len(x.inputs) != len(program.inputs):
        return _no(checked, f"{len(x.inputs)} inputs for {len(program.inputs)} slots", at)
    if not least <= len(x.outputs) <= most:
        return _no(checked, f"{len(x.outputs)} values are written, and a {x.op} has {least} outputs", at)
    slots = list(zip(program.inputs, x.inputs, strict=True))
    for name in ("weight", "input", "batch"):
        taken = [keys for slot, keys in slots if slot[0] == name]
        if len(set(taken)) < len(taken):
            return _no(checked, f"the same {name} is read twice", at)
    zeros = {zero.output for zero in x.zeros}
    for slot, keys in slots:
        supplied = slot[0] == "rng" or slot == ("grad_output", program.loss)
        if slot[0] != "grad_output" and len(keys) != (0 if supplied else 1):
            return _no(checked, f"{len(keys)} values for {_slot(slot)}", at)
        if slot[0] == "grad_output" and not keys and not supplied and slot[1] not in zeros:
            return _no(checked, f"no gradient for {_slot(slot)}", at)
        if slot[0] == "grad_output" and supplied and (keys or x.loss_share is None):
            return _no(checked, "the gradient of the loss is not what the pass starts from", at)
    return True


def _no(checked: Checked, message: str, at: At) -> bool:
    checked.wrong(CODE, message, at)
    return False


def _slot(slot: Slot) -> str:
    return f"{slot[0].replace('_', ' of ')} {slot[1]}"


class _Names:
    """What stands in each slot of each chunk, as the passes of all microbatches say."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.known: dict[tuple[int, str, int], tuple[object, At]] = {}
        self.makers: dict[ValueId, tuple[int, At]] = {}

    def learn(self, at: At, x: Compute, program: StageProgram) -> None:
        chunk, writes = program.chunk, x.outputs
        gives = [("saved", 0)] if x.op == "R" else [slot for slot in program.outputs if slot[0] not in BUNDLES]
        if len(writes) > len(gives):
            gives.append(("saved" if x.op == "F" else "kept", 0))
        point = writes[0].microbatch
        outputs = list(zip(gives, writes, strict=True))
        every = {"weight", *program.without_samples}
        for slot, keys in (*zip(program.inputs, x.inputs, strict=True), *((slot, (key,)) for slot, key in outputs)):
            for key in keys:
                self._one(at, chunk, slot, key)
                of_any = every.intersection((slot[0], (slot[0].removeprefix("grad_"), slot[1])))
                if not _overlap(key.microbatch, point) and not of_any:
                    self.checked.wrong(CODE, f"{key} is of another part of the batch than {writes[0]}", at)
        for slot, key in outputs:
            if slot[0] == "output":
                maker = self.makers.setdefault(key.every_microbatch, (chunk, at))
                if maker[0] != chunk:
                    self.checked.wrong(CODE, f"two chunks make {key.every_microbatch}", maker[1], at)

    def _one(self, at: At, chunk: int, slot: Slot, key: ValueId) -> None:
        said = _tensor(slot, key, chunk)
        if said is None:
            self.checked.wrong(CODE, f"{key} is no {_slot(slot)} of chunk {chunk}", at)
            return
        name, other = self.known.setdefault((chunk, slot[0].removeprefix("grad_"), slot[1]), (said, at))
        if name != said:
            self.checked.wrong(CODE, f"{_slot(slot)} of chunk {chunk} is {said} here and {name} elsewhere", other, at)


_SLOTS = {
    "weight": Kind.WEIGHT,
    "batch": Kind.BATCH,
    "saved": Kind.SAVED,
    "kept": Kind.RESIDUALS,
    "grad_weight": Kind.WEIGHT_GRADIENT,
    "grad_input": Kind.GRADIENT,
    "grad_output": Kind.GRADIENT,
}


def _tensor(slot: Slot, key: ValueId, chunk: int) -> object | None:
    """Which tensor of the model a value is, if it can be in the slot."""
    kind, i = slot
    made = key.origin
    if kind == "output" and made.kind is Kind.WEIGHT and key is made.updated:
        return Kind.WEIGHT, key.name  # the new value of a buffer
    if made.kind is not _SLOTS.get(kind, Kind.ACTIVATION):
        return None
    owned = {
        "weight": len(made.owner) == 1 or made.owner[1:] == (chunk,),
        "batch": made.owner == (chunk,),
        "saved": made.owner == (chunk,),
        "kept": made.owner == (chunk,),
        "grad_weight": made.owner == (chunk, i),
        "grad_input": made.owner == (chunk, i),
    }.get(kind, True)
    return key.name or kind if owned else None


def _overlap(a: Point | None, b: Point | None) -> bool:
    """Of the same microbatch, or one of a part of the other's."""
    return not a or not b or a[: len(b)] == b[: len(a)]
