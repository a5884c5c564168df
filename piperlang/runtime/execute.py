"""One device's instructions on real tensors: a flat interpreter that knows no strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piperlang.capture.differentiate import Piece
from piperlang.capture.random import mix
from piperlang.ir.graph import Key
from piperlang.plan.instruction import NORM, DevicePlan, Instruction
from piperlang.plan.sums import reads, sums, travels_alone
from piperlang.runtime.boxes import take
from piperlang.runtime.comm import Comm
from piperlang.runtime.optimize import Optimizers, Update, added
from piperlang.runtime.optimizer_copy import Part
from piperlang.runtime.ways import Way, leaving


class Device:
    """Values, weights and optimizer of one device, and what each instruction does to them."""

    def __init__(
        self,
        plan: DevicePlan,
        kinds: Sequence[Mapping[str, Any]],
        pieces: Sequence[Piece],
        weights: Mapping[str, torch.Tensor],
        comm: Comm | None,
        where: torch.device,
        seed: int,
        kept: dict[Key, torch.Tensor] | None = None,
    ) -> None:
        """`kept`: weights of another device's plan on the same process, to work on those."""
        self.plan, self.kinds, self.pieces, self.comm, self.where, self.seed = plan, kinds, pieces, comm, where, seed
        self.kept: dict[Key, torch.Tensor] = (
            kept
            if kept is not None
            else {key: self._part(weights[held["weight"]], held) for key, held in plan.weights.items()}
        )
        self.values: dict[Key, Any] = {}
        self.sums = sums(plan)
        self.reads = {id(instruction): reads(instruction, self.sums) for instruction in plan.instructions}
        """What each instruction reads, sums in place of their parts."""
        self.uses: dict[Key, int] = {}
        for keys in self.reads.values():
            for key in keys:
                self.uses[key] = self.uses.get(key, 0) + 1
        self.permanent = set(plan.next.values()) | set(plan.losses)
        self.before = {new: old for old, new in plan.next.items()}
        self.left: dict[Key, int] = {}
        self.last_gradients: dict[str, Any] | None = None
        self.run: dict[str, Callable[[Instruction], None]] = {
            name: getattr(self, f"_{name}") for name in _OPERATIONS
        } | dict.fromkeys("FBIWR", self._compute)

    optimizers: Optimizers
    """Of the process; only a plan with updates needs any."""

    def updates(self) -> list[Update]:
        """What each update instruction changes."""
        return [
            Update(
                self.plan.device, instruction.writes[0], [self._updated(entry) for entry in instruction.args["weights"]]
            )
            for instruction in self.plan.instructions
            if instruction.do == "update"
        ]

    def _updated(self, entry: Mapping[str, Any]) -> Part:
        held, now = self.plan.weights[entry["old"]], self.kept[entry["old"]]
        flat = held["flat"]
        if entry["take"] is not None:
            start = flat[0] if flat is not None else 0
            flat = start + entry["take"][0], start + entry["take"][1]
        return Part(entry["weight"], self._taken_weight(now, entry), held["box"], flat, entry["partial"])

    @staticmethod
    def _taken_weight(weight: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
        """The part of a kept weight that an update changes: a view."""
        return weight if entry["take"] is None else weight.view(-1)[slice(*entry["take"])]

    def _part(self, weight: torch.Tensor, held: Mapping[str, Any]) -> torch.Tensor:
        local = take(weight, held["box"])
        if held["flat"] is not None:
            low, high = held["flat"]
            local = local.flatten()[low:high]
        return local.detach().clone(memory_format=torch.contiguous_format).to(self.where)

    # --------------------------------------------------------------------------------------------------- a step

    def begin(self, step: int, feeds: dict[Key, torch.Tensor], count: float) -> None:
        """`feeds` is emptied: its parts go when nobody reads them any more, and whoever called must not keep them."""
        self.values = {**self.kept, **{key: value.to(self.where, non_blocking=True) for key, value in feeds.items()}}
        feeds.clear()
        self.left = dict(self.uses)
        self.step, self.count = step, count

    def end(self) -> float:
        """What this device's losses count for; keeps the new weights."""
        loss = sum(float(self.values[key]) * share / self.count for key, share in self.plan.losses.items())
        for old, new in self.plan.next.items():
            self.kept[old] = self.values[new]
        self.values = {}
        return loss

    def execute(self, instruction: Instruction) -> None:
        self.run[instruction.do](instruction)
        left = self.left
        for key in self.reads[id(instruction)]:
            remaining = left[key] = left[key] - 1
            if not remaining and key not in self.kept and key not in self.permanent:
                self.values.pop(key, None)

    # ------------------------------------------------------------------------------------------------- compute

    def _compute(self, instruction: Instruction) -> None:
        args = instruction.args
        kind = self.kinds[args["kind"]]
        piece = self.pieces[args["kind"]]
        given: dict[Any, Any] = {}
        for slot, keys in zip(kind["slots"], args["reads"], strict=True):
            name = slot[0]
            if name in ("saved", "kept"):
                given.update(self.values[keys[0]])
            elif name == "grad_output":
                given[slot] = self._gradient(slot[1], keys, args, kind)
            elif name == "rng":
                given[slot] = torch.tensor([mix(self.seed, self.step), args["first"], *args["at"]], device=self.where)
            else:
                given[slot] = self.values[keys[0]]
        taken = [given[slot] for slot in piece.takes]
        results = piece.call(taken)
        self._store(instruction, kind, dict(zip(piece.gives, results, strict=True)), (taken, results))

    def _store(self, instruction: Instruction, kind: Mapping[str, Any], gave: Mapping[Any, Any], around: Any) -> None:
        saved = {slot: value for slot, value in gave.items() if slot[0] == "saved"}
        kept = {slot: value for slot, value in gave.items() if slot[0] == "kept"}
        if kind["op"] == "R":
            written: list[Any] = [saved]
        else:
            written = [gave[slot] for slot in kind["gives"] if slot[0] not in ("saved", "kept")] + (
                [saved] if kind["op"] == "F" else [kept] if kept else []
            )
        for key, value in zip(instruction.writes, written, strict=False):
            self._put(key, value, around)

    def _put(self, key: Key, value: Any, around: Any = ()) -> None:
        """Keep a value for whoever reads it, if anybody does. `around`: what it may lie in together with others."""
        if key in self.sums:
            self._accumulate(self.sums[key], value, around)
        elif key in self.plan.losses:
            # Kept to the end of the step: torch may return a scalar as a view of a buffer as large as what was reduced.
            self.values[key] = value.clone()
        elif key in self.uses or key in self.permanent:
            self.values[key] = value

    def _accumulate(self, total: Key, value: torch.Tensor, around: Any) -> None:
        """Gradients of microbatches are added up as they come, in float32 where they are in half precision."""
        known = self.values.get(total)
        if known is None:
            # It must be ours alone to add to: two weights that are added up in the model have one gradient, and one
            # tensor for it.
            half = value.dtype in (torch.bfloat16, torch.float16)
            self.values[total] = value.to(torch.float32) if half else value.clone() if _shares(value, around) else value
        else:
            known += value

    def _total(self, keys: Sequence[Key]) -> torch.Tensor:
        """A gradient: what has been added up already, or its parts."""
        return self.values[self.sums[keys[0]]] if keys[0] in self.sums else added([self.values[key] for key in keys])

    def _gradient(
        self, output: int, keys: Sequence[Key], args: Mapping[str, Any], kind: Mapping[str, Any]
    ) -> torch.Tensor:
        if output == kind["loss"]:
            return torch.tensor(args["share"] / self.count, device=self.where, dtype=self.loss_dtype)
        if not keys:
            shape, dtype = args["zeros"][output]
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.where)
        total: torch.Tensor = self.values[keys[0]]
        for key in keys[1:]:
            total = total + self.values[key]
        return total

    loss_dtype = torch.float32

    # ------------------------------------------------------------------------------------------------- moving

    def _send(self, instruction: Instruction) -> None:
        args = instruction.args
        assert self.comm is not None
        value = (
            self.values[args["key"]] if args["key"] is not None else torch.ones(1, dtype=torch.uint8, device=self.where)
        )
        for device, tag, box, _ in args["parts"]:
            self.comm.send(device, tag, (value if box is None else take(value, box)).contiguous())

    def _recv(self, instruction: Instruction) -> None:
        args = instruction.args
        assert self.comm is not None
        out = torch.empty(args["shape"], dtype=getattr(torch, args["dtype"]), device=self.where)
        for device, tag, box, shape in args["parts"]:
            if box is None:
                self.comm.recv(device, tag, out)
            else:
                part = out.new_empty(shape)
                self.comm.recv(device, tag, part)
                take(out, box).copy_(part)
        self._put_own(out, args["own"])
        self._put(instruction.writes[0], out)

    def _put_own(self, out: torch.Tensor, own: Sequence[tuple[Key, Any, Any]]) -> None:
        for key, taken, put in own:
            take(out, put).copy_(take(self.values[key], taken))

    def _copy(self, instruction: Instruction) -> None:
        args = instruction.args
        out = torch.zeros(args["shape"], dtype=getattr(torch, args["dtype"]), device=self.where)
        self._put_own(out, args["own"])
        self._put(instruction.writes[0], out)

    def _all_reduce(self, instruction: Instruction) -> None:
        args = instruction.args
        assert self.comm is not None
        value = self.values[instruction.reads[0]].clone(memory_format=torch.contiguous_format)
        self.comm.all_reduce(args["group"], value)
        self._put(instruction.writes[0], value if args["keep"] is None else take(value, args["keep"]).contiguous())

    def _exchange(self, instruction: Instruction) -> None:
        args = instruction.args
        assert self.comm is not None
        value = self.values[instruction.reads[0]]
        members = args["members"]
        give = (
            torch.cat([take(value, box).reshape(-1) for _, box, _ in args["give"]])
            if args["give"]
            else value.new_empty(0)
        )
        sizes = [
            [sum(torch.Size(shape).numel() for peer, _, shape in args[side] if peer == member) for member in members]
            for side in ("give", "take")
        ]
        arrived = value.new_empty(sum(sizes[1]))
        self.comm.exchange(args["group"], give, sizes[0], arrived, sizes[1])
        out = value.new_empty(args["shape"])
        at = 0
        for _, box, shape in args["take"]:
            size = torch.Size(shape).numel()
            take(out, box).copy_(arrived[at : at + size].view(shape))
            at += size
        self._put(instruction.writes[0], out)

    # ------------------------------------------------------------------------------------------- rows and experts

    def _choose(self, instruction: Instruction) -> None:
        """Find the way to the experts that rows chose: everybody tells everybody how many come; and let the choices go
        it. On CUDA the host waits here, once for all that follows."""
        args, chosen = instruction.args, self.values[instruction.reads[0]]
        members = args["members"]
        parts = leaving(chosen, args["experts"], len(members))
        give = [len(part) for part in parts]
        told = chosen.new_tensor(give)
        counts = torch.empty_like(told)
        assert self.comm is not None
        self.comm.exchange(args["group"], told, [1] * len(members), counts, [1] * len(members))
        way = Way(torch.cat(parts), give, counts.tolist())
        first = members.index(self.plan.device) * (args["experts"] // len(members))
        self._put(instruction.writes[0], self._gone(args["group"], chosen[way.order], way.give, way.take) - first)
        self._put(instruction.writes[1], way)

    def _dispatch(self, instruction: Instruction) -> None:
        value, way = (self.values[key] for key in instruction.reads)
        self._put(instruction.writes[0], self._gone(instruction.args["group"], value[way.order], way.give, way.take))

    def _combine(self, instruction: Instruction) -> None:
        value, way = (self.values[key] for key in instruction.reads)
        back = self._gone(instruction.args["group"], value, way.take, way.give)
        self._put(instruction.writes[0], torch.empty_like(back).index_copy_(0, way.order, back))

    def _gone(self, group: int, rows: torch.Tensor, give: list[int], take: list[int]) -> torch.Tensor:
        """Rows, so many to each member, exchanged for so many from each."""
        assert self.comm is not None
        size = torch.Size(rows.shape[1:]).numel()
        arrived = rows.new_empty(sum(take), *rows.shape[1:])
        self.comm.exchange(
            group, rows.contiguous().view(-1), [size * n for n in give], arrived.view(-1), [size * n for n in take]
        )
        return arrived

    def _offload(self, instruction: Instruction) -> None:
        self.values[instruction.writes[0]] = {
            slot: _to(value, torch.device("cpu")) for slot, value in self.values[instruction.reads[0]].items()
        }

    def _fetch(self, instruction: Instruction) -> None:
        self.values[instruction.writes[0]] = {
            slot: _to(value, self.where) for slot, value in self.values[instruction.reads[0]].items()
        }

    # ------------------------------------------------------------------------------------------------ weights

    def _gather(self, instruction: Instruction) -> None:
        """Parts of weights to whole ones. A large weight in equal parts arrives where it stays; the others go together
        in one message."""
        args = instruction.args
        assert self.comm is not None
        alone, together = _apart(args["weights"])
        for entry in alone:
            part = self.values[entry["from"][0]]
            whole = self._again(entry["to"])
            if whole is None:
                whole = part.new_empty(entry["shape"])
            else:
                part = part.clone()  # it lies in the whole, and backends differ in what they allow there
            self.comm.gather_into(args["group"], whole.view(-1), part.view(-1))
            self.values[entry["to"]] = whole
        types = dict.fromkeys(
            self.values[entry["from"][0]].dtype for entry in together
        )  # a message is of one type: torch.cat would convert
        for dtype in types:
            self._gather_together(
                args["group"], [entry for entry in together if self.values[entry["from"][0]].dtype == dtype]
            )

    def _gather_together(self, group: int, together: Sequence[Mapping[str, Any]]) -> None:
        assert self.comm is not None
        sizes = [max(high - low for low, high in entry["cuts"]) for entry in together]
        mine = torch.cat(
            [
                _padded(self.values[entry["from"][0]].flatten(), size)
                for entry, size in zip(together, sizes, strict=True)
            ]
        )
        everyone = mine.new_empty(len(together[0]["cuts"]), mine.numel())
        self.comm.gather_into(group, everyone.view(-1), mine)
        start = 0
        for entry, size in zip(together, sizes, strict=True):
            pieces = [
                part[start : start + high - low] for part, (low, high) in zip(everyone, entry["cuts"], strict=True)
            ]
            whole = self._again(entry["to"])
            self.values[entry["to"]] = (
                torch.cat(pieces).view(entry["shape"])
                if whole is None
                else torch.cat(pieces, out=whole.view(-1)).view(entry["shape"])
            )
            start += size

    def _again(self, key: Key) -> torch.Tensor | None:
        """Where a weight lay before its update, if it is gathered to be kept: nobody reads the old one any more."""
        old = self.before.get(key)
        return None if old is None else self.values[old]

    def _scatter(self, instruction: Instruction) -> None:
        """Sums of gradients, each device its part. A large one in equal parts is sent as it lies; the others go
        together in one message."""
        args = instruction.args
        assert self.comm is not None
        me = args["members"].index(self.plan.device)
        alone, together = _apart(args["weights"])
        for entry in alone:
            total = self._total(entry["from"])
            low, high = entry["cuts"][me]
            mine = total.new_empty(high - low)
            self.comm.scatter_into(args["group"], mine, total.contiguous().view(-1))
            self._put(entry["to"], mine)
        if not together:
            return
        totals = [self._total(entry["from"]).flatten() for entry in together]
        sizes = [max(high - low for low, high in entry["cuts"]) for entry in together]
        parts = torch.cat(
            [
                _padded(total[slice(*entry["cuts"][r])], size)
                for r in range(len(together[0]["cuts"]))
                for entry, total, size in zip(together, totals, sizes, strict=True)
            ]
        )
        mine = parts.new_empty(sum(sizes))
        self.comm.scatter_into(args["group"], mine, parts)
        start = 0
        for entry, size in zip(together, sizes, strict=True):
            low, high = entry["cuts"][me]
            self._put(entry["to"], mine[start : start + high - low].clone())
            start += size

    def _reduce(self, instruction: Instruction) -> None:
        args = instruction.args
        assert self.comm is not None
        entries = args["weights"]
        totals = [self._total(entry["from"]) for entry in entries]
        flat = torch.cat([total.flatten() for total in totals])
        if args.get("share", 1.0) != 1.0:
            flat *= args["share"]
        self.comm.all_reduce(args["group"], flat)
        start = 0
        for entry, total in zip(entries, totals, strict=True):
            self.values[entry["to"]] = flat[start : start + total.numel()].view(total.shape)
            start += total.numel()

    def _norm(self, instruction: Instruction) -> None:
        """What to scale all gradients by, so that their norm is at most the limit; torch's own rule."""
        args = instruction.args
        assert self.comm is not None
        parts = [
            self._taken(self._total(entry["grads"]), entry["take_grad"]) for entry in args["weights"] if entry["counts"]
        ]
        squares = [
            torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)).double().square()
            for part in parts
        ]
        total = (
            torch.stack(squares).sum().view(1) if squares else torch.zeros(1, dtype=torch.float64, device=self.where)
        )
        self.comm.all_reduce(args["group"], total)
        self.values[NORM] = (args["limit"] / (total.sqrt() + 1e-6)).clamp(max=1.0)

    @staticmethod
    def _taken(gradient: torch.Tensor, cut: Sequence[int] | None) -> torch.Tensor:
        return gradient if cut is None else gradient.flatten()[slice(*cut)]

    def _update(self, instruction: Instruction) -> None:
        """In place: the plan lets nobody read the old weights any more."""
        scale = self.values[NORM] if NORM in instruction.reads else None
        entries = instruction.args["weights"]
        weights, gradients = [], []
        for entry in entries:
            gradient = self._total(entry["grads"])
            if self.last_gradients is not None:
                self.last_gradients[entry["old"]] = gradient.detach().clone()
            weights.append(self._taken_weight(self.values[entry["old"]], entry))
            gradient = self._taken(gradient, entry["take_grad"])
            gradients.append(gradient if scale is None else gradient * scale.to(gradient.dtype))
        self.optimizers.update(self.plan.device, instruction.writes[0], weights, gradients)
        for entry, weight in zip(entries, weights, strict=True):
            self.values[entry["new"]] = weight


_OPERATIONS = (
    "send",
    "recv",
    "copy",
    "all_reduce",
    "exchange",
    "choose",
    "dispatch",
    "combine",
    "offload",
    "fetch",
    "gather",
    "scatter",
    "reduce",
    "norm",
    "update",
)


def _apart(entries: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Weights that travel alone, and those that travel together."""
    alone = [entry for entry in entries if travels_alone(entry)]
    return alone, [entry for entry in entries if not travels_alone(entry)]


def _shares(value: torch.Tensor, around: Any) -> bool:
    """Whether others among the tensors around it lie in the same storage."""
    storage = value.untyped_storage().data_ptr()
    return (
        sum(
            one.untyped_storage().data_ptr() == storage
            for one in pytree.tree_leaves(around)
            if isinstance(one, torch.Tensor)
        )
        > 1
    )


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])


def _to(value: Any, where: torch.device) -> Any:
    """Activations may be tuples of tensors."""
    if isinstance(value, tuple | list):
        return [_to(part, where) for part in value]
    return value.to(where)
