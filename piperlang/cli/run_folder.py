"""The run folder of a job: what is written there, and the diagnostics when it cannot be written."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from piperlang.cli.model import doing
from piperlang.cli.report import open_script
from piperlang.diagnostics import PiperError, error
from piperlang.interrupts import uninterrupted
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.cli.resume import Resumed
    from piperlang.elaborate.directive import Directive

WEIGHTS = "weights.pt"
AVERAGES = "weights-ema.pt"
"""Their moving averages, if the model file has `ema`."""
METRICS = "metrics.jsonl"
VERSIONS = "versions.json"
RESTARTS = "restarts.jsonl"
"""Why a job has started again."""
NOT_WRITTEN = "P0609"
FULL = (errno.ENOSPC, errno.EDQUOT)
PATIENCE = 600.0
"""Seconds to wait for room on the disk, for what would be lost."""
_RECORDS = (METRICS, RESTARTS, VERSIONS, WEIGHTS, AVERAGES, "verified.json")
_CHECKPOINTS = "checkpoints"
LOCK = ".lock"
"""Kept by the job that trains here."""
OUTPUT = "output"
"""What workers print."""


def check_folder(folder: Path, used: bool = False) -> None:
    """Refuse a run folder that cannot be made or written, without making it, or that has another run, unless it may be
    `used`."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} cannot be written"
    elif not used and _is_used(folder):
        raise error(
            "P0902",
            f"{folder} has the results of another run",
            help=f"continue that run with `--resume {folder}`, replace it with --overwrite, or choose another folder"
            " with --out",
        )
    else:
        return
    raise _no_folder(folder, problem)


def may_be_used(options: argparse.Namespace) -> bool:
    """Whether the folder of --out may have a run: it is replaced, or it is the one that is resumed."""
    if options.resume in (None, "auto"):
        return options.overwrite or options.resume is not None
    return Path(options.out).absolute() == Path(options.resume).absolute()


def _is_used(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*_RECORDS, _CHECKPOINTS))


def _no_folder(folder: Path, problem: object) -> PiperError:
    return error(
        "P0902", f"cannot make the run folder {folder}", notes=[str(problem)], help="choose another with --out"
    )


def open_folder(options: argparse.Namespace, resumed: Resumed | None) -> tuple[Path, bool]:
    """The run folder: that of the run that is resumed, `--out`, or a new one, which no other job has. Whether it is
    new."""
    if resumed is not None and not options.out and isinstance(resumed.run, Path):
        folder = resumed.run
    elif options.out:
        folder = Path(options.out)
        check_folder(folder, used=may_be_used(options))
    else:
        return _new_folder(Path(options.script).stem if options.script != "-" else "stdin"), True
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _no_folder(folder, problem) from None
    return folder, new


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """No other job trains in the folder meanwhile: it would cut the rows of this one, and remove its checkpoints. The
    lock ends with this process, however that ends."""
    path = folder.absolute() / LOCK
    file = _locked(path, folder)
    with file:
        with suppress(OSError):  # a full disk; the lock is there without it
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def check_free(folder: Path) -> None:
    """Refuses a folder in which a job trains now, before anything is read that this job may remove."""
    path = folder.absolute() / LOCK
    if path.exists():
        _locked(path, folder).close()


def _locked(path: Path, folder: Path) -> TextIO:
    while True:
        with writing(path, "nothing, training has not begun"):
            file = path.open("a+")
        try:
            # Of the process, not of the file: processes that the user's code forks do not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in (errno.EACCES, errno.EAGAIN):
                return file  # a file system without locks
            file.seek(0)
            who = file.read().strip()
            file.close()
            raise error(
                "P0902",
                f"a job is training in {folder}",
                notes=[who] if who else [],
                help="wait until it has ended, or choose another folder with --out",
            ) from None
        with suppress(OSError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()  # the job that had it has ended just now, and removed it


@contextmanager
def removed_if_interrupted(folder: Path) -> Iterator[None]:
    """A job that is interrupted before its first step leaves no folder. One that fails leaves what tells why; the next
    one may use the folder."""
    at, runs = folder.absolute(), Path("runs").absolute()  # the user's code may change the working directory
    metrics = at / METRICS
    try:
        yield
    except (KeyboardInterrupt, PiperError) as problem:
        if metrics.exists() and metrics.stat().st_size:
            raise
        if isinstance(problem, PiperError):
            for name in _RECORDS:
                with suppress(OSError):
                    (at / name).unlink(missing_ok=True)
        else:
            with uninterrupted():
                shutil.rmtree(at, ignore_errors=True)
                if at.parent == runs:
                    with suppress(OSError):  # there are others
                        runs.rmdir()
        raise


def _new_folder(stem: str) -> Path:
    """Two jobs that start together get two folders: to make one is atomic."""
    for n in range(1, 1_000_000):
        folder = Path("runs") / f"{stem}-{n}"
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as problem:
            raise _no_folder(folder, problem) from None
        return folder
    raise _no_folder(Path("runs") / stem, "there are a million of them")


def write_about(
    folder: Path, options: argparse.Namespace, plan: Any, directives: Sequence[Directive], resumed: Resumed | None
) -> None:
    """What is written before training. Results of another run in the folder are removed, so that nothing in it is taken
    for a result of this one."""
    import torch

    from piperlang.elaborate.resolved import resolved
    from piperlang.plan.files import dump
    from piperlang.version import __version__

    source, _ = open_script(options.script)
    with writing(folder / WEIGHTS, "nothing, training has not begun"):
        for name in _RECORDS:
            if resumed is None or name not in (METRICS, RESTARTS):
                (folder / name).unlink(missing_ok=True)
        if resumed is None:
            for name in (_CHECKPOINTS, OUTPUT):
                shutil.rmtree(folder / name, ignore_errors=True)
        elif isinstance(resumed.run, Path):
            keep_rows(resumed.run / METRICS, folder / METRICS, resumed.step)
        _open_store(folder, options, resumed)
        if options.executor == "ray":
            (folder / OUTPUT).mkdir(exist_ok=True)
    write_text(folder / "schedule.piper", source.text)
    write_text(folder / "resolved.piper", resolved(directives))
    write_text(folder / "plan.json", dump(plan))
    versions = {
        "piperlang": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": sys.argv[1:],
        "seed": options.seed,
        "parameters": options.parameters,
    }
    write_text(folder / VERSIONS, json.dumps(versions, indent=2) + "\n")


def _open_store(folder: Path, options: argparse.Namespace, resumed: Resumed | None) -> None:
    """Where checkpoints are: those of a run that is resumed stay where they are, unless `--checkpoints` says
    otherwise."""
    from piperlang.runtime.checkpoint.store import keep_elsewhere, store_of

    if options.checkpoints is not None or resumed is None:
        keep_elsewhere(folder, options.checkpoints)
    elif not isinstance(resumed.run, Path):
        keep_elsewhere(folder, str(resumed.run))
    if resumed is None and options.overwrite:
        store = store_of(folder)
        store.prune(0)


def keep_rows(old: Path, new: Path, step: int) -> None:
    """Writes the rows of the steps before this one. The last row of a job that was killed may be torn."""
    kept = []
    for line in old.read_text(encoding="utf-8").splitlines() if old.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] < step:
                kept.append(f"{line}\n")
    part = new.with_name(f"{new.name}.part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(new)


def write_text(path: Path, text: str, lost: str = "nothing, training has not begun") -> None:
    with writing(path, lost):
        path.write_text(text, encoding="utf-8")


def note_restart(folder: Path, record: Mapping[str, Any]) -> None:
    """Why a job has started again, or could not."""

    def write() -> None:
        with writing(folder / RESTARTS, "why the job started again"), (folder / RESTARTS).open("a") as file:
            file.write(f"{json.dumps(record)}\n")

    patiently(write)


def drop(metrics: TextIO) -> None:
    """Forget what could not be written: closing the file would try again, and raise again."""
    try:
        metrics.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), metrics.fileno())


def save(job: Any, folder: Path, name: str, averaged: bool = False) -> None:
    """The file is there when it is whole."""
    import torch

    path, part = folder / name, folder / f"{name}.part"
    with doing("saving the weights", f"saved {name}") as saving:
        weights = job.weights(averaged)

        def write() -> None:
            with writing(path, f"the weights of {counted(len(weights), 'tensor')}"):
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    with part.open("wb") as file:
                        torch.save(weights, file)
                    part.replace(path)
                except BaseException:
                    with suppress(OSError):
                        part.unlink(missing_ok=True)
                    raise

        patiently(write)
        saving.detail = f"{sum(tensor.numel() for tensor in weights.values()):,} numbers"


def patiently(write: Callable[[], None]) -> None:
    """While there is no room on the disk, tries again."""
    until = time.monotonic() + PATIENCE
    told = False
    while True:
        try:
            write()
            return
        except PiperError as problem:
            if not _no_room(problem) or time.monotonic() > until:
                raise
            if not told:
                waits = f"waiting for room on the disk, {PATIENCE / 60:.0f} minutes at most"
                emit(Notice(f"{problem.diagnostics[0].message}: {waits}", warning=True))
            told = True
            time.sleep(1.0)


def _no_room(problem: PiperError) -> bool:
    cause: BaseException | None = problem
    while cause is not None:
        # safetensors has the number of the system's error in its text only
        if getattr(cause, "errno", None) in FULL or any(f"os error {number}" in str(cause) for number in FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def writing(path: Path, lost: str) -> Iterator[None]:
    """A file of the run folder that cannot be written is a P0609."""
    try:
        yield
    except (OSError, RuntimeError) as problem:  # torch raises both
        cause = problem if isinstance(problem, OSError) else problem.__context__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(problem).partition("\n")[0]
        raise error(
            NOT_WRITTEN,
            f"cannot write {path}",
            notes=[reason, f"lost: {lost}"],
            help="look at the space on the disk, and leave the folder alone while the job runs; or choose another with"
            " --out",
        ) from problem
