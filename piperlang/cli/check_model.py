"""piperc check with a model: compile, verify and, with --numerics, compare numerically."""

from __future__ import annotations

import argparse
import json
from typing import Any

from piperlang.cli import report
from piperlang.cli.model import captured, doing, load_both, scheduled
from piperlang.diagnostics import LIMIT, Diagnostic, PiperError, error
from piperlang.diagnostics.render import FOR_PROGRAMS, as_json
from piperlang.ir.graph import Graph
from piperlang.ir.layout import devices_of
from piperlang.ir.sort import topological
from piperlang.progress.lines import counted


def run(options: argparse.Namespace) -> int:
    model, *scripts = options.scripts
    if not scripts:
        raise error("P0902", "SCHEDULE.piper is missing", help="piperc check MODEL.py SCHEDULE.piper")
    if len(scripts) != 1:
        raise error(
            "P0902",
            f"expected one script with a model, not {len(scripts)}",
            help="piperc check MODEL.py SCHEDULE.piper",
        )
    options.script = scripts[0]
    result: dict[str, Any] = {"ok": False}
    problems: tuple[Diagnostic, ...] = ()
    try:
        problems = _check(model, options, result)
    except PiperError as problem:
        problems = problem.diagnostics
        result["ok"] = False
    if options.format == "json":
        print(json.dumps({**result, "diagnostics": [as_json(d.seen_by_user()) for d in problems[:LIMIT]]}))
    else:
        report.result(problems, options.format)
        if not problems and options.format not in FOR_PROGRAMS:
            _tell(model, options, result)
    return report.exit_code(problems) or (0 if result["ok"] else 1)


def _check(model: str, options: argparse.Namespace, result: dict[str, Any]) -> tuple[Diagnostic, ...]:
    file = load_both(model, options.script, options.precision)
    if options.numerics:
        from piperlang.runtime.reference.numerics import capture_doubled

        with doing(f"tracing {model}"):
            program = capture_doubled(file, options.seed)
    else:
        program = captured(file, options.seed)
    found = scheduled(program, options)
    if found.problems:
        return found.problems
    with doing("building the graph"):
        graph = found.graph()
        topological(graph)
    result |= {
        "ok": True,
        "nodes": len(graph.nodes),
        "devices": len(_devices(graph)),
        "chunks": len(graph.model.chunks),
    }
    if options.numerics:
        from piperlang.capture.program import CutProgram
        from piperlang.runtime.reference.numerics import compare

        cut = found.captured
        assert isinstance(cut, CutProgram)
        with doing("comparing two training steps"):
            compared = compare(file, program, graph, cut, options.seed)
        result |= {
            "ok": compared.ok,
            "loss_reference": compared.loss_reference,
            "loss": compared.loss,
            "max_grad_rel_err": compared.max_grad_rel_err,
            "max_weight_rel_err": compared.max_weight_rel_err,
            "worst": compared.worst,
            "judged_by_gradient": list(compared.judged_by_gradient),
        }
    return ()


def _devices(graph: Graph) -> set[int]:
    return {device for template in graph.templates for device in devices_of(template.where)}


def _tell(model: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    size = ", ".join(counted(result[f"{what}s"], what) for what in ("device", "chunk", "node"))
    if "loss" not in result:
        print(f"{options.script}: ok with {model} ({size})")
        return
    verdict = "matches plain PyTorch" if result["ok"] else "DIFFERENT"
    print(f"{options.script}: {verdict} ({size})")
    print(f"  loss after two steps  {result['loss']:.9g}   plain PyTorch {result['loss_reference']:.9g}")
    print(
        f"  largest difference    gradients {result['max_grad_rel_err']:.1e}, weights"
        f" {result['max_weight_rel_err']:.1e} (relative{', ' + result['worst'] if result['worst'] else ''})"
    )
    noisy = result["judged_by_gradient"]
    if noisy:
        print(
            f"  compared by gradient  {', '.join(noisy[:3])}{f' and {len(noisy) - 3} more' if len(noisy) > 3 else ''}:"
            " elements whose gradient is rounding noise"
        )
