"""Moving averages of weights: those of torch's AveragedModel, however updates are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as f
from torch import optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import piperlang
from piperlang.cli.main import main
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.often import one_in
from tests.support.optimizer_jobs import STEPS, Net, Weights, assert_equal, batch, net, scheduled

DECAY = 0.9


def plain() -> Weights:
    model = net()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        f.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averaged.update_parameters(model)
    return {name.removeprefix("module."): p.detach() for name, p in averaged.named_parameters()}


def adamw(params: list[torch.nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.05)


TRAINING = Training(Net, adamw, ema=DECAY)


@pytest.mark.parametrize("script", one_in(3, ["ddp", "zero1", "zero3", "pp", "columns zero1", "owned two axes"]))
def test_in_threads(script: str) -> None:
    _, captured, plan = scheduled(script)
    with ThreadJob(plan, captured, TRAINING, 20.0, "float64") as job:
        for step in range(STEPS):
            job.step(batch(step))
        assert_equal(job.weights(averaged=True), plain())
        assert not torch.equal(job.weights(averaged=True)["first.weight"], job.weights()["first.weight"])


@pytest.mark.slow
def test_on_workers(cluster: Cluster) -> None:
    _, captured, plan = scheduled("pp zero3")
    with Job(plan, captured, TRAINING, timeout=30, loss_dtype="float64", cluster=cluster) as job:
        for step in range(STEPS):
            job.step(batch(step))
        assert_equal(job.weights(averaged=True), plain())


FILE = """
import torch
from torch import nn
def model(): return nn.Linear(4, 3)
def loss(y, t): return nn.functional.mse_loss(y, t)
def data():
    while True: yield torch.randn(8, 4), torch.randn(8, 3)
ema = {}
"""
SCRIPT = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with states=sharded\n"


def test_in_a_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, script = tmp_path / "m.py", tmp_path / "s.piper"
    script.write_text(SCRIPT)
    command = [str(model), str(script), "--executor", "inline", "--steps", "2", "--out", str(tmp_path / "run")]
    model.write_text(FILE.format("1.5"))
    assert main(command) == 1
    assert "`ema` is 1.5, not a number from 0 to below 1" in capsys.readouterr().err
    model.write_text(FILE.format("0.9"))
    assert main(command) == 0
    now, averaged = (torch.load(tmp_path / "run" / name) for name in ("weights.pt", "weights-ema.pt"))
    assert now.keys() == averaged.keys()
    assert not torch.equal(now["weight"], averaged["weight"])
    model.write_text(FILE.format("None"))
    assert main([*command, "--overwrite"]) == 0
    assert not (tmp_path / "run" / "weights-ema.pt").exists()


def test_from_python(tmp_path: Path) -> None:
    script = tmp_path / "s.piper"
    script.write_text(SCRIPT)
    with piperlang.compile(
        net, script, loss=f.mse_loss, example=batch(0), optimizer=adamw, executor="inline", ema=DECAY
    ) as trainer:
        for step in range(STEPS):
            trainer.step(batch(step))
        assert_equal(trainer.averages(), plain())
    with (
        piperlang.compile(
            net, script, loss=f.mse_loss, example=batch(0), optimizer=adamw, executor="inline"
        ) as trainer,
        pytest.raises(piperlang.PiperError, match="no moving averages"),
    ):
        trainer.averages()
