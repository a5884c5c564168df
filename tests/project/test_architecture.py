"""docs/architecture.md: the script that it follows through all stages is printed there as it is, and every file that it
names exists."""

from __future__ import annotations

import re

import pytest

from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model
from piperlang.elaborate.resolved import resolved
from piperlang.ir.text import text as graph_text
from piperlang.pipeline import planned, schedule
from piperlang.plan.text import text as plan_text
from piperlang.source import Source
from tests.support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```(piper|directives|graph|plan)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
FOLDERS = ("docs", "grammar", "piperlang", "stdlib", "tests")


@pytest.fixture(scope="module")
def stages() -> dict[str, str]:
    file = load_model(ROOT / "examples" / "01_mlp" / "model.py")
    found = schedule(capture(file.model, file.loss, next(iter(file.data()))), Source("two.piper", BLOCKS["piper"]))
    assert not found.problems
    graph = found.graph()
    plan = plan_text(planned(graph))
    return {
        "directives": resolved(found.directives),
        "graph": graph_text(graph),
        "plan": plan[plan.index("device 1\n") :],
    }


def test_directives(stages: dict[str, str]) -> None:
    assert stages["directives"] == BLOCKS["directives"]


@pytest.mark.parametrize("stage", ["graph", "plan"])
def test_lines_are_there_in_this_order(stage: str, stages: dict[str, str]) -> None:
    lines = iter(stages[stage].splitlines())
    shown = BLOCKS[stage].splitlines()
    assert len(shown) >= 4
    missing = [line for line in shown if line not in lines]  # `in` moves on to where it was found
    assert not missing, stages[stage]


def test_files_exist_and_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150
    named = {name.lstrip("/") for name in re.findall(r"[\w/]+\.(?:py|lark|md)\b", PAGE)} - {"model.py"}
    files = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.*"))]
    known = {path.relative_to(ROOT).as_posix() for path in files}
    unknown = [name for name in named if not any(path == name or path.endswith(f"/{name}") for path in known)]
    assert len(named) > 40
    assert not unknown
