"""Workers of a job: what they listen on, clusters that are joined, an interrupt at the keyboard, cleanup, what they
print."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from piperlang.cli.main import main
from piperlang.interrupts import uninterrupted
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.cluster.ray_itself import OwnRay
from piperlang.runtime.driver.janitor import MARK, clear, start_janitor, stop_janitor
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support import ROOT
from tests.support.equivalence import SAMPLES, compiled, optimizer, program
from tests.support.jobs import assert_trains
from tests.support.models import CASES
from tests.support.processes import processes

MLP = ROOT / "examples" / "01_mlp"
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


class Apart(Cluster):
    """Workers that share no files with each other or the driver, as far as the job knows, once `apart` is set."""

    apart = False

    @property
    def local(self) -> bool:
        return not self.apart and super().local


@pytest.mark.slow
def test_a_cluster_from_start_to_end() -> None:
    """Everything listens on loopback; a process started beside the cluster is not of the cluster; workers that share no
    files train; a process that writes while the cluster is closed does not keep it from being closed; Ray, which draws
    from `random`, leaves it to others as it was.

    One test, because starting Ray takes longer than all of this."""
    drawn = random.getstate()
    cluster = Apart(2)
    assert random.getstate() == drawn
    beside = subprocess.Popen(["sleep", "600"])
    writing = None
    try:
        only_loopback_is_listened_on(cluster)
        only_what_ray_started_is_of_the_cluster(cluster, beside)
        cluster.apart = True
        case = CASES["mlp"]
        assert_trains(cluster, case, program("mlp"), SCRIPT)
        writing = writer(cluster.folder, {MARK: str(cluster.folder)})
        cluster.close()
        assert not cluster.folder.exists()
        assert writing.wait(10) == -signal.SIGKILL
        assert processes(cluster.folder) == []
        assert beside.poll() is None
        cluster.close()  # nothing to do
        assert random.getstate() == drawn
    finally:
        for process in (beside, writing):
            if process is not None:
                process.kill()
                process.wait()
        cluster.close()


def only_loopback_is_listened_on(cluster: Cluster) -> None:
    case = CASES["mlp"]
    graph, captured = compiled(program("mlp"), SCRIPT)
    with Job(lower(graph), captured, Training(case.model, optimizer), timeout=30, cluster=cluster) as job:
        job.step(case.batch(SAMPLES))
        found = listening([*processes(cluster.folder), os.getpid()])
    assert len(found) > 3  # the control store, the scheduler, two workers
    assert set().union(*found.values()) <= LOOPBACK


def only_what_ray_started_is_of_the_cluster(cluster: Cluster, beside: subprocess.Popen[bytes]) -> None:
    """Only the processes that Ray starts carry the mark, not those that the program starts while it has a job."""
    assert beside.pid not in processes(cluster.folder)
    assert {"raylet", "gcs_server"} <= {
        Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes(cluster.folder)
    }


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray that somebody else has started, with two CPUs. Workers are not niced: on a busy machine they would not get
    to run."""
    folder = tempfile.mkdtemp(prefix="pr-", dir="/tmp")
    code = (
        f"import ray, sys, time\noptions = dict(include_dashboard=False, logging_level='error', _temp_dir={folder!r},"
        " object_store_memory=100 * 2**20)\nfound = ray.init(num_cpus=2, _system_config={'worker_niceness': 0},"
        " **options)\nprint(found.address_info['gcs_address'], flush=True)\nsys.stdin.read()\n"
    )
    # Ray starts with tokens unless told otherwise, and a token would have to be handed to whoever joins.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.stdin.close()
    server.wait(30)
    subprocess.run(["rm", "-rf", folder], check=True)


def piperc(arguments: list[str], out: Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "piperlang", str(MLP / "model.py"), *arguments, "--json", "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


DRIVER = """
import os, sys, time
from pathlib import Path
from piperlang.runtime.driver.janitor import start_janitor
folder = Path(sys.argv[1])
start_janitor(folder)
if not os.fork():
    time.sleep(60)  # it keeps the janitor's standard input open
os._exit(0)
"""


def test_a_driver_that_nobody_buries(tmp_path: Path) -> None:
    """It has ended, its parent does not ask how, and a process that it has forked lives on: the janitor cleans up."""
    folder = tmp_path / "job"
    folder.mkdir()
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


@pytest.mark.slow
def test_a_cluster_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on under the script that fits, if there is one."""
    monkeypatch.setattr("piperlang.runtime.driver.cluster.cluster.ROOM", 1.0)
    monkeypatch.setattr(OwnRay, "start", _one_cpu)
    (tmp_path / "two.piper").write_text(SCRIPT)
    (tmp_path / "one.piper").write_text("split batch into 2 as mb\n")
    words = [str(MLP / "model.py"), str(tmp_path / "two.piper"), "--steps", "2", "--out", str(tmp_path / "run")]
    assert main([*words, "--elastic", str(tmp_path / "one.piper")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the Ray cluster does not have enough free resources for 2 workers" in said
    assert f"continuing after 0 steps under {tmp_path / 'one.piper'}, on 1 device" in said
    assert (tmp_path / "run" / "schedule.piper").read_text() == "split batch into 2 as mb\n"


def _one_cpu(self: OwnRay, count: int, start: Callable[[OwnRay, int], None] = OwnRay.start) -> None:
    start(self, 1)


def test_a_cluster_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(MLP / "pipeline.piper")
    assert main([str(MLP / "model.py"), script, "--address", "nowhere", "--out", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "error[P0605]: cannot join a Ray cluster at nowhere" in err
    assert "Traceback" not in err


@pytest.fixture
def temporary() -> Iterator[Path]:
    """TMPDIR of a job: short, because Ray makes sockets there, and empty again when the job has ended."""
    folder = Path(tempfile.mkdtemp(prefix="pi-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def endless(temporary: Path, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """A job that trains until it is interrupted, in a session of its own, as from a terminal."""
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    script = tmp_path / "two.piper"
    script.write_text(SCRIPT)
    arguments = [str(script), "--steps", "100000", *options]
    return piperc(arguments, tmp_path / "run", env=environment, start_new_session=True)


def trained(job: subprocess.Popen[str]) -> None:
    """Wait until the job has trained a step."""
    assert job.stdout is not None
    line = job.stdout.readline()
    assert line, job.communicate(timeout=600)[1]
    assert json.loads(line)["step"] == 0


def started(job: subprocess.Popen[str], temporary: Path) -> None:
    """Wait until the job has made its folder."""
    while not list(temporary.glob("piper-*")):
        assert job.poll() is None
        time.sleep(0.005)


def interrupted(job: subprocess.Popen[str], temporary: Path, again: float | None = None) -> None:
    """Ctrl-C, which goes to all processes of the terminal: exit code 130, one line, no process and no file left."""
    os.killpg(job.pid, signal.SIGINT)
    if again is not None:
        time.sleep(again)
        os.killpg(job.pid, signal.SIGINT)
    try:
        _, err = job.communicate(timeout=600)
    finally:
        job.kill()
    assert job.returncode == 130, err
    assert re.fullmatch(r"(SIGINT: [^\n]+\n)?interrupted (while [^\n]+|after [\d,]+ steps?; [^\n]+)\n", err), err
    assert processes(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow  # tests/cli/test_interrupts.py interrupts a job that trains every time
def test_an_interrupt(temporary: Path, tmp_path: Path) -> None:
    job = endless(temporary, tmp_path)
    trained(job)
    interrupted(job, temporary)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.5, 3.0])
def test_an_interrupt_during_start_up(delay: float, temporary: Path, tmp_path: Path) -> None:
    job = endless(temporary, tmp_path)
    started(job, temporary)
    time.sleep(delay)
    interrupted(job, temporary)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [i / 2 for i in range(12)])
def test_sigterm_during_start_up(delay: float, temporary: Path, tmp_path: Path) -> None:
    """Ray has handlers of its own for it while it starts."""
    job = endless(temporary, tmp_path)
    started(job, temporary)
    time.sleep(delay)
    job.send_signal(signal.SIGTERM)
    try:
        _, err = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 143, err
    assert re.fullmatch(r"(SIGTERM: [^\n]+\n)?terminated (while [^\n]+|after [\d,]+ steps?; [^\n]+)\n", err), err
    assert processes(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_the_control_store_of_a_joined_cluster_dies(address: str, temporary: Path, tmp_path: Path) -> None:
    """Ray itself would end the driver after a minute, with a trace of C++."""
    job = endless(temporary, tmp_path, "--address", address, "--save-every", "2")
    trained(job)
    (control,) = (
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if b"gcs_server" in command_of(path) and parent(parent(int(path.name))) == os.getpid()
    )
    os.kill(control, signal.SIGKILL)
    began = time.monotonic()
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1, err
    assert f"error[P0603]: the control store (GCS) of Ray at {address} refuses connections" in err
    assert "is saved: `--resume" in err
    assert time.monotonic() - began < 40


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait", [pytest.param(started, id="start-up"), pytest.param(lambda job, _: trained(job), id="training")]
)
def test_an_interrupt_that_is_repeated(
    wait: Callable[[subprocess.Popen[str], Path], None], temporary: Path, tmp_path: Path
) -> None:
    """The second one arrives while the job is closed because of the first one."""
    job = endless(temporary, tmp_path)
    wait(job, temporary)
    interrupted(job, temporary, again=0.2)


@pytest.mark.slow
def test_a_cluster_that_is_joined(
    address: str, temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is interrupted leaves the cluster as it was: its two CPUs are free for the next job, which ends by
    itself."""
    job = endless(temporary, tmp_path, "--address", address)
    trained(job)
    interrupted(job, temporary)
    arguments = [str(MLP / "model.py"), str(tmp_path / "two.piper"), "--steps", "2", "--address", address, "--json"]
    code, said = main([*arguments, "--out", str(tmp_path / "next")]), capsys.readouterr()
    assert code == 0, said.err
    assert [json.loads(line)["step"] for line in said.out.splitlines()] == [0, 1]


def test_an_interrupt_is_postponed() -> None:
    done = []

    def block() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --------------------------------------------------------------------------------------------------------- cleanup


def writer(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that writes into a folder as fast as it can, and makes the folder again whenever it is gone."""
    code = (
        "import itertools, os, pathlib\n"
        "folder = pathlib.Path(os.environ['WRITE_TO'])\n"
        "for i in itertools.count():\n"
        "    folder.mkdir(exist_ok=True)\n"
        "    (folder / str(i % 1000)).touch()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={"WRITE_TO": str(folder), **environment}, stderr=subprocess.DEVNULL
    )
    while not (folder / "0").exists():
        time.sleep(0.01)
    return process


def test_clear_spares_other_jobs(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    gone_with_ours, stays = (writer(folder, {MARK: str(folder)}) for folder in (ours, theirs))
    try:
        assert clear(ours, 10.0, {os.getpid()})
        assert not ours.exists()
        assert gone_with_ours.wait(10) == -signal.SIGKILL
        assert theirs.exists()
        assert stays.poll() is None
    finally:
        stays.kill()
        stays.wait()


@pytest.fixture
def janitor(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    folder = tmp_path / "job"
    folder.mkdir()
    process = start_janitor(folder)
    yield process, folder
    process.kill()
    process.wait()


def test_a_janitor_finishes_what_the_driver_has_not(janitor: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, folder = janitor
    writing = writer(folder, {MARK: str(folder)})
    stop_janitor(process, done=False)
    assert process.wait(20) == 0
    assert writing.wait(10) == -signal.SIGKILL
    assert not folder.exists()


def test_a_janitor_ends_when_the_folder_is_gone(janitor: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, folder = janitor
    folder.rmdir()
    assert process.wait(20) == 0


# ----------------------------------------------------------------------------------------------------------- output


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["ray", "inline"])
def test_a_job_with_an_all_to_all_prints_no_warning(executor: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / "03_moe"
    files = [str(example / "model.py"), str(example / "own_axis.piper")]
    command = [
        sys.executable,
        "-m",
        "piperlang",
        *files,
        "--steps",
        "1",
        "--executor",
        executor,
        "--out",
        str(tmp_path / "run"),
    ]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""
