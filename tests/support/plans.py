"""Large plans without a model: one-forward-one-backward over stages and replicas, as the compiler would lower it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import (
    Backward,
    Forward,
    Instruction,
    Message,
    ParameterUpdate,
    Receive,
    ReduceGradients,
    Send,
    Shards,
    Update,
)
from piperlang.plan.plan import DevicePlan, Feed, Group, ParameterShard, Plan, PlanNode, StageProgram

WIDTH = 64
WEIGHTS = 4


def pipeline(stages: int, replicas: int, microbatches: int) -> Plan:
    """Stage s of replica r is device s * replicas + r; gradients are added up over replicas."""
    return _Pipeline(stages, replicas, microbatches).plan()


class _Pipeline:
    def __init__(self, stages: int, replicas: int, microbatches: int) -> None:
        self.stages, self.replicas, self.micro = stages, replicas, microbatches
        self.samples = replicas * microbatches
        self.nodes: dict[str, int] = {}
        self.programs = [program for s in range(stages) for program in self._programs(s)]

    def plan(self) -> Plan:
        devices = [self._device(s, r) for s in range(self.stages) for r in range(self.replicas)]
        groups = [Group(tuple(s * self.replicas + r for r in range(self.replicas)), "comm") for s in range(self.stages)]
        return Plan(
            devices,
            self.programs,
            [PlanNode(name, f"large.piper:{3 + number % 7}", ()) for name, number in self.nodes.items()],
            self.samples,
            "mean",
            (),
            groups,
        )

    def _programs(self, s: int) -> tuple[StageProgram, StageProgram]:
        weights = tuple(("weight", i) for i in range(WEIGHTS))
        given = (("batch", 0),) if s in (0, self.stages - 1) else ()
        inputs = (("input", 0),) if s else ()
        loss = 0 if s == self.stages - 1 else None
        gradients = tuple(("grad_weight", i) for i in range(WEIGHTS)) + ((("grad_input", 0),) if s else ())
        backward = (*weights[:2], ("grad_output", 0), ("saved", 0))
        return (
            StageProgram("F", s, 1, ((), ()), weights + given + inputs, (("output", 0), ("saved", 0)), loss, False),
            StageProgram("B", s, 1, ((), ()), backward, gradients, loss, False),
        )

    def _node(self, name: str) -> int:
        return self.nodes.setdefault(name, len(self.nodes))

    def _device(self, s: int, r: int) -> DevicePlan:
        device = DevicePlan(s * self.replicas + r)
        self.at: dict[ValueId, int] = {}
        for w in range(WEIGHTS):
            box = ((0, WIDTH), (0, WIDTH))
            device.weights[_weight(s, w)] = ParameterShard(f"layers.{s}.{w}", box, None, r == 0)
            device.next[_weight(s, w)] = _weight(s, w).updated
        warm = min(self.stages - s - 1, self.micro)
        for m in range(warm):
            self._forward(device, s, r, m)
        for m in range(self.micro - warm):
            self._forward(device, s, r, warm + m)
            self._backward(device, s, r, m)
        for m in range(self.micro - warm, self.micro):
            self._backward(device, s, r, m)
        self._update(device, s)
        return device

    def _emit(self, device: DevicePlan, make: type[Instruction], stream: str, name: str, **fields: Any) -> None:
        x = make(stream, self._node(name), (), **fields)
        done = [self.at[key] for key in x.reads if key in self.at]
        waits = tuple(sorted({i for i in done if device.instructions[i].stream != stream}))
        for key in x.writes:
            self.at[key] = len(device.instructions)
        device.instructions.append(replace(x, waits=waits))

    def _send(self, device: DevicePlan, s: int, m: int, key: ValueId, target: int, tag: int) -> None:
        messages = (Message(target, tag, None, (1, WIDTH)),)
        name = f"send[stage={s}, mb={m}] of {key.kind.value}"
        self._emit(device, Send, "comm>", name, value=key, messages=messages, dtype="float32")

    def _recv(self, device: DevicePlan, s: int, m: int, key: ValueId, source: int, tag: int) -> None:
        self._emit(
            device,
            Receive,
            f"comm<{source}",
            f"recv[stage={s}, mb={m}] of {key.kind.value}",
            target=key,
            messages=(Message(source, tag, None, (1, WIDTH)),),
            local=(),
            shape=(1, WIDTH),
            dtype="float32",
        )

    def _forward(self, device: DevicePlan, s: int, r: int, m: int) -> None:
        me, sample = device.device, m * self.replicas + r
        keys = [_weight(s, w) for w in range(WEIGHTS)]
        if s in (0, self.stages - 1):
            name = "flat_0" if s == 0 else "flat_1"
            keys.append(ValueId(Kind.BATCH, name, (s,), (m,)))
            device.feeds.append(Feed(keys[-1], name, ((sample, sample + 1), (0, WIDTH))))
        if s:
            keys.append(_activation(s - 1, m).redistributed(s))
            self._recv(device, s, m, keys[-1], me - self.replicas, m)
        self._emit(
            device,
            Forward,
            "compute",
            f"F[stage={s}, mb={m}]",
            program=2 * s,
            inputs=tuple((key,) for key in keys),
            outputs=(_activation(s, m), _saved(s, m)),
            first_sample=sample,
            coordinates=(),
        )
        if s == self.stages - 1:
            device.losses[_activation(s, m)] = 1 / self.samples
        else:
            self._send(device, s, m, _activation(s, m), me + self.replicas, m)

    def _backward(self, device: DevicePlan, s: int, r: int, m: int) -> None:
        me, last = device.device, s == self.stages - 1
        gradient = () if last else (_gradient(s, m).redistributed(s),)
        if gradient:
            self._recv(device, s, m, gradient[0], me + self.replicas, m)
        writes = tuple(_weight_gradient(s, w, m) for w in range(WEIGHTS))
        writes += (_gradient(s - 1, m),) if s else ()
        self._emit(
            device,
            Backward,
            "compute",
            f"B[stage={s}, mb={m}]",
            program=2 * s + 1,
            inputs=((_weight(s, 0),), (_weight(s, 1),), gradient, (_saved(s, m),)),
            outputs=writes,
            first_sample=m * self.replicas + r,
            coordinates=(),
            loss_share=1 / self.samples,
        )
        if s:
            self._send(device, s, m, writes[-1], me - self.replicas, m)

    def _update(self, device: DevicePlan, s: int) -> None:
        for w in range(WEIGHTS):
            parts = tuple(_weight_gradient(s, w, m) for m in range(self.micro))
            gradient, old = ValueId(Kind.REDUCED, f"layers.{s}.{w}", (s * WEIGHTS + w,), None, ":a"), _weight(s, w)
            shards = (Shards(parts, gradient, (), (WIDTH, WIDTH)),)
            name = f"all_reduce[stage={s}, w={w}]"
            self._emit(device, ReduceGradients, "comm", name, group=s, shards=shards, dtype="float32")
            change = ParameterUpdate(f"layers.{s}.{w}", old, (gradient,), old.updated, None, None, False)
            self._emit(device, Update, "compute", f"update[stage={s}, w={w}]", parameters=(change,))


def _weight(s: int, w: int) -> ValueId:
    return ValueId(Kind.WEIGHT, f"layers.{s}.{w}", (s * WEIGHTS + w,))


def _weight_gradient(s: int, w: int, m: int) -> ValueId:
    return ValueId(Kind.WEIGHT_GRADIENT, f"layers.{s}.{w}", (s, w), (m,))


def _activation(s: int, m: int) -> ValueId:
    return ValueId(Kind.ACTIVATION, f"x{s}", (), (m,))


def _gradient(s: int, m: int) -> ValueId:
    return ValueId(Kind.GRADIENT, f"x{s}", (s + 1, 0), (m,))


def _saved(s: int, m: int) -> ValueId:
    return ValueId(Kind.SAVED, "", (s,), (m,))
