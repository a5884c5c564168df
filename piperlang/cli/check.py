"""Check schedule scripts: syntax, names, values, and consistency of the directives. No model is needed.
For a folder, all scripts in it are checked.

With a model (piperc check MODEL.py SCHEDULE.piper), the model is traced and also checked: every selector matches,
every chunk is placed, the batch size is divisible, the order has no deadlock. With --numerics, two training steps
are run with plain PyTorch and under the schedule, and compared.
"""

from __future__ import annotations

import argparse
from collections import Counter

from piperlang.cli.model import add_precision
from piperlang.cli.parsing import SEED
from piperlang.cli.report import add_parameters, exit_code, model_first, open_script, parameters, result, say, scripts
from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.printable import printable
from piperlang.pipeline import Outlined, outline


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scripts", nargs="+", metavar="[MODEL.py] FILE.piper", help="files or folders; `-` reads standard input"
    )
    parser.add_argument(
        "--numerics", action="store_true", help="compare two training steps with plain PyTorch (needs a model)"
    )
    parser.add_argument("--seed", type=SEED, default=0, help="random seed of weights and dropout, for --numerics")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_parameters(parser)
    add_precision(parser)


def run(options: argparse.Namespace) -> int:
    options.format = "json" if options.json else options.format
    models = [name for name in options.scripts if name.endswith(".py")]
    if options.scripts[0].endswith(".py"):
        from piperlang.cli.check_model import run as run_model

        return run_model(options)
    if models:
        raise model_first("check", models[0], options.scripts[0])
    if options.numerics:
        raise error("P0902", "--numerics needs a model", help="piperc check MODEL.py SCHEDULE.piper --numerics")
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    overrides = parameters(options)
    names, problems = scripts(options.scripts)
    for name in names:
        try:
            found = _check(name, overrides)
        except PiperError as problem:
            problems.extend(problem.diagnostics)
            continue
        wrong = found.problems or found.outline.finish()
        problems.extend(wrong)
        if not wrong and options.format == "full":
            print(f"{printable(name)}: ok ({_says(found)})")
    result(problems, options.format)
    return exit_code(problems)


def _check(name: str, overrides: dict[str, str]) -> Outlined:
    source, path = open_script(name)
    return outline(source, path, overrides, say=say)


def _says(found: Outlined) -> str:
    """A short summary of the script."""
    lanes = found.outline.lanes.lanes
    counts = Counter(
        {
            "device": max((mesh.size for mesh in found.outline.meshes), default=0),
            "chunk": len(found.outline.placements.by_chunk),
            "ordered step": sum(len(lane.steps) * len(lane.devices) for lane in lanes),
        }
    )
    parts = [f"{count:,} {what}{'s' if count != 1 else ''}" for what, count in counts.items() if count]
    return ", ".join(parts) or "no directives"
