"""Write a starter model and schedule: model.py and schedule.piper, ready to run.

The model is a small transformer with data, loss and optimizer; its blocks are annotated as stages. The schedule runs it
as a pipeline on two devices. Existing files are never overwritten.
"""

from __future__ import annotations

import argparse
import shlex
from contextlib import suppress
from pathlib import Path

from piperlang.cli.needs import INSTALL, installed
from piperlang.diagnostics import error, listed
from piperlang.resources import resource

FILES = ("model.py", "schedule.piper")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        metavar="DIR",
        help="the folder to write to (default: current folder); created if it does not exist",
    )


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise error(
            "P0902",
            f"{listed(there, 'and')} already {'exists' if len(there) == 1 else 'exist'} in {_named(folder)}",
            help="choose another folder: `piperc init DIR`",
        )
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            path = folder / name
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(resource("examples", "starter", name).read_text(encoding="utf-8"))
    except OSError as problem:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise error(
            "P0902",
            f"cannot write to {_named(folder)}",
            notes=[(problem.strerror or str(problem)).lower()],
            help="choose another folder: `piperc init DIR`",
        ) from None
    model, script = (shlex.quote(str(path)) for path in written)
    print(f"wrote {written[0]} and {written[1]}; next:\n")
    if not all(map(installed, ("torch", "ray", "numpy", "safetensors"))):
        print(f"  {INSTALL}\n      installs torch and Ray, which trace and train models")
    print(f"  piperc orders {script}\n      shows the order of passes on every device")
    print(f"  piperc check {model} {script} --numerics\n      compares two steps under the schedule with plain PyTorch")
    print(f"  piperc {model} {script} --steps 50\n      trains on two worker processes; no GPU is needed")
    return 0


def _named(folder: Path) -> str:
    return "this folder" if folder == Path() else str(folder)
