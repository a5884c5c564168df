"""docs/habits.md: every habit, and what each schedule makes of it."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piperlang import __version__
from tests.habits import CATEGORIES, HABITS
from tests.habits.habit import REFUSED, SAME, Habit
from tests.habits.run import CAUGHT, CRASH, SCHEDULES, TITLES, WRONG, Outcome
from tests.support import ROOT

PAGE = ROOT / "docs" / "habits.md"
HEAD = """# Habits of training code

A schedule must never change the mathematics. This page tries that on {total} habits of training code: custom autograd
functions, hooks, weight norms, counters in buffers and in Python, parameter groups, losses that mix samples, dropout,
in-place operations, unusual inputs. Each habit is a small model of four stages with its loss, batches and optimizer;
the code is in [tests/habits](../tests/habits).

Each habit is trained for three steps under four schedules on two devices: data parallelism (`ddp`), ZeRO-1, ZeRO-3,
and a 1F1B pipeline with two microbatches. A habit that mixes the samples of a batch also runs in a pipeline that does
not split the batch. The reference is plain eager PyTorch from the same seed. Compared are the loss and every gradient
of every step, and at the end every weight and buffer of `state_dict()`.

| outcome | meaning |
|---|---|
| same | everything equals plain training, up to rounding |
| refused | the compiler, or the job, stopped with a diagnostic of this code |
| caught | the compiler did not notice; the comparison with eager PyTorch before the first step refused it |
| WRONG | it trained, and something differs: a bug |
| CRASH | it ended with something that is no diagnostic: a bug |

Eager dropout draws its masks from torch's generator. In piperlang masks depend on the seed, the step and the position
in the batch; for habits with dropout the reference draws the same masks.

This page is written by `python -m tests.habits --write{executor}`, from a run with piperlang {piperlang}, torch
{torch} and Python {python} on {workers}. Of {runs} runs, {counts}.
"""
_WORKERS = {"threads": "the inline executor", "ray": "Ray workers over gloo"}


def page(results: Mapping[str, Mapping[str, Outcome]], executor: str) -> str:
    kinds = [outcome.kind for outcomes in results.values() for outcome in outcomes.values()]
    counts = ", ".join(
        f"{kinds.count(kind)} are {_plain(kind)}" for kind in (SAME, REFUSED, CAUGHT, WRONG, CRASH) if kind in kinds
    )
    lines = [
        HEAD.format(
            total=len(results),
            piperlang=__version__,
            torch=torch.__version__.partition("+")[0],
            python=platform.python_version(),
            executor="" if executor == "threads" else f" --executor {executor}",
            workers=_WORKERS[executor],
            runs=len(kinds),
            counts=counts,
        )
    ]
    for category in CATEGORIES:
        columns = [name for name in SCHEDULES if any(name in results.get(habit.name, {}) for habit in category.habits)]
        titles = " | ".join(TITLES[name] for name in columns)
        lines += [f"## {category.title}", "", f"| habit | {titles} | reason |", f"|---{'|---' * len(columns)}|---|"]
        lines += [_row(habit, results[habit.name], columns) for habit in category.habits if habit.name in results]
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


_OTHER = re.compile(r"\nThe same runs on .*?\n(?=\n## )", re.DOTALL)


def with_other_run(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as it is, and how the same habits came out in another run: on workers, with another version of torch."""
    text = _OTHER.sub("", PAGE.read_text(encoding="utf-8"))
    recorded, first = listed(text), rows[0]
    kinds = [row["kind"] for row in rows]
    counts = ", ".join(
        f"{kinds.count(kind)} are {_plain(kind)}" for kind in (SAME, REFUSED, CAUGHT, WRONG, CRASH) if kind in kinds
    )
    where = f"{_WORKERS[first['executor']]}, torch {first['torch']} and Python {first['python']}"
    other = [row for row in rows if (row["kind"] == SAME) != (recorded[row["habit"]][row["schedule"]] == SAME)]
    line = f"\nThe same runs on {where}: of {len(rows)}, {counts}."
    if other:
        line += " The same in one of the two runs only: "
        line += (
            "; ".join(
                f"{name} ({', '.join(r['schedule'] for r in other if r['habit'] == name)})"
                for name in dict.fromkeys(r["habit"] for r in other)
            )
            + "."
        )
    head, section, rest = text.partition("\n\n## ")
    return head + "\n" + line + section + rest


def _row(habit: Habit, outcomes: Mapping[str, Outcome], columns: list[str]) -> str:
    cells = [outcomes[name].cell if name in outcomes else "" for name in columns]
    reason = next((outcome.reason.partition("; ")[0] for outcome in outcomes.values() if outcome.kind != SAME), "")
    return f"| {_escaped(habit.name)} | {' | '.join(cells)} | {_escaped(reason)} |"


def _plain(kind: str) -> str:
    return {SAME: "the same", REFUSED: "refused"}.get(kind, kind)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "\\<").replace("*", "\\*").replace("__", "\\_\\_")


def listed(text: str) -> dict[str, dict[str, str]]:
    """What the page says of each habit under each schedule."""
    names = {_escaped(name): name for name in HABITS}
    found: dict[str, dict[str, str]] = {}
    for section in text.split("\n## ")[1:]:
        rows = [
            [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("|") and not line.startswith("|---")
        ]
        columns = [next(name for name, title in TITLES.items() if title == cell) for cell in rows[0][1:-1]]
        for name, *cells, _ in rows[1:]:
            name = name.replace("\0", "\\|")
            found[names.get(name, name)] = {column: cell for column, cell in zip(columns, cells, strict=True) if cell}
    return found
