"""`piperc` as a user meets it: real processes, exit codes, what is on which stream."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

EXAMPLE = str(ROOT / "examples" / "00_orders" / "moe_dualpipev.piper")


def piperc(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "piperlang", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=600, cwd=cwd)


def test_check_is_fine_with_the_examples() -> None:
    done = piperc("check", EXAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("ok (4 devices, 4 chunks, 94 ordered steps)")


def test_no_torch_and_no_ray() -> None:
    code = (
        f"import sys; from piperlang.cli.main import main; assert main(['check', {EXAMPLE!r}]) == 0;"
        " print(sorted({'torch', 'ray', 'pygments', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [[], ["check"], ["graph"], ["plan"]])
def test_a_script_that_does_not_parse_is_refused_before_the_model_is_loaded(command: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")  # without it, that is what is said first
    (tmp_path / "model.py").write_text("raise SystemExit('loaded')\n")
    (tmp_path / "bad.piper").write_text("mesh gpu = pp: 2\nplace [stage=0 on gpu\n")
    done = piperc(*command, "model.py", "bad.piper", cwd=tmp_path)
    assert done.returncode == 1
    assert "error[P0105]" in done.stderr
    assert "bad.piper:2:7" in done.stderr
    assert "loaded" not in done.stdout + done.stderr


def test_orders_as_json_csv_and_grid() -> None:
    data = json.loads(piperc("orders", EXAMPLE, "-p", "ranks=2", "-p", "microbatches=4", "--json").stdout)
    assert [row["device"] for row in data["devices"]] == [0, 1, 2, 3]
    order = data["devices"][0]["order"]
    assert order[0] == [{"stage": 0, "pass": "F", "mb": 0}]
    assert [{"stage": 0, "pass": "F", "mb": 3}, {"stage": 3, "pass": "B", "mb": 1}] in order
    rows = list(csv.DictReader(io.StringIO(piperc("orders", EXAMPLE, "--csv").stdout)))
    assert rows[0] == {"device": "0", "step": "0", "stage": "0", "pass": "F", "mb": "0"}
    grid = piperc("orders", EXAMPLE).stdout
    assert "devices 0-1 | 0F0 0F1 0F2 3F0 3I0 3W0" in grid
    assert "49 units, 2% idle" in grid


def test_print_goes_to_stderr_so_that_data_stays_data() -> None:
    script = "mesh gpu = pp: 1\nplace [stage=0] on gpu\nprint 'hello'\norder on gpu:\n    [stage=0, pass=F]\n"
    done = piperc("orders", "-", "--json", stdin=script)
    assert done.stderr == "hello\n"
    assert json.loads(done.stdout)["devices"][0]["order"] == [[{"stage": 0, "pass": "F"}]]


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["check", "-"], "print x\n", 1, "P0201"),
        (["check", "-", "--format", "json"], "print 1\n", 0, ""),
        (["check", "nowhere.piper"], None, 2, "P0901"),
        (["check", "model.py"], None, 2, "P090"),  # without a schedule; P0905 where torch is not installed
        (["chek", "x"], None, 2, "did you mean `check`?"),
        (["check"], None, 2, "P0902"),
        (["check", "-", "--frmat=json"], "", 2, "did you mean `--format`?"),
        (["orders", "-", "-p", "x"], "", 2, "name=value"),
        (["orders", "-", "-p", "rank=2"], "param ranks = 1\n", 2, "did you mean `ranks`?"),
        (["orders", "-"], "let x = 1\n", 1, "P0502"),
        (["explain", "P0302"], None, 0, ""),
        (["explain", "p0302"], None, 0, ""),
        (["explain", "P9999"], None, 2, "P0904"),
        (["explain"], None, 0, ""),
        (["--version"], None, 0, ""),
        (["--help"], None, 0, ""),
        (["check", "/dev/null"], None, 2, "P0901"),
    ],
)
def test_exit_codes(arguments: list[str], stdin: str | None, code: int, says: str) -> None:
    done = piperc(*arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_json_diagnostics_on_stdout() -> None:
    done = piperc("check", "-", "--format=json", stdin="print x\n")
    assert json.loads(done.stdout)["diagnostics"][0]["code"] == "P0201"
    assert done.stderr == ""


def test_several_files_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.piper").write_text("print x\n")
    (tmp_path / "b.piper").write_text("print y\n")
    done = piperc("check", "a.piper", "b.piper", "--format", "concise", cwd=tmp_path)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["a.piper", "b.piper"]


def test_fmt(tmp_path: Path) -> None:
    path = tmp_path / "s.piper"
    path.write_bytes(b"let  x=1\r\n")
    path.chmod(0o640)
    assert piperc("fmt", "--check", str(path)).returncode == 1
    difference = piperc("fmt", "--diff", str(path))
    assert difference.returncode == 1
    assert "+let x = 1" in difference.stdout
    assert path.read_bytes() == b"let  x=1\r\n"
    assert piperc("fmt", str(path)).returncode == 0
    assert path.read_bytes() == b"let x = 1\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert piperc("fmt", "--check", str(path)).returncode == 0
    assert os.listdir(tmp_path) == ["s.piper"]
    broken = piperc("fmt", "-", stdin="let x = (\n")
    assert (broken.returncode, broken.stdout) == (1, "")


def test_our_own_bug_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from piperlang.cli import check, main

    def broken(*_: object) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr(check, "run", broken)
    assert main.main(["check", "x.piper"]) == 70
    assert "bug in piperc" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m piperlang orders {EXAMPLE} -p microbatches=400 -p ranks=8 --csv | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("device,step")
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    (tmp_path / "s.piper").write_text("print x\n")
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m piperlang check s.piper {closed}"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
