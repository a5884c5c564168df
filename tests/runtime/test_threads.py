"""Jobs on threads of one process."""

from __future__ import annotations

import _thread
import threading
import time

import pytest

from piperlang.capture.program import capture
from piperlang.plan.instructions import Instruction
from piperlang.plan.lower import lower
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import SAMPLES, compiled, optimizer
from tests.support.models import CASES

SCRIPT = """mesh gpu = pp: 2, dp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
replicate [stage=*] over gpu.dp with params=sharded, grads=sharded
split batch into 2 as mb
"""


@pytest.mark.parametrize("at", [0, 3, 9])
def test_ctrl_c_in_the_middle_of_a_step_ends_every_thread(at: int) -> None:
    """Threads that wait for each other, for a message or at a barrier, would keep the process from ending."""
    case = CASES["mlp"]
    graph, captured = compiled(capture(case.model, case.loss, case.batch(SAMPLES)), SCRIPT)
    before = set(threading.enumerate())
    job = ThreadJob(lower(graph), captured, Training(case.model, optimizer), 100.0)
    streams = job.training.streams[1]
    execute, executed = streams.execute, iter(range(10_000))

    def interrupted(instruction: Instruction) -> None:
        if next(executed) == at:
            _thread.interrupt_main()
            time.sleep(0.2)
        execute(instruction)

    streams.execute = interrupted
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        job.step(case.batch(SAMPLES))
    job.close()
    assert time.monotonic() - started < 20
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
