"""A model file is a module as imported ones are, in the driver and on workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from piperlang.capture.user.model_file import load_model
from piperlang.cli.main import main
from tests.support.jobs import Lent

MODEL = """
from __future__ import annotations
import pickle, sys
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, get_type_hints
import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    width: int = 4
    names: list[str] = field(default_factory=list)
    kind: ClassVar[str] = "net"

class Row(NamedTuple):
    step: int

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, g): return 2 * g

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.width, config.width)
    def forward(self, x): return Double.apply(self.layer(x))

def model(): return Net(sys.modules[__name__].Config())
def loss(output, target): return nn.functional.mse_loss(output, target)
def data():
    while True: yield torch.ones(2, 4), torch.ones(2, 4)
def optimizer(params):
    assert pickle.loads(pickle.dumps(Config())) == Config() and get_type_hints(Config)["width"] is int
    return torch.optim.SGD(params, lr=0.1)
def on_step(step):
    assert pickle.loads(pickle.dumps(Row(step["step"]))) == Row(step["step"])
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a model file is put there
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    (tmp_path / "alone.piper").write_text("")
    return path


def trained(file: Path, executor: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    folder = file.parent
    arguments = [str(file), str(folder / "alone.piper"), "--steps", "2", "--executor", executor, "--json"]
    code, said = main([*arguments, "--out", str(folder / "run")]), capsys.readouterr()
    assert code == 0, said.err
    return [json.loads(line)["loss"] for line in said.out.splitlines()]


def test_it_is_found_by_its_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = trained(file, "inline", capsys)
    assert losses[1] < losses[0]
    assert sys.modules["model"].__file__ == str(file)


@pytest.mark.slow
def test_it_is_found_by_its_name_on_workers(file: Path, capsys: pytest.CaptureFixture[str], lent_worker: Lent) -> None:
    losses = trained(file, "ray", capsys)
    assert losses[1] < losses[0]


def test_a_library_keeps_its_name(file: Path) -> None:
    taken = file.rename(file.parent / "json.py")
    assert load_model(taken).model().layer.weight.shape == (4, 4)
    assert sys.modules["json"] is json


def test_two_files_of_one_name(file: Path, tmp_path: Path) -> None:
    """The one that is used last has the name."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "model.py"
    other.write_text(MODEL.replace("width: int = 4", "width: int = 6"))
    for path, width in ((file, 4), (other, 6), (file, 4)):
        assert load_model(path).model().layer.in_features == width
        assert sys.modules["model"].__file__ == str(path)
