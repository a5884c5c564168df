"""Parameters, meshes, module paths and options: from syntax to checked values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from piperlang.diagnostics import Label, PiperError, did_you_mean, error, listed
from piperlang.elaborate.directive import ModulePath, Option
from piperlang.elaborate.values import Mesh, Value, brief, kind
from piperlang.source import Source
from piperlang.syntax import tree
from piperlang.syntax.parse import parse
from piperlang.syntax.words import OPTION_WORDS, OPTIONS

if TYPE_CHECKING:
    from piperlang.elaborate.evaluate import Evaluator

MAX_DEVICES = 65_536


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


def declare_mesh(self: Evaluator, node: tree.MeshOf) -> Mesh:
    axes: dict[str, int] = {}
    for axis in node.axes:
        name = axis.name.text
        if name in axes:
            raise error(
                "P0408", f"duplicate axis `{name}` in one mesh", axis.name.span, help="give each axis its own name"
            )
        size = self.integer(axis.size)
        if size < 1:
            raise error("P0408", f"axis `{name}` has size {size}", axis.size.span, "the size must be at least 1")
        axes[name] = size
    mesh = Mesh(node.name.text, tuple(axes.items()), node.span)
    if mesh.size > MAX_DEVICES:
        raise error("P0408", f"mesh `{mesh.name}` has {mesh.size:,} devices", node.span, f"at most {MAX_DEVICES:,}")
    return mesh


def module_path(self: Evaluator, node: tree.Path) -> ModulePath:
    parts: list[str | int | tuple[int | None, int | None] | None] = []
    for part in node.parts:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, tree.Everything):
            parts.append(None)
        elif isinstance(part, tree.Range):
            low, high = (self.integer(end) if end is not None else None for end in (part.low, part.high))
            parts.append((low, high))
        else:
            parts.append(self.integer(part))
    return ModulePath(tuple(parts), node.span)


def options(self: Evaluator, directive: str, settings: tuple[tree.Setting, ...]) -> tuple[Option, ...]:
    seen: dict[str, Option] = {}
    for setting in settings:
        name = setting.name.text
        legal = OPTIONS[directive]
        if name not in legal:
            label = f"its options are {listed(legal, 'and')}" if legal else "it takes no options"
            raise error(
                "P0405",
                f"`{directive}` has no option `{name}`",
                setting.name.span,
                label,
                help=did_you_mean(name, legal),
            )
        if name in seen:
            raise error("P0405", f"`{name}` is given twice", setting.span, also=[Label(seen[name].span, "first here")])
        seen[name] = Option(name, _option(self, name, setting), setting.span)
    return tuple(seen.values())


def _option(self: Evaluator, name: str, setting: tree.Setting) -> Value:
    words = OPTION_WORDS.get(name)
    node = setting.value
    if words is not None:
        word = node.text if isinstance(node, tree.Name) and node.text in words else self.evaluate(node)
        if word not in words:
            note = "; a sum would change the result of training" if name == "reduce" else ""
            raise error(
                "P0405",
                f"`{name}` cannot be `{node.span.text}`",
                node.span,
                f"it must be {listed(words)}{note}",
                help=did_you_mean(node.span.text, words),
            )
        return word
    value = self.evaluate(node)
    if name == "bucket":
        if not isinstance(value, tree.Size) or value.bytes < 1:
            raise error("P0405", "`bucket` must be a size above 0", node.span, brief(value), help="bucket=25MB")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise error("P0405", f"`{name}` must be an integer of 0 or more", node.span, brief(value), help=f"{name}=1")
    return value
