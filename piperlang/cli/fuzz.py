"""Train a model under random schedules and compare each with the plain model, for whoever changes the compiler.

Every case has a seed that makes it again: placements, splits, data parallelism and ZeRO, weights divided where the
model allows it, schedules of the library or full random orders. A script that fails is made smaller for as long as it
fails in the same way, shown, and written to a file."""

from __future__ import annotations

import argparse
import json
import re
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from piperlang.cli.model import doing, load
from piperlang.cli.parsing import COUNT, SEED, Number
from piperlang.diagnostics import error
from piperlang.elaborate.declare import MAX_DEVICES

if TYPE_CHECKING:
    from piperlang.fuzz.attempt import Bench, Outcome
    from piperlang.fuzz.traits import Traits
    from piperlang.fuzz.write import Mesh

EXAMPLE = "write `--mesh pp=2,dp=2`"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="the devices: stages go along an axis `pp`, the batch or weights along all others",
    )
    where.add_argument(
        "--devices", type=Number(int, 1, MAX_DEVICES), metavar="N", help="random meshes of at most so many (default: 8)"
    )
    parser.add_argument("--count", type=COUNT, default=20, metavar="N", help="how many schedules (default: 20)")
    parser.add_argument(
        "--seed", type=SEED, default=0, help="of the first schedule; each further one has the next (default: 0)"
    )
    parser.add_argument(
        "--executor",
        choices=("graph", "inline", "ray"),
        default="graph",
        help="simulated devices, threads of this process, or real workers (default: graph)",
    )
    parser.add_argument("--out", metavar="DIR", default=".", help="where scripts that fail are written (default: here)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each schedule")


def run(options: argparse.Namespace) -> int:
    mesh = _mesh(options.mesh) if options.mesh is not None else None
    devices = 8 if options.devices is None else options.devices
    file = load(options.model)
    from piperlang.fuzz.attempt import Bench
    from piperlang.fuzz.traits import Traits

    bench = Bench(file, 0, options.executor, prod(size for _, size in mesh) if mesh else devices)
    with doing(f"tracing {options.model}"):
        traits = Traits(bench.program)
        _check_mesh(traits, mesh)
    try:
        failed = sum(
            not _case(options, bench, traits, seed, mesh, devices)
            for seed in range(options.seed, options.seed + options.count)
        )
    finally:
        bench.close()
    if not options.json:
        print(f"{options.count} schedules, {failed} of them wrong")
    return 1 if failed else 0


def _mesh(text: str) -> Mesh:
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, sign, size = (word.strip() for word in part.partition("="))
        if (
            not sign
            or not axis.isidentifier()
            or not re.fullmatch("[0-9]{1,18}", size)
            or int(size) < 1
            or axis in found
        ):
            raise error("P0902", f"`--mesh {text}` is not understood", help=EXAMPLE)
        found[axis] = int(size)
    if prod(found.values()) > MAX_DEVICES:
        raise error("P0902", f"`--mesh {text}` has more than {MAX_DEVICES:,} devices", help=EXAMPLE)
    return tuple(found.items())


def _check_mesh(traits: Traits, mesh: Mesh | None) -> None:
    wide = prod(size for axis, size in mesh or () if axis != "pp")
    if wide > 1 and not traits.divides:
        raise error(
            "P0902",
            "the model mixes samples, so nothing can divide its batch",
            help="give a mesh of `pp` alone: `--mesh pp=2`",
        )
    if traits.samples % wide:
        raise error(
            "P0902",
            f"{traits.samples} samples do not come out even on {wide} devices",
            help="give a smaller mesh, or batches of more samples in the model file",
        )


def _case(
    options: argparse.Namespace, bench: Bench, traits: Traits, seed: int, mesh: Mesh | None, devices: int
) -> bool:
    """One schedule, written and tried; says what it came to."""
    from piperlang.fuzz.write import write

    started = time.perf_counter()
    with doing(f"seed {seed}"):
        script = write(traits, seed, mesh, devices)
        outcome = bench.attempt(script)
    row: dict[str, object] = {
        "seed": seed,
        "outcome": outcome.kind,
        "what": outcome.what,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if options.json:
        row["script"] = script
    else:
        print(
            f"seed {seed}: {'same mathematics' if outcome.fine else outcome.kind.upper()} ({outcome.what})", flush=True
        )
    if not outcome.fine:
        row |= _shrunk(options, bench, seed, script, outcome)
    if options.json:
        print(json.dumps(row), flush=True)
    return outcome.fine


def _shrunk(options: argparse.Namespace, bench: Bench, seed: int, script: str, outcome: Outcome) -> dict[str, object]:
    from piperlang.fuzz.shrink import shrink

    whole = Path(options.out) / f"fuzz-{seed}.piper"
    small = Path(options.out) / f"fuzz-{seed}-small.piper"
    _write(whole, script)
    with doing(f"making the script of seed {seed} smaller"):
        shorter = shrink(script, lambda text: bench.attempt(text).like(outcome))
    _write(small, shorter)
    if not options.json:
        print("".join(f"    {line}\n" for line in shorter.splitlines()), end="")
        print(
            f"  {small}, made from {whole}; `piperc check {options.model} {small} --numerics` tries it again",
            flush=True,
        )
    return {"small": shorter, "file": str(small)}


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise error(
            "P0902", f"cannot write {path}", notes=[str(problem)], help="choose another folder with --out"
        ) from None
