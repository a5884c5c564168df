"""Whether another commit was faster: the same benchmarks in two checkouts, by turns in one call.

The other checkout runs its own benchmarks, with this Python. The smallest of all rounds counts, since other work can
only lengthen a measurement; rounds begin with one checkout and the other in turn.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.compare /tmp/before [--rounds 3] [--only host]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sleeping import show

HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Measured:
    """Columns that name a row of a benchmark, and columns to compare."""

    names: tuple[str, ...]
    columns: tuple[str, ...]


BENCHMARKS = {
    "host": Measured(("what", "instructions"), ("us_per_instruction",)),
    "fidelity": Measured(("schedule",), ("piper_ms", "torch_ms")),
    "overlap": Measured(("pp",), ("dualpipev_ms", "one_f_one_b_ms")),
    "graph_scale": Measured(("microbatches",), ("seconds", "capture_seconds", "peak_bytes")),
}
"""torch's column of fidelity is the same code in both: its ratio shows how far this machine can be trusted."""

Figures = dict[tuple[str, str], float]


def rows_of(printed: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """graph_scale prints one object, in which the row of twice the microbatches is nested."""
    return printed["rows"] if "rows" in printed else [printed, printed["twice"]]


def run(checkout: Path, name: str) -> Iterator[tuple[tuple[str, str], float]]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured = BENCHMARKS[name]
    for row in rows_of(json.loads(done.stdout[done.stdout.index("{") :])):
        for column in measured.columns:
            yield (" ".join(str(row[key]) for key in measured.names), column), row[column]


def compare(name: str, before: Path, rounds: int) -> list[dict[str, Any]]:
    smallest: dict[Path, Figures] = {before: {}, HERE: {}}
    for turn in range(rounds):
        for checkout in (before, HERE) if turn % 2 == 0 else (HERE, before):
            print(f"{name}, round {turn + 1} of {rounds}, {checkout}", file=sys.stderr)
            figures = smallest[checkout]
            for key, value in run(checkout, name):
                figures[key] = min(value, figures.get(key, value))
    return [
        {
            "benchmark": name,
            "row": row,
            "column": column,
            "before": value,
            "after": smallest[HERE][row, column],
            "ratio": f"{smallest[HERE][row, column] / value:.3f}",
        }
        for (row, column), value in smallest[before].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--rounds", type=int, default=3, help="of which the smallest figure counts (default: 3)")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="may be given several times")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    for name in chosen.only or BENCHMARKS:
        show(compare(name, chosen.before.resolve(), chosen.rounds), chosen.json)


if __name__ == "__main__":
    main()
