"""Parameters of a script: their defaults, and the overrides of a command line."""

from __future__ import annotations

from collections.abc import Mapping

from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.values import Value, brief, kind
from piperlang.source import Source
from piperlang.syntax import tree
from piperlang.syntax.parse import parse


def parameter(node: tree.Param, default: Value, overrides: Mapping[str, str]) -> Value:
    """The parameter's value: its default, or the override read as a literal of the default's type."""
    if not isinstance(default, bool | int | float | str | tree.Size):
        raise error(
            "P0204",
            f"a parameter must be a number, string, boolean or size, not {kind(default)}",
            node.value.span,
            kind(default),
            help="use `let` for computed values",
        )
    name = node.name.text
    if name not in overrides:
        return default
    text = overrides[name]
    if isinstance(default, str):
        return text
    value = _literal(text)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise error(
            "P0903",
            f"`{text}` is not {kind(default)}",
            node.span,
            f"the default of `{name}` is {kind(default)}",
            help=f"for example, `-p {name}={brief(default)}`",
        )
    return value


def _literal(text: str) -> Value:
    """`4`, `-1.5`, `25MB`, `true`; None if it is not a literal."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        script, problems = parse(Source("-p", f"param x = {text}"))
    except PiperError:
        return None
    if problems or len(script.statements) != 1 or not isinstance(script.statements[0], tree.Param):
        return None
    value = script.statements[0].value
    if isinstance(value, tree.Unary) and isinstance(value.operand, tree.Literal) and value.operator == "-":
        inner = value.operand.value
        return -inner if isinstance(inner, int | float) else None
    return value.value if isinstance(value, tree.Literal) else None
