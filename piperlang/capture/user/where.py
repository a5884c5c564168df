"""The line of the user's code behind an exception, or behind an operator of a traced graph."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Iterable
from functools import lru_cache
from inspect import unwrap
from pathlib import Path
from traceback import extract_stack, extract_tb
from typing import Any

from torch import fx

from piperlang.resources import PACKAGE
from piperlang.source import Source, Span

_OTHERS = (sysconfig.get_path("stdlib") + os.sep, str(PACKAGE) + os.sep, "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TEXTS: dict[str, Source] = {}
_BOUND: dict[int, tuple[object, Span]] = {}


def remember(source: Source) -> None:
    """Quote lines of this file from here: on another machine the file may not exist, and on this one it may change."""
    _TEXTS[source.name] = source


def bind(function: object, span: Span) -> None:
    """Record the location of a callable that has no code object: a class, a module, a `functools.partial`."""
    _BOUND[id(function)] = function, span


def line_of(problem: BaseException) -> Span | None:
    """The innermost line of the user's code in the traceback of an exception; if there is none, that of its cause."""
    frames = [(frame.filename, frame.lineno or 1) for frame in extract_tb(problem.__traceback__)]
    if "Original Traceback" in (text := text_of(problem)):  # raised in another process; the text contains its traceback
        frames += [(name, int(line)) for name, line in _FRAME.findall(text)]
    cause = problem.__cause__
    return _last(frames) or (line_of(cause) if cause is not None else None)


def text_of(problem: BaseException) -> str:
    """What an exception says; nothing if its own `__str__` fails."""
    try:
        return str(problem)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


def here() -> Span | None:
    """The line of the user's code that is running: the innermost frame outside of piperlang and libraries."""
    return _last((frame.filename, frame.lineno or 1) for frame in extract_stack())


def line_of_operator(node: fx.Node) -> Span | None:
    """The innermost line of the user's code that called the operator when it was traced."""
    return line_in(node.meta.get("stack_trace") or "")


def line_in(trace: str) -> Span | None:
    """The innermost line of the user's code in the text of a traceback."""
    return _last((name, int(line)) for name, line in _FRAME.findall(trace))


def line_of_function(function: Callable[..., Any]) -> Span | None:
    """The line where a user function is defined. What has no code of its own is shown where the model file binds it,
    and a class otherwise where an instance is made."""
    inner = unwrap(function)
    if not hasattr(inner, "__code__") and id(inner) in _BOUND:
        return _BOUND[id(inner)][1]
    code = getattr(inner.__init__ if isinstance(inner, type) else inner, "__code__", None)  # type: ignore[misc]
    return _last([(code.co_filename, code.co_firstlineno)]) if code is not None else None


def is_users(function: Callable[..., Any]) -> bool:
    """Whether a function is defined in the user's own code."""
    code = getattr(unwrap(function), "__code__", None)
    return code is not None and is_users_file(code.co_filename)


def line_at(source: Source, line: int) -> Span:
    """A line without its indentation."""
    line = min(max(line, 1), len(source.line_starts))
    text, start = source.line(line), source.line_starts[line - 1]
    first = start + len(text) - len(text.lstrip())
    return source.span(first, max(first + 1, start + len(text)))


def _last(frames: Iterable[tuple[str, int]]) -> Span | None:
    for name, line in reversed([frame for frame in frames if is_users_file(frame[0])]):
        if name in _TEXTS:
            return line_at(_TEXTS[name], line)
        try:
            return line_at(Source(name, Path(name).read_text(encoding="utf-8")), line)
        except (OSError, UnicodeDecodeError):
            continue
    return None


@lru_cache(maxsize=4096)  # asked for every function that is looked at before a step
def is_users_file(name: str) -> bool:
    return "site-packages" not in name and "dist-packages" not in name and not name.startswith(_OTHERS)
