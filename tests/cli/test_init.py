"""`piperc init`: a model and a schedule that run as they are."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from piperlang.cli import init
from piperlang.cli.main import main
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import read


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(text: str) -> list[list[str]]:
    """The commands that are printed to go on with, without `piperc`."""
    return [shlex.split(line)[1:] for line in re.findall(r"^  (piperc .*)$", text, re.MULTILINE)]


def test_writes_two_files_and_says_what_to_do_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert sorted(os.listdir(here)) == ["model.py", "schedule.piper"]
    assert captured.out.startswith("wrote model.py and schedule.piper; next:\n")
    orders, check, train = commands(captured.out)
    assert main(orders) == 0
    assert "device 0 | F0 F1 .  .  B0---" in capsys.readouterr().out
    assert check == ["check", "model.py", "schedule.piper", "--numerics"]
    assert train == ["model.py", "schedule.piper", "--steps", "50"]


def test_what_it_writes_trains_and_keeps_the_mathematics(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from tests.support.traced import traced_once

    assert main(["init", "a job"]) == 0
    _, check, train = commands(capsys.readouterr().out)
    assert check[1:3] == ["a job/model.py", "a job/schedule.piper"]
    with traced_once():
        assert main(check) == 0
        assert "matches plain PyTorch (2 devices, 2 chunks" in capsys.readouterr().out
        assert main([*train, "--executor", "inline", "--json", "--out", "run"]) == 0
    losses = [json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 50
    assert losses[-1] < 0.7 * losses[0]


def test_what_the_schedule_suggests_works(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commented lines of the schedule, taken in as they say."""
    assert main(["init"]) == 0
    path = here / "schedule.piper"
    text = path.read_text()
    assert format_source(read(path)) == text
    for schedule in ("gpipe", "zero_bubble"):
        path.write_text(text.replace("one_f_one_b", schedule))
        assert main(["check", "schedule.piper"]) == 0
    replicated = (
        text.replace("mesh gpu = pp: ranks\n", "mesh gpu = pp: ranks, dp: 2\n")
        .replace("# from std.data", "from std.data")
        .replace("# zero1(", "zero1(")
    )
    assert replicated.count("zero1") == 2
    path.write_text(replicated)
    capsys.readouterr()
    assert main(["check", "schedule.piper"]) == 0
    assert "4 devices" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["model.py", "schedule.piper"])
def test_never_writes_over_a_file(there: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / there).write_text("mine")
    assert main(["init"]) == 2
    assert f"error[P0902]: `{there}` already exists in this folder" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [(there, "mine")]


def test_a_file_in_place_of_the_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job").write_text("mine")
    assert main(["init", "job"]) == 2
    assert "cannot write to job" in capsys.readouterr().err


def test_a_disk_that_takes_the_first_file_only(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "second").symlink_to("/dev/full/x")  # a path that cannot be opened, but does not exist either
    monkeypatch.setattr(init, "FILES", ("model.py", "second"))
    assert main(["init"]) == 2
    assert "cannot write to this folder" in capsys.readouterr().err
    assert os.listdir(here) == ["second"]


def test_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(init, "installed", lambda name: False)
    assert main(["init"]) == 0
    assert "  pip install 'piperlang[run]'\n" in capsys.readouterr().out
