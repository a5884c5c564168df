"""Train a model under random schedules and compare each with plain PyTorch. Meant for compiler developers.

Every case is reproducible from its seed: placements, splits, data parallelism and ZeRO, sharded weights where the
model allows it, schedules of the library or full random orders. A failing script is reduced while it still fails in
the same way, printed, and written to a file."""

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
from piperlang.directives.mesh import MAX_DEVICES

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
        help="the mesh: stages are placed along axis `pp`, the batch or weights are divided along the others",
    )
    where.add_argument(
        "--devices",
        type=Number(int, 1, MAX_DEVICES),
        metavar="N",
        help="use random meshes of at most N devices (default: 8)",
    )
    parser.add_argument("--count", type=COUNT, default=20, metavar="N", help="number of schedules (default: 20)")
    parser.add_argument(
        "--seed", type=SEED, default=0, help="seed of the first schedule; the following ones count up (default: 0)"
    )
    parser.add_argument(
        "--executor",
        choices=("graph", "inline", "ray"),
        default="graph",
        help="run on simulated devices, threads of this process, or Ray workers (default: graph)",
    )
    parser.add_argument(
        "--out", metavar="DIR", default=".", help="folder for failing scripts (default: current folder)"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per schedule")


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
        print(f"{options.count} schedules, {failed} failed")
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
            raise error("P0902", f"invalid mesh `--mesh {text}`", help=EXAMPLE)
        found[axis] = int(size)
    if prod(found.values()) > MAX_DEVICES:
        raise error("P0902", f"`--mesh {text}` has more than {MAX_DEVICES:,} devices", help=EXAMPLE)
    return tuple(found.items())


def _check_mesh(traits: Traits, mesh: Mesh | None) -> None:
    wide = prod(size for axis, size in mesh or () if axis != "pp")
    if wide > 1 and not traits.divides:
        raise error(
            "P0902",
            "the model mixes samples, so its batch cannot be divided",
            help="use a mesh with the axis `pp` only: `--mesh pp=2`",
        )
    if traits.samples % wide:
        raise error(
            "P0902",
            f"batch size {traits.samples} is not divisible by {wide} devices",
            help="use a smaller mesh, or larger batches in the model file",
        )


def _case(
    options: argparse.Namespace, bench: Bench, traits: Traits, seed: int, mesh: Mesh | None, devices: int
) -> bool:
    """Generate and try one schedule; print the result."""
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
            f"seed {seed}: {'matches plain PyTorch' if outcome.fine else outcome.kind.upper()} ({outcome.what})",
            flush=True,
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
    with doing(f"reducing the script of seed {seed}"):
        shorter = shrink(script, lambda text: bench.attempt(text).like(outcome))
    _write(small, shorter)
    if not options.json:
        print("".join(f"    {line}\n" for line in shorter.splitlines()), end="")
        print(
            f"  {small}, reduced from {whole}; to reproduce, run `piperc check {options.model} {small} --numerics`",
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
