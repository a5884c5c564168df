"""A ledger of samples: each is trained with once, under three numbers of devices that follow each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piperlang.cli.main import main

SAMPLES, BATCH = 96, 8
MODEL = f"""
import torch
from torch import nn
class Ledger(nn.Module):
    '''Row i counts how often sample i was trained with.'''
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding({SAMPLES}, 1)
        nn.init.zeros_(self.rows.weight)
    def forward(self, ids):
        return self.rows(ids)[:, 0]
def model(): return Ledger()
def loss(output, target): return -output.mean()
def optimizer(params): return torch.optim.SGD(params, lr={BATCH}.0)
def data():
    ids = torch.arange({SAMPLES})
    pairs = torch.utils.data.TensorDataset(ids, ids)
    g = torch.Generator().manual_seed(7)
    return iter(torch.utils.data.DataLoader(pairs, {BATCH}, shuffle=True, generator=g))
"""
REPLICAS = "mesh gpu = dp: 4\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\n"
SHARDED = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"
ONE = "mesh gpu = d: 1\nplace [pass=*] on gpu\nsplit batch into 2 as mb\n"


@pytest.mark.parametrize("order", [(REPLICAS, SHARDED, ONE), (ONE, REPLICAS, SHARDED)])
def test_nothing_is_lost_or_repeated(order: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for script, steps in zip(order, (5, 9, SAMPLES // BATCH), strict=True):
        (tmp_path / "s.piper").write_text(script)
        words = [str(tmp_path / "model.py"), str(tmp_path / "s.piper"), "--executor", "inline", "--steps", str(steps)]
        assert main([*words, "--save-every", "100", "--resume", "auto", "--out", str(tmp_path / "run")]) == 0
        counts = torch.load(tmp_path / "run" / "weights.pt")["rows.weight"].flatten()
        assert sorted(counts.tolist()) == [0.0] * (SAMPLES - BATCH * steps) + [1.0] * BATCH * steps
