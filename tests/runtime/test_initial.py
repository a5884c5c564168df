"""Initial weights of large models: created once per node, in a file that has no name."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from piperlang.capture.user.seeding import seed_all
from piperlang.diagnostics import PiperError
from piperlang.runtime.driver import initial
from piperlang.runtime.driver.assemble import fingerprint
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.initial import WeightFile, create, mapped
from tests.support.equivalence import program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.jobs import assert_trains
from tests.support.models import CASES

WIDE = 6


class Odd(nn.Module):
    """Tied weights, buffers, another dtype, a weight that is read, one that is copied, and one that draws late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.tied.weight = self.first.weight
        self.scale = float(self.first.weight.abs().max())
        self.small = nn.Linear(WIDE, WIDE).half()
        self.copied = nn.Parameter(self.first.bias.detach().clone())
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("table", torch.randn(WIDE))
        for parameter in self.tied.parameters():
            nn.init.normal_(parameter)


@pytest.mark.parametrize("model", [Odd, CASES["gpt"].model])
def test_a_mapped_model_has_the_values_of_the_plain_one(model: type[nn.Module]) -> None:
    seed_all(3)
    plain = model()
    drawn = torch.rand(2)
    file = WeightFile.new()
    try:
        made, created = create(file, model, 3, fingerprint)
        assert created.fingerprint == fingerprint(plain)
        other = WeightFile(os.open(created.path, os.O_RDWR))
        found = mapped(created, other, model, 3)
        assert torch.equal(torch.rand(2), drawn)
        other.close()
        assert fingerprint(found) == fingerprint(made) == fingerprint(plain)
        assert [type(p) for p in found.parameters()] == [type(p) for p in plain.parameters()]
        assert all(p.requires_grad for p in found.parameters())
        assert all(p.data_ptr() in file.known for p in made.parameters() if p.dtype == torch.float32)
        inode = f" {os.fstat(file.descriptor).st_ino} "
        assert inode in Path("/proc/self/maps").read_text()
    finally:
        file.close()
    del made, found
    gc.collect()
    assert inode not in Path("/proc/self/maps").read_text()


def test_models_of_different_shapes_are_refused() -> None:
    file = WeightFile.new()
    try:
        _, created = create(file, lambda: nn.Linear(2, 3), 0, fingerprint)
        with pytest.raises(PiperError, match="they differ in weight"):
            mapped(created, file, lambda: nn.Linear(2, 4), 0)
    finally:
        file.close()


def test_too_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = WeightFile.new()
    try:
        with pytest.raises(PiperError, match="no space for the initial weights"):
            create(file, lambda: nn.Linear(2, 3), 0, fingerprint)
    finally:
        file.close()


@pytest.mark.parametrize("name", ["zbv x zero3", "zero3"])
def test_jobs_train_from_a_file(name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "LARGE", 0)
    model, script = JOB_SCHEDULES[name]
    assert_trains(cluster, CASES[model], program(model), script)
