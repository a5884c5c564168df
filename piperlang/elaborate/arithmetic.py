"""Operators on values. Integers have 64 bits and lists a length limit, so that no expression can exhaust memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import isfinite
from typing import Any

from piperlang.diagnostics import error
from piperlang.elaborate.values import Value, kind
from piperlang.source import Span
from piperlang.syntax.tree import Size

MAX_INTEGER = 2**63
MAX_ITEMS = 1_000_000
"""Longest list, range or string that a script can create."""

_NUMERIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "/": operator.truediv,
    "%": operator.mod,
}
_ORDERING: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def binary(op: str, left: Value, right: Value, span: Span) -> Value:
    if number(left) and number(right):
        return bounded(_divide(op, left, right, span), span)
    if op == "+" and isinstance(left, str) and isinstance(right, str):
        return limited(left + right, span)
    if op == "+" and isinstance(left, tuple | range) and isinstance(right, tuple | range):
        check_length(len(left) + len(right), span)
        return (*left, *right)
    if op == "*" and isinstance(left, tuple | str) and isinstance(right, int) and not isinstance(right, bool):
        check_length(len(left) * right, span)
        return left * right
    if isinstance(left, Size) or isinstance(right, Size):
        return _sized(op, left, right, span)
    raise _cannot(op, left, right, span)


def _divide(op: str, left: Any, right: Any, span: Span) -> Any:
    try:
        return _NUMERIC[op](left, right)
    except ZeroDivisionError:
        raise error(
            "P0212",
            "division by zero",
            span,
            "the divisor is 0",
            help="guard the division with `if`, or `require` a value above 0",
        ) from None
    except OverflowError:
        raise error("P0211", "this number is too large", span) from None


def _sized(op: str, left: Value, right: Value, span: Span) -> Value:
    """Sizes add and compare with sizes, scale by numbers, and divide into numbers; `25MB + 1` is ambiguous."""
    if isinstance(left, Size) and isinstance(right, Size):
        if op in ("+", "-"):
            return Size(int(bounded(_NUMERIC[op](left.bytes, right.bytes), span)))
        if op in ("//", "/", "%"):
            result = _divide(op, left.bytes, right.bytes, span)
            return Size(result) if op == "%" else bounded(result, span)
    elif isinstance(left, Size) and number(right) and op in ("*", "//", "/"):
        return _whole(_divide(op, left.bytes, right, span), span)
    elif isinstance(right, Size) and number(left) and op == "*":
        return _whole(_divide(op, left, right.bytes, span), span)
    raise _cannot(op, left, right, span)


def _whole(count: float, span: Span) -> Size:
    if abs(count) >= MAX_INTEGER:
        raise error("P0211", "this size is too large", span, "sizes are limited to 64 bits")
    return Size(int(count))


def _cannot(op: str, left: Value, right: Value, span: Span) -> Exception:
    return error(
        "P0204",
        f"`{op}` is not supported between {kind(left)} and {kind(right)}",
        span,
        f"{kind(left)} {op} {kind(right)}",
    )


def power(base: Value, exponent: Value, span: Span) -> Value:
    if not (number(base) and number(exponent)):
        raise _cannot("**", base, exponent, span)
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 64:
        raise error("P0211", "this number is too large", span, "integers are limited to 64 bits")
    try:
        result: Any = base**exponent  # type: ignore[operator]
    except ZeroDivisionError:
        raise error("P0212", "zero cannot be raised to a negative power", span) from None
    except OverflowError:
        raise error("P0211", "this number is too large", span) from None
    if isinstance(result, complex):
        raise error("P0212", "a negative number cannot be raised to a fractional power", span)
    return bounded(result, span)


def bounded(value: Any, span: Span) -> int | float:
    if isinstance(value, float) and not isfinite(value):
        raise error("P0211", "this number is too large", span, "the result is not finite")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise error("P0211", "this number is too large", span, "integers are limited to 64 bits")
    number: int | float = value
    return number


def limited(text: str, span: Span) -> str:
    check_length(len(text), span)
    return text


def check_length(length: int, span: Span) -> None:
    if length > MAX_ITEMS:
        raise error(
            "P0208",
            f"this value would have {length:,} items",
            span,
            f"the limit is {MAX_ITEMS:,}",
            help="a schedule needs at most thousands; check the sizes",
        )


def compare(op: str, left: Value, right: Value, span: Span) -> bool:
    if op in ("==", "!="):
        same = left == right and isinstance(left, bool) == isinstance(right, bool)
        return same == (op == "==")
    if op in ("in", "not in"):
        return _contained(left, right, span) == (op == "in")
    if isinstance(left, Size) and isinstance(right, Size):
        return _ORDERING[op](left.bytes, right.bytes)
    if (number(left) and number(right)) or (isinstance(left, str) and isinstance(right, str)):
        return _ORDERING[op](left, right)
    raise error("P0204", f"cannot compare {kind(left)} with {kind(right)}", span, f"{kind(left)} {op} {kind(right)}")


def _contained(item: Value, container: Value, span: Span) -> bool:
    if isinstance(container, str) and isinstance(item, str):
        return item in container
    if isinstance(container, tuple | range):
        return item in container
    raise error("P0204", f"`in` needs a list on the right, not {kind(container)}", span)
