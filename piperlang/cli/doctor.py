"""Show what this machine has for training, what will be used, what is missing and how to install it.

Exits with 1 if training cannot work here. It starts no workers and leaves no files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from piperlang.cli.needs import INSTALL, OLDEST, installed
from piperlang.cli.report import colored, paint
from piperlang.version import __version__

PATIENCE = 120.0
"""Timeout in seconds for importing torch and Ray; a cold network disk is slow."""
PORTS = 32
"""Number of ports to try: about what a job of eight workers needs."""
STORE = 200 * 2**20
"""Bytes of Ray's object store, in /dev/shm."""
WORKER = 2**29
"""Approximate bytes that a worker uses before it has a model: torch and Ray."""


@dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["fine", "note", "missing"]
    """A `note` is a limitation; if something is `missing`, training cannot work."""
    found: str
    help: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(options: argparse.Namespace) -> int:
    findings: list[Finding] = []
    if not options.json:
        print(f"piperlang {__version__} on {platform.system()} {platform.machine()}")
    torch: dict[str, Any] = {}
    for finding in found(torch):
        findings.append(finding)
        if not options.json:  # one by one: torch and Ray take long
            _row(_mark(finding.state), f"{finding.name:<9} ", finding.found)
    ok = not any(finding.state == "missing" for finding in findings)
    uses = used(torch) if ok else {}
    if options.json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings], "uses": uses}, indent=2))
    else:
        _conclude(findings, uses, ok)
    return 0 if ok else 1


def found(torch: dict[str, Any]) -> Iterator[Finding]:
    """All findings; torch's own report is stored in `torch`."""
    with ExitStack() as stack:
        asked = {name: stack.enter_context(_asked(name)) for name in OLDEST if installed(name)}
        yield Finding("Python", "fine", f"{platform.python_version()}, {sys.executable}")
        yield from machine()
        for name in OLDEST:
            answer = _answer(asked[name]) if name in asked else {}
            yield package(name, answer)
            if name == "torch" and "version" in answer:
                torch |= answer
                yield from accelerators(torch)


def _mark(state: str) -> str:
    color = paint(sys.stdout)
    return {"fine": color.help("ok"), "note": color.bold("--")}.get(state) or color.error("!!")


def _row(mark: str, name: str, text: str) -> None:
    """`  ok torch     2.13.0`, wrapped in its column where there is a terminal."""
    width = max(20, shutil.get_terminal_size().columns - 5 - len(name)) if sys.stdout.isatty() else len(text) + 1
    first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    print(f"  {mark} {name}{first}", *(" " * (5 + len(name)) + line for line in more), sep="\n", flush=True)


def _conclude(findings: list[Finding], uses: dict[str, str], ok: bool) -> None:
    if uses:
        print("\ntraining uses")
        for name, what in uses.items():
            _row("  ", f"{name:<9} ", what)
    helps = dict.fromkeys((finding.help, finding.state) for finding in findings if finding.help)
    if helps:
        print("\nnext steps")
        for help, state in helps:
            _row(_mark(state), "", help)
    print("\ntraining works here" if ok else "\ntraining cannot work here; `check`, `fmt`, `orders` and `explain` can")


# ----------------------------------------------------------------------------------------------------------- packages


@contextmanager
def _asked(name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py")), name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"problem": f"import takes more than {PATIENCE:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        last = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"problem": f"import fails: {last[:200]}"}
    return found


def package(name: str, answer: dict[str, Any]) -> Finding:
    version = answer.get("version")
    wanted = ".".join(map(str, OLDEST[name]))
    if not answer:
        return Finding(name, "missing", "not installed", INSTALL)
    if version is None:
        return Finding(name, "missing", answer["problem"], f"reinstall it: pip install --force-reinstall {name}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST[name]:
        return Finding(name, "missing", f"{version}, older than {wanted}", f"pip install --upgrade '{name}>={wanted}'")
    return Finding(name, "fine", version)


def accelerators(torch: dict[str, Any]) -> Iterator[Finding]:
    """Devices and communication backends of torch."""
    if torch["gpus"]:
        for number, gpu in enumerate(torch["gpus"]):
            yield Finding(
                f"GPU {number}", "fine", f"{gpu['name']}, {_size(gpu['free'])} free of {_size(gpu['memory'])}"
            )
        yield Finding("CUDA", "fine", torch["cuda"])
        if torch["nccl"]:
            yield Finding("NCCL", "fine", torch["nccl"])
        else:
            yield Finding(
                "NCCL",
                "note",
                "not in this build of torch",
                "install a build of torch with NCCL, or train with --backend gloo",
            )
    elif Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
        why = (
            "this build of torch is for CPU"
            if torch["cuda"] is None
            else f"torch, built for CUDA {torch['cuda']}, cannot use it"
        )
        yield Finding(
            "CUDA",
            "note",
            f"there is a GPU, but {why}",
            "install a build of torch for the CUDA version that nvidia-smi shows",
        )
    else:
        yield Finding("CUDA", "note", "no GPU: training runs on CPU")
    if torch["gloo"]:
        yield Finding("gloo", "fine", "in torch")
    else:
        yield Finding(
            "gloo", "missing", "not in this build of torch", "install a build of torch with distributed support"
        )


# ----------------------------------------------------------------------------------------------------------- machine


def machine() -> Iterator[Finding]:
    yield Finding("cores", "fine", f"{_cores():g}")
    total, free = _memory()
    if free < 2 * WORKER:
        yield Finding(
            "memory",
            "note",
            f"{_size(free)} free of {_size(total)}",
            f"free some memory: a worker uses {_size(WORKER)} before it loads a model",
        )
    else:
        yield Finding(
            "memory", "fine", f"{_size(free)} free of {_size(total)}: room to start {free // WORKER:,} workers"
        )
    shared = _free(Path("/dev/shm"))
    if shared is not None:
        small = f"give /dev/shm {_size(STORE)} or more (docker: --shm-size=1g); otherwise Ray uses the disk"
        yield Finding(
            "/dev/shm", "fine" if shared >= STORE else "note", f"{_size(shared)} free", "" if shared >= STORE else small
        )
    yield _folder()
    yield _ports()
    yield _terminal()


def _folder() -> Finding:
    """Ray keeps its session in the folder for temporary files."""
    try:
        with tempfile.NamedTemporaryFile():
            folder = Path(tempfile.gettempdir())
    except OSError as problem:
        return Finding(
            "temporary",
            "missing",
            (problem.strerror or str(problem)).lower(),
            "set TMPDIR to a folder that can be written to",
        )
    free = _free(folder) or 0
    full = free < 2**30
    return Finding(
        "temporary",
        "note" if full else "fine",
        f"{folder}, {_size(free)} free",
        f"free some space in {folder}, or set TMPDIR to another folder" if full else "",
    )


def _ports() -> Finding:
    """Whether processes on this machine can connect to each other."""
    try:
        with ExitStack() as stack:
            for _ in range(PORTS):
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                stack.enter_context(socket.create_connection(server.getsockname(), timeout=2))
    except OSError as problem:
        return Finding(
            "ports",
            "missing",
            f"127.0.0.1: {(problem.strerror or str(problem)).lower()}",
            "workers connect through ports of 127.0.0.1; allow processes to listen there",
        )
    return Finding("ports", "fine", f"{PORTS} of 127.0.0.1 tried, all free and reachable")


def _terminal() -> Finding:
    if not sys.stdout.isatty():
        what = "standard output is not a terminal"
    else:
        what = f"{shutil.get_terminal_size().columns} columns, {os.environ.get('TERM', 'TERM is not set')}"
    colors = "colors" if colored(sys.stdout) else "no colors"
    return Finding("terminal", "fine", f"{what}, {colors}, {sys.stdout.encoding}")


def used(torch: dict[str, Any]) -> dict[str, str]:
    """What a job with default options uses."""
    gpus = len(torch["gpus"])
    if not gpus:
        return {"backend": "gloo, on CPU", "devices": f"one process per device of the script, on {_cores():g} cores"}
    shared = "workers share it" if gpus == 1 else "with more devices workers share GPUs"
    return {
        "backend": "nccl, on CUDA",
        "devices": f"one process per device of the script, on {gpus} GPU{'s' if gpus > 1 else ''}; {shared}",
        "compiler": "Inductor; --no-compile disables it",
    }


def _cores() -> float:
    """The cores that this process may use: a container may be limited."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limit = float(quota) / float(period)
    except (OSError, ValueError):
        limit = float("inf")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(usable), limit)


def _memory() -> tuple[int, int]:
    """Bytes in all and free, of the machine or of the container."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit, taken = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or one without a limit
        return total, free
    return min(total, limit), min(free, max(0, limit - taken))


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
