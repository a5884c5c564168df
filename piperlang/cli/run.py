"""Train with a plan that `piperc plan -o FILE` saved. A plan whose model, script or versions have changed is
rejected."""

from __future__ import annotations

import argparse
from pathlib import Path

from piperlang.cli.backend import chosen_backend
from piperlang.cli.elastic import CompiledScript, alternatives, train
from piperlang.cli.model import Batches, captured, doing, load, scheduled
from piperlang.cli.report import add_import_path
from piperlang.cli.train import add_training, check_loaded, check_usage, is_done, start_of, weights_of
from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.files import unreadable


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="FILE.plan")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the model file that the plan names, even if it is neither in the plan's folder nor in this one",
    )
    add_import_path(parser)
    add_training(parser)


def run(options: argparse.Namespace) -> int:
    from piperlang.plan import files
    from piperlang.plan.rewrite.clip import skips
    from piperlang.plan.verify import check

    check_usage(options)
    run_before = start_of(options)
    if is_done(options, run_before):
        return 0
    if options.plan.endswith(".piper"):
        raise error(
            "P0902",
            f"{options.plan} is a schedule, not a plan",
            help="`piperc MODEL.py SCHEDULE.piper` trains; `piperc plan MODEL.py SCHEDULE.piper -o FILE` writes a plan",
        )
    try:
        text = Path(options.plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise unreadable(Path(options.plan), problem) from None
    with doing(f"checking {options.plan}"):
        plan = files.load(text, options.plan)
        made = plan.about
        if not all(isinstance(made.get(key), str) for key in ("model", "script")) or made["script"] == "-":
            raise error(
                "P0505",
                f"cannot use {options.plan}",
                notes=["it does not record its model and script"],
                help="make it again with `piperc plan MODEL.py SCHEDULE.piper -o FILE`",
            )
        _check_trusted(options, Path(made["model"]))
        old = files.stale(files.about(Path(made["model"]), Path(made["script"]), made.get("parameters")), made)
        if old is not None:
            raise PiperError(old)
        check(plan)
    options.script, options.model = made["script"], made["model"]
    given = dict(made.get("parameters", {}))
    precision = given.pop("--precision", None)
    if options.precision not in (None, precision):
        raise error(
            "P0902",
            f"cannot use `--precision {options.precision}`: {options.plan} was made without it",
            help=f"make it again with `piperc plan MODEL.py SCHEDULE.piper --precision {options.precision}`",
        )
    options.precision = precision
    if skips(plan) != (options.on_nan != "continue"):
        raise error(
            "P0902",
            f"cannot use `--on-nan {options.on_nan}`: {options.plan} was made for another",
            help=f"make it again with `piperc plan MODEL.py SCHEDULE.piper --on-nan {options.on_nan}`",
        )
    options.parameters = [f"{name}={value}" for name, value in given.items()]
    file = load(made["model"], options.seed).at(options.precision, weights_of(options))
    check_loaded(options, file)
    backend = chosen_backend(options)
    batches = Batches(file, options.seed)
    traced = captured(file, options.seed, batches.first, backend)
    found = scheduled(traced, options)
    if found.problems:
        raise PiperError(*found.problems)
    schedules = [CompiledScript(options, found, plan), *alternatives(options, traced, file.max_norm)]
    train(schedules, file, batches, backend, run_before)
    return 0


def _check_trusted(options: argparse.Namespace, model: Path) -> None:
    """To train with a plan runs the model file that it names, whoever has written it."""
    real = model.resolve()
    here = (Path(options.plan).resolve().parent, Path.cwd())
    if not options.trust and not any(real.is_relative_to(folder) for folder in here):
        raise error(
            "P0902",
            f"{options.plan} would run {real}, which is neither in its folder nor in this one",
            help="if you know that file, add `--trust`",
        )
