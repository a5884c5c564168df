"""A machine as numbers: what a device computes and moves in a second, and how devices are connected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HALF = ("bfloat16", "float16")
"""Dtypes that a device computes with at the same rate."""


@dataclass(frozen=True)
class Interconnect:
    """What connects devices."""

    bandwidth: float
    """Bytes a second that one device sends, and receives at the same time."""
    latency: float
    """Seconds until the first byte of a message arrives."""


@dataclass(frozen=True)
class Machine:
    """All rates are sustained ones, not those of a data sheet. The defaults are a large accelerator."""

    name: str = "a large accelerator"
    flops: Mapping[str, float] = field(default_factory=lambda: {"float32": 400e12})
    """Floating-point operations a second of large matrix multiplications, by dtype."""
    memory_bandwidth: float = 3e12
    memory: float = 80 * 2**30
    """Bytes of a device."""
    launch: float = 10e-6
    """Seconds that an instruction takes however little it does."""
    host: float = 0.0
    """Seconds that the host needs to issue an instruction; 0 where streams are threads."""
    devices_per_node: int = 8
    node: Interconnect = Interconnect(50e9, 10e-6)
    """Within a node."""
    network: Interconnect = Interconnect(50e9, 10e-6)
    """Between nodes."""
    rendezvous: bool = True
    """A message is sent when its receiver is ready, too, as by NCCL; otherwise it is buffered, as by gloo."""
    side_by_side: int = 1
    """How many passes run at full speed at once on a device; more share it."""
    shared_devices: int = 0
    """How many devices all ranks share, in turn; 0: each has one of its own."""

    def known_rate(self, dtype: str) -> float | None:
        alike = HALF if dtype in HALF else ()
        return next((self.flops[name] for name in (dtype, *alike) if name in self.flops), None)

    def rate(self, dtype: str) -> float:
        """Without a rate that is known, that of float32."""
        return self.known_rate(dtype) or self.flops.get("float32") or next(iter(self.flops.values()))
