"""Whole jobs beside plain training: what happens around a step (data, seeds, globals, the optimizer function) changes
nothing either, or is refused."""

from __future__ import annotations

import json
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch

from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model
from piperlang.capture.user.state import TorchState
from piperlang.cli import run_folder
from piperlang.cli.main import main
from tests.support.between_steps import (
    BASE,
    CURSORS,
    NORMED,
    OPTIMIZERS,
    PIPELINE,
    REFUSED,
    REPLICAS,
    SAME,
    SCALED,
    WHOLE,
    assert_plain,
    job,
    refused,
    seed,
)
from tests.support.jobs import Lent
from tests.support.often import one_in


@pytest.mark.parametrize("name", one_in(9, SAME))
def test_same_as_plain(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, SAME[name], PIPELINE, "--executor", "inline")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


def test_statistics_with_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, NORMED, WHOLE, "--executor", "inline")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


NEIGHBOUR = """
from neighbour_of_model import factor
FACTOR = 1.0
class N(M):
    def forward(self, x): return super().forward(x) * FACTOR * factor()
def model(): return N()
def on_step(row):
    import neighbour_of_model
    neighbour_of_model.FACTOR = 2.0
"""


def test_two_globals_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_model.py").write_text("FACTOR = 1.0\ndef factor(): return FACTOR\n")
    code, _, _ = job(tmp_path, NEIGHBOUR, PIPELINE, "--executor", "inline")
    assert (code, sys.modules.pop("neighbour_of_model").FACTOR) == (1, 2.0)
    assert "error[P0808]: global `FACTOR` of module `neighbour_of_model`" in capsys.readouterr().err


@pytest.mark.parametrize("watched", ["", "def on_step(row): pass\n"], ids=["ahead", "with on_step"])
@pytest.mark.parametrize("name", CURSORS)
def test_validation_that_moves_the_data(
    name: str, watched: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches are drawn in the order in which a plain loop draws them."""
    text = (
        CURSORS[name]
        + watched
        + """
def numbered():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(draw()))
    return x, x.argmax(1) % 3
def data():
    while True: yield numbered()
def validation():
    for _ in range(2): yield numbered()
"""
    )
    code, losses, _ = job(tmp_path, text, PIPELINE, "--executor", "inline", "--validate-every", "1")
    assert code == 0, capsys.readouterr().err
    scope: dict[str, Any] = {}
    exec(BASE + text, scope)
    seed(0)
    model = scope["model"]()
    optimizer = scope["optimizer"](model.parameters())
    batches, expected = scope["data"](), []
    for _ in range(3):
        inputs, target = next(batches)
        optimizer.zero_grad()
        loss = scope["loss"](model(inputs), target)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
        list(scope["validation"]())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", one_in(9, REFUSED))
def test_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, code, words = REFUSED[name]
    err = refused(tmp_path, text, PIPELINE, capsys, "--executor", "inline")
    assert f"error[{code}]" in err
    assert "model.py:" in err
    assert words in err


@pytest.mark.parametrize("options", [(), ("--no-verify",)], ids=["verified", "not verified"])
@pytest.mark.parametrize("name", one_in(4, OPTIMIZERS))
def test_optimizers_that_change_what_others_read(
    name: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the comparison before the first step, too."""
    text, words = OPTIMIZERS[name]
    exit_code, _, _ = job(tmp_path, text, REPLICAS, "--executor", "inline", *options)
    err = capsys.readouterr().err
    assert exit_code == 1
    assert "error[P0808]" in err or ("error[P0601]" in err and "changes in every step" in err)
    assert words in err
    assert "model.py:" in err


@pytest.mark.parametrize("scale", ["1.0", "torch.ones(())"])
@pytest.mark.parametrize("script", ["", REPLICAS.replace("ddp", "zero1")], ids=["one device", "zero1"])
def test_a_class_attribute_of_the_optimizer_that_the_schedule_changes(
    scale: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, _, _ = job(tmp_path, SCALED.format(scale=scale), script, "--executor", "inline")
    err = capsys.readouterr().err
    assert exit_code == 1
    assert "error[P0808]: class attribute `My.scale`" in err or "error[P0601]: class `My`" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        OPTIMIZERS["a tensor that the loss reads"],
        OPTIMIZERS["a mask that data changes"],
        OPTIMIZERS["a buffer of the model"],
        (REFUSED["a tensor in a dict that the schedule changes"][0].replace("e > 0", "e > 1"), "`cfg` changes when"),
    ],
    ids=["a tensor", "a mask", "a buffer", "by the schedule, in the second step"],
)
def test_what_workers_change_without_a_comparison(
    text: str, words: str, lent_worker: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optimizer and schedule run on workers, data in the driver."""
    exit_code, _, _ = job(tmp_path, text, "", "--no-verify")
    err = capsys.readouterr().err
    assert lent_worker.jobs == 1
    assert exit_code == 1
    assert "error[P0808]" in err
    assert words in err
    assert "model.py:" in err


def test_the_check_before_a_step_is_quick(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        BASE + "W = torch.ones(8)\ndef loss(o, t): return W.mean() * o.square().mean()\n"
    )
    file = load_model(tmp_path / "model.py")
    frozen = capture(file.model, file.loss, next(file.data())).sizes.small.frozen
    frozen.check()
    # Of this process alone: other work on the machine does not count. On a quiet one it is 90 us.
    seconds = min(timeit.repeat(frozen.check, timer=time.process_time, number=20, repeat=20)) / 20
    assert seconds < 500e-6


def test_a_seed_at_the_top_of_the_file_on_workers(
    lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers run the model file, too, before they seed."""
    code, losses, weights = job(tmp_path, SAME["a seed at the top of the file"], PIPELINE)
    assert code == 0, capsys.readouterr().err
    assert lent.jobs == 1
    assert_plain(tmp_path, losses, weights)


def test_a_model_at_the_top_of_the_file_has_the_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a seed of its own: weights are those of a script that seeds first."""
    text = "NET = M()\ndef model(): return NET\n"
    code, losses, _ = job(tmp_path, text, PIPELINE, "--executor", "inline", "--seed", "7")
    assert code == 0, capsys.readouterr().err
    scope: dict[str, Any] = {}
    seed(7)
    exec(BASE + text, scope)
    again, same, _ = job(tmp_path, text + "# again\n", PIPELINE, "--executor", "inline", "--seed", "7")
    assert (again, same) == (0, losses)
    unlike, other, _ = job(tmp_path, text + "# other\n", PIPELINE, "--executor", "inline", "--seed", "8")
    assert unlike == 0
    assert other != losses
    seed(7)
    inputs, target = next(scope["data"]())
    assert losses[0] == pytest.approx(float(scope["loss"](scope["NET"](inputs), target).detach()), rel=1e-6)


def test_the_model_file_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BASE)
    assert load_model(tmp_path / "model.py") is load_model(tmp_path / "model.py")


FAILING = {
    "data that fails": (
        "def data():\n    for _ in range(3): yield torch.randn(8, 4), torch.randint(3, (8,))\n    raise OSError('no"
        " more')\n"
    ),
    "validation of another dtype": (
        "def validation():\n    yield torch.randn(8, 4), torch.randint(3, (8,))\n    yield torch.randn(8, 4).double(),"
        " torch.randint(3, (8,))\n"
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_between_steps_costs_no_state(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(BASE + FAILING[name])
    (tmp_path / "pp.piper").write_text(PIPELINE)
    words = [
        str(tmp_path / "model.py"),
        str(tmp_path / "pp.piper"),
        "--steps",
        "5",
        "--executor",
        "inline",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--validate-every", "3"] if "validation" in name else words) == 1
    err = capsys.readouterr().err
    assert "error[P0801]" in err
    assert "note: the state after 3 steps is saved; " in err
    assert f"`--resume {tmp_path / 'run'}`" in err
    assert not list((tmp_path / "run").glob("*.pt*"))
    trained = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert trained == ([0, 1, 2] if "data" in name else [0, 1])
    mended = "def data():\n    while True: yield torch.randn(8, 4), torch.randint(3, (8,))\n"
    (tmp_path / "model.py").write_text(BASE + (mended if "data" in name else ""))
    assert main([*words, "--resume", "auto"]) == 0, capsys.readouterr().err
    resumed = torch.load(tmp_path / "run" / "weights.pt")
    if "data" in name:  # a validation draws from the generator of the data
        assert main([*words[:-1], str(tmp_path / "whole")]) == 0
        whole = torch.load(tmp_path / "whole" / "weights.pt")
        assert all(torch.equal(resumed[key], value) for key, value in whole.items())


def unwritable(
    folder: Path, more: str, capsys: pytest.CaptureFixture[str], out: Path | None = None
) -> tuple[str, list[str]]:
    """The error of a job whose run folder becomes unusable, and what is there after it."""
    out = out or folder / "run"
    (folder / "model.py").write_text(BASE + more)
    (folder / "pp.piper").write_text(PIPELINE)
    words = [str(folder / "model.py"), str(folder / "pp.piper"), "--steps", "4", "--executor", "inline"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "PATIENCE", 0.0)
        assert main([*words, "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert "error[P0609]: cannot write" in err
    assert "Traceback" not in err
    return err, sorted(path.name for path in out.iterdir())


def test_a_run_folder_that_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = f"import shutil\ndef on_step(row):\n    if row['step'] == 1: shutil.rmtree({str(tmp_path / 'run')!r})\n"
    err, left = unwritable(tmp_path, more, capsys)
    assert f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}\n" in err
    assert "note: No such file or directory\n" in err
    assert "note: lost: the rows of metrics so far: the file was removed\n" in err
    assert "note: the state after 3 steps is saved; " in err
    assert left == ["checkpoints"]


def test_a_disk_that_is_full_during_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "run" / "metrics.jsonl"
    full = (
        f"import os\nROWS = {str(rows)!r}\ndef optimizer(params):\n"
        "    os.path.lexists(ROWS) or os.symlink('/dev/full', ROWS)\n    return torch.optim.SGD(params, lr=0.1)\n"
    )
    err, left = unwritable(tmp_path, full, capsys)
    assert f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}\n" in err
    assert "note: No space left on device\n" in err
    assert "note: lost: the rows of metrics from step 0 on\n" in err
    assert "checkpoints" in left
    assert "weights.pt" not in left


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights.pt.part").symlink_to("/dev/full")
    err, left = unwritable(tmp_path, "", capsys)
    assert f"cannot write {tmp_path / 'run' / 'weights.pt'}\n" in err
    assert "note: No space left on device\n" in err
    assert "note: lost: the weights" in err
    assert not [name for name in left if name.startswith("weights")]


def test_results_of_an_earlier_job_are_not_taken_for_this_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with results is refused; with --overwrite they are removed before training begins."""
    code, _, _ = job(tmp_path, "", PIPELINE, "--executor", "inline", "--save-every", "1")
    assert code == 0, capsys.readouterr().err
    words = [str(tmp_path / "model.py"), str(tmp_path / "s.piper"), "--executor", "inline", "--out"]
    assert main([*words, str(tmp_path / "run")]) == 2
    assert "has the results of another run" in capsys.readouterr().err
    code, _, _ = job(tmp_path, "def on_step(row): 1 / 0\n", PIPELINE, "--executor", "inline")
    assert code == 1
    assert not list((tmp_path / "run").glob("*.pt*"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_working_directory_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(BASE + "import os\ndef on_step(row): os.chdir('/')\n")
    (tmp_path / "pp.piper").write_text(PIPELINE)
    assert main(["model.py", "pp.piper", "--steps", "2", "--executor", "inline", "--out", "run"]) == 0
    assert (tmp_path / "run" / "weights.pt").exists()


def test_what_the_file_prints_stays_out_of_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(BASE + "def on_step(row): print('seen', row['step'])\n")
    (tmp_path / "pp.piper").write_text(PIPELINE)
    words = [
        str(tmp_path / "model.py"),
        str(tmp_path / "pp.piper"),
        "--steps",
        "2",
        "--executor",
        "inline",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    found = capsys.readouterr()
    assert [json.loads(line)["step"] for line in found.out.splitlines()] == [0, 1]
    assert "seen 0\nseen 1\n" in found.err


def test_torch_itself_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo replaces methods of nn.Module that no forward calls, when the first chunk is compiled."""
    before = TorchState(torch.nn.Linear(2, 2))
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, lambda *_: None, raising=False)
    assert before.changed() is None
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *_: None)
    assert before.changed() == "`Linear.forward`"
