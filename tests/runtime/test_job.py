"""Plans on real Ray workers over gloo equal the plain model.

`pytest tests/runtime/test_job.py -m slow` runs two hundred more random schedules.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch.distributed import HashStore

from piperlang.capture.program import capture
from piperlang.diagnostics import PiperError
from piperlang.fuzz.traits import Traits
from piperlang.fuzz.write import write
from piperlang.runtime.comm.process_group import agree, proof
from piperlang.runtime.driver.cluster import Cluster
from tests.matrix import SAMPLES, cases
from tests.support.equivalence import program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.jobs import assert_trains
from tests.support.models import CASES, Case
from tests.support.often import one_in
from tests.support.random_models import case


@pytest.mark.parametrize("name", one_in(3, JOB_SCHEDULES))
def test_trains_as_one_device_would(name: str, cluster: Cluster) -> None:
    model, script = JOB_SCHEDULES[name]
    assert_trains(cluster, CASES[model], program(model), script)


EACH = 5
"""Random schedules for one model."""


@cache
def random_model(number: int) -> tuple[Case, Traits]:
    """Random models, and every third time a GPT or a mixture of experts, whose weights can be divided in more ways."""
    found = (
        cases()[("gpt-4", "moe-4", "dropless-4", "gpt-2", "moe-2", "dropless-2")[number // 3 % 6]]
        if number % 3 == 1
        else case(number)
    )
    return found, Traits(capture(found.model, found.loss, found.batch(SAMPLES)))


def check_random(cluster: Cluster, seed: int) -> None:
    found, traits = random_model(seed // EACH)
    script = write(traits, seed, devices=8)
    try:
        assert_trains(cluster, found, traits.program, script)
    except BaseException:
        print(script)
        raise


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 10))])
def test_random_schedules_train_as_one_device_would(seed: int, cluster: Cluster) -> None:
    check_random(cluster, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 210))
def test_two_hundred_more(seed: int, cluster: Cluster) -> None:
    check_random(cluster, seed)


def test_workers_of_two_plans_do_not_join() -> None:
    store = HashStore()
    secret = "ab" * 32
    for plan, other in (("this", "another"), ("this", "this")):
        store.set("digest-1", f"{other} {proof(secret, other, 1).hex()}")
        if other != plan:
            with pytest.raises(PiperError, match="workers 0 and 1 have different plans"):
                agree(store, 0, 2, plan, secret)
        else:
            agree(store, 0, 2, plan, secret)
