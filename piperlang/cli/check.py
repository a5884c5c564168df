"""Check schedule scripts: syntax, names, values, and whether what they say fits together. No model is needed.

What only a model can tell (does every selector match, is every chunk placed) is checked when a model is there.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from piperlang.cli.report import add_parameters, open_script, parameters, report, say
from piperlang.diagnostics import LIMIT, Diagnostic, PiperError
from piperlang.diagnostics.render import as_json, printable
from piperlang.session import Outlined, outline


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scripts", nargs="+", metavar="FILE.piper", help="`-` reads standard input")
    add_parameters(parser)


def run(options: argparse.Namespace) -> int:
    overrides = parameters(options)
    problems: list[Diagnostic] = []
    for name in options.scripts:
        try:
            found = _check(name, overrides)
        except PiperError as problem:
            problems.extend(problem.diagnostics)
            continue
        problems.extend(found.problems or found.outline.finish())
        if not problems and options.format == "full":
            print(f"{printable(name)}: fine ({_says(found)})")
    if options.format == "json":
        print(json.dumps({"diagnostics": [as_json(d.seen_by_user()) for d in problems[:LIMIT]]}, indent=2))
    else:
        report(problems, options.format)
    if problems and all(d.code.startswith("P09") for d in problems):
        return 2
    return 1 if problems else 0


def _check(name: str, overrides: dict[str, str]) -> Outlined:
    source, path = open_script(name)
    return outline(source, path, overrides, say=say)


def _says(found: Outlined) -> str:
    """What the script comes to, in a few words."""
    lanes = found.outline.lanes.lanes
    counts = Counter({
        "device": max((mesh.size for mesh in found.outline.meshes), default=0),
        "chunk": len(found.outline.placements.by_chunk),
        "ordered step": sum(len(lane.steps) * len(lane.devices) for lane in lanes),
    })  # fmt: skip
    parts = [f"{count:,} {what}{'s' if count != 1 else ''}" for what, count in counts.items() if count]
    return ", ".join(parts) or "no directives"
