"""Other processes of the machine: they can neither read nor change a job, nor take part in it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from piperlang.diagnostics import PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.comm.gloo import GlooComm
from piperlang.runtime.comm.process_group import Meeting, agree, proof
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.janitor import processes
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import SAMPLES, compiled, optimizer, program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.models import CASES

STORE = """
import sys
from ray._raylet import GcsClient
try:
    store = GcsClient(address=sys.argv[1])
    {call}
    print("done")
except Exception as problem:
    print(type(problem).__name__)
"""
CALLS = {
    "read": 'store.internal_kv_keys(b"", None, timeout=5)',
    "written": 'store.internal_kv_put(b"piper", b"x", True, None, timeout=5)',
}


def listening(pids: list[int]) -> Iterator[tuple[int, str, int]]:
    """Process, address in hexadecimal, and port."""
    owner: dict[str, int] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                owner[target[8:-1]] = pid
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in owner:
                address, _, port = fields[1].rpartition(":")
                yield owner[fields[9]], address, int(port, 16)


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def of_job(cluster: Cluster) -> list[tuple[int, str, int]]:
    return list(listening([*processes(cluster.folder, ()), os.getpid()]))


@pytest.mark.parametrize(("what", "token"), [("read", "0" * 64), ("written", None)])
def test_the_control_store_is_for_the_job(what: str, token: str | None, cluster: Cluster) -> None:
    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= (
        {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    )
    words = [sys.executable, "-c", STORE.format(call=CALLS[what]), address]
    for env, said in ((environment, "AuthenticationError"), (dict(os.environ), "done")):
        found = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert found.stdout.strip() == said, found.stderr


METHODS = {
    b"gcs_server": ("JobInfoGcsService/AddJob",),
    b"raylet": ("NodeManagerService/GetNodeStats", "ObjectManagerService/Pull"),
    b"": ("CoreWorkerService/PushTask",),
}
"""Of each process of Ray, what its ports offer: a task that is pushed is code that is run."""


def test_ports_are_of_this_machine_and_ask_for_the_token(cluster: Cluster) -> None:
    ports = of_job(cluster)
    assert len(ports) > len(cluster.workers)
    assert {address[-8:] for _, address, _ in ports} == {"0100007F"}
    answers: dict[int, set[grpc.StatusCode]] = {}
    for pid, _, port in ports:
        name, *_ = command(pid).split(b"\0")
        if name.startswith(b"ray::RuntimeEnvAgent"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/get_or_create_runtime_env", data=b"", timeout=10)
            assert refused.value.code in (401, 403)
        else:
            kind = next(kind for kind in METHODS if kind in name)
            answers.setdefault(pid, set()).update(answer(port, method) for method in METHODS[kind])
    for pid, found in answers.items():  # gloo's ports do not answer at all
        assert grpc.StatusCode.UNAUTHENTICATED in found, command(pid)


def answer(port: int, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=3)
        found: grpc.StatusCode = refused.value.code()
        return found


def test_the_token_is_readable_by_this_user_only(cluster: Cluster) -> None:
    assert stat.S_IMODE(cluster.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((cluster.folder / "token").stat().st_mode) == 0o600
    assert not [pid for pid in processes(cluster.folder, ()) if (cluster.folder / "token").read_bytes() in command(pid)]


@pytest.mark.parametrize("theirs", ["another secret", "", "plan"])
def test_a_meeting_asks_for_the_secret(theirs: str) -> None:
    """A worker of another job, or of an earlier start of this one, or one that knows the plan."""
    store = HashStore()
    secret, other = "ab" * 32, "cd" * 32
    proved = f"plan {proof(other, 'plan', 1).hex()}"
    store.set("digest-1", proved if theirs == "another secret" else theirs)
    with pytest.raises(PiperError) as found:
        agree(store, 0, 2, "plan", secret)
    assert found.value.diagnostics[0].code == "P0614"


def connect(rank: int, path: str, secret: str, said: Any) -> None:
    store = FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    try:
        GlooComm(Meeting(rank, {0: 0, 1: 1}, store, 30, "", secret)).check(dist.group.WORLD, "all")  # type: ignore[arg-type]
        said.put((rank, "fine"))
    except PiperError as problem:
        said.put((rank, problem.diagnostics[0].code))
    dist.destroy_process_group()


@pytest.mark.parametrize("same", [pytest.param(True, marks=pytest.mark.slow), False])
def test_connections_are_proved(same: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    secrets = ["ab" * 32, ("ab" if same else "cd") * 32]
    ranks = [context.Process(target=connect, args=(i, str(tmp_path / "store"), secrets[i], said)) for i in range(2)]
    for one in ranks:
        one.start()
    found = {said.get(timeout=120) for _ in ranks}
    for one in ranks:
        one.join()
    assert found == {(0, "fine"), (1, "fine")} if same else {(0, "P0614"), (1, "P0614")}


def trained(job: Job, case: Any) -> float:
    torch.manual_seed(0)
    return job.step(case.batch(SAMPLES)).loss


def test_noise_at_the_ports_changes_nothing(cluster: Cluster) -> None:
    name, script = JOB_SCHEDULES["dp"]
    graph, captured = compiled(program(name), script)
    plan, case = lower(graph), CASES[name]
    losses = []
    for noise in (False, True):
        with Job(plan, captured, Training(case.model, optimizer), timeout=30, cluster=cluster) as job:
            found = [trained(job, case)]
            strangers = (
                [socket.create_connection(("127.0.0.1", port), 10) for _, _, port in of_job(cluster)] if noise else []
            )
            for one in strangers:
                one.sendall(os.urandom(256))
            found += [trained(job, case) for _ in range(3)]
            for one in strangers:
                one.close()
            losses.append(found)
    assert losses[0] == losses[1]
    assert all(torch.isfinite(torch.tensor(losses[0])))
