"""Runs that are saved, resumed, looked at, exported and imported on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from piperlang.cli.main import main
from piperlang.runtime.checkpoint.files import read_manifest
from tests.support.between_steps import BASE, PIPELINE

MORE = """
ema = 0.9
def optimizer(params): return torch.optim.Adam(params, lr=0.01)
def lr_schedule(optimizer): return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
def data():
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
def validation():
    for _ in range(2): yield torch.randn(8, 4), torch.randint(3, (8,))
"""
DATA = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(MORE)
        (path / "pp.piper").write_text(PIPELINE)
        (path / "dp.piper").write_text(DATA)

    def write(self, more: str) -> None:
        (self.path / "model.py").write_text(BASE + more)

    def train(self, script: str, *options: str) -> int:
        words = [str(self.path / "model.py"), str(self.path / script), "--executor", "inline", "--validate-every", "2"]
        return main([*words, *options])

    def run(self, name: str) -> str:
        return str(self.path / name)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.path / name)
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A run of five steps with its checkpoints, and one of eight that was never interrupted."""
    made = Folder(tmp_path_factory.mktemp("runs"))
    assert made.train("pp.piper", "--steps", "5", "--save-every", "2", "--out", made.run("run"), "--seed", "3") == 0
    assert made.train("pp.piper", "--steps", "8", "--out", made.run("whole"), "--seed", "3") == 0
    return made


def copied(folder: Folder, tmp_path: Path) -> Path:
    shutil.copytree(folder.path / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_resumed_run_is_the_same_run(folder: Folder, tmp_path: Path) -> None:
    """A validation draws from the generators, too."""
    run = copied(folder, tmp_path)
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    assert folder.train("pp.piper", "--steps", "8", "--resume", str(run)) == 0
    for name in ("weights.pt", "weights-ema.pt"):
        whole = folder.weights(f"whole/{name}")
        assert all(torch.equal(value, whole[key]) for key, value in torch.load(run / name).items())
    rows = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, folder.path / "whole")
    ]
    for here, there in zip(*rows, strict=True):
        assert {k: here.get(k) for k in ("step", "loss")} == {k: there.get(k) for k in ("step", "loss")}
    assert [row.get("validation_loss") for row in rows[0]][:4] == [row.get("validation_loss") for row in rows[1]][:4]


def test_under_another_script_in_another_folder(folder: Folder, tmp_path: Path) -> None:
    words = ["--steps", "8", "--resume", folder.run("run/checkpoints/step-00000004"), "--out", str(tmp_path / "new")]
    assert folder.train("dp.piper", *words) == 0
    whole = folder.weights("whole/weights.pt")
    assert all(torch.allclose(v, whole[k], atol=1e-6) for k, v in torch.load(tmp_path / "new" / "weights.pt").items())


def test_a_folder_has_one_run(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two branches in one folder, a new start after a fault could take the wrong one."""
    run = copied(folder, tmp_path)
    older = str(run / "checkpoints" / "step-00000002")
    assert folder.train("pp.piper", "--steps", "8", "--resume", older) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "error[P0612]" in err
    assert "it has a later checkpoint, step-00000005" in err
    assert folder.train("pp.piper", "--steps", "8", "--resume", older, "--out", folder.run("whole")) == 2
    assert "error[P0902]" in capsys.readouterr().err
    assert folder.train("pp.piper", "--steps", "3", "--resume", older, "--out", str(tmp_path / "branch")) == 0
    assert folder.train("pp.piper", "--steps", "6", "--resume", str(run), "--out", str(run)) == 0


def test_constants_of_the_program_are_those_of_the_file(folder: Folder, tmp_path: Path) -> None:
    """They are no weights: a run that is resumed with another forward has its constants, not those of before."""
    here = Folder(tmp_path)
    scaled = (
        MORE + "class N(M):\n    def forward(self, x): return super().forward(x * torch.tensor([1.0, 1.0, 1.0, 2.0]))\n"
        "def model(): return N()\n"
    )
    here.write(scaled)
    assert here.train("pp.piper", "--steps", "2", "--save-every", "2", "--out", here.run("run")) == 0
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert {tensor.name for tensor in manifest.tensors} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    losses = []
    for name, text in (("same", scaled), ("other", scaled.replace("2.0]", "3.0]"))):
        here.write(text)
        assert here.train("pp.piper", "--steps", "3", "--resume", here.run("run"), "--out", here.run(name)) == 0
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[2])["loss"])
    assert losses[0] != losses[1]


def test_auto_starts_resumes_and_ends(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for steps, said in (
        ("2", "there is no checkpoint yet"),
        ("4", "resuming after 2 steps"),
        ("4", "trained 4 steps already"),
    ):
        assert folder.train("dp.piper", "--steps", steps, "--save-every", "2", "--resume", "auto") == 0
        assert said in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["dp-1"]


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "another seed": (MORE, ["--seed", "4"], "the run has seed 3"),
    "another rate": (MORE.replace("0.01", "0.02"), [], "option `lr` of the group of weight a.bias is 0.0118"),
    "another schedule": (MORE.replace("ExponentialLR(optimizer, 0.9)", "ConstantLR(optimizer)"), [], "option `lr`"),
    "other data": (
        MORE.replace("torch.randn(8, 4), torch", "2 * torch.randn(8, 4), torch"),
        [],
        "batches of `data` are not those that the run has read",
    ),
    "a variable that on_step sets": (
        MORE.replace("while True: yield torch", "while True: yield (1 + (LEVEL > 9)) * torch")
        + "LEVEL = 0\ndef on_step(row):\n    global LEVEL\n    LEVEL = row['step']\n",
        [],
        "`LEVEL`, which `data` reads, is not what it was",
    ),
    "another model": (
        MORE + "class N(M):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)\ndef model(): return N()\n",
        [],
        "of shape [8, 4], and the model [6, 4]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_run_is_refused(
    name: str, folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, options, said = REFUSED[name]
    here = Folder(tmp_path)
    here.write(more)
    run = copied(folder, tmp_path)
    if "on_step" in more:
        assert here.train("pp.piper", "--steps", "5", "--out", str(run), "--overwrite", "--save-every", "5") == 0
        here.write(more + "# a new process would run the file again\n")
    assert here.train("pp.piper", "--steps", "8", "--resume", str(run), *options) == 1
    err = capsys.readouterr().err
    assert "error[P0612]" in err
    assert said in err
    if "rate" in name:
        assert here.train("pp.piper", "--steps", "6", "--resume", str(run), "--new-options") == 0


def test_damaged_ones_are_named_and_older_ones_used(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, tmp_path)
    (run / "checkpoints" / "step-00000005" / "part-00000.safetensors").write_bytes(b"x")
    assert main(["ckpt", "verify", str(run)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("whole") == 2
    assert "error[P0611]" in captured.err
    assert "part-00000.safetensors: it has 1 bytes" in captured.err
    assert folder.train("pp.piper", "--steps", "5", "--resume", str(run)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be used: part-00000.safetensors: it has 1 bytes" in out
    assert "resuming after 4 steps" in out
    for damaged in (run / "checkpoints").glob("*/manifest.json"):
        damaged.unlink()
    assert folder.train("pp.piper", "--steps", "9", "--resume", str(run)) == 1
    assert "manifest.json: it is missing" in capsys.readouterr().err


def test_more_steps_than_were_planned(folder: Folder, tmp_path: Path) -> None:
    """A validation after the last step draws random numbers, and leaves no trace in the run that goes on."""
    here = Folder(tmp_path)
    words = [str(tmp_path / "model.py"), str(tmp_path / "dp.piper"), "--executor", "inline"]
    assert main([*words, "--steps", "3", "--save-every", "3", "--out", str(tmp_path / "run")]) == 0
    assert main([*words, "--steps", "6", "--resume", str(tmp_path / "run")]) == 0
    assert main([*words, "--steps", "6", "--out", str(tmp_path / "whole")]) == 0
    whole = here.weights("whole/weights.pt")
    assert all(torch.equal(value, whole[name]) for name, value in here.weights("run/weights.pt").items())


def test_other_changes_are_told(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = Folder(tmp_path)
    here.write(MORE.replace("ema = 0.9", "ema = 0.8") + "max_norm = 0.5\n")
    run = copied(folder, tmp_path)
    assert here.train("pp.piper", "--steps", "6", "--resume", str(run)) == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in ("the model file has changed", "`max_norm` is 0.5, and was None", "`ema` is 0.8, and was 0.9"):
        assert said in out


def test_a_loss_that_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and metrics stay JSON."""
    made = Folder(tmp_path)
    made.write(MORE + "def optimizer(p): return torch.optim.SGD(p, lr=1e38)\n")
    assert made.train("pp.piper", "--steps", "4", "--no-verify", "--on-nan", "continue", "--out", made.run("run")) == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in rows
    assert json.loads(rows.splitlines()[-1])["loss"] is None
    out = capsys.readouterr().out
    assert out.count("the loss of step ") == 1


def test_ls_and_show(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", folder.run("run"), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["samples"]) for row in rows] == [(5, 40), (4, 32), (2, 16)]
    assert main(["ckpt", "ls", folder.run("run")]) == 0
    assert "step 5, 40 samples" in capsys.readouterr().out
    assert main(["ckpt", "show", folder.run("run")]) == 0
    out = capsys.readouterr().out
    assert "step 5, 40 samples, seed 3" in out
    assert "exp_avg: float32[" in out
    assert main(["ckpt", "ls", str(tmp_path)]) == 1
    assert "has no checkpoint" in capsys.readouterr().err


def test_export_and_start_from_it(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", folder.run("run"), "-o", str(tmp_path / "plain")]) == 0
    plain, saved = load_file(tmp_path / "plain" / "model.safetensors"), folder.weights("run/weights.pt")
    assert list(plain) == sorted(saved)
    assert all(torch.equal(value, saved[name]) for name, value in plain.items())
    assert main(["export", folder.run("run"), "-o", str(tmp_path / "plain")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", folder.run("run"), "-o", str(tmp_path / "averaged"), "--averaged"]) == 0
    averages = folder.weights("run/weights-ema.pt")
    assert all(
        torch.equal(value, averages[name])
        for name, value in load_file(tmp_path / "averaged" / "model.safetensors").items()
    )
    assert main(["import", folder.run("run/weights.pt"), "-o", str(tmp_path / "imported")]) == 0
    losses = []
    for name in ("plain", "imported"):
        words = ["--steps", "1", "--initial-weights", str(tmp_path / name), "--out", str(tmp_path / f"from {name}")]
        assert folder.train("pp.piper", *words) == 0
        losses.append(json.loads((tmp_path / f"from {name}" / "metrics.jsonl").read_text())["loss"])
    assert losses[0] == losses[1]


def test_what_is_no_state_dict_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "pickled.pt")
    torch.save({"epoch": 3}, tmp_path / "number.pt")
    (tmp_path / "text.pt").write_text("hello")
    for number, name in enumerate(("pickled.pt", "number.pt", "text.pt")):
        assert main(["import", str(tmp_path / name), "-o", str(tmp_path / str(number))]) == 1
        assert not (tmp_path / str(number)).exists()
        assert "error[P0801]" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "missing.pt"), "-o", str(tmp_path / "x")]) != 0
    assert "error[P0901]" in capsys.readouterr().err
