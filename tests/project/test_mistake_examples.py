"""The broken schedules of examples/90_mistakes: each prints exactly what is recorded beside it, and its repaired form
is fine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piperlang.cli.main import main
from tests.support import ROOT
from tests.support.traced import traced_once

FOLDER = Path("examples") / "90_mistakes"
MODEL = str(FOLDER / "model.py")
NAMES = sorted(path.name.removesuffix(".fixed.piper") for path in (ROOT / FOLDER).glob("*.fixed.piper"))
torch.set_num_threads(1)
each_mistake = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # so that diagnostics name files as the page does
        yield


def recorded(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@each_mistake
def test_a_mistake_is_told_as_recorded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", MODEL, str(FOLDER / f"{name}.piper")]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == recorded(name)


@each_mistake
def test_its_repair_keeps_the_mathematics(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", MODEL, str(FOLDER / f"{name}.fixed.piper"), "--numerics"])
    written = capsys.readouterr()
    assert code == 0, written.err
    assert f"{name}.fixed.piper: matches plain PyTorch" in written.out


@each_mistake
def test_what_is_recorded_has_a_line_and_a_repair(name: str) -> None:
    text = recorded(name)
    assert re.match(r"error\[P\d{4}\]: .+\n +--> " + re.escape(str(FOLDER / f"{name}.piper")) + r":\d+:\d+\n", text)
    assert "  = help: " in text
    assert text.count("error[") == 1


def test_nothing_is_left_over() -> None:
    """Every mistake has its three files, and a line on the page."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(NAMES) >= 8
    assert {path.name for path in FOLDER.glob("*.piper")} == {
        f"{name}{kind}" for name in NAMES for kind in (".piper", ".fixed.piper")
    }
    assert {path.name for path in FOLDER.glob("*.txt")} == {f"{name}.txt" for name in NAMES}
    for name in NAMES:
        code = re.findall(r"error\[(P\d{4})\]", recorded(name))[0]
        assert re.search(rf"^\| {name}\.piper \|.*\| {code} \|", page, re.MULTILINE), name


def test_what_the_page_shows_is_recorded() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n\$ piperc check \S+ (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown
    for script, text in shown:
        assert text == recorded(Path(script).stem)
