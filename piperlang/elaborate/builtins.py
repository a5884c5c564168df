"""The built-in functions, each a plain Python function of (evaluator, arguments, call)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from piperlang.core.mesh import Axis, Mesh, Submesh
from piperlang.core.selector import Selector
from piperlang.diagnostics import error
from piperlang.elaborate.arithmetic import binary, bounded, check_length, compare, number
from piperlang.elaborate.values import Value, kind
from piperlang.source import Span
from piperlang.syntax.tree import CallOf, Size

if TYPE_CHECKING:
    from piperlang.elaborate.evaluate import Evaluator

Arguments = list[Value]


def _arity(name: str, arguments: Arguments, least: int, most: int, call: CallOf) -> None:
    if not least <= len(arguments) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise error(
            "P0205",
            f"`{name}` takes {wanted} argument{'s' if wanted != '1' else ''}",
            call.span,
            f"{len(arguments)} given",
        )


def _sequence(name: str, value: Value, span: Span) -> Sequence[Value]:
    if isinstance(value, tuple | range):
        return value
    raise error("P0204", f"`{name}` needs a list, not {kind(value)}", span)


def _whole_numbers(name: str, arguments: Arguments, call: CallOf) -> list[int]:
    numbers: list[int] = []
    for value, argument in zip(arguments, call.arguments, strict=True):
        if not isinstance(value, int) or isinstance(value, bool):
            raise error("P0204", f"`{name}` needs integers, not {kind(value)}", argument.span, kind(value))
        numbers.append(value)
    return numbers


def _range(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("range", arguments, 1, 3, call)
    numbers = _whole_numbers("range", arguments, call)
    if len(numbers) == 3 and numbers[2] == 0:
        raise error("P0212", "the step of a range cannot be 0", call.arguments[2].span)
    result = range(*numbers)
    if numbers and max(abs(n) for n in numbers) > 2**62:
        raise error("P0208", "this range is too long", call.span)
    check_length(len(result), call.span)
    return result


def _len(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("len", arguments, 1, 1, call)
    value = arguments[0]
    if isinstance(value, Mesh | Axis):
        return value.size
    if isinstance(value, Submesh):
        return value.size()
    if isinstance(value, tuple | range | str):
        return len(value)
    raise error("P0204", f"{kind(value)} has no length", call.arguments[0].span)


def _extreme(op: str) -> Callable[[Evaluator, Arguments, CallOf], Value]:
    name = "min" if op == "<" else "max"

    def builtin(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
        items = arguments if len(arguments) != 1 else list(_sequence(name, arguments[0], call.span))
        if not items:
            raise error("P0205", f"`{name}` of an empty sequence", call.span, "pass at least one value")
        self.charge(len(items), call.span)
        best = items[0]
        for item in items[1:]:
            if compare(op, item, best, call.span):
                best = item
        if len(items) == 1:
            compare(op, best, best, call.span)
        return best

    return builtin


def _sum(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("sum", arguments, 1, 1, call)
    items = _sequence("sum", arguments[0], call.span)
    self.charge(len(items), call.span)
    total: Value = Size(0) if items and isinstance(items[0], Size) else 0
    for item in items:
        total = binary("+", total, item, call.span)
    return total


def _abs(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("abs", arguments, 1, 1, call)
    value: Any = arguments[0]
    if not number(value):
        raise error("P0204", f"`abs` needs a number, not {kind(value)}", call.span)
    return bounded(abs(value), call.span)


def _enumerate(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("enumerate", arguments, 1, 1, call)
    items = _sequence("enumerate", arguments[0], call.span)
    self.charge(len(items), call.span)
    return tuple((i, item) for i, item in enumerate(items))


def _zip(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    lists = [_sequence("zip", value, call.span) for value in arguments]
    lengths = {len(items) for items in lists}
    if len(lengths) > 1:
        raise error(
            "P0205",
            "`zip` needs lists of equal length",
            call.span,
            f"lengths {', '.join(map(str, sorted(lengths)))}",
            help="cut the longer one: xs[0:n]",
        )
    self.charge(sum(map(len, lists)), call.span)
    return tuple(tuple(items) for items in zip(*lists, strict=True))


def _reversed(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("reversed", arguments, 1, 1, call)
    items = _sequence("reversed", arguments[0], call.span)
    self.charge(len(items), call.span)
    return tuple(reversed(items))


def _sorted(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("sorted", arguments, 1, 1, call)
    items = _sequence("sorted", arguments[0], call.span)
    self.charge(len(items) * 4, call.span)
    for left, right in pairwise(items):
        compare("<", left, right, call.span)
    return tuple(sorted(items, key=lambda item: item.bytes if isinstance(item, Size) else item))  # type: ignore[arg-type, return-value]


def _count(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("count", arguments, 1, 1, call)
    if not isinstance(arguments[0], Selector):
        raise error("P0204", f"`count` needs a selector, not {kind(arguments[0])}", call.span, help="count([stage=*])")
    return self.graph.count(arguments[0])


def _tags(self: Evaluator, arguments: Arguments, call: CallOf) -> Value:
    _arity("tags", arguments, 1, 1, call)
    if not isinstance(arguments[0], str):
        raise error(
            "P0204",
            f"`tags` needs the name of a tag in quotes, not {kind(arguments[0])}",
            call.span,
            help='tags("stage")',
        )
    found = tuple(sorted(self.graph.tags(arguments[0]), key=lambda v: (isinstance(v, str), v)))
    self.charge(len(found), call.span)
    return found


BUILTINS: dict[str, Callable[[Evaluator, Arguments, CallOf], Value]] = {
    "range": _range,
    "len": _len,
    "min": _extreme("<"),
    "max": _extreme(">"),
    "sum": _sum,
    "abs": _abs,
    "enumerate": _enumerate,
    "zip": _zip,
    "reversed": _reversed,
    "sorted": _sorted,
    "count": _count,
    "tags": _tags,
}
