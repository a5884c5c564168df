"""Export the weights of a run: plain safetensors under the names of the model's own state dict.

`piperc export RUN -o DIR` writes those of the newest checkpoint that is whole. A model of transformers gets its
config.json, so that `from_pretrained(DIR)` loads it; one inside another module is chosen by name: `--module net`."""

from __future__ import annotations

import argparse
from pathlib import Path

from piperlang.cli.model import doing
from piperlang.cli.resume import location, newest_of
from piperlang.diagnostics import did_you_mean, error


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "-o", "--output", metavar="DIR", required=True, help="the folder to write; it must be new or empty"
    )
    parser.add_argument(
        "--averaged", action="store_true", help="the moving averages of the weights, if the run has any"
    )
    parser.add_argument("--module", default="", metavar="NAME", help="only the weights of this module of the model")


def run(options: argparse.Namespace) -> int:
    from piperlang.runtime.checkpoint.export import entries, export
    from piperlang.runtime.checkpoint.files import Reader

    folder = Path(options.output)
    found = newest_of(location(options.run_folder))
    reader = Reader(found.checkpoint, found.manifest)
    if options.averaged and not any(name.kind == "average" for name in found.manifest.tensors):
        raise error("P0902", "the run has no moving averages", help="leave out --averaged, or train with `ema`")
    if not entries(reader, options.module, options.averaged):
        modules = {name.rpartition(".")[0] for name in found.manifest.entries}
        raise error(
            "P0902",
            f"no weight of the model is in a module `{options.module}`",
            help=did_you_mean(options.module, sorted(modules - {""})) or "`piperc ckpt show RUN` lists the weights",
        )
    with doing(f"exporting to {folder}", f"exported to {folder}") as exporting:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise error("P0902", f"{folder} is not empty", help="choose another folder with -o")
            done = export(reader, folder, options.module, options.averaged)
        except OSError as problem:
            raise error(
                "P0902", f"cannot write {folder}: {problem.strerror}", help="choose another folder with -o"
            ) from None
        exporting.detail = f"step {found.step}, {done.tensors} tensors, {done.elements:,} numbers"
    for name in done.left_out:
        print(f"left out: {name} is not a tensor")
    return 0
