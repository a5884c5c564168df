"""Workers of a job: what they listen on, clusters that are joined, an interrupt at the keyboard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from piperlang.capture.program import capture
from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.cluster import Cluster
from piperlang.runtime.job import Job, Training
from tests.equivalence import SAMPLES, compiled, optimizer
from tests.jobs import assert_trains
from tests.models import CASES
from tests.test_faults import gone, processes

ROOT = Path(__file__).parent.parent
SCRIPT = """mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 2 as mb
"""

pytestmark = pytest.mark.usefixtures("alone")


def listening(pids: list[int]) -> dict[int, set[str]]:
    """Addresses, as the kernel writes them, on which processes wait for connections."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                inodes[words[9]] = words[1].partition(":")[0]
    found: dict[int, set[str]] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                found.setdefault(pid, set()).add(inodes[target[8:-1]])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_everything_listens_on_loopback() -> None:
    case = CASES["mlp"]
    graph, captured = compiled(capture(case.model, case.loss, case.batch(SAMPLES)), SCRIPT)
    with Job(lower(graph), captured, Training(case.model, optimizer), timeout=30) as job:
        job.step(case.batch(SAMPLES))
        found = listening([*processes(job.cluster.folder), os.getpid()])
    assert len(found) > 3  # the control store, the scheduler, two workers
    assert set().union(*found.values()) <= LOOPBACK


class Apart(Cluster):
    """Workers that share no files with each other or the driver, as far as the job knows."""

    @property
    def local(self) -> bool:
        return False


def test_workers_that_share_no_files() -> None:
    case = CASES["mlp"]
    cluster = Apart(2)
    try:
        assert_trains(cluster, case, capture(case.model, case.loss, case.batch(SAMPLES)), SCRIPT)
    finally:
        cluster.close()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray that somebody else has started, with two CPUs."""
    folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    code = (
        "import ray, sys, time\n"
        f"found = ray.init(num_cpus=2, include_dashboard=False, logging_level='error', _temp_dir={folder!r}, object_store_memory=100 * 2**20)\n"
        "print(found.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    # Ray starts with tokens unless told otherwise, and a token would have to be handed to whoever joins.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.stdin.close()
    server.wait(30)
    subprocess.run(["rm", "-rf", folder], check=True)


def piperc(arguments: list[str], out: Path, **options: object) -> subprocess.Popen[str]:
    example = ROOT / "examples" / "01_mlp"
    command = [sys.executable, "-m", "piperlang.cli.main", str(example / "model.py"), *arguments, "--json", "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_a_cluster_that_is_joined(address: str, tmp_path: Path) -> None:
    """The job uses it, leaves it as it was, and says so when it has no room or is not there."""
    script = tmp_path / "two.piper"
    script.write_text("mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\n")
    for name in ("first", "second"):
        job = piperc([str(script), "--steps", "2", "--address", address], tmp_path / name)
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        assert [json.loads(line)["step"] for line in out.splitlines()] == [0, 1]


def test_a_cluster_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piperlang.runtime.cluster.ROOM", 1.0)
    monkeypatch.setattr("piperlang.runtime.cluster.Cluster._start", _one_cpu)
    with pytest.raises(PiperError) as found:
        Cluster(2)
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0605"
    assert "no room for 2 workers" in diagnostic.message
    assert any("of 1 are free" in note for note in diagnostic.notes), diagnostic.notes


def _one_cpu(self: Cluster, count: int, start: object = Cluster._start) -> None:
    start(self, 1)  # type: ignore[operator]


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    job = piperc([str(ROOT / "examples" / "01_mlp" / "pipeline.piper"), "--address", "nowhere"], tmp_path / "run")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1
    assert "error[P0605]: cannot join a Ray cluster at nowhere" in err
    assert "Traceback" not in err


def test_an_interrupt(tmp_path: Path) -> None:
    """Ctrl-C in the middle of training: exit code 130, nothing printed but what was printed, nothing left."""
    folder = Path(tempfile.mkdtemp(prefix="pi-", dir="/tmp"))
    try:
        job = piperc([str(ROOT / "examples" / "01_mlp" / "pipeline.piper"), "--steps", "100000"], tmp_path / "run", env={**os.environ, "TMPDIR": str(folder)})
        assert job.stdout is not None
        assert json.loads(job.stdout.readline())["step"] == 0
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=60)
        assert job.returncode == 130, err
        assert "Traceback" not in err
        started = time.monotonic()
        while list(folder.iterdir()) and time.monotonic() - started < 10:
            time.sleep(0.1)
        assert not list(folder.iterdir())
        gone(folder / "any", 10.0)
    finally:
        folder.rmdir()
