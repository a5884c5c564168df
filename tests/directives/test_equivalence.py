"""A schedule never changes the mathematics: every directive alone, and every pair of directives, on every kind of
model. Their plans are right, too.

`pytest tests/directives/test_equivalence.py -m slow` has those that do not run every time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.directive_scripts import PAIRS, SHARD, SINGLES, TAGS, script
from tests.support.equivalence import assert_same, program
from tests.support.models import CASES
from tests.support.plan_runs import right_plan


def models(*names: str) -> pytest.MarkDecorator:
    """All tests of a model go to one process, which traces it once."""
    return pytest.mark.parametrize(
        "model", [pytest.param(name, marks=pytest.mark.xdist_group(f"model {name}")) for name in names]
    )


each_model = models(*CASES)


def shared_out(combinations: Sequence[tuple[str, ...]], count: int) -> pytest.MarkDecorator:
    """In every run, every combination on one in `count` models, and every model with one in `count` combinations."""
    cases = [
        pytest.param(
            model,
            names,
            id=f"{'+'.join(names)}-{model}",
            marks=[pytest.mark.xdist_group(f"model {model}"), *([pytest.mark.slow] if (i + j) % count else [])],
        )
        for i, model in enumerate(CASES)
        for j, names in enumerate(combinations)
    ]
    return pytest.mark.parametrize(("model", "names"), cases)


@shared_out(SINGLES, 16)
def test_a_directive_alone(model: str, names: tuple[str, ...]) -> None:
    right_plan(assert_same(CASES[model], program(model), script(model, *names)))


@shared_out(PAIRS, 24)
def test_a_pair_of_directives(model: str, names: tuple[str, ...]) -> None:
    right_plan(assert_same(CASES[model], program(model), script(model, *names)))


@pytest.mark.xdist_group("model mlp")
@pytest.mark.parametrize(
    "schedule", ["looped_bfs(gpu, 2, 4)", "interleaved_zero_bubble(gpu, 2, 4)", "interleaved(gpu, 2, 4)"]
)
@pytest.mark.parametrize("prefetch", [1, 2])
def test_activations_come_back_in_the_order_of_the_script(schedule: str, prefetch: int) -> None:
    """looped_bfs runs the last microbatch's backward first; zero bubble puts weight halves off until after other
    microbatches' input halves."""
    name = schedule.partition("(")[0]
    text = (
        f"from std.pipeline import loop, {name}\nmesh gpu = pp: 2\nsplit batch into 4 as mb\nloop(gpu, 2, 2)\noffload"
        f" [pass=*] with prefetch={prefetch}\n{schedule}\n"
    )
    assert_same(CASES["mlp"], program("mlp"), text)


@models("gpt", "unet")
def test_parts_of_a_sum_are_cut_and_joined_as_parts(model: str) -> None:
    """A stage that is split, some of it divided by features: what is a sum over devices stays one while it is cut."""
    text = f"{TAGS[model]}\nmesh gpu = tp: 2\nplace [pass=*] on gpu\n{SHARD[model]}\nsplit [stage=0:2] into 2 as half\n"
    assert_same(CASES[model], program(model), text)
