"""What it brings to run one microbatch's backward beside another's forward: DualPipeV against 1F1B.

A layer is an operator whose F, I and W take 20 ms each, between two exchanges of 10 ms each way: dispatch, experts,
combine, as in a mixture of experts. The exchanges are chunks on a stream of their own, in both schedules. 1F1B has
nothing to run beside them; DualPipeV says `F & B`, so that the exchange of one hides behind the operator of the other.
Two layers a rank, microbatches 4 * pp; each the shortest of some steps on Ray workers over gloo. The foreseen ratio is
what the orders allow.

    python -m benchmarks.overlap [--json] [--steps 5] [--pp 2] [--layer eoe] [--timeline DIR]
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.sleeping import TIMELINE, Timed, make_model, options, plain_loss, show, timed
from piperlang.runtime.driver.cluster import Cluster

MS, EXCHANGE = 20.0, 10.0
SCRIPT = """
from std.pipeline import {name}, {place}
mesh gpu = pp: {ranks}
split batch into {micro} as mb
{place}(gpu, {ranks})
stream [exchange=*] on "exchange"
{name}(gpu, {ranks}, {micro})
"""
SCHEDULES = {"dualpipev": ("vee", 2), "one_f_one_b": ("loop", 1)}
"""Placement, and stages on each rank; a rank has two layers in both."""


def measure(ranks: int, layer: str, steps: int) -> dict[str, Any]:
    layers, micro = 2 * ranks, 4 * ranks
    expected = plain_loss(make_model(layers, layers, layer), micro)
    found: dict[str, Timed] = {}
    cluster = Cluster(ranks)
    try:
        for name, (place, stages) in SCHEDULES.items():
            make = partial(make_model, layers, stages * ranks, layer, MS, EXCHANGE)
            found[name] = timed(
                cluster, make, micro, SCRIPT.format(name=name, place=place, ranks=ranks, micro=micro), steps
            )
            assert abs(found[name].loss - expected) <= 1e-5 * expected, (name, found[name].loss, expected)
    finally:
        cluster.close()
    dual, plain = found["dualpipev"], found["one_f_one_b"]
    return {
        "pp": ranks,
        "mb": micro,
        "layer": layer,
        "dualpipev_ms": round(dual.ms, 1),
        "one_f_one_b_ms": round(plain.ms, 1),
        "ratio": round(dual.ms / plain.ms, 4),
        "foreseen_ratio": round(dual.foreseen_ms / plain.foreseen_ms, 4),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pp", type=int, choices=(2, 4), action="append", help="may be given several times")
    parser.add_argument("--layer", default="eoe", help="o: an operator, e: an exchange (default: eoe)")
    parser.add_argument(
        "--timeline", metavar="DIR", help="where workers write when they did what, of the last step of all"
    )
    chosen = parser.parse_args()
    if chosen.timeline:
        Path(chosen.timeline).mkdir(parents=True, exist_ok=True)
        os.environ[TIMELINE] = str(Path(chosen.timeline).resolve())
    show([measure(ranks, chosen.layer, chosen.steps) for ranks in chosen.pp or (2, 4)], chosen.json)


if __name__ == "__main__":
    main()
