"""`piperc doctor`: what it says of this machine, and of machines that lack something."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piperlang.cli import doctor
from piperlang.cli.main import main


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages that are found before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    return code, data, {finding["name"]: finding for finding in data["findings"]}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    ray = pytest.importorskip("ray")
    code, data, found = told(capsys)
    assert (code, data["ok"]) == (0, True), data
    assert found["Python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["torch"]["found"] == torch.__version__
    assert found["ray"]["found"] == ray.__version__
    assert set(found) >= {"numpy", "CUDA", "gloo", "cores", "memory", "/dev/shm", "temporary", "ports", "terminal"}
    assert ("GPU 0" in found) == torch.cuda.is_available()
    assert data["uses"]["backend"].startswith("nccl" if torch.cuda.is_available() else "gloo")


def test_as_text_for_packages_of_ours(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions that are too old, and a package that breaks when it is loaded."""
    (packages / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    (packages / "ray.py").write_text("__version__ = '1.9.2'")
    (packages / "numpy.py").write_text("__version__ = '2.4.6'")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "  !! torch     import fails: OSError: libcudart.so.12: cannot open shared object file\n" in out
    assert "  !! ray       1.9.2, older than 2.40\n" in out
    assert "  ok numpy     2.4.6\n" in out
    assert "  !! pip install --upgrade 'ray>=2.40'\n" in out
    assert out.endswith("\ntraining cannot work here; `check`, `fmt`, `orders` and `explain` can\n")
    assert "training uses" not in out


def test_without_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: False)
    code, data, found = told(capsys)
    assert (code, data["ok"], data["uses"]) == (1, False, {})
    for name in ("torch", "ray", "numpy", "safetensors"):
        assert (found[name]["state"], found[name]["found"], found[name]["help"]) == (
            "missing",
            "not installed",
            "pip install 'piperlang[run]'",
        )
    assert "CUDA" not in found


def test_a_package_that_hangs_leaves_nothing(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = packages / "pid"
    (packages / "torch.py").write_text(
        "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '100'])\n"
        f"open({str(marker)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(100)"
    )
    for name in ("ray", "numpy", "safetensors"):
        (packages / f"{name}.py").write_text("__version__ = '9.9'")
    monkeypatch.setattr(doctor, "PATIENCE", 3.0)
    started = time.monotonic()
    code, _, found = told(capsys)
    assert time.monotonic() - started < 30
    assert (code, found["torch"]["found"]) == (1, "import takes more than 3 s")
    for pid in marker.read_text().split():
        deadline = time.monotonic() + 30
        while os.path.exists(f"/proc/{pid}") and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, f"{pid} is still there"
            time.sleep(0.05)


def test_an_interrupt_leaves_nothing(packages: Path) -> None:
    marker = packages / "pid"
    (packages / "torch.py").write_text(
        f"import os, time\nopen({str(marker)!r} + '_', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(marker)!r} + '_', {str(marker)!r})\ntime.sleep(100)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{Path(doctor.__file__).parents[2]}"}
    job = subprocess.Popen(
        [sys.executable, "-m", "piperlang", "doctor"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=300)
    assert (job.returncode, err) == (130, b"interrupted while starting\n")
    assert not os.path.exists(f"/proc/{marker.read_text()}")


TORCH = {
    "version": "2.13.0",
    "cuda": "13.0",
    "gpus": [{"name": "H200", "free": 2**37, "memory": 2**37 + 2**30}],
    "gloo": True,
    "nccl": "2.28.9",
}


def test_what_is_said_of_gpus() -> None:
    found = {finding.name: finding for finding in doctor.accelerators(TORCH)}
    assert found["GPU 0"].found == "H200, 128.0 GiB free of 129.0 GiB"
    assert (found["CUDA"].found, found["NCCL"].found) == ("13.0", "2.28.9")
    assert doctor.used(TORCH)["backend"] == "nccl, on CUDA"
    without = {finding.name: finding for finding in doctor.accelerators({**TORCH, "nccl": None, "gloo": False})}
    assert (without["NCCL"].state, without["gloo"].state) == ("note", "missing")


def test_no_ports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "installed", lambda name: False)
    monkeypatch.setattr(socket, "create_server", refused)
    _, _, found = told(capsys)
    assert (found["ports"]["state"], found["ports"]["found"]) == ("missing", "127.0.0.1: permission denied")


@pytest.mark.slow
def test_files_of_this_folder_are_not_loaded(tmp_path: Path) -> None:
    """A folder with a torch.py of somebody's own is no reason to run it."""
    (tmp_path / "numpy.py").write_text("open('loaded', 'w')\n__version__ = '9.9'")
    pytest.importorskip("numpy")
    command = [sys.executable, "-P", "-m", "piperlang", "doctor"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200, check=False)
    assert not (tmp_path / "loaded").exists()
