"""`--on-nan`: a step whose loss or gradients are not finite is left out on all devices, or ends the job in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piperlang
from piperlang.cli.main import main
from piperlang.diagnostics import PiperError
from tests.support.between_steps import PIPELINE, REPLICAS, WHOLE

MODEL = """
import torch, piperlang
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        NORM
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = self.between(self.a(x).abs().sqrt())
        with piperlang.annotate("stage", 1):
            return self.b(x)
def model(): return M()
def loss(o, t): return nn.functional.cross_entropy(o, t)
def data():
    for step in range(1000):
        g = torch.Generator().manual_seed(step)
        x, t = torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
        if step in BAD: x[5, 2] = float(BAD[step])
        yield x, t
def optimizer(p): return torch.optim.Adam(p, lr=0.05)
def lr_schedule(o): return torch.optim.lr_scheduler.ExponentialLR(o, 0.9)
ema = 0.5
"""
PLAIN, BATCH_NORM = "self.between = nn.Identity()", "self.between = nn.BatchNorm1d(8)"
ZERO3 = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"
SCHEDULES = {"pipeline": PIPELINE, "replicas": REPLICAS, "ZeRO-3": ZERO3, "whole": WHOLE}
STEPS = 7


def written(folder: Path, script: str, bad: dict[int, str], norm: str = PLAIN, more: str = "") -> list[str]:
    text = (
        MODEL.replace("        NORM\n", f"        {norm}\n")
        .replace("BAD[", f"{bad!r}[")
        .replace("in BAD", f"in {bad!r}")
    )
    (folder / "model.py").write_text(text + more)
    (folder / "s.piper").write_text(script)
    return [str(folder / "model.py"), str(folder / "s.piper"), "--executor", "inline", "--steps", str(STEPS)]


def plain(folder: Path, bad: dict[int, str], max_norm: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The loop that a careful user writes: weights and their averages."""
    scope: dict[str, Any] = {}
    exec((folder / "model.py").read_text(), scope)
    torch.manual_seed(0)
    model = scope["model"]()
    optimizer = scope["optimizer"](model.parameters())
    schedule = scope["lr_schedule"](optimizer)
    averages: dict[str, Any] = {}
    for step, (x, t) in zip(range(STEPS), scope["data"](), strict=False):
        before = {name: value.clone() for name, value in model.named_buffers()}
        loss = scope["loss"](model(x), t)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        finite = bool(loss.isfinite() and norm.isfinite())
        assert finite == (step not in bad)
        if finite:
            optimizer.step()
            schedule.step()
            for name, value in model.named_parameters():
                averages[name] = averages.get(name, value.detach()).lerp(value.detach(), 0.5)
        else:
            for name, value in model.named_buffers():
                value.copy_(before[name])
    return model.state_dict(), averages


def same(run: Path, expected: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, wanted in zip(("weights.pt", "weights-ema.pt"), expected, strict=True):
        found = torch.load(run / name)
        for key, value in wanted.items():
            assert torch.allclose(found[key], value, atol=1e-6), (name, key)


@pytest.mark.parametrize("script", SCHEDULES)
@pytest.mark.parametrize("max_norm", [None, pytest.param(0.1, marks=pytest.mark.slow)])
def test_skipped_steps_change_nothing(script: str, max_norm: float | None, tmp_path: Path) -> None:
    """The norm is that of all devices: a number in one sample that only one of them has is seen by all."""
    bad = {1: "nan", 3: "inf", 4: "nan"}
    more = f"max_norm = {max_norm}\n" if max_norm is not None else ""
    norm = BATCH_NORM if script == "whole" else PLAIN
    words = written(tmp_path, SCHEDULES[script], bad, norm, more)
    assert main([*words, "--on-nan", "skip", "--out", str(tmp_path / "run")]) == 0
    same(tmp_path / "run", plain(tmp_path, bad, max_norm))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("skipped")] == list(bad)
    assert all(row["loss"] is None for row in rows if row["step"] in bad)
    assert all(row["gradient_norm"] > 0 for row in rows if row["step"] not in bad)


@pytest.mark.parametrize("script", ["pipeline", "ZeRO-3"])
def test_a_fused_optimizer_skips_on_the_device(script: str, tmp_path: Path) -> None:
    """The host does not wait for the norm. The first step is among them: it makes the state."""
    bad = {0: "nan", 3: "inf"}
    fused = "def optimizer(p): return torch.optim.Adam(p, lr=0.05, fused=True)\n"
    words = written(tmp_path, SCHEDULES[script], bad, more=fused)
    assert main([*words, "--on-nan", "skip", "--no-verify", "--out", str(tmp_path / "run")]) == 0
    same(tmp_path / "run", plain(tmp_path, bad))


def test_gradients_alone(tmp_path: Path) -> None:
    """The loss is finite: the root of 0 has an infinite slope."""
    words = written(tmp_path, PIPELINE, {2: "nan"})
    text = (tmp_path / "model.py").read_text().replace("nn.Linear(4, 8)", "nn.Linear(4, 8, bias=False)")
    (tmp_path / "model.py").write_text(text.replace("x[5, 2] = float({2: 'nan'}[step])", "x[5] = 0.0"))
    assert main([*words, "--on-nan", "skip", "--out", str(tmp_path / "run"), "--steps", "3"]) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2])
    assert row["skipped"]
    assert row["loss"] > 0
    assert row["gradient_norm"] is None  # JSON has no other word for it


@pytest.mark.parametrize("script", ["pipeline", "whole"])
def test_stops_with_the_last_good_state(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the default. The run goes on from there as if it had skipped the step at once."""
    norm = BATCH_NORM if script == "whole" else PLAIN
    words = written(tmp_path, SCHEDULES[script], {4: "nan"}, norm)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert main([*words, "--out", str(run)]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "error[P0613]: the loss of step 4 is nan" in err
    assert "the state after 4 steps is saved" in err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert main([*words, "--resume", str(run)]) == 1
    assert main([*words, "--resume", str(run), "--on-nan", "skip"]) == 0
    assert main([*words, "--out", str(whole), "--on-nan", "skip"]) == 0
    for name in ("weights.pt", "weights-ema.pt"):
        assert all(
            torch.equal(a, b) for a, b in zip(*(torch.load(x / name).values() for x in (run, whole)), strict=True)
        )


def test_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = written(tmp_path, PIPELINE, {2: "nan"})
    assert main([*words, "--on-nan", "continue", "--out", str(tmp_path / "run")]) == 0
    assert "the loss of step 2 is nan" in " ".join(capsys.readouterr().out.split())
    assert all(value.isnan().all() for value in torch.load(tmp_path / "run" / "weights.pt").values())
    plan = (tmp_path / "run" / "plan.json").read_text()
    assert '"norm"' not in plan


def test_saved_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have it, or not."""
    words = written(tmp_path, PIPELINE, {2: "nan"})[:2]
    plan = str(tmp_path / "step.plan")
    assert main(["plan", *words, "-o", plan, "--on-nan", "continue"]) == 0
    run = ["run", plan, "--executor", "inline", "--steps", "4", "--out", str(tmp_path / "run")]
    assert main(run) == 2
    assert "was made for another" in capsys.readouterr().err
    assert main([*run, "--on-nan", "continue"]) == 0
    assert main(["plan", *words, "-o", plan]) == 0
    assert main([*run, "--on-nan", "skip", "--overwrite"]) == 0


def test_trainer_raises_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "s.piper").write_text(REPLICAS.replace("[stage=*]", "[pass=*]"))

    def train(on_nan: str) -> piperlang.Trainer:
        return piperlang.compile(
            lambda: nn.Linear(4, 3),
            tmp_path / "s.piper",
            loss=nn.functional.cross_entropy,
            example=good,
            optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
            executor="inline",
            on_nan=on_nan,
        )

    good = torch.ones(4, 4), torch.tensor([0, 1, 2, 0])
    bad = torch.full((4, 4), torch.nan), good[1]
    states = []
    for batches in ([good, bad, good], [good, good]):
        with train("stop") as trainer:
            for batch in batches:
                if batch is bad:
                    with pytest.raises(PiperError, match="the loss of step 1 is nan"):
                        trainer.step(batch)
                else:
                    trainer.step(batch)
            states.append(trainer.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    with train("skip") as trainer:
        assert trainer.step(bad).skipped
    with pytest.raises(ValueError, match="on_nan"):
        train("ignore")


@pytest.mark.parametrize("script", ["pipeline", "replicas"])
def test_a_gradient_after_an_update(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can wait for an update if that waits for the norm of what comes then."""
    order = "order [stage=1, update] -> [stage=0, pass=B]"
    words = written(tmp_path, SCHEDULES[script] + order + "\n", {})
    line = len((SCHEDULES[script] + order).splitlines())
    for command in ([], ["plan"]):
        given = words[:2] if command else words
        assert main([*command, *given]) == 1
        told = capsys.readouterr().err
        assert "P0501" in told
        assert f"s.piper:{line}:7" in told
        assert "updates wait for the norm of all gradients" in told
        assert "--on-nan continue" in told
    assert main([*words, "--on-nan", "continue", "--out", str(tmp_path / "run")]) == 0
    plain_words = written(tmp_path, SCHEDULES[script], {})
    assert main([*plain_words, "--on-nan", "continue", "--out", str(tmp_path / "plain")]) == 0
    runs = (torch.load(tmp_path / name / "weights.pt").values() for name in ("run", "plain"))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
