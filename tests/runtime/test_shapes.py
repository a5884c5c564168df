"""Batches of several shapes: other lengths, a smaller last batch. Losses and weights are those of a plain loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import piperlang
from piperlang import PiperError
from piperlang.plan.lower import lower
from piperlang.plan.rewrite.pad import padded, padding
from piperlang.plan.verify import check
from tests.support.between_steps import BASE, PIPELINE, REPLICAS, WHOLE, assert_plain, job, plain, refused
from tests.support.equivalence import compiled, program
from tests.support.jobs import Lent
from tests.support.often import one_in

# ------------------------------------------------------------------------------------------------------ any schedule

SCHEDULES = {
    "ddp": "from std.data import ddp\nmesh gpu = dp: 4\nplace [stage=*] on gpu\nddp(gpu.dp)\n",
    "1f1b x zero3": (
        "from std.data import zero3\nfrom std.pipeline import loop, one_f_one_b\nmesh gpu = pp: 2, dp: 2\n"
        "loop(gpu, 2)\nsplit batch into 2 as mb\nzero3(gpu.dp)\none_f_one_b(gpu, 2, 2)\n"
    ),
    "zero1, a pipeline with a whole loss": (
        "from std.data import zero1\nmesh gpu = pp: 3\nplace [stage=0] on gpu[pp=0:2]\nplace [stage=1] on gpu[pp=2]\n"
        "replicate [stage=0] over gpu.pp\nsplit batch into 2 as mb\n"
    ),
}
SIZES = {
    "a smaller last batch": [(8, 6), (8, 6), (6, 6), (8, 6), (6, 6)],
    "one sample": [(4, 6), (1, 6), (4, 6)],
    "an odd number": [(8, 6), (7, 6), (3, 6), (8, 6)],
    "lengths": [(4, 6), (4, 9), (4, 3), (4, 9), (4, 6)],
    "both": [(4, 6), (8, 9), (2, 5), (12, 6), (5, 9)],
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with piperlang.annotate("stage", 0):
            hidden = torch.tanh(self.mix(self.embed(tokens)))
            hidden = hidden + hidden.cumsum(1) / tokens.shape[1]
        with piperlang.annotate("stage", 1):
            out: torch.Tensor = self.out(hidden)
            return out


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / 100


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return loss, (target >= 0).sum()


def next_word(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


LOSSES = {"mean": mean, "total": total, "counted": counted, "next word": next_word}


def batch(shape: tuple[int, int], number: int, masks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(number)
    tokens = torch.randint(20, shape, generator=draws)
    target = tokens.roll(1, 1)
    if masks:
        target[torch.rand(shape, generator=draws) < 0.3] = -100
    return tokens, target


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


CASES = [(schedule, sizes, loss) for sizes in SIZES for schedule in SCHEDULES for loss in LOSSES]
HALVES = (
    "from std.pipeline import loop, zero_bubble\nmesh gpu = pp: 2\nloop(gpu, 2)\nsplit batch into 4 as mb\n"
    "zero_bubble(gpu, 2, 4)\n"
)


@pytest.mark.parametrize("case", one_in(60, CASES))
def test_the_same_as_plain(case: tuple[str, str, str], tmp_path: Path) -> None:
    schedule, sizes, loss = case
    _assert_plain(SCHEDULES[schedule], SIZES[sizes], loss, tmp_path)


@pytest.mark.parametrize("script", [SCHEDULES["1f1b x zero3"], HALVES])
def test_one_sample_in_each_part(script: str, tmp_path: Path) -> None:
    """With one sample, a part of the batch that the backward reads is a view, which is a copy with several."""
    _assert_plain(script, [(4, 6), (4, 6)], "next word", tmp_path)


def _assert_plain(script: str, sizes: Sequence[tuple[int, int]], loss: str, folder: Path) -> None:
    (folder / "s.piper").write_text(script)
    batches = [batch(shape, i, masks=loss != "total") for i, shape in enumerate(sizes)]
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    with piperlang.compile(
        Net, folder / "s.piper", loss=LOSSES[loss], example=batches[0], optimizer=sgd, executor="inline"
    ) as trainer:
        for tokens, target in batches:
            optimizer.zero_grad()
            found: Any = LOSSES[loss](model(tokens), target)
            expected = found[0] / found[1] if isinstance(found, tuple) else found
            expected.backward()
            optimizer.step()
            done = trainer.step((tokens, target))
            assert done.loss == pytest.approx(float(expected.detach()), rel=1e-5)
            assert done.samples == len(tokens)
        weights = trainer.state_dict()
        for name, value in model.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=1e-4, atol=1e-6), name
        with torch.no_grad():
            for tokens, target in batches[-2:]:
                found = LOSSES[loss](model(tokens), target)
                expected = found[0] / found[1] if isinstance(found, tuple) else found
                assert trainer.evaluate((tokens, target)) == pytest.approx(float(expected), rel=1e-5)


def test_a_limit(tmp_path: Path) -> None:
    (tmp_path / "s.piper").write_text(SCHEDULES["ddp"])
    with piperlang.compile(
        Net,
        tmp_path / "s.piper",
        loss=mean,
        example=batch((4, 6), 0, False),
        optimizer=sgd,
        executor="inline",
        shapes=2,
    ) as trainer:
        trainer.step(batch((4, 6), 0, False))
        trainer.step(batch((4, 7), 1, False))
        with pytest.raises(PiperError) as found:
            trainer.step(batch((4, 8), 2, False))
        (diagnostic,) = found.value.diagnostics
        assert diagnostic.code == "P0801"
        assert "another shape than the 2 before it: [4, 8], [4, 8]" in diagnostic.message
        trainer.step(batch((4, 7), 3, False))


class OtherWeights(Net):
    """Long sequences use another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().forward(tokens)
        return out if tokens.shape[1] < 8 else out + self.long(self.embed(tokens)).sum(-1, keepdim=True)


def test_other_weights_for_another_shape(tmp_path: Path) -> None:
    """They would not be updated, or have no optimizer state."""
    (tmp_path / "s.piper").write_text(SCHEDULES["ddp"])
    with piperlang.compile(
        OtherWeights, tmp_path / "s.piper", loss=mean, example=batch((4, 6), 0, False), optimizer=sgd, executor="inline"
    ) as trainer:
        trainer.step(batch((4, 6), 0, False))
        with pytest.raises(PiperError) as found:
            trainer.step(batch((4, 9), 1, False))
        (diagnostic,) = found.value.diagnostics
        assert diagnostic.code == "P0606"
        assert any("for a batch of shape [4, 9], [4, 9]" in note for note in diagnostic.notes)


SIZED: dict[str, tuple[str, str]] = {
    "a branch on the batch size": (
        "class N(M):\n    def forward(self, x): return super().forward(x * 1.5 if len(x) > 1 else x)\n"
        "def model(): return N()\n",
        "P0608",
    ),
    "a branch on the batch size of the loss": (
        "def loss(o, t): return nn.functional.cross_entropy(o, t) * (2. if len(t) == 5 else 1.)\n",
        "",
    ),
    "a least number": (
        "def loss(o, t): return nn.functional.cross_entropy(o, t, reduction='sum') / max(len(t), 2)\n",
        "P0608",
    ),
    "a counter of samples": (
        "class N(M):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('seen', torch.zeros((), dtype=torch.long))\n"
        "    def forward(self, x):\n        with piperlang.annotate('stage', 0):\n            self.seen += x.shape[0]\n"
        "        return super().forward(x)\ndef model(): return N()\n",
        "P0412",
    ),
    "a backward that is not linear": (
        "class Clipped(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x.clone()\n"
        "    @staticmethod\n    def backward(ctx, g): return g.clamp(-.02, .02)\n"
        "class N(M):\n    def forward(self, x):\n        y = super().forward(x)\n"
        "        with piperlang.annotate('stage', 1): return Clipped.apply(y)\ndef model(): return N()\n",
        "P0412",
    ),
}
LAST = "def data():\n    for n in (8, {}): yield torch.randn(n, 4), torch.randint(3, (n,))\n"
PART = WHOLE + "split [stage=1] into 2 as mb\n"


@pytest.mark.parametrize("name", SIZED)
def test_what_sees_that_a_batch_is_padded(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python code that reads the batch size, and buffers that depend on the samples: never wrong without a word."""
    text, code = SIZED[name]
    text += LAST.format(5 if "loss" in name else 1)
    if not code:
        _, losses, weights = job(tmp_path, text, PART, "--executor", "inline")
        assert_plain(tmp_path, losses, weights)
        return
    err = refused(tmp_path, text, PART, capsys, "--executor", "inline")
    assert f"error[{code}" in err
    assert "the first one has shape [8, 4], [8]" in err


def test_evaluation_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of one sample is traced with two: the validation loss would be that of the other branch."""
    text, code = SIZED["a branch on the batch size"]
    text += "def validation():\n    for n in (8, 1): yield torch.randn(n, 4), torch.randint(3, (n,))\n"
    err = refused(tmp_path, text, REPLICAS, capsys, "--executor", "inline")
    assert f"error[{code}]" in err
    assert "for a batch of shape [1, 4], [1]" in err


ONLY_IN_TRAINING = """
class N(M):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros_like(self.a.weight))
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            if self.training:
                with torch.no_grad(): self.average.lerp_(self.a.weight, 0.3)
            x = x + nn.functional.linear(x, self.average)[:, :4]
        return super().forward(x)
def model(): return N()
def data():
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
def validation(): yield torch.randn(8, 4), torch.randint(3, (8,))
"""


def test_a_buffer_that_changes_in_training_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation keeps it as training does, also under ZeRO-3."""
    script = REPLICAS.replace("ddp", "zero3")
    code, losses, weights = job(tmp_path, ONLY_IN_TRAINING, script, "--executor", "inline", "--steps", "3")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


def test_a_slice_without_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of some samples is 0 / 0; that of the batch is not."""
    text = """
def loss(o, t):
    mask = (t > 1).float()
    return (nn.functional.cross_entropy(o, t, reduction="none") * mask).sum(), mask.sum()
def data():
    for n in (8, 6): yield torch.randn(n, 4), torch.arange(n) * 3 // n
"""
    code, losses, weights = job(tmp_path, text, REPLICAS, "--executor", "inline", "--steps", "4")
    assert code == 0, capsys.readouterr().err
    divided = text + "pair = loss\ndef loss(o, t):\n    total, count = pair(o, t)\n    return total / count\n"
    (tmp_path / "model.py").write_text(BASE + divided)
    assert_plain(tmp_path, losses, weights)


# ------------------------------------------------------------------------------------------------------- a command

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(5)
SET = TensorDataset(torch.randn(22, 4, generator=g), torch.randint(3, (22,), generator=g))
def data(): return DataLoader(SET, batch_size=8, shuffle=True)
def validation(): return DataLoader(SET, batch_size=5)
"""
KEPT = """
torch.manual_seed(3)
NET = M()
def model(): return NET
def data():
    for n in (8, 6, 8, 3):
        x = torch.randn(n, 4)
        yield x, x.argmax(1) % 3
"""


@pytest.mark.parametrize("where", one_in(2, ["workers", "driver"]))
@pytest.mark.parametrize("script", one_in(2, [REPLICAS, PIPELINE]))
def test_a_smaller_last_batch_on_workers(
    script: str, where: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", where, "--steps", "7", "--validate-every", "4")
    code, losses, weights = job(tmp_path, LOADER, script, *options)
    assert code == 0, capsys.readouterr().err
    expected, state, validated = plain(tmp_path / "model.py", 7, validates=(3, 6))
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in state.items():
        assert torch.allclose(weights[name], value, rtol=1e-4, atol=1e-6), name
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["validation_loss"] for row in rows if "validation_loss" in row] == pytest.approx(validated, rel=1e-5)


@pytest.mark.parametrize("options", [("--executor", "inline"), pytest.param((), marks=pytest.mark.slow)])
def test_a_model_that_the_file_keeps(
    options: tuple[str, ...], lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is traced again with its initial weights, though code that uses it during training is refused."""
    code, losses, weights = job(tmp_path, KEPT, REPLICAS, "--steps", "6", *options)
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)
    used = KEPT + "def on_step(row): NET.a.weight.sum()\n"
    err = refused(tmp_path, used, REPLICAS, capsys, "--executor", "inline", "--out", str(tmp_path / "other"))
    assert "error[P0808]: this code uses a model object that is not being trained" in err


# ---------------------------------------------------------------------------------------------------------- padding


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 9), st.integers(1, 60), st.booleans())
def test_a_padded_batch_can_be_divided(others: list[int], count: int, samples: int, repeats: bool) -> None:
    """Into as many parts as any chunk has; every sample counts once, and equally in every part of the loss."""
    parts = [count, *(count * number for number in others)]
    whole = lcm(*parts)
    programs = [SimpleNamespace(samples=whole // n, loss=None if i else 0) for i, n in enumerate(parts)]
    plan: Any = SimpleNamespace(samples=whole, programs=programs)
    found = padding(plan, samples, repeats)
    if found is None:
        assert samples % whole == 0 or not repeats
        return
    rows, weights = found
    assert len(rows) == len(weights)
    assert len(rows) % whole == 0
    size = len(rows) // count
    assert all(len(set(weights[i : i + size])) == 1 for i in range(0, len(rows), size))
    for sample in range(samples):
        assert sum(w for row, w in zip(rows, weights, strict=True) if row == sample) == pytest.approx(1)
    if not repeats:
        assert set(weights) <= {0.0, 1.0}
        assert rows[:samples] == tuple(range(samples))


@pytest.mark.parametrize(("parts", "samples", "size"), [(4, 2, 4), (16, 61, 64), (16, 63, 80), (8, 7, 8), (8, 1, 8)])
def test_a_padded_batch_is_not_much_larger(parts: int, samples: int, size: int) -> None:
    plan: Any = SimpleNamespace(samples=parts, programs=[SimpleNamespace(samples=1, loss=0)])
    found = padding(plan, samples, repeats=True)
    assert found is not None
    assert len(found.rows) == size


def test_a_wrong_share_of_a_padded_plan_is_found() -> None:
    graph, _ = compiled(program("mlp"), SCHEDULES["ddp"])
    plan = lower(graph)
    each = plan.programs[0].samples
    plan = padded(plan, (*[1.0] * (plan.samples - each), *[0.0] * each))
    check(plan)
    for device in plan.devices:
        for key, share in device.losses.items():
            device.losses[key] = 0.0 if share else 1 / 3
            with pytest.raises(PiperError):
                check(plan)
            device.losses[key] = share
