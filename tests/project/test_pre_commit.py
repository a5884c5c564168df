"""The hooks of .pre-commit-hooks.yaml under the real pre-commit, with the piperc of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytest.importorskip("pre_commit")
HOOKS = (ROOT / ".pre-commit-hooks.yaml").read_text()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that uses the hooks as they are, but for where piperc comes from."""
    hooks = "".join(f"      {line}\n" for line in HOOKS.replace("language: python", "language: system").splitlines())
    (tmp_path / ".pre-commit-config.yaml").write_text(f"repos:\n  - repo: local\n    hooks:\n{hooks}")
    (tmp_path / "good.piper").write_text("let x = 1\n")
    (tmp_path / "notes.txt").write_text("print x\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def committed(repository: Path) -> tuple[int, str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(repository / ".git" / "store"),
    }
    subprocess.run(["git", "add", "-A"], cwd=repository, check=True)
    command = [sys.executable, "-m", "pre_commit", "run", "--color", "never"]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_good_script_passes(repository: Path) -> None:
    code, out = committed(repository)
    assert code == 0, out
    assert out.count("Passed") == 2


def test_a_wrong_script_fails_and_says_why(repository: Path) -> None:
    (repository / "wrong.piper").write_text("print y\n")
    code, out = committed(repository)
    assert code == 1
    assert "error[P0201]" in out
    assert "wrong.piper:1:7" in out
    assert "piperc fmt...............................................................Passed" in out


def test_a_badly_laid_out_script_is_formatted(repository: Path) -> None:
    (repository / "wide.piper").write_text("let  y=1\n")
    code, out = committed(repository)
    assert code == 1
    assert "files were modified by this hook" in out
    assert (repository / "wide.piper").read_text() == "let y = 1\n"
    assert committed(repository)[0] == 0
