"""The examples: every schedule keeps the mathematics of its model, and the README's main job does what the README
says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from piperlang.capture.user.model_file import load_model
from piperlang.cli.main import main
from piperlang.plan.estimate.summary import bytes_text as size_text
from tests.support import ROOT
from tests.support.jobs import Lent
from tests.support.processes import processes
from tests.support.terminal import rows_of
from tests.support.traced import traced_once

MISTAKES = "90_mistakes"
"""Broken on purpose, and tested in test_mistake_examples.py."""
SCHEDULES = sorted(
    path
    for path in (ROOT / "examples").glob("*/*.piper")
    if (path.parent / "model.py").exists() and path.parent.name != MISTAKES
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
torch.set_num_threads(1)
LIMIT = 1e-5
STEPS = 4

TRAINED = {"01_mlp", "04_zero", "08_dropless"}
"""Examples whose schedules are trained step by step in every run of the tests, and compared in float64 by hand; of the
others it is the other way round. By example, because its model is traced once for either."""

BY_HAND = {
    "02_gpt/interleaved",
    "02_gpt/tensor",
    "03_moe/data_axis",
    "03_moe/own_axis",
    "05_tensor_parallel/columns_rows",
    "05_tensor_parallel/pipeline",
    "05_tensor_parallel/sequence",
    "06_dualpipev/by_hand",
    "06_dualpipev/dualpipev",
    "06_dualpipev/one_f_one_b",
    "05_tensor_parallel/three_axes",
    "07_hf_llama/one_f_one_b",
    "07_hf_llama/tensor",
    "07_hf_llama/zbv",
    "08_dropless/data_axis",
    "08_dropless/own_mesh",
    "02_gpt/one_f_one_b",
    "03_moe/dualpipev",
    "08_dropless/dualpipev",
    "04_zero/prefetch",
    "04_zero/zero1",
    "04_zero/zero2_1f1b",
}
"""Schedules that take long and differ from others of their example in what other tests vary."""

INITIAL = "starter"
"""What `piperc init` writes: tests/cli/test_init.py compares it."""


def name_of(schedule: Path) -> str:
    return f"{schedule.parent.name}/{schedule.stem}"


def schedules(often: Callable[[str], bool]) -> pytest.MarkDecorator:
    """Those of examples that are not run often, and those BY_HAND, are marked slow. All of an example go to one
    process, which traces its model once."""

    def every_time(path: Path) -> bool:
        return often(path.parent.name) and name_of(path) not in BY_HAND

    params = [
        pytest.param(
            path,
            id=name_of(path),
            marks=[pytest.mark.xdist_group(path.parent.name), *([] if every_time(path) else [pytest.mark.slow])],
        )
        for path in SCHEDULES
    ]
    return pytest.mark.parametrize("schedule", params)


@cache
def plain(model: Path, steps: int, seed: int = 0) -> list[float]:
    """The losses of the model as anyone would train it on one device."""
    file = load_model(model)
    torch.manual_seed(seed)
    made = file.model()
    assert file.optimizer is not None
    optimizer = file.optimizer(list(made.parameters()))
    rates = file.lr_schedule(optimizer) if file.lr_schedule else None
    torch.manual_seed(seed)
    losses = []
    for inputs, target in islice(file.data(), steps):
        optimizer.zero_grad()
        loss = file.loss(made(inputs), target)
        loss.backward()
        optimizer.step()
        if rates is not None:
            rates.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield


def losses_of(text: str) -> list[float]:
    return [json.loads(line)["loss"] for line in text.splitlines()]


@schedules(lambda example: example not in {*TRAINED, INITIAL})
def test_a_schedule_keeps_the_mathematics(schedule: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", str(schedule.parent / "model.py"), str(schedule), "--numerics", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    assert result["ok"]
    assert result["devices"] > 1
    assert max(result["max_grad_rel_err"], result["max_weight_rel_err"]) <= LIMIT


@schedules(lambda example: example in TRAINED)
def test_a_plan_trains_like_the_plain_model(schedule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = schedule.parent / "model.py"
    code = main(
        [
            str(model),
            str(schedule),
            "--steps",
            str(STEPS),
            "--executor",
            "inline",
            "--json",
            "--out",
            str(tmp_path / "run"),
        ]
    )
    written = capsys.readouterr()
    assert code == 0, written.err
    assert losses_of(written.out) == pytest.approx(plain(model, STEPS), rel=LIMIT)


# ---------------------------------------------------------------------------------------------------- on real workers


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a short name: the sockets of Ray lie below it, and their paths may have a
    hundred characters."""
    folder = Path(tempfile.mkdtemp(prefix="px-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def main_job() -> list[str]:
    """What the first command of the README gives to piperc."""
    command = next(
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("python3 -m venv")
    )
    return shlex.split(command.partition(".venv/bin/piperc ")[2])


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    out: str


def train(arguments: list[str], out: Path, temporary: Path) -> Trained:
    """A job on Ray workers, which must leave nothing but its run folder."""
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "piperlang", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--json" in arguments or done.stderr == ""  # beside JSON, standard error is for people
    assert processes(temporary) == []
    assert list(temporary.glob("piper-*")) == []
    return trained(arguments, out, done.stdout)


def trained(arguments: list[str], out: Path, said: str) -> Trained:
    """What a job has left in its run folder, which must be all that belongs there."""
    assert sorted(path.name for path in out.iterdir()) == [
        "metrics.jsonl",
        *([] if "inline" in arguments else ["output"]),
        "plan.json",
        "resolved.piper",
        "schedule.piper",
        "verified.json",
        "versions.json",
        "weights.pt",
    ]
    assert json.loads((out / "plan.json").read_text(encoding="utf-8"))
    assert (out / "schedule.piper").read_text(encoding="utf-8") == (ROOT / arguments[1]).read_text(encoding="utf-8")
    losses = losses_of((out / "metrics.jsonl").read_text(encoding="utf-8"))
    assert "--json" not in arguments or losses == losses_of(said)
    return Trained(losses, torch.load(out / "weights.pt"), said)


def test_the_main_job(tmp_path: Path, temporary: Path, lent: Lent, capsys: pytest.CaptureFixture[str]) -> None:
    """On workers it trains like the plain model, comes out the same to the last bit when run again, and prints what the
    README shows: as a log the first time, as JSON the second time, on other workers."""
    model, _, flag, steps = arguments = main_job()
    assert flag == "--steps"
    losses, weights, log = train(arguments, tmp_path / "first", temporary)
    lines = log.splitlines()
    assert any(re.fullmatch(r"workers (\d)/\1 \d+\.\d s", line) for line in lines)
    assert rows_of(lines) == [*range(0, int(steps), 5), int(steps) - 1]
    assert losses == pytest.approx(plain(ROOT / model, int(steps)), rel=LIMIT)
    assert losses[-1] < losses[0] / 3

    with chdir(ROOT):
        code = main([*arguments, "--json", "--out", str(tmp_path / "second")])
    said = capsys.readouterr()
    assert (code, lent.jobs) == (0, 1), said.err
    again, same, _ = trained([*arguments, "--json"], tmp_path / "second", said.out)
    assert again == losses
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], weights[name]) for name in weights)

    shown = re.findall(r"^step +(\d+)  loss (\S+) ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown
    assert [losses[int(step)] for step, _ in shown] == pytest.approx([float(loss) for _, loss in shown], rel=1e-4)


@schedules(lambda example: False)
def test_a_schedule_on_workers(schedule: Path, tmp_path: Path, temporary: Path) -> None:
    model = schedule.parent / "model.py"
    arguments = [str(model), str(schedule), "--steps", str(STEPS), "--json"]
    assert train(arguments, tmp_path / "run", temporary).losses == pytest.approx(plain(model, STEPS), rel=LIMIT)


# -------------------------------------------------------------------------------------------------------- their pages


def test_every_schedule_is_on_its_page() -> None:
    assert {path.parent.name for path in SCHEDULES} >= TRAINED
    for schedule in SCHEDULES:
        assert schedule.name in (schedule.parent / "README.md").read_text(encoding="utf-8"), schedule


@pytest.mark.xdist_group("04_zero")
def test_the_memory_table_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """What examples/04_zero/README.md says of every schedule is what `piperc plan` prints."""
    folder = ROOT / "examples" / "04_zero"
    rows = re.findall(
        r"^\| (\w+) \| (.+ (?:B|KiB|MiB)) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name for name, _ in rows} == {path.stem for path in folder.glob("*.piper")}
    for name, cells in rows:
        assert main(["plan", str(folder / "model.py"), str(folder / f"{name}.piper"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        held = found["memory"]["by"]
        sent = sum(stream["bytes"] for stream in found["communication"].values())
        expected = [found["memory"]["bytes"]["max"], held["weights"], held["gradients"], held["optimizer states"], sent]
        assert cells.split(" | ") == [size_text(number) for number in expected], name


def test_pages_name_files_that_are_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"examples/\w+/[\w*.]+\.(?:py|piper)", text)
        for name in named:
            assert list(ROOT.glob(name)), (page, name)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
