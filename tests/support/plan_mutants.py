"""Plans with one mistake: what a bug in the compiler, or a hand in the file, could do to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Combine,
    Compute,
    Copy,
    Dispatch,
    GatherParameters,
    ParameterUpdate,
    Receive,
    Routing,
    ScatterGradients,
    Send,
    ShardCollective,
    Update,
)
from piperlang.plan.plan import DevicePlan, Plan

MOVES = (Send, Receive, Copy, AllToAll, Routing, AllReduce, ShardCollective)
"""Instructions with a dtype and shapes."""


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

    def any(self, *kinds: type[Any]) -> tuple[DevicePlan, int, Any]:
        found = [
            (device, i, x)
            for device in self.plan.devices
            for i, x in enumerate(device.instructions)
            if not kinds or isinstance(x, kinds)
        ]
        if not found:
            raise Nothing
        return self.draw.choice(found)

    def change(self, device: DevicePlan, i: int, **fields: Any) -> None:
        device.instructions[i] = replace(device.instructions[i], **fields)

    def item(self, device: DevicePlan, i: int, name: str, make: Callable[[Any], Any]) -> None:
        """Change one record of a tuple of records."""
        records = list(getattr(device.instructions[i], name))
        k = self.pick(range(len(records)))
        records[k] = make(records[k])
        self.change(device, i, **{name: tuple(records)})

    def pick(self, among: Any) -> Any:
        found = list(among)
        if not found:
            raise Nothing
        return self.draw.choice(found)


def _moved(device: DevicePlan, at: Callable[[int], int | None]) -> None:
    """Waits follow the instructions they are for."""
    for i, x in enumerate(device.instructions):
        device.instructions[i] = replace(x, waits=tuple(sorted(k for k in map(at, x.waits) if k is not None)))


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
    device, i, _ = m.any(Send, Receive)
    m.item(device, i, "messages", lambda one: one._replace(tag=max(0, one.tag + m.pick((-1, 1, 7)))))


def peer(m: Mutant) -> None:
    device, i, x = m.any(Send, Receive) if m.draw.random() < 0.5 else m.any(AllToAll)
    name = m.pick(("give", "take")) if isinstance(x, AllToAll) else "messages"
    numbers = [d.device for d in m.plan.devices]
    m.item(device, i, name, lambda one: one._replace(peer=m.pick(n for n in numbers if n != one.peer)))


def group(m: Mutant) -> None:
    device, i, x = m.any(AllToAll, Routing, AllReduce, ShardCollective)
    m.change(device, i, group=m.pick(g for g in range(len(m.plan.groups) + 1) if g != x.group))


def _other_shape(m: Mutant, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > 1 and m.draw.random() < 0.3 and shape[0] != shape[1]:
        return (shape[1], shape[0], *shape[2:])
    k = m.pick(range(len(shape)))
    return (*shape[:k], max(0, shape[k] + m.pick((-1, 1))), *shape[k + 1 :])


def shape(m: Mutant) -> None:
    device, i, x = m.any(*MOVES)
    records = [name for name in ("shards", "messages", "give", "take") if getattr(x, name, ())]
    if records and (m.draw.random() < 0.6 or not hasattr(x, "shape")):
        m.item(device, i, m.pick(records), lambda one: one._replace(shape=_other_shape(m, one.shape)))
    elif hasattr(x, "shape"):
        m.change(device, i, shape=_other_shape(m, x.shape))
    else:
        raise Nothing


def dtype(m: Mutant) -> None:
    device, i, x = m.any(*MOVES)
    m.change(device, i, dtype=m.pick(name for name in ("float64", "float16", "int64", "bool") if name != x.dtype))


def experts(m: Mutant) -> None:
    device, i, x = m.any(Routing)
    m.change(device, i, experts=m.pick(n for n in (0, 1, 2, 3, 8) if n != x.experts))


def way(m: Mutant) -> None:
    """Combine instead of dispatch, or the other way round."""
    device, i, x = m.any(Dispatch, Combine)
    every = {one.name: getattr(x, one.name) for one in fields(x) if one.init}
    device.instructions[i] = (Combine if isinstance(x, Dispatch) else Dispatch)(**every)


def _shifted(m: Mutant, interval: tuple[int, int]) -> tuple[int, int]:
    low, high = interval
    return m.pick(((low + 1, high), (low, high - 1), (low + 1, high + 1), (low - 1, high - 1), (low, high + 1)))


def cuts(m: Mutant) -> None:
    if m.draw.random() < 0.4:
        device, i, _ = m.any(Update)
        which = m.pick(("part", "gradient_part"))

        def shifted(one: ParameterUpdate) -> ParameterUpdate:
            return one._replace(**{which: _shifted(m, getattr(one, which) or (0, 4))})

        m.item(device, i, "parameters", shifted)
    else:
        device, i, _ = m.any(GatherParameters, ScatterGradients)
        m.item(device, i, "shards", lambda one: one._replace(cuts=_one_of(m, one.cuts, lambda cut: _shifted(m, cut))))


def _one_of(m: Mutant, items: tuple[Any, ...], make: Callable[[Any], Any]) -> tuple[Any, ...]:
    k = m.pick(range(len(items)))
    return (*items[:k], make(items[k]), *items[k + 1 :])


def box(m: Mutant) -> None:
    """Shift a box, or exchange two."""
    device, i, x = m.any(Send, Receive, AllToAll, Copy, AllReduce)
    if getattr(x, "keep", None) is not None and m.draw.random() < 0.5:
        m.change(device, i, keep=_one_of(m, x.keep, lambda interval: _shifted(m, interval)))
        return
    name = m.pick(name for name in ("messages", "local", "copies", "give", "take") if getattr(x, name, ()))
    records = list(getattr(x, name))
    places = [(k, field) for k, one in enumerate(records) for field in one._fields if _is_box(getattr(one, field))]
    k, field = m.pick(places)
    whole = getattr(records[k], field)
    if m.draw.random() < 0.4:
        other = m.pick(j for j, at in places if j != k and at == field)
        theirs = getattr(records[other], field)
        if whole == theirs:
            raise Nothing
        records[k] = records[k]._replace(**{field: theirs})
        records[other] = records[other]._replace(**{field: whole})
    else:
        records[k] = records[k]._replace(**{field: _one_of(m, whole, lambda one: _moved_interval(m, one))})
    m.change(device, i, **{name: tuple(records)})


def _moved_interval(m: Mutant, interval: tuple[int, int]) -> tuple[int, int]:
    low, high = interval
    if m.draw.random() < 0.5:
        return _shifted(m, interval)
    return m.pick(((high, 2 * high - low), (low - (high - low), low)))


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


def _renamed(value: Any, old: ValueId, new: ValueId) -> Any:
    if isinstance(value, tuple):
        items = [_renamed(item, old, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return new if value == old else value


def _rename(m: Mutant, device: DevicePlan, i: int, old: ValueId, new: ValueId) -> None:
    x = device.instructions[i]
    names = [one.name for one in fields(x) if one.init and one.name not in ("stream", "node", "waits")]
    m.change(device, i, **{name: _renamed(getattr(x, name), old, new) for name in names})


def key(m: Mutant) -> None:
    """Another key, of this device or of none, wherever the instruction says it."""
    device, i, x = m.any()
    old = m.pick((*x.reads, *x.writes))
    known = sorted({k for y in device.instructions for k in (*y.reads, *y.writes)} | set(device.weights) - {old})
    alike = [k for k in known if k.kind is old.kind and k != old]
    new = (
        old.changed("!unknown")
        if m.draw.random() < 0.2
        else m.pick(alike if alike and m.draw.random() < 0.7 else [k for k in known if k != old])
    )
    _rename(m, device, i, old, new)


def microbatch(m: Mutant) -> None:
    """The same value of another microbatch, wherever the instruction says it."""
    device, i, x = m.any()
    old = m.pick(k for k in x.reads if k.microbatch is not None)
    known = {k for y in device.instructions for k in (*y.reads, *y.writes)}
    _rename(
        m, device, i, old, m.pick(sorted(k for k in known if k.every_microbatch is old.every_microbatch and k != old))
    )


def piece(m: Mutant) -> None:
    """Another stage program, other samples, another share."""
    device, i, x = m.any(Compute)
    which = m.pick(("program", "first_sample", *(("loss_share",) if x.loss_share is not None else ())))
    if which == "program":
        m.change(device, i, program=m.pick(k for k in range(len(m.plan.programs) + 1) if k != x.program))
    elif which == "first_sample":
        m.change(device, i, first_sample=x.first_sample + m.pick((-2, -1, 1, 2)))
    else:
        m.change(device, i, loss_share=m.pick((0.0, 0.3, 2.0)))


def share(m: Mutant) -> None:
    found = [(device, k) for device in m.plan.devices for k in device.losses]
    device, k = m.pick(found)
    if m.draw.random() < 0.5:
        del device.losses[k]
    else:
        device.losses[k] *= 2


def feed(m: Mutant) -> None:
    found = [(d, k) for d in m.plan.devices for k, fed in enumerate(d.feeds) if fed.box]  # a number has no box to move
    device, k = m.pick(found)
    fed = device.feeds[k]
    if m.draw.random() < 0.3:
        del device.feeds[k]
        return
    low, high = fed.box[0]
    moved = (
        (low + 1, high + 1),
        (high, 2 * high - low),
        (low, high + 1),
        (low - 1, high - 1),
        (low - (high - low), low),
    )
    device.feeds[k] = fed._replace(box=(m.pick(moved), *fed.box[1:]))


def kept(m: Mutant) -> None:
    """What becomes of an updated weight."""
    device = m.pick(d for d in m.plan.devices if d.next)
    old = m.pick(device.next)
    if m.draw.random() < 0.4:
        del device.next[old]
        return
    weights = {k for x in device.instructions for k in x.writes if k.kind is Kind.WEIGHT}
    device.next[old] = m.pick(sorted(weights - {device.next[old]} or {old}))


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
