"""A failed instruction: its exception, and the line of the user's code behind it."""

from __future__ import annotations

import linecache
import re
from traceback import walk_tb
from typing import NamedTuple

from torch import fx

from piperlang.capture.autodiff.pass_graph import PassGraph
from piperlang.capture.trace.random import module_of
from piperlang.capture.user.user_code import said
from piperlang.capture.user.where import line_of, line_of_operator
from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.source import Span

_ASSIGNED = re.compile(r"\s*(\w+)(:.*?)? = ")
_GENERATED = "eval_with_key"
"""Part of the file names that torch.fx gives to generated code."""

HELP = (
    "fix this line, or the values that reach it; to use a debugger, run the same step in one process with"
    " `--executor inline`"
)
HELP_WITHOUT_LINE = "debug the plain model on the same batch, or the same step in one process with `--executor inline`"
HELP_HERE = "fix this line, or what reaches it; the step runs in this process, where a debugger can stop there"
HELP_HERE_WITHOUT_LINE = (
    "debug the plain model on the same batch, or this command with a debugger: `python -m pdb -m piperlang`"
)


class Failure(NamedTuple):
    """Sent from a worker to the driver. It contains no exception object, because its class may exist only on the
    worker."""

    position: int
    """The index of the instruction in the device's list; -1 after the last one."""
    said: str
    span: Span | None = None
    """The line of the user's code that raised, if the traceback contains one."""
    operator: int | None = None
    """The index of the call in its graph that raised, counted from 0."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """The diagnostics, if the exception was a PiperError."""


def failure_of(problem: BaseException, position: int = -1) -> Failure:
    if isinstance(problem, PiperError):
        return Failure(position, said(problem), diagnostics=problem.diagnostics)
    return Failure(position, said(problem), line_of(problem), _operator(problem))


def failed(device: str, failure: Failure, piece: PassGraph | None, notes: list[str], here: bool = False) -> PiperError:
    """The diagnostic. `piece`: the driver's copy of the graph that ran, whose operators still have their source lines;
    `here`: it ran in this process."""
    if failure.diagnostics:
        return PiperError(*failure.diagnostics)
    node = _call(piece, failure.operator)
    span = failure.span or (line_of_operator(node) if node is not None else None)
    module = [module_of(node)] if node is not None else []
    with_line, without = (HELP_HERE, HELP_HERE_WITHOUT_LINE) if here else (HELP, HELP_WITHOUT_LINE)
    return error(
        "P0604",
        f"{device} failed",
        span,
        "raised here" if span else "",
        notes=[failure.said, *module, *notes][:9],
        help=with_line if span else without,
    )


def _operator(problem: BaseException) -> int | None:
    """The index of the graph call that was running. The generated code assigns every result to the name of its node."""
    for frame, line in walk_tb(problem.__traceback__):
        if _GENERATED in frame.f_code.co_filename and isinstance(module := frame.f_locals.get("self"), fx.GraphModule):
            name = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, line))
            names = [node.name for node in _calls(module)]
            return names.index(name[1]) if name is not None and name[1] in names else None
    return None


def _call(piece: PassGraph | None, operator: int | None) -> fx.Node | None:
    """The call with this index. Names cannot be used: a pickled graph has different names, and no source lines."""
    if piece is None or operator is None or not isinstance(piece.module, fx.GraphModule):
        return None
    calls = _calls(piece.module)
    return calls[operator] if operator < len(calls) else None


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]
