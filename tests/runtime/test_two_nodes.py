"""A job on two machines, as far as Ray and gloo can tell: two network namespaces with a link between them. All tests
need root and about a minute each, so they run by hand: `pytest -m slow tests/runtime/test_two_nodes.py`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piperlang.cli.main import main
from tests.support import ROOT
from tests.support.between_steps import BASE
from tests.support.two_nodes import HEAD, NODE, POSSIBLE, TwoNodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not POSSIBLE, reason="network namespaces need root and `ip`"),
]
STEPS = 60
MODEL = """
import os, time
PAUSE = float(os.environ.get("PIPER_TEST_PAUSE", "0"))
def optimizer(p): return torch.optim.Adam(p, lr=0.01)
def data():
    while True:
        time.sleep(PAUSE)
        yield torch.randn(8, 4), torch.randint(3, (8,))
"""
FOUR = """from std.data import zero3
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: 2, dp: 2
loop(gpu, 2)
split batch into 2 as mb
zero3(gpu.dp)
one_f_one_b(gpu, 2, 2)
"""
TWO = "from std.data import ddp\nmesh gpu = dp: 2\nplace [stage=*] on gpu\nddp(gpu.dp)\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(BASE + MODEL)
    (tmp_path / "four.piper").write_text(FOUR)
    (tmp_path / "two.piper").write_text(TWO)
    return tmp_path


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as nodes:
        nodes.environment["PIPER_TEST_PAUSE"] = "0.2"
        yield nodes


def plain(files: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights that were trained in one process."""
    where = str(files / "whole")
    options = ["--steps", str(steps), "--executor", "inline", "--out", where]
    assert main([str(files / "model.py"), str(files / "four.piper"), *options]) == 0
    found: dict[str, torch.Tensor] = torch.load(files / "whole" / "weights.pt")
    return found


def assert_weights(files: Path, exact: bool = True) -> None:
    whole, run = plain(files), torch.load(files / "run" / "weights.pt")
    for name, value in whole.items():
        assert torch.equal(run[name], value) if exact else torch.allclose(run[name], value, atol=1e-5), name


def restarts(files: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (files / "run" / "restarts.jsonl").read_text().splitlines()]


def options(files: Path, *more: object) -> list[object]:
    return [files / "model.py", files / "four.piper", "--steps", STEPS, "--log-every", 1, "--out", files / "run", *more]


def test_the_link_is_cut_and_restored(nodes: TwoNodes, files: Path) -> None:
    """For a moment: nobody notices. For longer than `--node-timeout`: diagnosed, and resumed when the node is back."""
    job = nodes.piperc(HEAD, *options(files, "--save-every", 5, "--node-timeout", 12))
    job.until(r"step +12 ")
    nodes.cut()
    time.sleep(4)
    nodes.mend()
    job.until(r"step +24 ")
    nodes.cut()
    began = time.monotonic()
    said = job.until("does not answer after", 60)
    noticed = time.monotonic() - began
    assert "starting again from step 2" in said
    assert noticed < 20
    time.sleep(5)
    nodes.mend()
    job.until("started again in", 180)
    assert job.ended() == 0, job.text
    (one,) = restarts(files)
    assert f"({NODE}), has not answered for 12 s" in str(one["notes"])
    assert_weights(files)


def test_connections_break_and_a_worker_of_the_other_node_dies(nodes: TwoNodes, files: Path) -> None:
    """Whichever process notices it first, what is reported is the cause."""
    job = nodes.piperc(HEAD, *options(files, "--save-every", 5))
    job.until(r"step +12 ")
    nodes.reset()
    said = job.until("cannot reach another device after", 60)
    assert "starting again from step 1" in said
    job.until("started again in")
    job.until(r"step +24 ")
    nodes.kill_worker(NODE)
    job.until(r"device 2 died after|device 3 died after", 60)
    assert job.ended() == 0, job.text
    assert ["died" in str(one["why"]) for one in restarts(files)] == [False, True]
    assert "SIGKILL" in str(restarts(files)[1]["notes"])
    assert_weights(files)


def test_a_node_is_lost_for_good(nodes: TwoNodes, files: Path) -> None:
    """The run continues on what is left, under the script that fits."""
    elastic = ["--elastic", files / "two.piper", "--wait-devices", 10]
    job = nodes.piperc(HEAD, *options(files, "--save-every", 5, "--node-timeout", 12, *elastic))
    job.until(r"step +22 ")
    nodes.lose()
    job.until("under .*two.piper, on 2 devices", 120)
    assert job.ended() == 0, job.text
    assert [str(one.get("script", "")).rpartition("/")[2] for one in restarts(files)] == ["two.piper"]
    assert (files / "run" / "schedule.piper").read_text() == TWO
    assert_weights(files, exact=False)


def test_the_driver_is_cut_off(nodes: TwoNodes, files: Path) -> None:
    """It cannot reach Ray's control store: a diagnostic, and what was saved."""
    job = nodes.piperc(NODE, *options(files, "--save-every", 5, "--node-timeout", 12))
    job.until(r"step +12 ")
    nodes.cut()
    began = time.monotonic()
    code = job.ended(120)
    assert code == 1, job.text
    assert f"error[P0603]: the control store (GCS) of Ray at {HEAD}:6379 cannot be reached" in job.text
    assert time.monotonic() - began < 30
    assert "the state after 1" in job.text


def test_what_a_node_does_not_have(files: Path) -> None:
    """Neither the run folder nor the same code."""
    other = files / "other"
    shutil.copytree(ROOT / "piperlang", other / "piperlang", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "grammar", ROOT / "stdlib"):
        (other / path.name).symlink_to(path)
    with (other / "piperlang" / "version.py").open("a") as file:
        file.write("# changed\n")
    with TwoNodes(environment={"PYTHONPATH": str(other)}) as nodes:
        job = nodes.piperc(HEAD, *options(files))
        assert job.ended() == 1, job.text
        assert "error[P0615]" in job.text
        assert f"({NODE}) has piperlang" in " ".join(job.text.split())
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {files} && exec "$0" "$@"']
    with TwoNodes(wrapped=hidden) as nodes:
        job = nodes.piperc(HEAD, *options(files, "--save-every", 5))
        assert job.ended() == 1, job.text
        text = " ".join(job.text.split())
        assert "error[P0615]" in text
        assert f"({NODE}) does not have {files}/run " in text.replace("`", "")
        job = nodes.piperc(HEAD, *options(files, "--overwrite", "--restart", 0))
        assert job.ended() == 0, job.text  # nothing is written there
        assert_weights(files)
