"""Trains all library models under all schedules and says how each came out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.habits.__main__ import row, show, summary
from tests.habits.run import clean
from tests.models import text, training, vision  # noqa: F401
from tests.models.model import MODELS
from tests.models.page import PAGE, page
from tests.models.run import ModelRunner


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name has it")
    parser.add_argument("--executor", default="threads", choices=["threads", "ray"])
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--from", dest="given", metavar="FILE", help="with --write: the --json of another run")
    parser.add_argument("--json", metavar="FILE", help="append a line of JSON for each model and schedule")
    options = parser.parse_args()
    if options.given:
        PAGE.write_text(page([json.loads(line) for line in Path(options.given).read_text().splitlines()]))
        return 0
    started, results = time.perf_counter(), {}
    rows: list[dict[str, Any]] = []
    runner = ModelRunner(options.executor)
    try:
        for name, model in MODELS.items():
            if options.only not in name:
                continue
            with clean():
                results[name] = runner.outcomes(model)
            show(model.habit, results[name])
            rows += [row(model.habit, schedule, found, options.executor) for schedule, found in results[name].items()]
    finally:
        runner.close()
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(one) + "\n" for one in rows)
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    return summary(results, time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
