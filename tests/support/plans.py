"""Large plans without a model: one-forward-one-backward over stages and replicas, as the compiler would lower it."""

from __future__ import annotations

from typing import Any

from piperlang.plan.instruction import DevicePlan, Instruction, Plan

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
        self.kinds: list[dict[str, Any]] = []
        for s in range(stages):
            self._kinds(s)

    def plan(self) -> Plan:
        devices = [self._device(s, r) for s in range(self.stages) for r in range(self.replicas)]
        groups = [(tuple(s * self.replicas + r for r in range(self.replicas)), "comm") for s in range(self.stages)]
        return Plan(
            devices,
            self.kinds,
            list(self.nodes),
            [f"large.piper:{3 + number % 7}" for number in self.nodes.values()],
            self.samples,
            "mean",
            groups,
        )

    def _kinds(self, s: int) -> None:
        weights = tuple(("weight", i) for i in range(WEIGHTS))
        given = (("batch", 0),) if s in (0, self.stages - 1) else ()
        inputs = (("input", 0),) if s else ()
        same = {
            "chunk": s,
            "samples": 1,
            "arranged": ((), ()),
            "loss": 0 if s == self.stages - 1 else None,
            "routed": False,
        }
        self.kinds.append(
            {"op": "F", "slots": weights + given + inputs, "gives": (("output", 0), ("saved", 0)), **same}
        )
        gives = tuple(("grad_weight", i) for i in range(WEIGHTS)) + ((("grad_input", 0),) if s else ())
        self.kinds.append(
            {"op": "B", "slots": (*weights[:2], ("grad_output", 0), ("saved", 0)), "gives": gives, **same}
        )

    def _node(self, name: str) -> int:
        return self.nodes.setdefault(name, len(self.nodes))

    def _device(self, s: int, r: int) -> DevicePlan:
        device = DevicePlan(s * self.replicas + r)
        self.at: dict[str, int] = {}
        for w in range(WEIGHTS):
            device.weights[_weight(s, w)] = {
                "weight": f"layers.{s}.{w}",
                "box": ((0, WIDTH), (0, WIDTH)),
                "flat": None,
                "first": r == 0,
            }
            device.next[_weight(s, w)] = f"{_weight(s, w)}'"
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

    def _emit(
        self,
        device: DevicePlan,
        do: str,
        stream: str,
        name: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        args: dict[str, Any],
    ) -> None:
        done = [self.at[key] for key in reads if key in self.at]
        waits = tuple(sorted({i for i in done if device.instructions[i].stream != stream}))
        for key in writes:
            self.at[key] = len(device.instructions)
        device.instructions.append(Instruction(do, stream, self._node(name), reads, writes, waits, args))

    def _send(self, device: DevicePlan, s: int, m: int, key: str, target: int, tag: int) -> None:
        self._emit(
            device,
            "send",
            "comm>",
            f"send[stage={s}, mb={m}] of {key[:1]}",
            (key,),
            (),
            {"parts": [(target, tag, None, (1, WIDTH))], "key": key, "dtype": "float32"},
        )

    def _recv(self, device: DevicePlan, s: int, m: int, key: str, source: int, tag: int) -> None:
        args = {"parts": [(source, tag, None, (1, WIDTH))], "own": [], "shape": (1, WIDTH), "dtype": "float32"}
        self._emit(device, "recv", f"comm<{source}", f"recv[stage={s}, mb={m}] of {key[:1]}", (), (key,), args)

    def _forward(self, device: DevicePlan, s: int, r: int, m: int) -> None:
        me, sample = device.device, m * self.replicas + r
        keys = [_weight(s, w) for w in range(WEIGHTS)]
        if s in (0, self.stages - 1):
            name = "flat_0" if s == 0 else "flat_1"
            keys.append(f"{name}@{s}#{m}")
            device.feeds.append((keys[-1], name, ((sample, sample + 1), (0, WIDTH))))
        if s:
            keys.append(f"x{s - 1}#{m}@{s}")
            self._recv(device, s, m, keys[-1], me - self.replicas, m)
        args = {"kind": 2 * s, "reads": tuple((key,) for key in keys), "first": sample, "at": []}
        self._emit(device, "F", "compute", f"F[stage={s}, mb={m}]", tuple(keys), (f"x{s}#{m}", f"saved:{s}#{m}"), args)
        if s == self.stages - 1:
            device.losses[f"x{s}#{m}"] = 1 / self.samples
        else:
            self._send(device, s, m, f"x{s}#{m}", me + self.replicas, m)

    def _backward(self, device: DevicePlan, s: int, r: int, m: int) -> None:
        me, last = device.device, s == self.stages - 1
        gradient = "seed" if last else f"d:x{s}:{s + 1}.0#{m}@{s}"
        if not last:
            self._recv(device, s, m, gradient, me + self.replicas, m)
        keys = (_weight(s, 0), _weight(s, 1), gradient, f"saved:{s}#{m}")
        writes = tuple(f"dw:layers.{s}.{w}@{s}.{w}#{m}" for w in range(WEIGHTS)) + (
            (f"d:x{s - 1}:{s}.0#{m}",) if s else ()
        )
        args = {
            "kind": 2 * s + 1,
            "reads": tuple((key,) for key in keys),
            "first": m * self.replicas + r,
            "at": [],
            "share": 1 / self.samples,
        }
        self._emit(
            device, "B", "compute", f"B[stage={s}, mb={m}]", tuple(key for key in keys if key != "seed"), writes, args
        )
        if s:
            self._send(device, s, m, writes[-1], me - self.replicas, m)

    def _update(self, device: DevicePlan, s: int) -> None:
        for w in range(WEIGHTS):
            parts = tuple(f"dw:layers.{s}.{w}@{s}.{w}#{m}" for m in range(self.micro))
            grad, old = f"g:layers.{s}.{w}@{s}.{w}:a", _weight(s, w)
            entry = {"from": parts, "to": grad, "cuts": [], "shape": (WIDTH, WIDTH)}
            self._emit(
                device,
                "reduce",
                "comm",
                f"all_reduce[stage={s}, w={w}]",
                parts,
                (grad,),
                {"group": s, "weights": [entry], "dtype": "float32", "reduce": "sum"},
            )
            change = {
                "weight": f"layers.{s}.{w}",
                "old": old,
                "grads": (grad,),
                "new": f"{old}'",
                "take": None,
                "take_grad": None,
                "partial": False,
            }
            self._emit(
                device,
                "update",
                "compute",
                f"update[stage={s}, w={w}]",
                (old, grad),
                (f"{old}'",),
                {"weights": [change]},
            )


def _weight(s: int, w: int) -> str:
    return f"w:layers.{s}.{w}@{s * WEIGHTS + w}"
