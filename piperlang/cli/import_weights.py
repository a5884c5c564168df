"""Import weights: a state dict that torch.save wrote, or safetensors, becomes a folder that training starts from.

`piperc import weights.pt -o DIR`, then `piperc MODEL.py SCHEDULE.piper --initial-weights DIR`. Nothing in the file is
executed: a file that is not a plain state dict of tensors is refused."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree

from piperlang.cli.model import doing
from piperlang.diagnostics import error
from piperlang.diagnostics.files import unreadable


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a state dict (.pt, .pth, .bin), or a file or folder of safetensors"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", required=True, help="the folder to write; it must be new or empty"
    )


def run(options: argparse.Namespace) -> int:
    from piperlang.runtime.checkpoint.imports import NotWeights, imported

    path, folder = Path(options.file), Path(options.output)
    try:
        path.stat()
    except OSError as problem:
        raise unreadable(path, problem) from None
    with ExitStack() as undone, doing(f"importing {path}", f"imported {path}") as importing:
        if not folder.exists():
            undone.callback(rmtree, folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise error("P0902", f"{folder} is not empty", help="choose another folder with -o")
            count, elements = imported(path, folder)
        except NotWeights as problem:
            raise error(
                "P0801",
                f"{path} has no weights that can be imported",
                notes=[str(problem)],
                help="save the state dict alone: `torch.save(model.state_dict(), FILE)`",
            ) from None
        except OSError as problem:
            raise error(
                "P0902", f"cannot write {folder}: {problem.strerror}", help="choose another folder with -o"
            ) from None
        undone.pop_all()
        importing.detail = f"{count} tensors, {elements:,} numbers"
    print(f"start from them: piperc MODEL.py SCHEDULE.piper --initial-weights {folder}")
    return 0
