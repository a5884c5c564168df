"""What is read and run without being asked: imports of scripts, and model files of saved plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from piperlang.cli.main import main
from piperlang.elaborate.modules import IMPORT_PATH
from tests.support.between_steps import BASE, PIPELINE

COMMON = "let nothing = 0\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("project/below", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "elsewhere" / "common.piper").write_text(COMMON)
    (tmp_path / "project" / "common.piper").write_text(COMMON)
    (tmp_path / "project" / "below" / "up.piper").write_text('import "../common.piper" as c\n' + COMMON)
    (tmp_path / "project" / "link.piper").symlink_to(tmp_path / "elsewhere" / "common.piper")
    (tmp_path / "project" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "project" / "inner.piper").symlink_to(tmp_path / "project" / "common.piper")
    return tmp_path / "project"


def checked(project: Path, path: str, *options: str) -> int:
    (project / "s.piper").write_text(f'import "{path}" as c\n{PIPELINE}')
    return main(["check", str(project / "s.piper"), *options])


@pytest.mark.parametrize("path", ["./common.piper", "below/up.piper", "./below/../common.piper", "inner.piper"])
def test_imports_of_the_folder(path: str, project: Path) -> None:
    assert checked(project, path) == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("../elsewhere/common.piper", "../elsewhere/common.piper is outside of the folder"),
        ("link.piper", "link.piper is a link to"),
        ("folder/common.piper", "folder/common.piper is a link to"),
    ],
)
def test_imports_from_elsewhere(
    path: str, said: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(project, path) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "error[P0209]" in err
    assert said in err
    assert f"--import-path {project.parent / 'elsewhere'}" in err
    assert checked(project, path, "--import-path", str(project / "below")) == 1
    assert checked(project, path, "--import-path", str(project.parent / "elsewhere")) == 0
    assert checked(project, path) == 1  # it is not remembered
    monkeypatch.setenv(IMPORT_PATH, str(project.parent / "elsewhere"))
    assert checked(project, path) == 0


def test_a_plan_names_the_file_that_it_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = project.parent / "elsewhere"
    (elsewhere / "model.py").write_text(BASE)
    (elsewhere / "s.piper").write_text(PIPELINE)
    plan, words = str(project / "step.plan"), [str(elsewhere / "model.py"), str(elsewhere / "s.piper")]
    assert main(["plan", *words, "-o", plan]) == 0
    monkeypatch.chdir(project)
    run = ["run", plan, "--executor", "inline", "--steps", "1", "--out"]
    assert main([*run, str(project / "run")]) == 2
    assert f"would run {elsewhere / 'model.py'}" in " ".join(capsys.readouterr().err.split())
    assert main([*run, str(project / "run"), "--trust"]) == 0
    monkeypatch.chdir(elsewhere)
    assert main([*run, str(project / "other")]) == 0
