"""A model whose passes take a while, for tests that interfere with a step; `main` trains until it is stopped."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from tests.support.models import Case, vectors

SECONDS = 0.2


@torch.library.custom_op("piper_tests::doze", mutates_args=())
def doze(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SECONDS)
    return x.clone()


doze.register_fake(torch.empty_like)
doze.register_autograd(lambda ctx, gradient: doze(gradient))


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = doze(torch.tanh(layer(x)))
        return x


CASE = Case("sleepy", Sleepy, lambda output, target: f.mse_loss(output, target), vectors, 2)
SCRIPT = """mesh gpu = pp: 2
place [stage=0] on gpu[pp=0]
place [stage=1] on gpu[pp=1]
split batch into 4 as mb
"""


def main() -> None:
    from piperlang.capture.program import capture
    from piperlang.plan.lower import lower
    from piperlang.runtime.driver.job import Job
    from piperlang.runtime.driver.training import Training
    from tests.support.equivalence import compiled, optimizer

    graph, captured = compiled(capture(CASE.model, CASE.loss, CASE.batch(8)), SCRIPT)
    with Job(lower(graph), captured, Training(CASE.model, optimizer)) as job:
        print(job.cluster.folder, flush=True)
        while True:
            job.step(CASE.batch(8))
