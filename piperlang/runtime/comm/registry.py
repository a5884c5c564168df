"""All backends, and the choice of one for a job.

Imports torch only inside functions: the command line lists the names before torch is imported."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piperlang.runtime.comm.backend import Backend
    from piperlang.runtime.comm.process_group import ProcessBackend

BACKENDS = ("gloo", "nccl", "threads")
"""Each is the `BACKEND` of the file with its name."""


class Unusable(ValueError):
    """A backend that cannot be used, and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"cannot use backend {name!r}: {why}")
        self.why = why


def for_workers() -> ProcessBackend:
    """The default for worker processes: NCCL if there are GPUs."""
    from piperlang.runtime.comm import gloo, nccl

    return nccl.BACKEND if nccl.BACKEND.device.available() else gloo.BACKEND


def chosen(executor: str, name: str | None = None) -> Backend:
    """The backend of a job, by default the one that suits the executor: `ray` for worker processes, `inline` for
    threads of this process. Raises Unusable."""
    from piperlang.runtime.comm import threads

    if name is None:
        return for_workers() if executor == "ray" else threads.BACKEND
    if name not in BACKENDS:
        raise Unusable(name, f"the backends are {', '.join(BACKENDS)}")
    backend: Backend = import_module(f"piperlang.runtime.comm.{name}").BACKEND
    if isinstance(backend, threads.Threads):
        if executor == "ray":
            raise Unusable(name, "it runs in one process, with `--executor inline`")
    elif executor == "inline":
        if backend.device.name != "cpu":
            raise Unusable(name, "`--executor inline` runs on the CPU")
        return threads.BACKEND  # `--executor inline --backend gloo`: on the same device, and no processes to connect
    if not backend.device.available():
        raise Unusable(name, "torch finds no GPU")
    return backend
