"""Two jobs in one run folder, and a checkpoint that is gone when it is read."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piperlang.cli import elastic
from piperlang.cli.main import main
from piperlang.runtime.checkpoint.manifest import Damaged
from tests.support.between_steps import BASE

MODEL = """
import os, time
def optimizer(p): return torch.optim.Adam(p, lr=0.01)
def data():
    while True:
        time.sleep(float(os.environ.get("PIPER_TEST_PAUSE", "0")))
        yield torch.randn(8, 4), torch.randint(3, (8,))
"""
ONE = "mesh gpu = pp: 1\nplace [stage=*] on gpu\n"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "model.py").write_text(BASE + MODEL)
    (tmp_path / "one.piper").write_text(ONE)
    files = [str(tmp_path / "model.py"), str(tmp_path / "one.piper")]
    return [*files, "--steps", "30", "--save-every", "2", "--executor", "inline", "--out", str(tmp_path / "run")]


def test_the_second_job_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it would resume the run or replace it; and the first job does not notice it."""
    monkeypatch.setenv("PIPER_TEST_PAUSE", "0.2")
    with subprocess.Popen([sys.executable, "-m", "piperlang", *words], stdout=subprocess.DEVNULL) as first:
        try:
            until = time.monotonic() + 90
            while not (tmp_path / "run" / "checkpoints" / "step-00000004").exists():
                assert time.monotonic() < until
                assert first.poll() is None
                time.sleep(0.1)
            monkeypatch.setenv("PIPER_TEST_PAUSE", "0")
            for more in (["--resume", "auto"], ["--overwrite"]):
                assert main([*words, *more]) == 2
                said = capsys.readouterr().err
                assert f"a job is training in {tmp_path / 'run'}" in said
                assert f"process {first.pid} on " in said
            assert first.wait(90) == 0
        finally:
            first.kill()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 30
    assert not (tmp_path / "run" / ".lock").exists()
    assert main([*words, "--overwrite", "--steps", "2"]) == 0  # nobody trains there any more


def test_a_checkpoint_that_is_gone(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the driver verified it."""
    assert main([*words, "--steps", "4"]) == 0
    opened = elastic.open_folder

    def gone(*given: object) -> object:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        return opened(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(elastic, "open_folder", gone)
    assert main([*words, "--resume", str(tmp_path / "run")]) == 1
    assert "error[P0611]: the checkpoint cannot be used: manifest.json: it is missing" in capsys.readouterr().err


def test_what_a_worker_says_of_it_arrives() -> None:
    found = pickle.loads(pickle.dumps(Damaged("part-0", "it is missing")))
    assert (found.file, found.why, str(found)) == ("part-0", "it is missing", "part-0: it is missing")
    assert found.diagnostics[0].code == "P0611"
