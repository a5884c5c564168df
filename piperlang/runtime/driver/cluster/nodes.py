"""What the nodes of a Ray cluster need for a job, checked before anything starts there: the same versions of what
trains, and files that are read or written on every node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from piperlang.diagnostics import Diagnostic, PiperError, error, listed

SAME = ("python", "torch", "piperlang")
_NAMED = 3


class NodeFacts(NamedTuple):
    """What a node has."""

    host: str
    address: str
    versions: Mapping[str, str | None]
    missing: Sequence[str]
    """Of the files that were asked for."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


OF_A_MACHINE = re.compile(
    r"(RAY|CUDA|NVIDIA|ROCR|HIP|SLURM|KUBERNETES|SSH|XDG|CONDA|VIRTUAL|LC|DBUS|SYSTEMD|SUDO|PYENV)_\w+"
    r"|PATH|\w+PATH|HOME|USER|LOGNAME|HOST|HOSTNAME|PWD|OLDPWD|SHELL|SHLVL|TERM|TMPDIR|TMP|TEMP|LANG|DISPLAY|MAIL|_"
)
"""Variables of the environment that say something about a machine, or a login on it."""


def shipped_environment() -> dict[str, str]:
    """Variables that workers get from the driver, wherever they are: model files read some."""
    return {name: value for name, value in os.environ.items() if OF_A_MACHINE.fullmatch(name) is None}


def _facts() -> Callable[[Sequence[str]], tuple[Any, ...]]:
    """A function that is sent by value, because it is defined here, to nodes that may have no piperlang."""

    def facts(paths: Sequence[str]) -> tuple[Any, ...]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os
        import platform
        import socket
        from pathlib import Path

        import ray

        def version(name: str) -> str | None:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return None

        versions = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": version("torch")}
        found = importlib.util.find_spec("piperlang")
        versions["piperlang"] = None
        if found is not None and found.submodule_search_locations:
            digest, root = hashlib.sha256(), Path(next(iter(found.submodule_search_locations)))
            for path in sorted(root.rglob("*.py")):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
            versions["piperlang"] = f"{version('piperlang') or 'from source'} (code {digest.hexdigest()[:12]})"
        missing = [path for path in paths if not os.path.exists(path)]
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return socket.gethostname(), address, versions, missing

    return facts


def here(paths: Sequence[str] = ()) -> NodeFacts:
    return NodeFacts(*_facts()(paths))


def ask(strategies: Sequence[Any], paths: Sequence[str] = ()) -> list[Any]:
    """One question for each strategy of scheduling, which says where; futures of the answers."""
    task = ray.remote(num_cpus=0, max_retries=-1)(_facts())
    return [task.options(scheduling_strategy=one).remote(list(paths)) for one in strategies]


def check(futures: Sequence[Any], meant: Path | None = None) -> None:
    """Raises P0615, with a diagnostic for each node that is not fit. `meant`: what missing files stand for."""
    mine = here().versions
    try:
        nodes = {str(node): node for node in (NodeFacts(*ray.get(future)) for future in futures)}
    except RayError as problem:
        reason = str(problem).strip().splitlines()[-1]
        raise error("P0615", "a node of the cluster cannot run a task", notes=[reason], help="`ray status`") from None
    problems: list[Diagnostic] = []
    for node in nodes.values():
        for name in SAME:
            its, ours = node.versions.get(name), mine[name]
            if its != ours:
                what = f"has no {name}" if its is None else f"has {name} {its}"
                problems += error(
                    "P0615",
                    f"node {node} {what}, and this machine has {ours}",
                    help=f"install the same {name} there, and run `ray start` again in that environment",
                ).diagnostics
        missing = [str(meant)] if meant is not None and node.missing else node.missing
        if missing:
            more = f" and {len(missing) - _NAMED} more" if missing[_NAMED:] else ""
            problems += error(
                "P0615",
                f"node {node} does not have {listed(list(missing[:_NAMED]), 'and')}{more}",
                help="every node reads and writes it: put it on storage that all nodes mount at the same path",
            ).diagnostics
    if problems:
        raise PiperError(*problems)
