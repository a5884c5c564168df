"""Every script of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from piperlang.pipeline import outline
from piperlang.source import Source
from tests.support import ROOT

PRELUDE = (
    "from std.pipeline import vee\nmesh gpu = pp: 2, dp: 2\nvee(gpu, 2)\nsplit batch into 8 as mb\nreplicate [stage=*]"
    " over gpu.dp\n"
)
BLOCK = re.compile(r"^```piper( fragment)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def scripts() -> list[tuple[str, str]]:
    found = []
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]:
        for number, (fragment, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            found.append((f"{page.name}#{number}", (PRELUDE if fragment else "") + text))
    return found


@pytest.mark.parametrize(("name", "text"), scripts(), ids=[name for name, _ in scripts()])
def test_script_of_the_documentation_runs(name: str, text: str) -> None:
    found = outline(Source(name, text), say=lambda line: None)
    assert [d.message for d in (*found.problems, *found.outline.finish())] == []


def test_there_are_scripts_to_run() -> None:
    assert sum(name.startswith("language.md") for name, _ in scripts()) >= 8


def broken(path: Path) -> bool:
    """On purpose; what they say is tested in test_mistake_examples.py."""
    return path.parent.name == "90_mistakes" and not path.stem.endswith(".fixed")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.piper")), ids=lambda p: p.name)
def test_examples_are_right_and_canonical(path: Path) -> None:
    from piperlang.syntax.format import format_source
    from piperlang.syntax.parse import read

    source = read(path)
    if not broken(path):
        found = outline(source, path)
        assert [d.message for d in (*found.problems, *found.outline.finish())] == []
    assert format_source(source) == source.text
