"""What a person sees of a long action: on a terminal, in a log, as JSON, in a notebook."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import piperlang
from piperlang.cli.main import main
from piperlang.progress import Began, Ended, Notice, StepMetrics, Stepping, Stopped, Workers, displayed_by, emit, phase
from piperlang.progress.lines import Pace, bar_fields, clock, default_every, row_line, wrapped
from piperlang.progress.plain import Plain
from tests.support import ROOT
from tests.support.terminal import PIPERC, rows_of, terminal

MLP = [str(ROOT / "examples" / "01_mlp" / "model.py"), str(ROOT / "examples" / "01_mlp" / "both.piper")]
INLINE = [*PIPERC, *MLP, "--executor", "inline"]
BAR = re.compile(r"\S+ *  (\d+)/(\d+)  loss \d\.\d{4}  [\d,]+( samples)?/s  ETA \d+:\d\d")
ROW = StepMetrics(10, 1.069707, 0.0516, 2481.0, 385 * 2**20)

MODEL = """
import sys, time, torch
from torch import nn

def model(): return nn.Linear(4, 4)
def loss(output, target): return nn.functional.mse_loss(output, target)
def data():
    while True: yield torch.randn(8, 4), torch.randn(8, 4)
"""


ACTION = """
import argparse, sys, time
from piperlang.cli.progress import progress_of
from piperlang.cli.report import report
from piperlang.diagnostics import PiperError, error
from piperlang.progress import Notice, StepMetrics, emit, phase, stepping

def on_step(step): pass

with progress_of(argparse.Namespace(command="train", json=False, format="full")):
    with phase("tracing model.py", "traced") as tracing:
        time.sleep(0.3)
        tracing.detail = "19 nodes"
    with stepping(STEPS, 20):
        for i in range(STEPS):
            time.sleep(0.01)
            emit(StepMetrics(i, 1.0 / (1 + i), 0.01, 3200.0, 2**28))
            on_step(i)
    emit(Notice("trained"))
"""
"""What a training command shows, without a model: torch takes seconds to import."""


def acting(steps: int, on_step: str = "pass") -> list[str]:
    return [
        sys.executable,
        "-c",
        ACTION.replace("STEPS", str(steps)).replace("def on_step(step): pass", f"def on_step(step):\n    {on_step}"),
    ]


def write(folder: Path, more: str) -> list[str]:
    """A job on one device, and what `piperc` is given to run it."""
    (folder / "model.py").write_text(MODEL + more)
    (folder / "s.piper").write_text("")
    return ["model.py", "s.piper", "--executor", "inline", "--no-verify"]


# ------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("width", range(24, 90))
def test_lines_fit_and_keep_their_numbers_whole(width: int) -> None:
    full = StepMetrics(1234, 1.069707, 0.0516, 12481.0, 12385 * 2**20, 1.5)
    whole = set(row_line(full).replace("  ", "\n").split("\n"))
    line = row_line(full, width)
    assert len(line) <= width
    assert set(line.replace("  ", "\n").split("\n")) <= whole
    assert line.startswith("step 1234  loss 1.069707")

    fields = bar_fields(full, 10_000, 3725.0, width)
    assert len(fields) <= width
    assert set(fields.split("  ")) <= {"1,235/10,000", "loss 1.0697", "12,481 samples/s", "12,481/s", "ETA 1:02:05"}


def test_a_line_at_any_width() -> None:
    assert row_line(ROW) == "step   10  loss 1.069707  2,481 samples/s  51.6 ms  385 MiB"
    assert row_line(ROW, 50) == "step   10  loss 1.069707  2,481 samples/s  51.6 ms"
    assert row_line(StepMetrics(10, 1.0, 0.05, 2481.0, 0, 0.5), 50) == "step   10  loss 1.000000  validation 0.500000"
    assert (
        wrapped("trained 200 steps on 4 devices in 3.9 s; runs/both-1", 49)
        == "trained 200 steps on 4 devices in 3.9 s;\nruns/both-1"
    )
    assert wrapped("as it is", None) == "as it is"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (3723, "1:02:03")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("total", "every"), [(1, 1), (10, 1), (20, 1), (21, 2), (50, 5), (200, 10), (1000, 50), (10_000, 500)]
)
def test_a_run_of_any_length_keeps_about_twenty_rows(total: int, every: int) -> None:
    assert default_every(total) == every


def test_which_rows_are_kept() -> None:
    def kept(pace: Pace, steps: range) -> list[int]:
        return [i for i in steps if pace.keeps(StepMetrics(i, 1.0, 1.0, 1.0, 0))]

    assert kept(Pace(10, None), range(10)) == list(range(10))
    assert kept(Pace(100, 30), range(100)) == [0, 30, 60, 90]
    assert kept(Pace(None, None), range(300)) == [0, 1, 2, 5, 10, 20, 50, 100, 200]
    assert Pace(100, 30).keeps(StepMetrics(7, 1.0, 1.0, 1.0, 0, validation_loss=0.5))
    times = iter(range(0, 10_000, 25))
    assert kept(Pace(100_000, None, lambda: next(times)), range(1, 12)) == [3, 6, 9]  # every minute, of steps of 25 s


def test_a_log() -> None:
    out = io.StringIO()
    display = Plain(out)
    for event in (
        Began("tracing model.py"),
        Ended("traced", 3.14, "87 nodes"),
        Began("applying s.piper"),
        Ended("", 5.0),
        Began("starting 4 workers"),
        Workers(2, 4),
        Ended("workers 4/4", 6.2),
        Stepping(40, 30),
        *(StepMetrics(i, 1.0, 0.1, 10.0, 2**20) for i in range(40)),
        Stopped(),
        Notice("trained"),
    ):
        display.show(event)
    display.close()
    steps = [f"step {i:4}  loss 1.000000  10 samples/s  100.0 ms  1 MiB" for i in (0, 30, 39)]
    assert out.getvalue().splitlines() == ["traced 3.1 s (87 nodes)", "workers 4/4 6.2 s", *steps, "trained"]


def test_signs_of_life_and_none_after_the_end() -> None:
    out = io.StringIO()
    display = Plain(out)
    display.written = time.monotonic()
    with displayed_by(display):
        with phase("tracing model.py", "traced"):
            until = time.monotonic() + 1.0
            while time.monotonic() < until:  # the main thread never sleeps, as it does not while it traces
                pass
        with phase("starting 2 workers", "workers 2/2"):
            emit(Workers(1, 2))
            time.sleep(2.2)
    said = out.getvalue().splitlines()
    assert re.fullmatch(
        r"(tracing model\.py \.\.\. [2-9] s\n)*traced \d+\.\d s\n(workers 1/2 \.\.\. \d+ s\n)+workers 2/2 \d+\.\d s",
        "\n".join(said),
    )
    time.sleep(2.2)
    display.close()
    assert out.getvalue().splitlines() == said
    assert not [thread for thread in threading.enumerate() if thread.name == "piper-progress"]


# ---------------------------------------------------------------------------------------------------------- terminals


@pytest.mark.slow
def test_a_run_at_50_columns(tmp_path: Path) -> None:
    with terminal([*INLINE, "--steps", "60", "--out", "run"], 50, cwd=tmp_path) as seen:
        assert seen.end() == 0
        lines = seen.lines
    assert any(re.fullmatch(r"traced \d+\.\d s \(\d+ nodes\)", line) for line in lines)
    assert "verified against eager PyTorch: 2e-07" in lines
    assert rows_of(lines) == [*range(0, 60, 5), 59]
    assert all(len(line) < 50 for line in lines)
    assert re.fullmatch(r"trained 60 steps on 4 devices in \d+\.\d s; run", lines[-1])
    assert not any(BAR.fullmatch(line) for line in lines)  # it has gone
    assert any(line.startswith("tracing model.py ... ") for line in seen.seen)
    bars = [found for line in seen.seen if (found := BAR.fullmatch(line))]
    assert bars
    assert {bar[2] for bar in bars} == {"60"}
    assert seen.screen.cursor.x == 0


@pytest.mark.slow  # tests/cli/test_interrupts.py interrupts jobs without a terminal
def test_ctrl_c_at_120_columns(tmp_path: Path) -> None:
    with terminal([*INLINE, "--steps", "100000", "--log-every", "10", "--out", "run"], 120, cwd=tmp_path) as seen:
        seen.read(
            until=lambda: bool(re.search(r"\d\d/100,000 .* samples/s  ETA", seen.lines[-1] if seen.lines else ""))
        )
        assert len(seen.lines[-1]) > 60
        seen.child.sendintr()
        assert seen.end() == 130
        lines = seen.lines
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert rows_of(lines)[-1] == steps - 1
    assert lines[-1] == f"interrupted after {steps} steps; run"
    assert not any("ETA" in line for line in lines)
    assert seen.screen.cursor.x == 0


def test_without_colours() -> None:
    with terminal(acting(40), 80, NO_COLOR="1") as seen:
        assert seen.end() == 0
    assert rows_of(seen.lines) == [0, 20, 39]
    assert any(BAR.fullmatch(line) for line in seen.seen)
    assert not re.search(rb"\x1b\[[\d;]*[34]\d", seen.raw)
    with terminal(acting(40), 80) as seen:
        assert seen.end() == 0
    assert re.search(rb"\x1b\[[\d;]*[34]\d", seen.raw)


def test_json_on_a_terminal() -> None:
    """Start-up is told; there is no bar between the rows."""
    command = acting(40)
    command[-1] = command[-1].replace("json=False", "json=True")
    with terminal(command, 200) as seen:
        assert seen.end() == 0
    assert [json.loads(line)["step"] for line in seen.lines] == list(range(40))
    assert any(re.fullmatch(r"tracing model\.py \.\.\. \d+ s", line) for line in seen.seen)
    assert not any("ETA" in line for line in seen.seen)


def test_on_a_dumb_terminal() -> None:
    with terminal(acting(40), 50, TERM="dumb", FORCE_COLOR="") as seen:
        assert seen.end() == 0
    assert rows_of(seen.lines) == [0, 20, 39]
    assert b"\x1b" not in seen.raw
    assert b"\r" not in seen.raw.replace(b"\r\n", b"")


def test_what_the_model_prints_stays_and_the_bar_goes_on() -> None:
    printing = """if step % 10 == 3: print("printed", step)
    if step % 10 == 5: print("half", end=" "); sys.stdout.flush()
    if step % 10 == 7: print("whole", step, file=sys.stderr)"""
    with terminal(acting(60, printing), 80) as seen:
        assert seen.end() == 0
        lines = seen.lines
    assert [line for line in lines if line.startswith("printed")] == [f"printed {i}" for i in range(3, 60, 10)]
    assert [line for line in lines if line.startswith("half")] == [f"half whole {i}" for i in range(7, 60, 10)]
    assert rows_of(lines) == [0, 20, 40, 59]
    assert any(BAR.fullmatch(line) for line in seen.seen)
    assert not any("ETA" in line for line in lines)


def test_a_terminal_that_becomes_narrow() -> None:
    with terminal(acting(150), 120) as seen:
        seen.read(until=lambda: any("ETA" in line for line in seen.lines[-1:]))
        seen.resize(50, 24)
        seen.seen.clear()
        assert seen.end() == 0
    assert rows_of(seen.lines)[-1] == 149
    bars = [line for line in seen.seen if BAR.fullmatch(line)]
    assert len(bars) > 2
    assert max(map(len, bars)) < 50


@pytest.mark.parametrize("ending", ["1 / (step - 50)", "sys.exit(3) if step == 50 else None"])
def test_an_error_begins_on_its_own_line(ending: str) -> None:
    with terminal(acting(100_000, ending), 80) as seen:
        assert seen.end() in (1, 3)
        lines = seen.lines
    assert rows_of(lines)[-1] == 50
    after = lines[lines.index(next(line for line in lines if line.startswith("step   50"))) + 1 :]
    assert after[:1] in ([], ["Traceback (most recent call last):"])
    assert "ETA" not in "".join(lines)
    assert seen.screen.cursor.x == 0


def test_no_end_of_the_process_hides_the_cursor() -> None:
    with terminal(acting(100_000), 80) as seen:
        seen.read(until=lambda: any("ETA" in line for line in seen.lines[-1:]))
        os.kill(seen.child.pid, signal.SIGTERM)
        assert seen.end() == -signal.SIGTERM
    assert b"\x1b[?25l" not in seen.raw


# --------------------------------------------------------------------------------------------------------------- logs


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    env = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def piperc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command in this process, with files for its output."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: str) -> Said:
        code = main(words)
        return Said(code, *capsys.readouterr())

    return call


SLOW = "def data():\n    time.sleep(2.1)\n    while True: yield torch.randn(8, 4), torch.randn(8, 4)\n"


def test_a_run_in_a_log(piperc: Callable[..., Said], tmp_path: Path) -> None:
    more = "def on_step(row): row['loss'] = None; return False\n"
    done = piperc(*write(tmp_path, SLOW + more), "--steps", "30", "--out", "run")
    assert (done.code, done.err) == (0, "")
    assert "\r" not in done.out
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert any(re.fullmatch(r"loading the first batch \.\.\. [1-9] s", line) for line in lines)
    assert any(re.fullmatch(r"traced \d+\.\d s \(\d+ nodes\)", line) for line in lines)
    assert "not verified against eager PyTorch: --no-verify" in lines
    assert rows_of(lines) == [*range(0, 30, 2), 29]
    assert re.fullmatch(r"trained 30 steps on 1 device in \d+\.\d s; run", lines[-1])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(30))
    assert all(row["loss"] > 0 for row in rows)  # whatever on_step does to its row


def test_json_is_pure(piperc: Callable[..., Said], tmp_path: Path) -> None:
    done = piperc(*write(tmp_path, SLOW), "--steps", "5", "--json")
    assert (done.code, done.err) == (0, "")
    assert [json.loads(line)["step"] for line in done.out.splitlines()] == list(range(5))


def test_other_commands_tell_on_standard_error(
    piperc: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, SLOW)
    monkeypatch.setattr("piperlang.progress.plain.PATIENCE", 1.8)
    done = piperc("check", "model.py", "s.piper")
    assert done.code == 0
    assert re.search(r"^tracing model.py \.\.\. [1-9] s$", done.err, re.MULTILINE)
    assert done.out.startswith("s.piper: ok")
    done = piperc("check", "model.py", "s.piper", "--json")
    assert json.loads(done.out)["ok"]
    assert done.err == ""


def test_a_log_with_colours_and_a_width() -> None:
    done = run(acting(20), FORCE_COLOR="1", COLUMNS="40")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"(\x1b\[2m)?traced 0\.\d s \(19 nodes\)(\x1b\[0m)?", lines[0])
    assert lines[1:] == ["step    0  loss 1.000000", "step   19  loss 0.050000", "trained"]


def test_a_reader_that_leaves() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = ACTION.replace("STEPS, 20", "STEPS, 1").replace("STEPS", "100000")
    code = code.replace("with progress_of", "import signal\nwith progress_of")
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    assert any(b"step" in line for line in child.stdout)
    child.stdout.close()
    assert child.wait(300) != 0
    assert child.stderr.read().count(b"BrokenPipeError") >= 1  # raised in the main thread, where `main` takes it
    child.stderr.close()


# ------------------------------------------------------------------------------------------------- metrics and on_step


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(["--log-every", "0"], "--log-every must be at least 1"), (["--log", "tensorbord"], "tensorbord")],
)
def test_wrong_use(wrong: list[str], says: str, piperc: Callable[..., Said], tmp_path: Path) -> None:
    started = time.monotonic()
    done = piperc(*write(tmp_path, "time.sleep(60)\n"), *wrong)
    assert done.code == 2
    assert says in done.err
    assert time.monotonic() - started < 30


def test_a_logger_that_is_not_installed(
    piperc: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("piperlang.cli.metrics.find_spec", lambda name: None if name == "mlflow" else real(name))
    done = piperc(*write(tmp_path, "time.sleep(60)\n"), "--log", "tensorboard", "--log", "mlflow")
    assert done.code == 2
    assert "`--log mlflow` needs the package `mlflow`, which is not installed" in done.err
    assert "pip install mlflow" in done.err


def test_tensorboard_has_every_row(piperc: Callable[..., Said], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    more = "def validation(): yield torch.ones(8, 4), torch.ones(8, 4)\n"
    done = piperc(
        *write(tmp_path, more), "--steps", "5", "--out", "run", "--log", "tensorboard", "--validate-every", "2"
    )
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("loss", "seconds", "samples_per_second", "memory_bytes", "validation_loss"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({row["step"]: row[name] for row in rows if name in row})
    assert [row["step"] for row in rows if "validation_loss" in row] == [1, 3, 4]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("def on_step(): pass\n", "`on_step` cannot be called as `on_step(row)`"),
        ("on_step = 3\n", "`on_step` is a value of type int, not a function"),
        ("def on_step(row): row['nothing']\n", "`on_step` raised KeyError: 'nothing'"),
    ],
)
def test_an_on_step_that_cannot_be_used(more: str, says: str, piperc: Callable[..., Said], tmp_path: Path) -> None:
    done = piperc(*write(tmp_path, more), "--steps", "2")
    assert done.code == 1
    assert says in done.err
    assert "--> model.py:9:1" in done.err


def test_on_step_is_called_with_every_row(piperc: Callable[..., Said], tmp_path: Path) -> None:
    more = (
        "import json\ncalls = []\ndef on_step(row):\n    calls.append(row)\n    open('calls',"
        " 'a').write(json.dumps(row) + '\\n')\n"
    )
    done = piperc(*write(tmp_path, more), "--steps", "3", "--out", "run")
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "calls").read_text() == (tmp_path / "run" / "metrics.jsonl").read_text()


# ---------------------------------------------------------------------------------------------------------- notebooks


@pytest.mark.slow
def test_a_trainer_in_a_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    write(tmp_path, "def optimizer(params): return torch.optim.SGD(params, lr=0.1)\n")
    cells = [
        (
            "import piperlang\nfrom model import *\nbatches = data()\ntrainer = piperlang.compile(model, 's.piper',"
            " loss=loss, example=next(batches), optimizer=optimizer, executor='inline')"
        ),
        "for _ in range(30):\n    trainer.step(next(batches))",
        "trainer.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # Ray and tqdm warn in streams, where some packages are not there.
    compiled, stepped = (
        [out for out in cell.outputs if out["output_type"] == "display_data"] for cell in notebook.cells[:2]
    )
    (text,) = [output["data"]["text/plain"] for output in compiled]
    assert re.match(r"traced \d+\.\d s \(\d+ nodes\)\nplanned", text)
    (data,) = [output["data"] for output in stepped]
    lines = data["text/plain"].splitlines()
    assert lines[0].startswith("verified against eager PyTorch: ")
    assert lines[1].startswith("workers 1/1")
    assert rows_of(lines) == [0, 1, 2, 5, 10, 20, 29]
    assert data["text/html"].startswith("<pre>verified")
    assert notebook.cells[2].outputs == []


def test_a_trainer_in_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from piperlang.capture.user.model_file import load_model

    monkeypatch.chdir(tmp_path)
    write(tmp_path, "def optimizer(params): return torch.optim.SGD(params, lr=0.1)\n")
    file = load_model(Path("model.py"))
    assert file.optimizer is not None
    batches = file.data()
    for progress, shown in ((None, []), (True, [0, 1, 2, 3])):
        with piperlang.compile(
            file.model,
            "s.piper",
            loss=file.loss,
            example=next(batches),
            optimizer=file.optimizer,
            executor="inline",
            progress=progress,
        ) as trainer:
            for _ in range(4):
                trainer.step(next(batches))
        said = capsys.readouterr()
        assert said.out == ""
        assert rows_of(said.err.splitlines()) == shown
        assert bool(said.err) == bool(progress)
