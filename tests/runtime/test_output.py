"""What workers print, and how they end: in the run folder, and in the error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piperlang.cli.main import main
from piperlang.runtime.driver.cluster.nodes import shipped_environment
from piperlang.runtime.driver.processes import Processes
from tests.support.between_steps import BASE, PIPELINE
from tests.support.jobs import Lent

MORE = """
import ctypes, os, sys
def data():
    g = torch.Generator().manual_seed(5)
    while True:
        print("loaded in", os.getpid())
        yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
def optimizer(p):
    print("made in", os.getpid(), flush=True)
    print("to standard error", file=sys.stderr)
    return torch.optim.SGD(p, lr=0.1)
def lr_schedule(optimizer):
    class Schedule(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            if self.last_epoch == 2 and os.environ.get("PIPER_TEST_END"):
                print("the last words of rank", os.getpid(), flush=True)
                END
            return [0.1]
    return Schedule(optimizer)
"""
ENDS = {
    "ctypes.string_at(0)": ("SIGSEGV", "Segmentation fault"),
    "os.kill(os.getpid(), 9)": ("SIGKILL", "the last words"),
    "os._exit(7)": ("with status 7", "the last words"),
}


def train(folder: Path, end: str, *options: str) -> int:
    (folder / "model.py").write_text(BASE + MORE.replace("END\n", f"{end}\n"))
    (folder / "s.piper").write_text(PIPELINE)
    return main([str(folder / "model.py"), str(folder / "s.piper"), "--steps", "4", *options])


def test_it_is_in_the_run_folder(lent: Lent, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, "pass", "--out", str(tmp_path / "run"), "--data", "workers") == 0
    for rank in (0, 1):
        text = (tmp_path / "run" / "output" / f"rank-{rank:05}.log").read_text()
        assert f"made in {lent.cluster.pids[rank]}\n" in text
        assert "to standard error\n" in text
        assert f"loaded in {lent.cluster.pids[rank]}\n" in text
    assert "made in" not in capfd.readouterr().out.replace(f"made in {os.getpid()}", "")


@pytest.mark.parametrize("end", ENDS)
def test_how_it_ended_is_told(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Checked in a driver whose optimizer is never stepped: only workers end."""
    monkeypatch.setenv("PIPER_TEST_END", "yes")
    options = ["--no-verify", "--out", str(tmp_path / "run"), "--restart", "0"]
    assert train(tmp_path, end, *options) == 1
    err = capsys.readouterr().err
    how, last = ENDS[end]
    assert "error[P0602]: device" in err
    assert how in err
    assert "the last lines that it printed:" in err
    assert last in err


def test_how_any_process_ended() -> None:
    """From outside, and by whomever it was started."""
    for number, said in ((signal.SIGKILL, "ended by SIGKILL"), (signal.SIGTERM, "ended by SIGTERM")):
        child = subprocess.Popen(["sleep", "60"])
        processes = Processes()
        before = len(os.listdir("/proc/self/fd"))
        processes.watch(child.pid)
        processes.watch(child.pid)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        assert processes.state(child.pid) in "SRD"
        assert processes.ended(child.pid) == ""
        child.send_signal(number)
        child.wait()
        told = processes.ended(child.pid)
        assert said in told or not told  # only a system that knows says so
        processes.close()


def test_nothing_is_left_for_a_profiler() -> None:
    code = (
        "import os, torch, piperlang.runtime\n"
        "torch.nn.Conv2d(64, 64, 3)(torch.randn(16, 64, 32, 32))\n"
        "assert not os.path.exists(f'/tmp/perf-{os.getpid()}.map')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_variables_of_a_machine_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MY_RATE", "NCCL_DEBUG", "AWS_REGION", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "LD_LIBRARY_PATH", "HOME", "SLURM_JOB_ID", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    found = shipped_environment()
    assert {"MY_RATE", "NCCL_DEBUG", "AWS_REGION", "OMP_NUM_THREADS"} <= found.keys()
    assert not {"CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "LD_LIBRARY_PATH", "HOME", "PATH", "SLURM_JOB_ID"} & found.keys()
