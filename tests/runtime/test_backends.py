"""The choice of a backend, and what each says about itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.runtime.comm import gloo, nccl, threads
from piperlang.runtime.comm.process_group import Meeting
from piperlang.runtime.comm.registry import BACKENDS, Unusable, chosen, for_workers
from piperlang.runtime.hardware import cuda


@pytest.mark.parametrize("name", BACKENDS)
def test_every_name_is_a_file(name: str) -> None:
    backend = import_module(f"piperlang.runtime.comm.{name}").BACKEND
    assert backend.name == name
    assert type(pickle.loads(pickle.dumps(backend))) is type(backend)  # workers receive it


def test_the_executor_decides_if_no_backend_is_named() -> None:
    workers = nccl.BACKEND if torch.cuda.is_available() else gloo.BACKEND
    assert for_workers() is chosen("ray") is workers
    assert chosen("inline") is threads.BACKEND


def test_a_named_backend() -> None:
    assert chosen("ray", "gloo") is gloo.BACKEND
    assert chosen("inline", "threads") is threads.BACKEND
    assert chosen("inline", "gloo") is threads.BACKEND  # both run on the CPU


@pytest.mark.parametrize(
    ("executor", "name", "why"),
    [
        ("inline", "nccl", "`--executor inline` runs on the CPU"),
        ("ray", "threads", "it runs in one process, with `--executor inline`"),
        ("ray", "mpi", "the backends are"),
    ],
)
def test_a_backend_that_cannot_be_used(executor: str, name: str, why: str) -> None:
    with pytest.raises(Unusable, match=f"cannot use backend '{name}': {why}"):
        chosen(executor, name)


def test_workers_that_share_a_gpu_look_like_different_hosts_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (nccl.PRIORITY, *nccl.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert nccl.BACKEND.environment(3, shares_device=True) == {"NCCL_HOSTID": "piper-3", **nccl.VARIABLES}
    assert nccl.BACKEND.environment(3, shares_device=False) == nccl.VARIABLES
    assert gloo.BACKEND.environment(3, shares_device=True) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert nccl.BACKEND.environment(3, shares_device=False)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert (nccl.BACKEND.buffered, gloo.BACKEND.buffered) == (False, True)


@pytest.mark.parametrize(
    ("resources", "users", "expected"),
    [
        (DEFAULT, {}, nccl.Limits(True, None)),
        (DEFAULT, {nccl.PRIORITY: "0"}, nccl.Limits(False, None)),
        (StreamResources(high_priority=False, ctas=4), {}, nccl.Limits(False, 4)),
        (StreamResources(high_priority=False), {nccl.PRIORITY: "true"}, nccl.Limits(True, None)),
        (StreamResources(high_priority=True), {nccl.PRIORITY: "0"}, nccl.Limits(True, None)),
        (StreamResources(ctas=8), {}, nccl.Limits(True, 8)),
    ],
)
def test_limits_of_a_communicator(resources: StreamResources, users: dict[str, str], expected: nccl.Limits) -> None:
    assert nccl.limits(resources, users) == expected


def test_workers_know_the_users_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nccl.PRIORITY, raising=False)
    assert nccl.PRIORITY not in nccl.BACKEND.environment(0, shares_device=False)
    monkeypatch.setenv(nccl.PRIORITY, "0")
    assert nccl.BACKEND.environment(0, shares_device=False)[nccl.PRIORITY] == "0"


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build of torch without NCCL")
def test_options_of_torchs_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nccl.PRIORITY, raising=False)
    comm = nccl.NcclComm(Meeting(0, {0: 0}, dist.HashStore(), 60.0, "", ""))
    given = comm._options(StreamResources(high_priority=False, ctas=8))
    assert (given.is_high_priority_stream, given.config.max_ctas, given._timeout) == (False, 8, comm.limit)
    default = comm._options(DEFAULT)
    assert default.is_high_priority_stream
    assert default.config.max_ctas == dist.ProcessGroupNCCL.Options().config.max_ctas


def test_priority_of_a_cuda_stream() -> None:
    assert [cuda.priority(StreamResources(high)) for high in (None, False, True)] == [0, 0, -1]


def test_only_workers_need_ray() -> None:
    """`--executor inline` runs where Ray is not installed."""
    code = "import piperlang.runtime.api, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OPERATORS = """
import importlib, pkgutil, sys, torch
import piperlang.runtime.driver.worker
def operators(): return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("piper::")}
known = operators()
assert "torch._dynamo" not in sys.modules
import piperlang.capture
for one in pkgutil.walk_packages(piperlang.capture.__path__, "piperlang.capture."): importlib.import_module(one.name)
print(len(known), *sorted(operators() - known))
"""


def test_workers_know_all_operators_and_do_not_load_the_compiler() -> None:
    """Graphs arrive pickled, and call operators by name. `early` only marks values until a chunk is divided."""
    done = subprocess.run([sys.executable, "-c", OPERATORS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    count, *missing = done.stdout.split()
    assert int(count) >= 5
    assert missing == ["piper::early"]
