"""Expressions in brackets: conditions of selectors, and submeshes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piperlang.core.mesh import Mesh, Submesh
from piperlang.core.selector import Condition, TagValue
from piperlang.diagnostics import did_you_mean, error, listed
from piperlang.elaborate.values import kind
from piperlang.syntax import tree
from piperlang.syntax.words import RESERVED_KEYS, SELECTOR_WORDS

if TYPE_CHECKING:
    from piperlang.elaborate.evaluate import Evaluator

P2P = ("send", "recv")
MAX_VALUES = 10_000


def condition(self: Evaluator, node: tree.Condition) -> Condition:
    """The condition as a value; a constant one (`pass=F`, `mb=next`) is created once."""
    known = self.constant.get(id(node))
    if known is not None:
        return known[1]
    made = _condition(self, node)
    value = node.value
    fixed = value is None or isinstance(value, tree.Everything | tree.Next | tree.Literal)
    if fixed or (isinstance(value, tree.Name) and value.text in SELECTOR_WORDS.get(node.key.text, ())):
        self.constant[id(node)] = (node, made)
    return made


def _condition(self: Evaluator, node: tree.Condition) -> Condition:
    key, value, negated = node.key.text, node.value, node.test == "!="
    if node.test == "absent":
        return Condition(key, "absent")
    if node.test == "update":
        return Condition("update", "present")
    if key == "update":
        raise error("P0301", "`update` takes no value", node.span, help="write `[update]`")
    if isinstance(value, tree.Everything):
        return _whole(node, "present")
    if isinstance(value, tree.Next):
        if key in RESERVED_KEYS:
            raise error(
                "P0301",
                f"`next` selects a microbatch, not a value of `{key}`",
                value.span,
                help=f"write the value of `{key}`",
            )
        return _whole(node, "next?" if value.optional else "next")
    if isinstance(value, tree.Range):
        if key in SELECTOR_WORDS:
            raise error(
                "P0301", f"`{key}` does not take a range", value.span, f"expected {listed(SELECTOR_WORDS[key])}"
            )
        low, high = (self.integer(end) if end is not None else None for end in (value.low, value.high))
        return Condition(key, "not range" if negated else "range", low=low, high=high)
    values = tuple(_values(self, key, value))
    return Condition(key, "not in" if negated else "in", values)


def _whole(node: tree.Condition, test: str) -> Condition:
    if node.test == "!=":
        key = node.key.text
        raise error(
            "P0301", f"`{key}!=...` needs a value", node.span, help=f"to select nodes without the tag, write `!{key}`"
        )
    return Condition(node.key.text, test)


def _values(self: Evaluator, key: str, value: Any) -> list[TagValue]:
    if isinstance(value, tree.Choices):
        return [found for item in value.items for found in _values(self, key, item)]
    words = SELECTOR_WORDS.get(key)
    if words is not None:
        return _words(self, key, words, value)
    result = self.evaluate(value)
    if isinstance(result, int | str):
        return [result]
    if isinstance(result, tuple | range) and result:
        self.charge(len(result), value.span)
        if len(result) > MAX_VALUES:
            raise error(
                "P0208",
                f"one condition has {len(result):,} values",
                value.span,
                f"the limit is {MAX_VALUES:,}",
                help="use a range: `0:n`",
            )
        if all(isinstance(item, int | str) for item in result):
            return [item for item in result if isinstance(item, int | str)]
    raise error("P0204", f"a tag must be an integer or a string, not {kind(result)}", value.span, kind(result))


def _words(self: Evaluator, key: str, words: tuple[str, ...], value: Any) -> list[TagValue]:
    if isinstance(value, tree.Join) and value.operator == "|":
        return [found for item in value.operands for found in _words(self, key, words, item)]
    word = value.text if isinstance(value, tree.Name) and value.text in words else self.evaluate(value)
    if not isinstance(word, str) or word not in words:
        shown = word if isinstance(word, str) else value.span.text
        raise error(
            "P0301",
            f"unknown value `{key}={shown}`",
            value.span,
            f"expected {listed(words)}",
            help=did_you_mean(str(shown), words),
        )
    return list(P2P) if word == "p2p" else [word]


def part_of_mesh(self: Evaluator, node: tree.Pick) -> Submesh:
    base = self.evaluate(node.base)
    if not isinstance(base, Mesh | Submesh):
        raise error("P0204", f"only a mesh is indexed by axis, not {kind(base)}", node.base.span, kind(base))
    mesh = base if isinstance(base, Mesh) else base.mesh
    picks = {} if isinstance(base, Mesh) else dict(base.picks)
    for item in node.conditions:
        axis = item.key.text
        if axis not in mesh.shape:
            raise error(
                "P0305",
                f"mesh `{mesh.name}` has no axis `{axis}`",
                item.key.span,
                f"its axes are {listed(mesh.shape, 'and')}",
                help=did_you_mean(axis, mesh.shape),
            )
        if axis in picks:
            raise error("P0305", f"axis `{axis}` is given twice", item.span)
        picks[axis] = _coordinates(self, mesh, item)
    # Selecting a whole axis changes nothing: gpu[dp=*] is gpu.
    partial = {axis: at for axis, at in picks.items() if len(at) < mesh.shape[axis]}
    return Submesh(mesh, tuple((axis, partial[axis]) for axis in sorted(partial, key=mesh.places.__getitem__)))


def _coordinates(self: Evaluator, mesh: Mesh, node: tree.Condition) -> tuple[int, ...]:
    size = mesh.shape[node.key.text]
    value = node.value
    self.charge(size // 3 if isinstance(value, tree.Range | tree.Everything) else 1, node.span)
    if node.test != "=" or isinstance(value, tree.Next):
        raise error(
            "P0305",
            "select coordinates with `=`",
            node.span,
            help=f"for example, `{mesh.name}[{node.key.text}=0]`, with `0:2` or `{{0, 3}}` for several",
        )
    if isinstance(value, tree.Everything):
        return tuple(range(size))
    if isinstance(value, tree.Range):
        low = self.integer(value.low) if value.low is not None else 0
        high = self.integer(value.high) if value.high is not None else size
        wanted = list(range(low, min(high, low + 1_000_000)))
    elif isinstance(value, tree.Choices):
        wanted = [self.integer(item) for item in value.items]
    else:
        wanted = [self.integer(value)]  # type: ignore[arg-type]
    outside = [at for at in wanted if not 0 <= at < size]
    at = value.span if value is not None else node.span
    if not wanted:
        raise error("P0305", "this range is empty", at, "ranges are half-open: the end is excluded")
    if outside:
        what = f"{node.key.text}={outside[0]}"
        raise error(
            "P0305",
            f"{what} is outside mesh `{mesh.name}`",
            at,
            f"axis `{node.key.text}` has size {size}: valid coordinates are 0 to {size - 1}",
        )
    return tuple(dict.fromkeys(wanted))
