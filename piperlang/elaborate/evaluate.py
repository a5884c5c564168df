"""Expressions to values. Statements, and the calls that run them, are in interpret.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piperlang.core.mesh import Axis, Mesh, Submesh
from piperlang.core.selector import Condition, Selector
from piperlang.diagnostics import PiperError, did_you_mean, error, listed
from piperlang.elaborate import arithmetic, picking
from piperlang.elaborate.directive import ScheduleTarget
from piperlang.elaborate.modules import Module
from piperlang.elaborate.values import Builtin, StepsValue, Value, kind
from piperlang.source import Span
from piperlang.syntax import tree
from piperlang.syntax.words import BUILTINS

BUDGET = 1_300_000
"""Evaluation budget: every evaluated expression and statement is one step. It is far above what any schedule needs."""

MAX_CONDITIONS = 2_000
"""Conditions in one selector, over all alternatives."""

_BUILTINS = {name: Builtin(name) for name in BUILTINS}


class Evaluator:
    def __init__(self, graph: ScheduleTarget, module: Module) -> None:
        self.graph = graph
        self.module = module
        self.locals: dict[str, Value] | None = None
        self.spent = 0
        self.constant: dict[int, tuple[tree.Condition, Condition]] = {}
        """Constant conditions, by the identity of their node (kept alive here)."""
        self.budget = BUDGET

    def charge(self, steps: int, span: Span) -> None:
        self.spent += steps
        if self.spent > self.budget:
            raise error(
                "P0208",
                f"evaluation budget of {self.budget:,} steps exceeded",
                span,
                "budget exceeded here",
                help="check the ranges of the loops around this line",
            )

    def weigh(self, value: Value, span: Span) -> None:
        """Charge for walking all of a value: lists of lists can share their items and be huge without being built."""
        if isinstance(value, str | range):
            self.charge(len(value), span)
        elif isinstance(value, tuple):
            self.charge(len(value), span)
            for item in value:
                if isinstance(item, tuple | range | str | Selector | StepsValue):
                    self.weigh(item, span)
        elif isinstance(value, Selector):
            self.charge(value.size(), span)
        elif isinstance(value, StepsValue):
            self.charge(sum(1 + len(group) for group in value.groups), span)

    def evaluate(self, node: Any) -> Value:
        self.spent += 1
        if self.spent > self.budget:
            self.charge(0, node.span)
        return _EVALUATE[type(node)](self, node)

    # ------------------------------------------------------------------------------------------------- names

    def literal(self, node: tree.Literal) -> Value:
        return node.value

    def name(self, node: tree.Name) -> Value:
        text = node.text
        if self.locals is not None and text in self.locals:
            return self.locals[text]
        if text in self.module.names:
            return self.module.names[text]
        if text in _BUILTINS:
            return _BUILTINS[text]
        if text in self.module.failed:
            raise PiperError  # already reported by an earlier diagnostic
        raise error(
            "P0203",
            f"`{text}` has no value here",
            node.span,
            "it is bound in a branch that was not taken, or further down",
            help="bind it before this line, on every path",
        )

    def attribute(self, node: tree.Attribute) -> Value:
        base = self.evaluate(node.base)
        name = node.name.text
        if isinstance(base, Mesh):
            if name not in base.shape:
                raise error(
                    "P0305",
                    f"mesh `{base.name}` has no axis `{name}`",
                    node.name.span,
                    f"its axes are {listed(base.shape, 'and')}",
                    help=did_you_mean(name, base.shape),
                )
            return Axis(base, name)
        if isinstance(base, Module):
            if name not in base.names:
                raise error(
                    "P0201", f"`{base.name}` has no `{name}`", node.name.span, help=did_you_mean(name, base.names)
                )
            return base.names[name]
        raise error("P0204", f"{kind(base)} has no attributes", node.span, kind(base))

    # ------------------------------------------------------------------------------------------------- lists

    def list_of(self, node: tree.ListOf) -> Value:
        return tuple(self.evaluate(item) for item in node.items)

    def comprehension(self, node: tree.Comprehension) -> Value:
        outer = self.locals
        self.locals = dict(outer) if outer is not None else {}
        self.charge(len(self.locals) // 20, node.span)
        items: list[Value] = []
        try:
            self._clauses(node, 0, items)
        finally:
            self.locals = outer
        return tuple(items)

    def _clauses(self, node: tree.Comprehension, at: int, items: list[Value]) -> None:
        if at == len(node.clauses):
            items.append(self.evaluate(node.element))
            arithmetic.check_length(len(items), node.span)
            return
        clause = node.clauses[at]
        if isinstance(clause, tree.Given):
            if self.truth(clause.test):
                self._clauses(node, at + 1, items)
            return
        for value in self.iterable(clause.iterable):
            self.bind(clause.names, value, clause.iterable.span)
            self._clauses(node, at + 1, items)

    def iterable(self, node: tree.Expr) -> tuple[Value, ...] | range:
        value = self.evaluate(node)
        if isinstance(value, tuple | range):
            return value
        help = f"range({value})" if isinstance(value, int) and not isinstance(value, bool) else None
        raise error(
            "P0204",
            f"cannot iterate over {kind(value)}",
            node.span,
            "expected a list or a range",
            help=help and f"did you mean `{help}`?",
        )

    def bind(self, names: tuple[tree.Ident, ...], value: Value, span: Span) -> None:
        scope = self.module.names if self.locals is None else self.locals
        if len(names) == 1:
            scope[names[0].text] = value
            return
        if not isinstance(value, tuple | range) or len(value) != len(names):
            given = f"{len(value)} values" if isinstance(value, tuple | range) else kind(value)
            raise error("P0204", f"{len(names)} names need {len(names)} values", span, given)
        for name, item in zip(names, value, strict=True):
            scope[name.text] = item

    def index(self, node: tree.IndexOf) -> Value:
        base = self.evaluate(node.base)
        if isinstance(base, Mesh | Submesh):
            raise error(
                "P0305",
                "a mesh is indexed by axis",
                node.span,
                help=f"write `{node.base.span.text}[{next(iter(_mesh(base).shape))}=...]`",
            )
        if not isinstance(base, tuple | range | str):
            raise error("P0204", f"cannot index {kind(base)}", node.base.span, kind(base))
        if isinstance(node.index, tree.Range):
            low, high = (self.integer(end) if end is not None else None for end in (node.index.low, node.index.high))
            self.charge(len(base), node.span)
            return base[low:high] if isinstance(base, str) else tuple(base[low:high])
        if isinstance(node.index, tree.Everything):
            raise error("P0204", "`*` is allowed in module paths and selectors only", node.index.span)
        at = self.integer(node.index)
        if not -len(base) <= at < len(base):
            raise error(
                "P0213",
                f"index {at} is out of range",
                node.index.span,
                f"{len(base)} items: valid indices are 0 to {len(base) - 1}" if base else "the list is empty",
            )
        return base[at]

    # ---------------------------------------------------------------------------------------------- operators

    def unary(self, node: tree.Unary) -> Value:
        if node.operator == "not":
            return not self.truth(node.operand)
        value = self.evaluate(node.operand)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise error("P0204", f"`{node.operator}` is not supported for {kind(value)}", node.span, kind(value))
        return -value if node.operator == "-" else value

    def power(self, node: tree.Power) -> Value:
        return arithmetic.power(self.evaluate(node.base), self.evaluate(node.exponent), node.span)

    def chain(self, node: tree.Chain) -> Value:
        value = self.evaluate(node.first)
        for op, operand in node.rest:
            right = self.evaluate(operand)
            value = arithmetic.binary(op, value, right, node.span)
            if type(value) in (tuple, str):
                self.charge(len(value), node.span)  # type: ignore[arg-type]
        return value

    def compare(self, node: tree.Compare) -> Value:
        left = self.evaluate(node.first)
        for op, operand in node.rest:
            right = self.evaluate(operand)
            self.weigh(left, node.span)
            self.weigh(right, node.span)
            if not arithmetic.compare(op, left, right, node.span):
                return False
            left = right
        return True

    def logic(self, node: tree.Logic) -> Value:
        if node.operator == "and":
            return all(self.truth(operand) for operand in node.operands)
        return any(self.truth(operand) for operand in node.operands)

    def choice(self, node: tree.Choice) -> Value:
        return self.evaluate(node.then if self.truth(node.test) else node.other)

    def join(self, node: tree.Join) -> Value:
        result = self.selector(node.operands[0])
        for operand in node.operands[1:]:
            other = self.selector(operand)
            self.charge(result.size() * len(other.alternatives) + other.size() * len(result.alternatives), node.span)
            result = result.union(other, node.span) if node.operator == "|" else result.meet(other, node.span)
            if result.size() > MAX_CONDITIONS:
                raise error(
                    "P0208",
                    "this selector is too large",
                    node.span,
                    f"{result.size():,} conditions; the limit is {MAX_CONDITIONS:,}",
                )
        return result

    # ------------------------------------------------------------------------------ values of a required type

    def truth(self, node: tree.Expr) -> bool:
        value = self.evaluate(node)
        if isinstance(value, bool):
            return value
        raise error(
            "P0204",
            f"a condition must be True or False, not {kind(value)}",
            node.span,
            kind(value),
            help="compare it: `x > 0`",
        )

    def integer(self, node: tree.Expr) -> int:
        value = self.evaluate(node)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        hint = "use `//` for integer division" if isinstance(value, float) else None
        raise error("P0204", f"expected an integer, not {kind(value)}", node.span, kind(value), help=hint)

    def text(self, node: tree.Expr, what: str) -> str:
        value = self.evaluate(node)
        if isinstance(value, str):
            return value
        raise error("P0204", f"{what} must be a string, not {kind(value)}", node.span, kind(value))

    def selector(self, node: Any) -> Selector:
        value = self.evaluate(node)
        if isinstance(value, Selector):
            return value
        help = "write a selector in brackets: `[stage=0]`"
        if isinstance(value, int | str):
            help = "write several values of a tag as `{0, 1}`"
        if kind(value) == "several steps":
            help = (
                "in a one-line function `a & b` means that the steps may overlap; for an intersection, write `(a & b)`"
            )
        raise error("P0204", f"expected a selector, not {kind(value)}", node.span, kind(value), help=help)

    def selector_of(self, node: tree.SelectorOf) -> Value:
        conditions = tuple(picking.condition(self, condition) for condition in node.conditions)
        return Selector((conditions,), node.span)

    def pick(self, node: tree.Pick) -> Value:
        return picking.part_of_mesh(self, node)

    def call(self, node: tree.CallOf) -> Value:
        raise NotImplementedError

    def overlap(self, node: tree.Overlap) -> Value:
        raise NotImplementedError


def _mesh(value: Mesh | Submesh) -> Mesh:
    return value if isinstance(value, Mesh) else value.mesh


_EVALUATE: dict[type, Callable[[Any, Any], Value]] = {
    tree.Literal: Evaluator.literal,
    tree.Name: Evaluator.name,
    tree.Attribute: Evaluator.attribute,
    tree.ListOf: Evaluator.list_of,
    tree.Comprehension: Evaluator.comprehension,
    tree.IndexOf: Evaluator.index,
    tree.Unary: Evaluator.unary,
    tree.Power: Evaluator.power,
    tree.Chain: Evaluator.chain,
    tree.Compare: Evaluator.compare,
    tree.Logic: Evaluator.logic,
    tree.Choice: Evaluator.choice,
    tree.Join: Evaluator.join,
    tree.SelectorOf: Evaluator.selector_of,
    tree.Pick: Evaluator.pick,
    tree.CallOf: lambda self, node: self.call(node),
    tree.Overlap: lambda self, node: self.overlap(node),
}
