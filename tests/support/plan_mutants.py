"""Plans with one mistake: what a bug in the compiler, or a hand in the file, could do to them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from piperlang.plan.instruction import ROUTES, DevicePlan, Instruction, Plan

COLLECTIVE = ("exchange", *ROUTES, "all_reduce", "gather", "scatter", "reduce")
COMPUTE = ("F", "B", "I", "W", "R")


class Nothing(Exception):
    """The plan has nothing of the kind to change."""


class Mutant:
    """A copy of a plan that may be changed, and who changes it."""

    def __init__(self, plan: Plan, draw: random.Random) -> None:
        self.draw = draw
        devices = [
            replace(
                d,
                instructions=list(d.instructions),
                feeds=list(d.feeds),
                weights=dict(d.weights),
                next=dict(d.next),
                losses=dict(d.losses),
            )
            for d in plan.devices
        ]
        self.plan = replace(plan, devices=devices)

    def any(self, *names: str) -> tuple[DevicePlan, int, Instruction]:
        found = [
            (device, i, x)
            for device in self.plan.devices
            for i, x in enumerate(device.instructions)
            if not names or x.do in names
        ]
        if not found:
            raise Nothing
        return self.draw.choice(found)

    def change(self, device: DevicePlan, i: int, **fields: Any) -> None:
        device.instructions[i] = device.instructions[i]._replace(**fields)

    def args(self, *names: str) -> dict[str, Any]:
        """The arguments of an instruction, free to be changed."""
        device, i, x = self.any(*names)
        args: dict[str, Any] = copy.deepcopy(x.args)
        self.change(device, i, args=args)
        return args

    def pick(self, among: Any) -> Any:
        found = list(among)
        if not found:
            raise Nothing
        return self.draw.choice(found)


def _moved(device: DevicePlan, at: Callable[[int], int | None]) -> None:
    """Waits follow the instructions they are for."""
    for i, x in enumerate(device.instructions):
        device.instructions[i] = x._replace(waits=tuple(sorted(k for k in map(at, x.waits) if k is not None)))


def swap(m: Mutant) -> None:
    device, i, _ = m.any()
    if i + 1 == len(device.instructions):
        raise Nothing
    _moved(device, lambda k: {i: i + 1, i + 1: i}.get(k, k))
    device.instructions[i : i + 2] = device.instructions[i : i + 2][::-1]


def swap_in_stream(m: Mutant) -> None:
    """With the next one of the same stream."""
    device, i, x = m.any()
    later = next((k for k in range(i + 1, len(device.instructions)) if device.instructions[k].stream == x.stream), None)
    if later is None:
        raise Nothing
    _moved(device, lambda k: {i: later, later: i}.get(k, k))
    device.instructions[i], device.instructions[later] = device.instructions[later], device.instructions[i]


def swap_raw(m: Mutant) -> None:
    """Waits stay numbers, and are of others now."""
    device, i, _ = m.any()
    if i + 1 == len(device.instructions):
        raise Nothing
    device.instructions[i : i + 2] = device.instructions[i : i + 2][::-1]


def drop(m: Mutant) -> None:
    device, i, _ = m.any()
    del device.instructions[i]
    _moved(device, lambda k: None if k == i else k - (k > i))


def duplicate(m: Mutant) -> None:
    device, i, _x = m.any()
    _moved(device, lambda k: k + (k > i))
    device.instructions.insert(i + 1, device.instructions[i])


def tag(m: Mutant) -> None:
    parts = m.args("send", "recv")["parts"]
    k = m.pick(range(len(parts)))
    peer, number, box, shape = parts[k]
    parts[k] = peer, max(0, number + m.pick((-1, 1, 7))), box, shape


def peer(m: Mutant) -> None:
    parts = m.args("send", "recv")["parts"] if m.draw.random() < 0.5 else m.args("exchange")[m.pick(("give", "take"))]
    k = m.pick(range(len(parts)))
    parts[k] = m.pick(d.device for d in m.plan.devices if d.device != parts[k][0]), *parts[k][1:]


def group(m: Mutant) -> None:
    args = m.args(*COLLECTIVE)
    if m.draw.random() < 0.5 and "members" in args:
        m.draw.shuffle(args["members"])
    else:
        args["group"] = m.pick(g for g in range(len(m.plan.groups) + 1) if g != args["group"])


def _other_shape(m: Mutant, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > 1 and m.draw.random() < 0.3 and shape[0] != shape[1]:
        return (shape[1], shape[0], *shape[2:])
    k = m.pick(range(len(shape)))
    return (*shape[:k], max(0, shape[k] + m.pick((-1, 1))), *shape[k + 1 :])


def shape(m: Mutant) -> None:
    args = m.args("send", "recv", "copy", *COLLECTIVE)
    if "weights" in args:
        entry = m.pick(args["weights"])
        entry["shape"] = _other_shape(m, entry["shape"])
        return
    parts = args.get("parts") or args.get(m.pick(("give", "take")))
    if parts and (m.draw.random() < 0.6 or "shape" not in args):
        k = m.pick(range(len(parts)))
        parts[k] = *parts[k][:-1], _other_shape(m, parts[k][-1])
    else:
        args["shape"] = _other_shape(m, args["shape"])


def dtype(m: Mutant) -> None:
    args = m.args("send", "recv", "copy", *COLLECTIVE)
    args["dtype"] = m.pick(name for name in ("float64", "float16", "int64", "bool") if name != args["dtype"])


def experts(m: Mutant) -> None:
    args = m.args(*ROUTES)
    args["experts"] = m.pick(n for n in (0, 1, 2, 3, 8) if n != args["experts"])


def way(m: Mutant) -> None:
    """There instead of back, or back instead of there."""
    device, i, x = m.any("dispatch", "combine")
    m.change(device, i, do="combine" if x.do == "dispatch" else "dispatch")


def reduction(m: Mutant) -> None:
    m.args("all_reduce", "gather", "scatter", "reduce")["reduce"] = m.pick(("max", "mean", "avg"))


def _shifted(m: Mutant, interval: tuple[int, int]) -> tuple[int, int]:
    low, high = interval
    return m.pick(((low + 1, high), (low, high - 1), (low + 1, high + 1), (low - 1, high - 1), (low, high + 1)))


def cuts(m: Mutant) -> None:
    if m.draw.random() < 0.4:
        entry = m.pick(m.args("update")["weights"])
        which = m.pick(("take", "take_grad"))
        entry[which] = _shifted(m, entry[which] or (0, 4))
    else:
        entry = m.pick(m.args("gather", "scatter")["weights"])
        k = m.pick(range(len(entry["cuts"])))
        entry["cuts"][k] = _shifted(m, entry["cuts"][k])


def box(m: Mutant) -> None:
    """Shift a box, or exchange two."""
    args = m.args("send", "recv", "exchange", "copy", "all_reduce")
    lists = [args[name] for name in ("parts", "own", "give", "take") if args.get(name)]
    if args.get("keep") is not None and m.draw.random() < 0.5:
        dim = m.pick(range(len(args["keep"])))
        args["keep"] = (*args["keep"][:dim], _shifted(m, args["keep"][dim]), *args["keep"][dim + 1 :])
        return
    parts = m.pick(lists)
    places = [(k, place) for k, part in enumerate(parts) for place in range(len(part)) if _is_box(part[place])]
    k, place = m.pick(places)
    if m.draw.random() < 0.4:
        other = m.pick(j for j, at in places if j != k and at == place)
        one, two = parts[k][place], parts[other][place]
        parts[k] = (*parts[k][:place], two, *parts[k][place + 1 :])
        parts[other] = (*parts[other][:place], one, *parts[other][place + 1 :])
        if one == two:
            raise Nothing
        return
    whole = parts[k][place]
    dim = m.pick(range(len(whole)))
    low, high = whole[dim]
    shifted = (
        _shifted(m, (low, high))
        if m.draw.random() < 0.5
        else m.pick(((high, 2 * high - low), (low - (high - low), low)))
    )
    parts[k] = (*parts[k][:place], (*whole[:dim], shifted, *whole[dim + 1 :]), *parts[k][place + 1 :])


def _is_box(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)


def wait(m: Mutant) -> None:
    found = [(device, i) for device in m.plan.devices for i, x in enumerate(device.instructions) if x.waits]
    device, i = m.pick(found)
    waits = device.instructions[i].waits
    gone = m.pick(range(len(waits)))
    m.change(device, i, waits=waits[:gone] + waits[gone + 1 :])


def stream(m: Mutant) -> None:
    """On another stream of its device, with the waits it had."""
    device, i, x = m.any()
    m.change(device, i, stream=m.pick(sorted({y.stream for y in device.instructions} - {x.stream})))


def _rename(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _rename(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rename(item, old, new) for item in value)
    return new if value == old else value


def key(m: Mutant) -> None:
    """Another key, of this device or of none, in the reads or the writes; in the arguments too, or only there."""
    device, i, x = m.any()
    old = m.pick((*x.reads, *x.writes))
    known = sorted({k for y in device.instructions for k in (*y.reads, *y.writes)} | set(device.weights) - {old})
    alike = [k for k in known if k[:2] == old[:2] and k != old]
    new = (
        f"{old}?"
        if m.draw.random() < 0.2
        else m.pick(alike if alike and m.draw.random() < 0.7 else [k for k in known if k != old])
    )
    how = m.draw.random()
    if how < 0.8:
        m.change(device, i, args=_rename(x.args, old, new))
    if how > 0.2:
        side = "reads" if old in x.reads else "writes"
        m.change(device, i, **{side: _rename(getattr(x, side), old, new)})


def microbatch(m: Mutant) -> None:
    """The same value of another microbatch, wherever the instruction says it."""
    device, i, x = m.any()
    old = m.pick(k for k in x.reads if "#" in k)
    base = old.partition("#")[0]
    new = m.pick(
        sorted(
            {k for y in device.instructions for k in (*y.reads, *y.writes) if k.partition("#")[0] == base and k != old}
        )
    )
    m.change(device, i, reads=_rename(x.reads, old, new), args=_rename(x.args, old, new))


def piece(m: Mutant) -> None:
    """Another piece of the model, other samples, another share."""
    args = m.args(*COMPUTE)
    which = m.pick([name for name in ("kind", "first", "share") if name in args])
    if which == "kind":
        args["kind"] = m.pick(k for k in range(len(m.plan.kinds) + 1) if k != args["kind"])
    elif which == "first":
        args["first"] += m.pick((-2, -1, 1, 2))
    else:
        args["share"] = m.pick((0.0, 0.3, 2.0))


def share(m: Mutant) -> None:
    found = [(device, k) for device in m.plan.devices for k in device.losses]
    device, k = m.pick(found)
    if m.draw.random() < 0.5:
        del device.losses[k]
    else:
        device.losses[k] *= 2


def feed(m: Mutant) -> None:
    device = m.pick(d for d in m.plan.devices if d.feeds)
    k = m.pick(range(len(device.feeds)))
    name, tensor, where = device.feeds[k]
    if m.draw.random() < 0.3:
        del device.feeds[k]
        return
    low, high = where[0]
    device.feeds[k] = (
        name,
        tensor,
        (
            m.pick(
                (
                    (low + 1, high + 1),
                    (high, 2 * high - low),
                    (low, high + 1),
                    (low - 1, high - 1),
                    (low - (high - low), low),
                )
            ),
            *where[1:],
        ),
    )


def kept(m: Mutant) -> None:
    """What becomes of an updated weight."""
    device = m.pick(d for d in m.plan.devices if d.next)
    old = m.pick(device.next)
    if m.draw.random() < 0.4:
        del device.next[old]
        return
    device.next[old] = m.pick(
        sorted(
            {k for x in device.instructions for k in x.writes if k.startswith("w:") and k != device.next[old]} or {old}
        )
    )


MUTATIONS = (
    swap,
    swap_in_stream,
    swap_raw,
    drop,
    duplicate,
    tag,
    peer,
    group,
    shape,
    dtype,
    experts,
    way,
    reduction,
    cuts,
    box,
    wait,
    stream,
    key,
    key,
    microbatch,
    piece,
    share,
    feed,
    kept,
)


def mutate(plan: Plan, seed: int) -> tuple[Plan, str]:
    """A plan with one mistake, and the name of it."""
    draw = random.Random(seed)
    while True:
        mutation = draw.choice(MUTATIONS)
        mutant = Mutant(plan, draw)
        try:
            mutation(mutant)
        except Nothing:
            continue
        return mutant.plan, mutation.__name__
