"""Binds the arguments of a call to the function's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piperlang.diagnostics import Label, did_you_mean, error
from piperlang.elaborate.values import Function, Value
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.elaborate.evaluate import Evaluator


def bind_arguments(self: Evaluator, function: Function, call: tree.CallOf) -> dict[str, Value]:
    """Values by parameter name; defaults are evaluated in the function's own module."""
    if len(call.arguments) == len(function.define.parameters) and all(a.name is None for a in call.arguments):
        # the common case: positional arguments only
        plain = {
            p.name.text: self.evaluate(a.value) for p, a in zip(function.define.parameters, call.arguments, strict=True)
        }
        if None not in plain.values():
            return plain
    parameters = {p.name.text: p for p in function.define.parameters}
    order = list(parameters)
    bound: dict[str, Value] = {}
    defined = Label(function.define.name.span, f"defined here with {_signature(function)}")
    for position, argument in enumerate(call.arguments):
        if argument.name is not None:
            name = argument.name.text
            if name not in parameters:
                raise error(
                    "P0205",
                    f"`{function.name}` has no parameter `{name}`",
                    argument.name.span,
                    also=[defined],
                    help=did_you_mean(name, parameters),
                )
        elif any(earlier.name is not None for earlier in call.arguments[:position]):
            raise error(
                "P0205",
                "positional argument after a named argument",
                argument.span,
                help="put it before the named arguments",
            )
        elif position >= len(order):
            raise error(
                "P0205",
                f"`{function.name}` takes at most {len(order)} arguments",
                argument.span,
                f"argument {position + 1}",
                also=[defined],
            )
        else:
            name = order[position]
        if name in bound:
            raise error("P0205", f"`{name}` is given twice", argument.span, also=[defined])
        value = self.evaluate(argument.value)
        if value is None:
            raise error("P0204", "this call has no value", argument.value.span, "the function does not return a value")
        bound[name] = value
    missing = [name for name, p in parameters.items() if name not in bound and p.default is None]
    if missing:
        listing = ", ".join(f"`{name}`" for name in missing)
        raise error("P0205", f"`{function.name}` is missing {listing}", call.span, also=[defined])
    _defaults(self, function, bound)
    return bound


def _defaults(self: Evaluator, function: Function, bound: dict[str, Value]) -> None:
    saved = self.module, self.locals
    self.module, self.locals = function.module, None
    try:
        for p in function.define.parameters:
            if p.name.text not in bound and p.default is not None:
                bound[p.name.text] = self.evaluate(p.default)
    finally:
        self.module, self.locals = saved


def _signature(function: Function) -> str:
    parts = [p.span.text for p in function.define.parameters]
    return f"({', '.join(parts)})"
