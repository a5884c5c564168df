"""The run folder of a job: what is written there, and the diagnostics when it cannot be written."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from piperlang.cli.model import doing
from piperlang.cli.report import open_script
from piperlang.diagnostics import PiperError, error
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.elaborate.directive import Directive

WEIGHTS = "weights.pt"
AVERAGES = "weights-ema.pt"
"""Their moving averages, if the model file has `ema`."""
UNFINISHED = "weights-unfinished.pt"
"""Of a job that ended with an error between two steps."""
PREVIOUS = "weights-previous{}.pt"
"""Of earlier jobs in the same folder: numbered from the second on."""
PREVIOUS_AVERAGES = "weights-ema-previous{}.pt"


def check_folder(folder: Path) -> None:
    """Refuse a run folder that cannot be made or written, without making it."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} cannot be written"
    else:
        return
    raise _no_folder(folder, problem)


def _no_folder(folder: Path, problem: object) -> PiperError:
    return error(
        "P0902", f"cannot make the run folder {folder}", notes=[str(problem)], help="choose another with --out"
    )


def open_folder(options: argparse.Namespace) -> Path:
    if options.out:
        folder = Path(options.out)
    else:
        stem = Path(options.script).stem if options.script != "-" else "stdin"
        folder = next(path for n in range(1, 1_000_000) if not (path := Path("runs") / f"{stem}-{n}").exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _no_folder(folder, problem) from None
    return folder


def write_about(folder: Path, options: argparse.Namespace, plan: Any, directives: Sequence[Directive]) -> None:
    import platform

    import torch

    from piperlang.elaborate.resolved import resolved
    from piperlang.plan.files import dump
    from piperlang.version import __version__

    source, _ = open_script(options.script)
    with writing(folder / WEIGHTS, "nothing, training has not begun"):
        for name, previous in ((WEIGHTS, PREVIOUS), (UNFINISHED, PREVIOUS), (AVERAGES, PREVIOUS_AVERAGES)):
            _set_aside(folder / name, previous)
        (folder / "verified.json").unlink(missing_ok=True)
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
    write_text(folder / "versions.json", json.dumps(versions, indent=2) + "\n")


def _set_aside(weights: Path, previous: str) -> None:
    """Weights of an earlier job in the same folder are kept, and never taken for those of this job."""
    names = (previous.format(f"-{n}" if n > 1 else "") for n in range(1, 1_000_000))
    if weights.exists():
        weights.replace(next(path for name in names if not (path := weights.with_name(name)).exists()))


def write_text(path: Path, text: str) -> None:
    with writing(path, "nothing, training has not begun"):
        path.write_text(text, encoding="utf-8")


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
        saving.detail = f"{sum(tensor.numel() for tensor in weights.values()):,} numbers"


@contextmanager
def writing(path: Path, lost: str) -> Iterator[None]:
    """A file of the run folder that cannot be written is a P0609."""
    try:
        yield
    except (OSError, RuntimeError) as problem:  # torch raises both
        cause = problem if isinstance(problem, OSError) else problem.__context__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(problem).partition("\n")[0]
        raise error(
            "P0609",
            f"cannot write {path}",
            notes=[reason, f"lost: {lost}"],
            help="look at the space on the disk, and leave the folder alone while the job runs; or choose another with"
            " --out",
        ) from problem
