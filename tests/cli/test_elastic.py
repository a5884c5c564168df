"""`--elastic`: what is refused before anything starts. tests/runtime/test_cluster.py has a machine that is too small,
tests/runtime/test_two_nodes.py a node that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from piperlang.cli.main import main
from tests.support.between_steps import BASE, PIPELINE, REPLICAS

CASES = {
    "": "names no script",
    "one.piper,": "names no script",
    "missing.piper": "missing.piper",
    "two.piper": "needs 2 devices, not fewer than",
    "one.piper,two.piper": "needs 2 devices, not fewer than",
    "wrong.piper": "wrong.piper is one of the scripts of --elastic",
}


@pytest.mark.parametrize("given", CASES)
def test_refused(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"first": PIPELINE, "two": REPLICAS, "one": "", "wrong": "place [stage=0] on gpu\n"}.items():
        (tmp_path / f"{name}.piper").write_text(text)
    (tmp_path / "model.py").write_text(BASE)
    assert main(["model.py", "first.piper", "--steps", "2", "--executor", "inline", "--elastic", given]) in (1, 2)
    assert CASES[given] in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
