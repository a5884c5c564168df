"""A declared precision: what plain PyTorch does with autocast, or in bfloat16."""

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
from tests.support.between_steps import BASE, PIPELINE, REPLICAS, job, seed
from tests.support.often import one_in

ZERO3 = REPLICAS.replace("ddp", "zero3")


def plain(text: str, precision: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    scope: dict[str, Any] = {}
    exec(BASE + text, scope)
    seed(0)
    model = scope["model"]()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    if precision == "bf16-true":
        model.bfloat16()
    optimizer = scope["optimizer"](masters if precision == "bf16-true" else model.parameters())
    seed(0)
    losses = []
    for (inputs, target), _ in zip(scope["data"](), range(steps), strict=False):
        inputs = inputs.bfloat16() if precision == "bf16-true" else inputs
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = scope["loss"](model(inputs), target)
        model.zero_grad()
        loss.backward()
        if precision == "bf16-true":
            for master, weight in zip(masters, model.parameters(), strict=True):
                master.grad = weight.grad.float()
        optimizer.step()
        if precision == "bf16-true":
            with torch.no_grad():
                for master, weight in zip(masters, model.parameters(), strict=True):
                    weight.copy_(master)
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


LOSS_MODULE = "loss = nn.CrossEntropyLoss()\n"


CASES = [
    (precision, text, script)
    for precision, text in (("bf16-mixed", ""), ("bf16-true", ""), ("bf16-mixed", LOSS_MODULE))
    for script in ("", PIPELINE, ZERO3)
]


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_as_plain(case: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precision, text, script = case
    declared = f'precision = "{precision}"\n' + text
    code, losses, weights = job(tmp_path, declared, script, "--executor", "inline")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "verified against eager PyTorch" in out
    expected, state = plain(text, precision, 3)
    assert losses == pytest.approx(expected, rel=1e-6 if not script else 1e-2)
    for name, value in state.items():
        assert weights[name].dtype == value.dtype
        assert torch.allclose(weights[name].float(), value.float(), rtol=2e-2, atol=2e-3), name
    full, _ = plain(text, "none", 3) if precision == "bf16-mixed" else ([0.0] * 3, {})
    assert losses != pytest.approx(full, rel=1e-6), "it is not in another precision"


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, _ = job(tmp_path, "", PIPELINE, "--executor", "inline", "--precision", "bf16-mixed")
    assert code == 0, capsys.readouterr().err
    assert losses == pytest.approx(plain("", "bf16-mixed", 3)[0], rel=1e-2)
    files = [str(tmp_path / "model.py"), str(tmp_path / "s.piper")]
    assert main(["check", *files, "--numerics", "--precision", "bf16-mixed"]) == 0
    plan = str(tmp_path / "plan.json")
    assert main(["plan", *files, "-o", plan, "--precision", "bf16-mixed"]) == 0
    capsys.readouterr()
    arguments = ["run", plan, "--steps", "3", "--executor", "inline", "--out", str(tmp_path / "again")]
    assert main(arguments) == 0, capsys.readouterr().err
    rows = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in rows] == losses
    assert main([*arguments, "--overwrite", "--precision", "bf16-true"]) == 2
    assert "was made without it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "words"),
    [('"fp16-mixed"', "float16 needs a loss scale"), ('"bf8"', "`precision` is 'bf8'"), ("16", "is 16")],
)
def test_others_are_refused(value: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = job(tmp_path, f"precision = {value}\n", "", "--executor", "inline")
    err = capsys.readouterr().err
    assert code == 1
    assert words in err
    assert "model.py:" in err


def test_from_python(tmp_path: Path) -> None:
    script = tmp_path / "s.piper"
    script.write_text("mesh gpu = pp: 1\nplace [pass=*] on gpu\n")
    batch = torch.randn(8, 4), torch.randn(8, 4)
    made: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "example": batch,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
        "executor": "inline",
    }
    with piperlang.compile(lambda: nn.Linear(4, 4), script, precision="bf16-mixed", **made) as trainer:
        loss = trainer.step(batch).loss
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss == pytest.approx(float(nn.functional.mse_loss(model(batch[0]), batch[1]).detach()), rel=1e-6)
    with pytest.raises(PiperError, match="P0801"):
        piperlang.compile(lambda: nn.Linear(4, 4), script, precision="fp16", **made)


def test_functions_in_autocast_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.T @ x
    @staticmethod
    def backward(ctx, g): return g
class N(M):
    def forward(self, x): return super().forward(Square.apply(x))
def model(): return N()
"""
    code, _, _ = job(tmp_path, text, "", "--executor", "inline", "--precision", "bf16-mixed")
    err = capsys.readouterr().err
    assert code == 1
    assert "error[P0809]" in err
    assert "is called inside of torch.autocast" in err
