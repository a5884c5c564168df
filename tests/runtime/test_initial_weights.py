"""Weights that a model starts from, read from safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import piperlang
from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model
from piperlang.capture.user.weight_files import FromFiles, StoredWeights
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver import initial
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import compiled

ZERO = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"


class Net(nn.Module):
    """A tied weight, a buffer that is saved and one that is not, and a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.again = nn.Linear(4, 6, bias=False)
        self.again.weight = self.first.weight
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(torch.tanh(self.first(x)))
        return self.last(self.again(x * self.scale + self.shift))  # type: ignore[no-any-return]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def trained() -> dict[str, torch.Tensor]:
    """The state dict of a model with other weights than a new one has, without the second name of the tied weight."""
    torch.manual_seed(77)
    state = {name: value + 0.1 for name, value in Net().state_dict().items()}
    del state["again.weight"]
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, as large checkpoints are saved."""
    state = trained()
    (tmp_path / "weights").mkdir()
    for number, names in enumerate((list(state)[::2], list(state)[1::2])):
        save_file({name: state[name] for name in names}, tmp_path / "weights" / f"model-{number}.safetensors")
    return tmp_path / "weights"


def plain(state: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    model.load_state_dict(state, strict=False)
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(batch()[0]), batch()[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].double() - value.double()).abs().max() < 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_threads(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Values are converted to the dtype of the model."""
    state = {name: value.to(dtype) for name, value in trained().items()}
    one = tmp_path / "one.safetensors"
    save_file(state, one)
    (tmp_path / "s.piper").write_text(ZERO)
    with piperlang.compile(
        Net,
        tmp_path / "s.piper",
        loss=loss,
        example=batch(),
        optimizer=sgd,
        executor="inline",
        initial_weights=folder if dtype == torch.float32 else one,
    ) as trainer:
        for _ in range(3):
            trainer.step(batch())
        assert_equal(trainer.state_dict(), plain(trained(), 3))


def test_workers_read_their_parts_of_a_large_model(
    folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "LARGE", 0)
    stored = StoredWeights(folder)
    make = FromFiles(Net, stored)
    graph, captured = compiled(capture(make, loss, batch()), ZERO)
    training = Training(make, sgd, weights=stored)
    with Job(lower(graph), captured, training, timeout=30, cluster=cluster) as job:
        assert_equal(job.weights(), plain(trained(), 0))
        for _ in range(3):
            job.step(batch())
        assert_equal(job.weights(), plain(trained(), 3))


MODEL = """
import torch
from torch import nn

initial_weights = {weights}

def model():
    return nn.Linear({width}, 4)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def data():
    while True:
        yield torch.zeros(4, {width}), torch.zeros(4, 4)
"""


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("3", "is of type int, not a path"),
        ("'nothing'", "nothing does not exist"),
        ("'.'", "has no .safetensors files"),
    ],
)
def test_a_path_that_cannot_be_used(weights: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(weights=weights, width=4))
    with pytest.raises(PiperError) as found:
        load_model(tmp_path / "model.py")
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0801"
    assert message in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.span.first.line == 5
    assert diagnostic.helps


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.zeros(4, 5), "bias": torch.zeros(4)}, "weight has shape [4, 5] in w.safetensors"),
        ({"linear.weight": torch.zeros(4, 4)}, "has no tensor for the parameters `weight` and `bias`"),
        (None, "cannot be read"),
    ],
)
def test_files_that_do_not_fit(state: dict[str, torch.Tensor] | None, message: str, tmp_path: Path) -> None:
    if state is None:
        (tmp_path / "w.safetensors").write_bytes(b"\1\2\3")
    else:
        save_file(state, tmp_path / "w.safetensors")
    (tmp_path / "model.py").write_text(MODEL.format(weights="'w.safetensors'", width=4))
    file = load_model(tmp_path / "model.py")
    with pytest.raises(PiperError) as found:
        capture(file.model, file.loss, next(iter(file.data())))
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0801"
    assert message in diagnostic.message
    assert diagnostic.span is not None
    assert diagnostic.helps


def test_another_checkpoint_has_another_digest(folder: Path, tmp_path: Path) -> None:
    """Nodes may have different files of the same shapes under one path."""
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        save_file({name: value + 1 for name, value in load_file(file).items()}, other / file.name)
    assert StoredWeights(other).digest != StoredWeights(folder).digest
    assert StoredWeights(folder).digest == StoredWeights(folder).digest
