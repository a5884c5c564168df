"""How long the session takes to answer, after the model is traced: a directive, a command, a completion.

Directives are those of an example's script, one statement at a time, as a user would type them: evaluating,
building the graph, estimates, the
comparison with the state before and the text of the answer are all in it. Completions are asked for after every key
of the same statements. After a `tag` the terminal traces the new chunks while the next statement is typed: that one is
typed at ten keys a second, all others without a pause. A call of a library function is one statement and several
directives: the row `directive` has its time divided by their number.

    python -m benchmarks.repl [--json] [--rounds 5] [MODEL.py SCHEDULE.piper ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from piperlang.repl.completion import complete
from piperlang.repl.model import OpenModel, open_model
from piperlang.repl.reading import statements
from piperlang.repl.session import Session
from piperlang.syntax.parse import read

ROOT = Path(__file__).parent.parent / "examples"
CASES = [
    (ROOT / "02_gpt" / "model.py", ROOT / "02_gpt" / f"{name}.piper")
    for name in ("one_f_one_b", "interleaved", "tensor")
]
DIRECTIVE_LIMIT, COMPLETION_LIMIT = 0.3, 0.05
KEY = 0.1
"""Seconds: a fast typist."""
COMMANDS = (
    ":list",
    ":orders",
    ":plan",
    ":memory",
    ":graph",
    ":show [pass=F]",
    ":why [pass=F] before [pass=B]",
    ":diff 0 3",
    ":undo",
    ":redo",
)


@dataclass(frozen=True)
class Measured:
    script: str
    what: str
    count: int
    median_ms: float
    max_ms: float
    max_cpu_ms: float
    """Of this process alone: what the largest would be if nothing else ran."""
    slowest: str


class Clock:
    """What each input took, every time: seconds, and seconds of the processor."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float, str]] = []

    @contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        started, busy = time.perf_counter(), time.process_time()
        yield
        self.times.append((time.perf_counter() - started, time.process_time() - busy, text))

    def measured(self, script: str, what: str) -> Measured:
        seconds, _, slowest = max(self.times)
        cpu = max(busy for _, busy, _ in self.times)
        return Measured(
            script,
            what,
            len(self.times),
            1e3 * median(t for t, _, _ in self.times),
            1e3 * seconds,
            1e3 * cpu,
            " ".join(slowest.split())[:60],
        )


def case(model: OpenModel, script: Path, rounds: int) -> list[Measured]:
    """Everything is traced in the first round, but for the model itself: later ones find it known."""
    clocks = {"statement": Clock(), "directive": Clock(), "command": Clock(), "completion": Clock()}
    for _ in range(rounds):
        session = Session(model)
        complete(session, "x")  # as the terminal does before its first prompt
        for text in statements(read(script)):
            typed = not session.state.settled
            session.cut_ahead()
            for end in range(1, len(text) + 1):
                time.sleep(KEY if typed else 0)
                with clocks["completion"](text[:end]):
                    complete(session, text[:end])
            before = len(session.state.directives)
            with clocks["statement"](text):
                session.execute(text).text()
            seconds, busy, _ = clocks["statement"].times[-1]
            count = len(session.state.directives) - before
            if count:
                clocks["directive"].times.append((seconds / count, busy / count, text))
        for text in COMMANDS:
            with clocks["command"](text):
                session.execute(text).text()
    return [clock.measured(f"{script.parent.name}/{script.stem}", what) for what, clock in clocks.items()]


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
        print("| script | input | number | median ms | max ms | max CPU ms | slowest |\n|---|---|---|---|---|---|---|")
        for row in rows:
            times = " | ".join(f"{ms:.1f}" for ms in (row.median_ms, row.max_ms, row.max_cpu_ms))
            print(f"| {row.script} | {row.what} | {row.count} | {times} | `{row.slowest}` |")
    limits = {"directive": DIRECTIVE_LIMIT, "command": DIRECTIVE_LIMIT, "completion": COMPLETION_LIMIT}
    return int(any(row.max_ms > 1e3 * limits[row.what] for row in rows if row.what in limits))


if __name__ == "__main__":
    sys.exit(main())
