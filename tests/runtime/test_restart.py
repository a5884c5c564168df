"""A worker that dies or hangs: the job starts again from its newest checkpoint, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from piperlang.cli.main import main
from piperlang.runtime.driver import job as jobs
from piperlang.runtime.driver.cluster import Cluster
from tests.support import ROOT
from tests.support.between_steps import BASE, PIPELINE
from tests.support.jobs import Lent

ZERO = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"
MORE = """
import os, signal
VICTIMS = {victims!r}
def optimizer(params): return torch.optim.Adam(params, lr=0.01)
def lr_schedule(optimizer): return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
def data():
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
def validation():
    yield torch.randn(8, 4), torch.randint(3, (8,))
def on_step(row):
    path = os.path.join(VICTIMS, str(row["step"]))
    if os.path.exists(path):
        pid, number = open(path).read().split()
        os.remove(path)
        os.kill(int(pid), int(number))
"""
KILL, STOP = 9, 19


@pytest.fixture
def lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    lent = Lent(cluster)
    monkeypatch.setattr(jobs, "Cluster", lent.asked)
    return lent


def train(folder: Path, script: str, *options: str) -> int:
    (folder / "victims").mkdir(exist_ok=True)
    (folder / "model.py").write_text(BASE + MORE.format(victims=str(folder / "victims")))
    (folder / "s.piper").write_text(script)
    words = [str(folder / "model.py"), str(folder / "s.piper"), "--steps", "7", "--validate-every", "3"]
    return main([*words, *([] if "inline" in options else ["--backend", "gloo"]), *options])


def strike(folder: Path, step: int, pid: int | None, number: int) -> None:
    """After this step, a worker gets a signal."""
    (folder / "victims").mkdir(exist_ok=True)
    (folder / "victims" / str(step)).write_text(f"{pid} {number}")


def assert_same(folder: Path) -> None:
    run, whole = (torch.load(folder / name / "weights.pt") for name in ("run", "whole"))
    assert all(torch.equal(run[name], value) for name, value in whole.items())
    rows: list[list[Any]] = []
    for name in ("run", "whole"):
        found = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        rows.append([(row["step"], row["loss"], row.get("validation_loss")) for row in found])
    assert rows[0] == rows[1]


CASES = {
    "killed, ZeRO-3": (ZERO, KILL, (4,), []),
    "stopped, pipeline": (PIPELINE, STOP, (4,), []),
    "twice": (PIPELINE, KILL, (2, 5), []),
    "before a checkpoint": (ZERO, KILL, (0,), []),
    "as a checkpoint begins": (PIPELINE, KILL, (3,), []),
    "loading in workers": (ZERO, KILL, (4,), ["--data", "workers"]),
}


@pytest.mark.slow  # the last test of this file has two restarts in one job
@pytest.mark.parametrize("name", CASES)
def test_the_job_starts_again(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, number, steps, options = CASES[name]
    assert train(tmp_path, script, "--executor", "inline", "--out", str(tmp_path / "whole")) == 0
    for i, step in enumerate(steps):
        strike(tmp_path, step, lent.cluster.pids[i], number)
    assert train(tmp_path, script, "--out", str(tmp_path / "run"), "--save-every", "2", *options) == 0
    assert_same(tmp_path)
    why = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert len(why) == len(steps)
    assert why[0]["why"] == f"device 0 {'died' if number == KILL else 'does not answer'}"
    out = " ".join(capsys.readouterr().out.split())
    assert f"after {steps[0] + 1} step" in out
    assert "started again in" in out


@pytest.mark.parametrize("saves", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_lost_is_said(
    saves: bool, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without checkpoints, or when it has started again too often."""
    lent = Lent(cluster)
    strike(tmp_path, 4, cluster.pids[1], KILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "Cluster", lent.asked)
        options = ["--save-every", "2", "--restart", "0"] if saves else []
        assert train(tmp_path, ZERO, "--out", str(tmp_path / "run"), *options) == 1
    err = capsys.readouterr().err
    assert "error[P0602]: device 1 died" in err
    if saves:  # the newest checkpoint may not have been whole yet
        found = re.search(r"lost: (\d) steps?; the state after (\d) steps is saved: `--resume", err)
        assert found is not None, err
        assert int(found[1]) + int(found[2]) == 5
    else:
        assert "lost: 5 steps; `--save-every N`" in err
    gone = cluster.halt()
    cluster.replace(gone)
    assert 1 in gone


@pytest.mark.slow
def test_a_worker_that_keeps_the_gil_is_alive(lent: Lent, tmp_path: Path) -> None:
    """One call of C for longer than a stopped worker is waited for."""
    busy = "import ctypes\nclass Slow(torch.optim.SGD):\n    def step(self):\n        ctypes.PyDLL(None).sleep(5)\n"
    busy += "        super().step()\nSlow.elementwise = True\n"
    (tmp_path / "model.py").write_text(BASE + busy + "def optimizer(p): return Slow(p, lr=0.1)\n")
    (tmp_path / "s.piper").write_text(PIPELINE)
    started = time.monotonic()
    assert (
        main(
            [
                str(tmp_path / "model.py"),
                str(tmp_path / "s.piper"),
                "--steps",
                "1",
                "--no-verify",
                "--backend",
                "gloo",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert time.monotonic() - started > 5
    assert os.path.exists(tmp_path / "run" / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["raylet/raylet", "gcs/gcs_server"])
def test_ray_itself_dies(pattern: str, tmp_path: Path) -> None:
    """Its own processes are watched: the error names the one that is gone, soon, and nothing is left."""
    short = Path(tempfile.mkdtemp(prefix="t"))  # a socket of Ray has a path of at most 107 bytes
    (tmp_path / "model.py").write_text(BASE)
    (tmp_path / "s.piper").write_text(PIPELINE)
    words = ["model.py", "s.piper", "--steps", "100000", "--log-every", "1", "--save-every", "2", "--out", "run"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(short)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    with subprocess.Popen(
        [sys.executable, "-m", "piperlang", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step    3 "):
            assert process.poll() is None
        (victim,) = _processes(pattern, str(short))
        started = time.monotonic()
        os.kill(victim, KILL)
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 15
    assert process.returncode == 1
    assert f"of Ray died (process {victim})" in err
    assert "is saved: `--resume run`" in err
    short.rmdir()  # it is empty


def _processes(pattern: str, folder: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if pattern in line.partition("\0")[0] and folder in line:
                found.append(int(path.parent.name))
    return found


AGAIN = """
def strike_again(name):
    if "PIPER_JOB" not in os.environ: return  # the driver
    try:
        os.remove(os.path.join(VICTIMS, name))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), 9)
def model():
    strike_again("model")
    return M()
def data():
    strike_again("data")
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
struck = on_step
def on_step(row):
    if row["step"] == 4:
        for name in ("model", "data"):
            if os.path.exists(os.path.join(VICTIMS, f"{name} next")):
                os.rename(os.path.join(VICTIMS, f"{name} next"), os.path.join(VICTIMS, name))
    struck(row)
"""


@pytest.mark.parametrize("name", ["model", pytest.param("data", marks=pytest.mark.slow)])
def test_another_one_dies_while_the_job_starts_again(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a function of the user, in the first worker that calls it."""
    monkeypatch.setattr(jobs, "Cluster", Lent(cluster).asked)
    (tmp_path / "victims").mkdir()
    (tmp_path / "model.py").write_text(BASE + MORE.format(victims=str(tmp_path / "victims")) + AGAIN)
    (tmp_path / "s.piper").write_text(ZERO)
    words = [str(tmp_path / "model.py"), str(tmp_path / "s.piper"), "--steps", "7", "--data", "workers"]
    assert main([*words, "--executor", "inline", "--data", "driver", "--out", str(tmp_path / "whole")]) == 0
    strike(tmp_path, 4, cluster.pids[0], KILL)
    (tmp_path / "victims" / f"{name} next").touch()
    assert main([*words, "--backend", "gloo", "--out", str(tmp_path / "run"), "--save-every", "2"]) == 0
    assert_same(tmp_path)
    why = [json.loads(line) for line in (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()]
    assert len(why) == 2
    assert "died" in why[0]["failed"]
    assert "failed" not in why[1]
    assert not list((tmp_path / "victims").iterdir())
