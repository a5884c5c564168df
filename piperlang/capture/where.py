"""The line of the user's own code behind an exception, or behind an operator of a traced graph."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterable
from inspect import unwrap
from pathlib import Path
from traceback import extract_tb
from typing import Any

from torch import fx

from piperlang.source import Source, Span

_OTHERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def line_of(problem: BaseException) -> Span | None:
    """The innermost line that raised it and is neither ours nor a library's."""
    return _last((frame.filename, frame.lineno or 1) for frame in extract_tb(problem.__traceback__))


def line_of_operator(node: fx.Node) -> Span | None:
    """The innermost line that called the operator when it was traced."""
    return _last((name, int(line)) for name, line in _FRAME.findall(node.meta.get("stack_trace") or ""))


def line_of_function(function: Callable[..., Any]) -> Span | None:
    """Where a function of the user's is defined."""
    code = getattr(unwrap(function), "__code__", None)
    return _last([(code.co_filename, code.co_firstlineno)]) if code is not None else None


def line_at(source: Source, line: int) -> Span:
    """A line without what it is indented by."""
    line = min(max(line, 1), len(source.line_starts))
    text, start = source.line(line), source.line_starts[line - 1]
    first = start + len(text) - len(text.lstrip())
    return source.span(first, max(first + 1, start + len(text)))


def _last(frames: Iterable[tuple[str, int]]) -> Span | None:
    own = [(name, line) for name, line in frames if "site-packages" not in name and not name.startswith(_OTHERS)]
    for name, line in reversed(own):
        try:
            return line_at(Source(name, Path(name).read_text(encoding="utf-8")), line)
        except (OSError, UnicodeDecodeError):
            continue
    return None
