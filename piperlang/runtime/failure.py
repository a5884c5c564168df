"""An instruction that failed: what was raised, and the line of the user's code behind it."""

from __future__ import annotations

import linecache
import re
from traceback import walk_tb
from typing import NamedTuple

from torch import fx

from piperlang.capture.differentiate import Piece
from piperlang.capture.random import module_of
from piperlang.capture.user_code import said
from piperlang.capture.where import line_of, line_of_operator
from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.source import Span

_ASSIGNED = re.compile(r"\s*(\w+)(:.*?)? = ")
_GENERATED = "eval_with_key"
"""Part of the names that torch.fx gives to the code of a graph."""

HELP = (
    "repair this line, or what reaches it; with `--executor inline` the same step runs in one process, where a debugger"
    " can stop there"
)
HELP_WITHOUT_LINE = (
    "run the plain model on the same batch, or the same step with `--executor inline`, in one process, with a debugger"
)
HELP_HERE = "repair this line, or what reaches it; the step runs in this process, where a debugger can stop there"
HELP_HERE_WITHOUT_LINE = (
    "run the plain model on the same batch, or this command with a debugger: `python -m pdb -m piperlang`"
)


class Failure(NamedTuple):
    """Travels from a worker to the driver, so it has no exception: its class may be known on the worker only."""

    position: int
    """Of the instruction, in the device's list; -1 after the last one."""
    said: str
    span: Span | None = None
    """The user's line that raised, where there is one among the frames of the exception."""
    operator: int | None = None
    """Which call of its graph raised, counted from 0."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """Those of a PiperError, which say all there is to say."""


def failure_of(problem: BaseException, position: int = -1) -> Failure:
    if isinstance(problem, PiperError):
        return Failure(position, said(problem), diagnostics=problem.diagnostics)
    return Failure(position, said(problem), line_of(problem), _operator(problem))


def failed(device: str, failure: Failure, piece: Piece | None, notes: list[str], here: bool = False) -> PiperError:
    """The diagnostic. `piece`: the graph that ran, as the driver has it, whose operators know their lines; `here`: it
    ran in this process."""
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
    """The call of a graph that was under way: the generated code assigns every result to the name of its node."""
    for frame, line in walk_tb(problem.__traceback__):
        if _GENERATED in frame.f_code.co_filename and isinstance(module := frame.f_locals.get("self"), fx.GraphModule):
            name = _ASSIGNED.match(linecache.getline(frame.f_code.co_filename, line))
            names = [node.name for node in _calls(module)]
            return names.index(name[1]) if name is not None and name[1] in names else None
    return None


def _call(piece: Piece | None, operator: int | None) -> fx.Node | None:
    """Counted, not named: a graph that has travelled has other names, and has forgotten its lines."""
    if piece is None or operator is None or not isinstance(piece.module, fx.GraphModule):
        return None
    calls = _calls(piece.module)
    return calls[operator] if operator < len(calls) else None


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]
