"""Trains all habits under all schedules and says how each came out."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.habits import HABITS
from tests.habits.habit import Habit
from tests.habits.isolated import Isolated
from tests.habits.page import PAGE, page, with_other_run
from tests.habits.run import CRASH, SCHEDULES, WRONG, Outcome, is_expected, schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="habits whose category or name has it")
    parser.add_argument(
        "--schedule", action="append", choices=list(SCHEDULES), help="this schedule only; may be given again"
    )
    parser.add_argument("--executor", default="threads", choices=["threads", "ray"])
    parser.add_argument("--write", action="store_true", help="write docs/habits.md")
    parser.add_argument("--from", dest="given", metavar="FILE", help="with --write: the --json of another run")
    parser.add_argument(
        "--beside", metavar="FILE", help="say in docs/habits.md how another run came out, by its --json"
    )
    parser.add_argument("--json", metavar="FILE", help="append a line of JSON for each habit and schedule")
    options = parser.parse_args()
    if options.write and (options.only or options.schedule):
        parser.error("the page lists all habits: --write goes without --only and --schedule")
    if options.beside or options.given:
        rows = [json.loads(line) for line in Path(options.beside or options.given).read_text().splitlines()]
        PAGE.write_text(with_other_run(rows) if options.beside else page(rows), encoding="utf-8")
        return 0
    started = time.perf_counter()
    results: dict[str, dict[str, Outcome]] = {}
    rows = []
    runner = Isolated(options.executor)
    try:
        for habit in HABITS.values():
            if options.only not in f"{habit.category}: {habit.name}":
                continue
            chosen = [name for name in schedules(habit) if not options.schedule or name in options.schedule]
            found = results[habit.name] = {schedule: runner.run(habit, schedule) for schedule in chosen}
            show(habit, found)
            new = [row(habit, schedule, outcome, options.executor) for schedule, outcome in found.items()]
            rows += new
            if options.json:
                with open(options.json, "a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in new)
    finally:
        runner.close()
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    return summary(results, time.perf_counter() - started)


def row(habit: Habit, schedule: str, outcome: Outcome, executor: str) -> dict[str, Any]:
    return {
        "habit": habit.name,
        "category": habit.category,
        "schedule": schedule,
        "executor": executor,
        "torch": torch.__version__.partition("+")[0],
        "python": platform.python_version(),
        **vars(outcome),
    }


def show(habit: Habit, outcomes: dict[str, Outcome]) -> None:
    """A line for each outcome: `!` what must not be, `?` what was not expected."""
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    lines: dict[str, list[str]] = {}
    for schedule, outcome in outcomes.items():
        sign = "!" if outcome.kind in (WRONG, CRASH) else " " if is_expected(habit, schedule, outcome) else "?"
        reason = " ".join(part for part in (outcome.place, outcome.reason) if part)
        lines.setdefault(f"{sign} {outcome.cell}|{reason}", []).append(schedule)
    print(f"{habit.category}: {habit.name}  {seconds:.1f} s")
    for line, names in lines.items():
        cell, _, reason = line.partition("|")
        print(f"    {cell:20} {' '.join(names):22} {reason}".rstrip(), flush=True)


def summary(results: dict[str, dict[str, Outcome]], seconds: float) -> int:
    kinds: dict[str, int] = {}
    for outcomes in results.values():
        for found in outcomes.values():
            kinds[found.kind] = kinds.get(found.kind, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{len(results)} habits under {sum(kinds.values())} schedules in {seconds:.0f} s: {counts}", file=sys.stderr)
    return 1 if kinds.get(WRONG, 0) + kinds.get(CRASH, 0) else 0


if __name__ == "__main__":
    sys.exit(main())
