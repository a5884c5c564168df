"""Which network interface of this machine leads to another one. gloo would take the one that the name of this machine
resolves to, which on many systems is the loopback interface."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address(peer: str) -> str:
    """The address of this machine from which it reaches a peer."""
    family, kind, *_, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(where)
        return str(probe.getsockname()[0])


def towards(peer: str) -> str | None:
    """The interface with that address. None if the system does not say so."""
    address = own_address(peer)
    return next((name for _, name in socket.if_nameindex() if address in _addresses(name)), None)


def _addresses(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it has none of IPv4
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
