"""Trace a model once: tracing imports much when it is first used, and every process forked after this has it.

Not with CUDA builds of torch: autograd starts threads there, which a forked process would not have.
"""

from __future__ import annotations

import contextlib

import torch

from piperlang.capture.program import capture
from tests.habits.habit import Layers, square, vectors
from tests.habits.run import clean

if torch.version.cuda is None:
    torch.set_num_threads(1)
    with clean(), contextlib.suppress(Exception):  # whatever is wrong with it shows again in the habits
        capture(Layers, square, vectors()).cut()
