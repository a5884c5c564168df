"""Compile and check the plan of a model under a schedule, print a summary, and save it to run later: piperc run
step.plan."""

from __future__ import annotations

import argparse
import json

from piperlang.cli.model import add_on_nan, add_precision, captured, doing, load_both, recorded_plan, scheduled
from piperlang.cli.report import add_parameters, check_output, report, write_output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.py")
    parser.add_argument("script", metavar="SCHEDULE.piper")
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan to a file")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_parameters(parser)
    add_precision(parser)
    add_on_nan(parser)


def run(options: argparse.Namespace) -> int:
    output = check_output(options.output, "-o", options) if options.output is not None else None
    file = load_both(options.model, options.script, options.precision)
    found = scheduled(captured(file), options)
    if found.problems:
        report(found.problems, options.format)
        return 1
    graph = found.graph()
    plan = recorded_plan(graph, options, file.max_norm)
    from piperlang.plan.estimate.summary import as_json, summary

    print(json.dumps(as_json(plan, graph)) if options.json else summary(plan, graph))
    if output is not None:
        from piperlang.plan.files import dump

        with doing(f"writing {output}"):
            write_output(output, dump(plan), "-o")
    return 0
