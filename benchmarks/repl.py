"""How long the session takes to answer, after the model is traced: a directive, a command, a completion.

Directives are those of an example's script, one statement at a time, as a user would type them: evaluating, building the graph, estimates, the
comparison with the state before and the text of the answer are all in it. Completions are asked for after every key of the same statements.

    python -m benchmarks.repl [--json] [--rounds 5] [MODEL.py SCHEDULE.piper ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from piperlang.repl.completion import complete
from piperlang.repl.model import OpenModel, open_model
from piperlang.repl.reading import statements
from piperlang.repl.session import Session
from piperlang.syntax.parse import read

ROOT = Path(__file__).parent.parent / "examples"
CASES = [(ROOT / "02_gpt" / "model.py", ROOT / "02_gpt" / f"{name}.piper") for name in ("one_f_one_b", "interleaved", "tensor")]
DIRECTIVE_LIMIT, COMPLETION_LIMIT = 0.3, 0.05
COMMANDS = (":list", ":orders", ":plan", ":memory", ":graph", ":show [pass=F]", ":why [pass=F] before [pass=B]", ":diff 0 3", ":undo", ":redo")


@dataclass(frozen=True)
class Measured:
    script: str
    what: str
    count: int
    median_ms: float
    max_ms: float
    slowest: str


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measured(script: str, what: str, times: dict[str, list[float]]) -> Measured:
    """Of every input the median over the rounds; then the median and the largest over inputs."""
    each = {text: median(found) for text, found in times.items()}
    slowest = max(each, key=lambda text: each[text])
    return Measured(script, what, len(each), 1e3 * median(each.values()), 1e3 * each[slowest], " ".join(slowest.split())[:60])


def case(model: OpenModel, script: Path, rounds: int) -> list[Measured]:
    directives: dict[str, list[float]] = {}
    commands: dict[str, list[float]] = {}
    completions: dict[str, list[float]] = {}
    for _ in range(rounds):
        session = Session(model)
        for text in statements(read(script)):
            for end in range(1, len(text) + 1):
                typed = text[:end]
                completions.setdefault(typed, []).append(timed(lambda typed=typed: complete(session, typed)))  # type: ignore[misc]
            directives.setdefault(text, []).append(timed(lambda text=text: session.execute(text).text()))  # type: ignore[misc]
        for text in COMMANDS:
            commands.setdefault(text, []).append(timed(lambda text=text: session.execute(text).text()))  # type: ignore[misc]
    name = f"{script.parent.name}/{script.stem}"
    return [measured(name, what, times) for what, times in (("statement", directives), ("command", commands), ("completion", completions))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = list(zip(options.files[::2], options.files[1::2], strict=True)) or CASES
    models = {path: open_model(path) for path in dict.fromkeys(model for model, _ in cases)}
    rows = [row for model, script in cases for row in case(models[model], script, options.rounds)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print("| script | input | number | median ms | max ms | slowest |\n|---|---|---|---|---|---|")
        for row in rows:
            print(f"| {row.script} | {row.what} | {row.count} | {row.median_ms:.1f} | {row.max_ms:.1f} | `{row.slowest}` |")
    limits = {"statement": DIRECTIVE_LIMIT, "command": DIRECTIVE_LIMIT, "completion": COMPLETION_LIMIT}
    return int(any(row.max_ms > 1e3 * limits[row.what] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
