"""Ranks that share one GPU, and compute on it at once.

Without NVIDIA's Multi-Process Service a GPU gives its time to one process after the other, in slices of milliseconds,
and a receive that waits takes slices, too: how long a pass takes then depends on what all other ranks wait for. With
the service, passes of all ranks run at the same time, and slow each other down as the simulator says of ranks that
share a device (simulate/sharing.py).

CUDA_MPS_ACTIVE_THREAD_PERCENTAGE does not make small GPUs of one: it says how many multiprocessors a rank may use, not
which. With 16% each, passes of four ranks took up to 1.7 times as long as alone, and with 10% NCCL's kernels of ranks
that waited left no room for the pass that they waited for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

DAEMON = "nvidia-cuda-mps-control"


@contextmanager
def at_once(ranks: int) -> Iterator[None]:
    """For processes that start inside."""
    if ranks == 1 or shutil.which(DAEMON) is None:
        yield
        return
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([DAEMON, "-d"], check=True, stdout=subprocess.DEVNULL, timeout=30)
        try:
            yield
        finally:
            subprocess.run(
                [DAEMON], input="quit -t 10\n", text=True, stdout=subprocess.DEVNULL, timeout=30, check=False
            )
            os.environ.clear()
            os.environ.update(before)
