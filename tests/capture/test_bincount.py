"""Counts of a fixed length (`bincount(x, minlength=n)`), as routers compute them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piperlang.capture.trace.rewritten import counts
from piperlang.cli.main import main

FILE = """
import torch
from torch import nn
from piperlang import annotate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        with annotate("stage", 0):
            gates = self.gate(x).softmax(-1)
            share = torch.bincount(gates.argmax(-1) {more}, minlength=3).float() / len(x)
        with annotate("stage", 1):
            return self.last(gates) + 0.1 * (share * gates.mean(0)).sum()


def model(): return Net()
def loss(y, t): return nn.functional.cross_entropy(y, t)
def data():
    while True: yield torch.randn(8, 4), torch.randint(2, (8,))
"""
WHOLE = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"


def test_like_bincount() -> None:
    x = torch.tensor([0, 2, 2, 1])
    assert torch.equal(counts(x, minlength=5), torch.bincount(x, minlength=5))
    for kind in (torch.float32, torch.float64, torch.float16, torch.int32):
        weights = torch.tensor([1, 3, 5, 2], dtype=kind)
        ours, theirs = counts(x, weights, 5), torch.bincount(x, weights, 5)
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert torch.equal(counts(x), torch.bincount(x))


def run(tmp_path: Path, more: str, script: str) -> int:
    (tmp_path / "m.py").write_text(FILE.format(more=more))
    (tmp_path / "s.piper").write_text(script)
    files = [str(tmp_path / name) for name in ("m.py", "s.piper")]
    return main([*files, "--executor", "inline", "--steps", "1", "--overwrite", "--out", str(tmp_path / "run")])


def test_in_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "", WHOLE) == 0
    assert run(tmp_path, "", WHOLE + "split batch into 2 as mb\n") == 1
    assert "error[P0805]" in capsys.readouterr().err


def test_without_a_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = "def loss(y, t): return nn.functional.cross_entropy(y, t) + torch.bincount(t).sum()\n"
    (tmp_path / "m.py").write_text(FILE.format(more="") + loss)
    (tmp_path / "s.piper").write_text(WHOLE)
    assert main(["check", str(tmp_path / "m.py"), str(tmp_path / "s.piper")]) == 1
    err = capsys.readouterr().err
    assert "error[P0802]: data-dependent shape" in err
    assert "def loss(y, t)" in err
    assert "give `bincount` a `minlength`" in err


def test_a_value_that_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain PyTorch would give a longer result."""
    assert run(tmp_path, "+ 1", WHOLE) == 1
    err = capsys.readouterr().err
    assert "error[P08" in err
    assert "a bug in piperc" not in err
