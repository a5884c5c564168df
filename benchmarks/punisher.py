"""Faults at random times, while four workers train: `python -m benchmarks.punisher [--minutes 30]`.

Every 20 s on average a worker is killed or stopped, the driver is ended by SIGTERM or killed and started again with the
same command, or the disk is full for some seconds. In the end the weights must be those of a run that nothing happened
to, bit by bit, and what the processes hold must not have grown. Needs root, for a small file system that can be filled.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

MODEL = """
import time, torch, piperlang
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = torch.tanh(self.a(x))
        with piperlang.annotate("stage", 1):
            return self.b(x)
def model(): return M()
def loss(output, target): return nn.functional.mse_loss(output, target)
def data():
    g = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(16, 64, generator=g)
        yield x, x.flip(1)
def optimizer(params): return torch.optim.AdamW(params, lr=1e-3)
def lr_schedule(optimizer): return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20_000)
def on_step(row): time.sleep(PAUSE)
"""
SCRIPT = """
mesh gpu = pp: 2, dp: 2
place [stage=0] on gpu[pp=0]
place [stage=1] on gpu[pp=1]
replicate [stage=*] over gpu.dp with params=sharded
split batch into 2 as mb
"""
FAULTS = {"kill a worker": 0.35, "stop a worker": 0.25, "fill the disk": 0.2, "SIGTERM": 0.15, "kill the driver": 0.05}
EVERY, FULL = 20.0, 8.0
"""Seconds between faults, on average, and that the disk is full."""


class Watched:
    """The job, as the system sees it."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.words, self.folder = words, folder
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.most: dict[str, dict[str, list[int]]] = {"driver": {}, "worker": {}}

    def start(self) -> None:
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.words, stdout=log, stderr=log, cwd=self.folder, env=environment)
        self.starts += 1

    def workers(self) -> list[int]:
        """The four that train, none that is only starting."""
        assert self.process is not None
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                environment = path.with_name("environ").read_bytes()
                if path.read_bytes().startswith(b"ray::Worker") and str(self.folder).encode() in environment:
                    found.append(int(path.parent.name))
        return found

    def look(self) -> None:
        """Notes what the driver and the workers hold."""
        assert self.process is not None
        for role, pids in (("driver", [self.process.pid]), ("worker", self.workers())):
            for pid in pids:
                with suppress(OSError, IndexError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    held = {
                        "open files": len(os.listdir(f"/proc/{pid}/fd")),
                        "threads": int(status.partition("Threads:")[2].split()[0]),
                        "MiB": int(status.partition("VmRSS:")[2].split()[0]) // 1024,
                    }
                    for what, amount in held.items():
                        self.most[role].setdefault(what, []).append(amount)


def strike(fault: str, job: Watched, disk: Path) -> bool:
    """False if there was nothing to strike."""
    assert job.process is not None
    if fault in ("kill a worker", "stop a worker"):
        workers = job.workers()
        if not workers:
            return False
        os.kill(random.choice(workers), signal.SIGKILL if fault == "kill a worker" else signal.SIGSTOP)
    elif fault == "fill the disk":
        ballast = disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        with suppress(OSError), ballast.open("ab", buffering=0) as file:  # the last bytes
            while True:
                file.write(bytes(1))
        until = time.monotonic() + FULL
        while time.monotonic() < until:
            job.look()
            time.sleep(1)
        ballast.unlink()
    else:
        job.process.send_signal(signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
        job.process.wait()
    return True


def run(minutes: float, steps: int, pause: float, seed: int) -> dict[str, Any]:
    random.seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="p"))  # a socket of Ray has a path of at most 107 bytes
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        (folder / "model.py").write_text(MODEL.replace("PAUSE", str(pause)))
        (folder / "plain.py").write_text(MODEL.replace("PAUSE", "0"))
        (folder / "s.piper").write_text(SCRIPT)
        piperc = [sys.executable, "-m", "piperlang"]
        options = ["--steps", str(steps), "--save-every", "50", "--resume", "auto", "--restart", "100000"]
        job = Watched([*piperc, "model.py", "s.piper", *options, "--out", str(disk / "run")], folder)
        counts: Counter[str] = Counter()
        exits: Counter[int] = Counter()
        started = time.monotonic()
        job.start()
        next_fault = started + 30
        while True:
            assert job.process is not None
            code = job.process.poll()
            now = time.monotonic()
            if code is not None:
                exits[code] += 1
                if code == 0:
                    break
                if code in (1, 2, 70) and not _full_at_start(folder / "log"):
                    raise RuntimeError(f"the job has ended with {code}: {folder / 'log'}")
                job.start()
            elif now > next_fault and now - started < 60 * minutes:
                fault = random.choices(list(FAULTS), list(FAULTS.values()))[0]
                counts[fault] += strike(fault, job, disk)
                next_fault = time.monotonic() + random.expovariate(1 / EVERY)
            else:
                job.look()
                time.sleep(0.5)
        seconds = time.monotonic() - started
        subprocess.run(
            [*piperc, "plain.py", "s.piper", "--steps", str(steps), "--executor", "inline", "--out", "whole"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found, expected = (torch.load(path / "weights.pt") for path in (disk / "run", folder / "whole"))
        rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        log = disk / "run" / "restarts.jsonl"
        restarts = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        same = [torch.equal(found[name], value) for name, value in expected.items()]
        return {
            "minutes": round(seconds / 60, 1),
            "steps": steps,
            "faults": dict(counts),
            "started by hand": job.starts - 1,
            "exit codes": {str(code): count for code, count in exits.items()},
            "restarts in place": len(restarts),
            "seconds of a restart": _ends([row["seconds"] for row in restarts]),
            "steps trained again": sum(row["step"] - row["from"] for row in restarts),
            "a row for every step": [row["step"] for row in rows] == list(range(steps)),
            "weights are the same, bit by bit": f"{sum(same)} of {len(same)} tensors",
            "left behind": [path.name for path in folder.iterdir() if path.name.startswith("piper-")],
            "held": {
                role: {what: _thirds(amounts) for what, amounts in kinds.items()} for role, kinds in job.most.items()
            },
        }
    finally:
        if job.process is not None and job.process.poll() is None:
            job.process.kill()
        subprocess.run(["umount", str(disk)], check=False)


def _full_at_start(log: Path) -> bool:
    """A job that starts on a full disk is refused."""
    return "nothing, training has not begun" in log.read_text()[-2_000:]


def _ends(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.1f} to {ordered[-1]:.1f}, median {ordered[len(ordered) // 2]:.1f}" if values else "none"


def _thirds(amounts: list[int]) -> str:
    """The largest of the first, the second and the last third of the time."""
    third = max(1, len(amounts) // 3)
    return " ".join(str(max(part)) for part in (amounts[:third], amounts[third : 2 * third], amounts[-third:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="faults come for so long (30)")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that the model file sleeps after a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        found = run(options.minutes, options.steps, options.pause, options.seed)
    except subprocess.CalledProcessError as problem:
        sys.exit(f"{problem} (errno {errno.EPERM}?): this needs root")
    for name, value in found.items():
        print(f"{name}: {json.dumps(value) if isinstance(value, dict) else value}")


if __name__ == "__main__":
    main()
