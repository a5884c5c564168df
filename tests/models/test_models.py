"""Models of libraries under schedules. By hand: `pytest -m slow tests/models`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.habits.run import is_expected
from tests.models import text, training, vision  # noqa: F401
from tests.models.model import MODELS
from tests.models.page import PAGE
from tests.models.run import ModelRunner


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    made = ModelRunner()
    yield made
    made.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_a_model_trains_as_plain_pytorch_does_or_is_refused(name: str, runner: ModelRunner) -> None:
    model = MODELS[name]
    found = runner.outcomes(model)
    assert [one for schedule, one in found.items() if not is_expected(model.habit, schedule, one)] == []


def test_the_page_lists_every_model() -> None:
    rows = [line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert rows[1:] == [f"| {name}" for name in MODELS]
    assert not any(word in PAGE.read_text(encoding="utf-8") for word in ("WRONG", "CRASH"))
