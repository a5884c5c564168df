"""Plans with a mistake that the check accepts, on real gloo: they must come to the right numbers there, too.

gloo is what a wrong plan would hang or go wrong on in silence; tests/plan/test_plan.py tries a thousand mistakes on
simulated devices. `-m slow` runs twenty here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch

from piperlang.diagnostics import PiperError
from piperlang.plan.plan import Plan
from piperlang.plan.verify import check
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import LIMIT, SAMPLES, optimizer, relative
from tests.support.models import CASES
from tests.support.plan_mutants import mutate
from tests.support.plan_runs import SUBJECTS, expected, planned


def accepted() -> Iterator[tuple[int, str, Plan]]:
    """Mistakes that change a plan of several devices and are not refused: their seed, whose plan it was, and what has
    become of it."""
    names = list(SUBJECTS)
    for seed in count():
        name = names[seed % len(names)]
        right = planned(*SUBJECTS[name])[2]
        if not 1 < len(right.devices) <= 8:
            continue
        plan, _ = mutate(right, seed)
        if plan == right:
            continue
        try:
            check(plan)
        except PiperError:
            continue
        yield seed, name, plan


def runs_right(cluster: Cluster, name: str, plan: Plan) -> None:
    model, text = SUBJECTS[name]
    case = CASES[model]
    graph, captured, _ = planned(model, text)
    losses, gradients, kept = expected(model, text)
    with Job(
        plan,
        captured,
        Training(case.model, optimizer),
        timeout=20,
        cluster=cluster,
        loss_dtype=graph.model.tensors[graph.model.loss].dtype,
    ) as job:
        for step, loss in enumerate(losses):
            torch.manual_seed(100 + step)
            assert job.step(case.batch(SAMPLES), gradients=True).loss == pytest.approx(loss, rel=LIMIT)
        for found, wanted in ((job.gradients(), gradients), (cluster.each("weights", count=len(plan.devices)), kept)):
            for have, want in zip(found, wanted, strict=True):
                assert have.keys() == want.keys()
                for key, value in want.items():
                    assert not value.numel() or relative(have[key], value) <= LIMIT, key


def test_a_mistake_on_gloo(cluster: Cluster) -> None:
    for _, name, plan in islice(accepted(), 1):
        runs_right(cluster, name, plan)


@pytest.mark.slow
def test_twenty_mistakes_on_gloo(cluster: Cluster) -> None:
    tried = []
    for seed, name, plan in islice(accepted(), 20):
        runs_right(cluster, name, plan)
        tried.append(seed)
    print("seeds", tried)
    assert len(tried) == 20
