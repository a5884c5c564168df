"""Ranks that share one GPU, each with its own share of the multiprocessors.

Without NVIDIA's Multi-Process Service a GPU gives its time to one process after the other, in slices of milliseconds,
and a receive that waits takes slices, too: how long a pass takes then depends on what all other ranks do, and no
model of separate devices can say it. With the service, and a part of the multiprocessors for each rank, ranks compute
at the same time, as small GPUs that share one memory. The parts are much smaller than they could be: with a quarter of
the GPU each, four ranks that computed at once took 1.8 times as long for a pass as one alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

DAEMON = "nvidia-cuda-mps-control"
USED = 40
"""Percent of the multiprocessors that all ranks together have."""


@contextmanager
def partitioned(ranks: int) -> Iterator[str]:
    """For processes that start inside. Gives a few words on how they share the GPU."""
    if ranks == 1:
        yield "alone"
        return
    if shutil.which(DAEMON) is None:
        yield "in time slices"
        return
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(USED // ranks),
        }
        subprocess.run([DAEMON, "-d"], check=True, stdout=subprocess.DEVNULL, timeout=30)
        try:
            yield f"{USED // ranks}% of the multiprocessors each"
        finally:
            subprocess.run(
                [DAEMON], input="quit -t 10\n", text=True, stdout=subprocess.DEVNULL, timeout=30, check=False
            )
            os.environ.clear()
            os.environ.update(before)
