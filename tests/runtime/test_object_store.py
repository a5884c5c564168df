"""Checkpoints where fsspec reaches: `file://` here, and an S3 server where one is installed (`pip install moto[server]
s3fs`, then `-m slow`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piperlang.cli.main import main
from piperlang.runtime.checkpoint.manifest import MANIFEST
from piperlang.runtime.checkpoint.remote import Remote
from piperlang.runtime.checkpoint.store import ObjectStore
from tests.support.between_steps import BASE, PIPELINE, REPLICAS

MORE = """
def optimizer(params): return torch.optim.Adam(params, lr=0.01)
def data():
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(BASE + MORE)
    (tmp_path / "pipeline.piper").write_text(PIPELINE)
    (tmp_path / "replicas.piper").write_text(REPLICAS)
    return tmp_path


def train(files: Path, script: str, steps: int, out: str, *options: str, executor: str = "inline") -> int:
    model, schedule = str(files / "model.py"), str(files / f"{script}.piper")
    return main([model, schedule, "--steps", str(steps), "--executor", executor, "--out", str(files / out), *options])


def weights(files: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(files / name / "weights.pt")
    return found


def assert_same(files: Path, *names: str) -> None:
    first, *others = (weights(files, name) for name in names)
    for other in others:
        assert all(torch.equal(value, other[key]) for key, value in first.items())


def listed(capsys: pytest.CaptureFixture[str], where: object) -> list[int]:
    capsys.readouterr()
    assert main(["ckpt", "ls", str(where), "--json"]) == 0
    return [row["step"] for row in json.loads(capsys.readouterr().out)]


def test_a_run_is_resumed_from_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the run folder, by its URL, under another schedule; what was not finished is no checkpoint."""
    url = f"file://{files}/bucket/run"
    assert train(files, "pipeline", 7, "whole") == 0
    assert train(files, "pipeline", 4, "run", "--save-every", "2", "--checkpoints", url) == 0
    assert listed(capsys, files / "run") == listed(capsys, url) == [4, 2]
    assert not (files / "run" / "checkpoints").exists()
    torn = files / "bucket" / "run" / "step-00000005"
    torn.mkdir()
    (torn / "part-00000.safetensors").write_bytes(b"half")
    assert listed(capsys, url) == [4, 2]
    assert main(["ckpt", "verify", url]) == 0
    # Elsewhere, with nothing but the URL.
    assert train(files, "pipeline", 7, "there", "--resume", url, "--save-every", "2", "--keep", "2") == 0
    assert_same(files, "whole", "there")
    assert listed(capsys, files / "there") == [7, 6]
    assert not torn.exists()
    assert main(["export", url, "-o", str(files / "exported")]) == 0
    assert (files / "exported" / "model.safetensors").exists()
    assert train(files, "replicas", 9, "other", "--resume", f"{url}/step-00000007") == 0


def test_what_cannot_be_used_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{files}/bucket/run"
    for wrong, said in (
        ("nowhere://x", "P0902"),
        (str(files), "is no URL"),
        ("file:///proc/nowhere/x\0", "cannot reach"),
    ):
        assert train(files, "pipeline", 2, "new", "--checkpoints", wrong) == 2
        assert said in capsys.readouterr().err
    assert train(files, "pipeline", 4, "run", "--save-every", "2", "--checkpoints", url) == 0
    capsys.readouterr()
    assert train(files, "pipeline", 4, "second", "--save-every", "2", "--checkpoints", url) == 2
    assert "has the checkpoints of another run" in capsys.readouterr().err
    part = files / "bucket" / "run" / "step-00000004" / "part-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.write_bytes(data)
    assert main(["ckpt", "verify", url]) == 1
    assert "part-00000.safetensors: its SHA-256" in " ".join(capsys.readouterr().err.split())
    assert train(files, "pipeline", 6, "run", "--resume", str(files / "run")) == 1
    assert "part-00000.safetensors: its SHA-256" in " ".join(capsys.readouterr().err.split())
    (part.parent / MANIFEST).unlink()
    assert train(files, "pipeline", 6, "run", "--resume", str(files / "run")) == 0
    assert train(files, "pipeline", 6, "whole") == 0
    assert_same(files, "whole", "run")


def test_what_cannot_be_written_is_told_before_training(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "file:///proc/nowhere"
    assert train(files, "pipeline", 4, "run", "--save-every", "2", "--checkpoints", url) == 1
    assert "error[P0609]: cannot write a checkpoint into file:///proc/nowhere" in capsys.readouterr().err
    assert not (files / "run" / "metrics.jsonl").exists() or not (files / "run" / "metrics.jsonl").read_text()


def test_one_job_writes_there(tmp_path: Path) -> None:
    first, second = (ObjectStore(Remote(f"file://{tmp_path}/bucket")) for _ in range(2))
    first.tidy()
    first.begin(2)
    second.tidy()
    second.begin(2)
    with pytest.raises(OSError, match="another job writes there now"):
        first.begin(4)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that speaks S3."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None:
        pytest.skip("`pip install moto[server] s3fs`")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5955")
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "5955"], stderr=-3)
    try:
        for _ in range(100):
            try:
                Remote("s3://runs").make()
                break
            except OSError:
                time.sleep(0.2)
        yield "s3://runs/first"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_workers_write_to_s3(bucket: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    assert train(files, "pipeline", 8, "whole") == 0
    options = ["--save-every", "2", "--checkpoints", bucket, "--keep", "2"]
    assert train(files, "pipeline", 4, "run", *options, executor="ray") == 0
    assert listed(capsys, bucket) == [4, 2]
    assert train(files, "pipeline", 8, "there", "--resume", bucket, "--save-every", "2", executor="ray") == 0
    assert_same(files, "whole", "there")
    part = Remote(f"{bucket}/step-00000008/part-00001.safetensors")
    part.write(part.read()[:-1] + b"!")
    assert main(["ckpt", "verify", bucket]) == 1
    assert "part-00001.safetensors: its SHA-256" in " ".join(capsys.readouterr().err.split())
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if name.startswith("piper-")]
