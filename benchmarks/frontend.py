"""How quickly the front end answers: `python -m benchmarks.frontend [--json]`.

Rows: starting `piperc check` on a 100-line script (best and median of several processes, beside an empty Python for
comparison), parsing and evaluating a 5,000-line script in one process, and loading the parser's tables from the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.modules import Module, from_source
from piperlang.elaborate.outline import Outline
from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.parse import parse

HEAD = '''"""A script of a given length."""
from std.pipeline import interleaved_zero_bubble, loop
param ranks = 4
mesh gpu = pp: ranks, dp: 2
loop(gpu, ranks, 2)
split batch into 8 as mb
replicate [!expert] over gpu.dp with grads=sharded, bucket=25MB
interleaved_zero_bubble(gpu, ranks, 8, chunks=2)
'''
BODY = '''
def f{n}(s, t=2):
    """Steps of part {n}."""
    let warm = min(s + t, {n} % 7 + 1)
    if warm > 3 and t != s:
        return [x * 2 for x in range(warm) if x % 2 == 0]
    return [stage=s, pass=F, mb=next]
let a{n} = f{n}({n} % 5, t=3)
stream [stage={n} % 8, comm=p2p] | [stage=0, pass=B] on "s{n}"
require {n} >= 0, "a size of at least 0"
'''


def script(lines: int) -> str:
    text = HEAD
    n = 0
    while text.count("\n") + BODY.count("\n") <= lines:
        text += BODY.format(n=n)
        n += 1
    return text + "# the end\n" * (lines - text.count("\n"))


def processes(command: list[str], times: int = 9) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def row(what: str, seconds: list[float], limit: float | None = None) -> dict[str, object]:
    return {
        "what": what,
        "best_s": round(seconds[0], 4),
        "median_s": round(statistics.median(seconds), 4),
        "limit_s": limit,
    }


def measure() -> list[dict[str, object]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hundred.piper"
        path.write_text(script(100))
        rows.append(row("python -c pass", processes([sys.executable, "-c", "pass"])))
        rows.append(
            row("piperc check, 100 lines", processes([sys.executable, "-m", "piperlang", "check", str(path)]), 0.4)
        )
        tables = str(Path(folder) / "tables")
        building = timed(lambda: grammar.build(cache_file=tables), 1)
        rows.append(row("parser tables, built", building))
        rows.append(row("parser tables, cached", timed(lambda: grammar.build(cache_file=tables)), 0.02))
    source = Source("long.piper", script(5000))
    rows.append(row("parse, 5,000 lines", timed(lambda: parse(source)), 1.5))
    rows.append(row("evaluate, 5,000 lines", timed(evaluation(source)), 1.0))
    return rows


def evaluation(source: Source) -> Callable[[], None]:
    script = from_source(source).script

    def run() -> None:
        # A fresh module over the same parsed script, so that only evaluation is timed.
        problems = Interpreter(Outline(), Module("long", script)).run()
        assert not problems, problems[0].message

    return run


def timed(call: Callable[[], object], times: int = 5) -> list[float]:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    rows = measure()
    if parser.parse_args().json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    print(f"{'what':28} {'best s':>9} {'median s':>9} {'limit s':>8}")
    for one in rows:
        print(f"{one['what']:28} {one['best_s']:>9} {one['median_s']:>9} {one['limit_s'] or '':>8}")


if __name__ == "__main__":
    main()
