"""Strategies compose: pipeline x data x expert and tensor parallelism on real workers equal the single device.

`pytest tests/runtime/test_matrix.py -m slow` runs all combinations that are not run every time.
"""

from __future__ import annotations

import re

import pytest
import torch

from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.numerics import gradient_errors
from tests.matrix import ALL, DATA, INSIDE, MATRIX, PAGE, PIPELINES, cases, listed, program, refused
from tests.support.equivalence import LIMIT, compiled, optimizer
from tests.support.jobs import Plain, assert_trains
from tests.support.often import one_in

OFTEN = (
    "gpipe x hybrid",
    "1f1b x ep",
    "zb-h1 x dp",
    "interleaved-zb x zero3",
    "dualpipe x zero2 x tp",
    "zbv x zero3 x dropless-data",
    "interleaved x zero2 x sp",
    "dualpipev x zero2 x ep-data",
    "zbv x zero1",
    "zero2 x dropless x experts on a mesh of their own",
)
"""Run every time: each pipeline, each data strategy and each way to divide a stage at least once."""
RUNNING = [name for name, each in ALL.items() if each.refused is None]
each_combination = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in RUNNING]
)


@each_combination
def test_equals_the_single_device(name: str, cluster: Cluster) -> None:
    each = ALL[name]
    assert_trains(cluster, cases()[each.model], program(each.model), each.script, steps=3)


@pytest.mark.parametrize("name", one_in(9, [name for name, each in ALL.items() if each.refused]))
def test_what_makes_no_sense_is_refused(name: str) -> None:
    assert refused(ALL[name]) == ALL[name].refused


def test_the_matrix_is_whole() -> None:
    assert {(each.pipeline, each.data, each.inside) for each in MATRIX} == {
        (p, d, i) for p in PIPELINES for d in DATA for i in INSIDE
    }
    assert len(RUNNING) >= 60
    assert set(OFTEN) <= set(RUNNING)
    often = [ALL[name] for name in OFTEN]
    assert {each.pipeline for each in often} >= set(PIPELINES)
    assert {each.data for each in often} >= set(DATA) - {"none"}
    assert {each.inside for each in often} == set(INSIDE)


def test_the_page_lists_the_matrix() -> None:
    found = listed(PAGE.read_text(encoding="utf-8"))
    assert set(found) == set(ALL)
    for name, cell in found.items():
        if ALL[name].refused:
            assert cell == f"refused {ALL[name].refused}"
        else:
            assert re.fullmatch(r"\de[-+]\d\d", cell), name
            assert float(cell) <= LIMIT


@pytest.mark.parametrize("name", one_in(2, ["zbv x zero3", "dualpipe x zero2 x tp"]))
def test_a_wrong_part_of_a_gradient_is_noticed(name: str) -> None:
    """In any device's part of any divided weight; and so is a part that nobody has."""
    each = ALL[name]
    case = cases()[each.model]
    graph, captured = compiled(program(each.model), each.script)
    plan = lower(graph)
    batch = case.batch(graph.model.samples)
    _, expected = Plain(case, program(each.model)).step(batch)
    with ThreadJob(plan, captured, Training(case.model, optimizer)) as job:
        job.step(batch, gradients=True)
        found = job.gradients()
    devices = [device.device for device in plan.devices]
    assert max(gradient_errors(graph, devices, found, expected).values()) <= LIMIT
    for k, device in enumerate(found):
        key, value = next((key, value) for key, value in device.items() if value.numel())
        weight = graph.held[key].weight
        for wrong in (
            value + 1e-3 * expected[weight].abs().max(),
            torch.full_like(value, float("nan")),
            value.flatten()[:-1],
        ):
            errors = gradient_errors(
                graph, devices, [{**other, key: wrong} if other is device else other for other in found], expected
            )
            assert not errors[weight] <= LIMIT, (k, weight)
            assert all(error <= LIMIT for name, error in errors.items() if name != weight)
    missing = {name: value for name, value in expected.items() if name != weight}
    assert gradient_errors(graph, devices, found, missing)[weight] == float("inf")
