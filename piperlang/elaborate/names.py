"""Checks names before evaluation: unknown names, names bound twice, and statements that are not allowed where they are,
also in code that never runs.

Scopes are as in Python, with one difference: a name is never bound again. A loop's
body has names of its own; the branches of an `if` bind in the scope around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from piperlang.diagnostics import LIMIT, Diagnostic, Label, did_you_mean, listed
from piperlang.elaborate.directive import BY_NODE
from piperlang.elaborate.library import exporting
from piperlang.elaborate.options import Words
from piperlang.source import Span
from piperlang.syntax import tree
from piperlang.syntax.words import BUILTINS, PYTHON_HABITS, SELECTOR_WORDS


@dataclass
class Scope:
    kind: str
    """`module`, `function` or `inner` (a loop's body, a comprehension)."""
    names: dict[str, Span] = field(default_factory=dict)


@dataclass
class Names:
    """Checks statements in sequence; keeps the module's names, so that a session can continue with them."""

    broken: frozenset[str] = frozenset()
    """Words of statements that did not parse: these may have bound any of them."""
    problems: list[Diagnostic] = field(default_factory=list)
    module: Scope = field(default_factory=lambda: Scope("module"))
    later: frozenset[str] = frozenset()
    """Names the module binds somewhere: known inside functions, which run later."""

    def __post_init__(self) -> None:
        self.scopes = [self.module]
        self.in_order = False
        self.depth = 0

    def check(self, statements: Iterable[tree.Statement]) -> list[Diagnostic]:
        body = tuple(statements)
        self.later = self.later | frozenset(_bound_anywhere(body))
        for statement in body:
            if self.enough:
                break
            self.statement(statement)
        return self.problems

    # ---------------------------------------------------------------------------------------------- reporting

    @property
    def enough(self) -> bool:
        """Whether the limit is reached: more diagnostics are not shown, and suggestions take time."""
        return len(self.problems) > LIMIT

    def complain(
        self,
        code: str,
        message: str,
        span: Span,
        label: str = "",
        *,
        help: str | None = None,
        also: tuple[Label, ...] = (),
    ) -> None:
        self.problems.append(Diagnostic(code, message, span, label, also, helps=(help,) if help else ()))

    # --------------------------------------------------------------------------------------------------- scopes

    @property
    def inside_function(self) -> bool:
        return any(scope.kind == "function" for scope in self.scopes)

    @contextmanager
    def scope(self, kind: str) -> Iterator[None]:
        self.scopes.append(Scope(kind))
        yield
        self.scopes.pop()

    def bind(self, ident: tree.Ident, *, shadow: bool = False) -> None:
        name = ident.text
        if name in BUILTINS:
            self.complain("P0202", f"`{name}` is a built-in function", ident.span, "choose another name")
        for scope in reversed(self.scopes):
            if shadow:
                break
            if name in scope.names:
                first = scope.names[name]
                adding = scope is not self.scopes[-1]  # probably a loop that accumulates a sum
                self.complain(
                    "P0202",
                    f"`{name}` is already bound",
                    ident.span,
                    "names cannot be rebound",
                    also=(Label(first, "bound here"),),
                    help="choose another name"
                    + ("; to accumulate a sum, use sum([... for x in ...])" if adding else ""),
                )
                break
            if scope.kind == "function":
                break
        self.scopes[-1].names[name] = ident.span

    def known(self, name: str) -> bool:
        if any(name in scope.names for scope in self.scopes) or name in BUILTINS or name in self.broken:
            return True
        return self.inside_function and name in self.later

    def use(self, name: str, span: Span) -> None:
        if self.known(name) or self.enough:
            return
        visible = {n for scope in self.scopes for n in scope.names} | set(BUILTINS)
        if self.inside_function:
            visible |= self.later
        module = exporting(name)
        if module is not None:
            help: str | None = f"add `from {module} import {name}`"
        elif name in PYTHON_HABITS:
            help = PYTHON_HABITS[name]
        else:
            help = did_you_mean(name, visible)
        label = "it is bound further down" if name in self.later else "not defined here"
        self.complain("P0201", f"unknown name `{name}`", span, label, help=help)

    # ----------------------------------------------------------------------------------------------- statements

    def statement(self, node: tree.Statement) -> None:
        if self.in_order and isinstance(node, _NOT_IN_ORDER):
            self.complain(
                "P0111", f"`{_word(node)}` is not allowed inside an order", node.span, help="move it before the order"
            )
        elif self.depth and isinstance(node, _TOP_ONLY):
            self.complain(
                "P0111", f"`{_word(node)}` is only allowed at the top level", node.span, help="move it out of the block"
            )
        if type(node) in _STATEMENTS:
            _STATEMENTS[type(node)](self, node)
        elif isinstance(node, tree.Directive):
            self.directive(node)
        else:
            self.expression(node)

    def block(self, block: tree.Block) -> None:
        self.depth += 1
        for statement in block.statements:
            self.statement(statement)
        self.depth -= 1

    def imports(self, node: tree.FromImport) -> None:
        for imported in node.names:
            self.bind(imported.bound)

    def import_module(self, node: tree.ImportModule) -> None:
        self.bind(node.name)

    def param(self, node: tree.Param) -> None:
        self.expression(node.value)
        self.bind(node.name)

    def let(self, node: tree.Let) -> None:
        for value in node.values:
            self.expression(value)
        for name in node.names:
            self.bind(name)

    def mesh(self, node: tree.MeshOf) -> None:
        for axis in node.axes:
            self.expression(axis.size)
        self.bind(node.name)

    def define(self, node: tree.Define) -> None:
        for parameter in node.parameters:
            if parameter.default is not None:
                self.expression(parameter.default)
        self.bind(node.name)
        with self.scope("function"):
            for parameter in node.parameters:
                self.bind(parameter.name)
            self.block(node.body)

    def loop(self, node: tree.For) -> None:
        self.expression(node.iterable)
        with self.scope("inner"):
            for name in node.names:
                self.bind(name)
            self.block(node.body)

    def repeat(self, node: tree.Repeat) -> None:
        self.expression(node.times)
        with self.scope("inner"):
            self.block(node.body)

    def branch(self, node: tree.If) -> None:
        names = self.scopes[-1].names
        bound: dict[str, Span] = {}
        bodies = [body for _, body in node.branches] + ([node.otherwise] if node.otherwise else [])
        for test, _ in node.branches:
            self.expression(test)
        for body in bodies:  # only one branch runs, so each may bind the same name
            known = len(names)
            self.block(body)
            while len(names) > known:  # dicts keep insertion order: the last ones were bound in the branch
                name, span = names.popitem()
                bound[name] = span
        names |= bound

    def order(self, node: tree.OrderBlock) -> None:
        self.expression(node.where)
        was, self.in_order = self.in_order, True
        with self.scope("inner"):
            self.block(node.body)
        self.in_order = was

    def steps(self, node: tree.Steps) -> None:
        before = len(self.problems)
        for step in node.steps:
            self.expression(step)
        if self.in_order or self.inside_function or len(self.problems) > before:
            return
        if len(node.steps) > 1 or not isinstance(node.steps[0], tree.CallOf):
            self.complain(
                "P0111",
                "this statement has no effect",
                node.span,
                "a step is only allowed inside an order",
                help="put it in `order on ...:`, or call a function",
            )

    def give(self, node: tree.Return) -> None:
        if node.value is not None:
            self.expression(node.value)
        if not self.inside_function:
            self.complain("P0111", "`return` outside a function", node.span, help="delete it, or put it in a `def`")

    def directive(self, node: tree.Directive) -> None:
        options: tuple[tree.Setting, ...] = getattr(node, "options", ())
        for part in node.children():
            if part not in options:
                self.expression(part)
        for setting in options:
            name = setting.name.text
            kind = BY_NODE[type(node)].legal.get(name)
            if isinstance(kind, Words):
                self.word("P0405", f"{name}=", kind.words, setting.value)
            elif kind is not None:
                self.expression(setting.value)

    def word(self, code: str, key: str, words: tuple[str, ...], value: tree.Node) -> None:
        """A value that is one of `words`, or a variable that holds one."""
        for name in _name_leaves(value):
            if name.text in words:
                continue
            if self.known(name.text):
                self.use(name.text, name.span)
            else:
                help = did_you_mean(name.text, words)
                self.complain(
                    code, f"unknown value `{key}{name.text}`", name.span, f"expected {listed(words)}", help=help
                )

    # ---------------------------------------------------------------------------------------------- expressions

    def expression(self, node: tree.Node) -> None:
        if isinstance(node, tree.Name):
            self.use(node.text, node.span)
        elif isinstance(node, tree.Comprehension):
            self.comprehension(node)
        elif isinstance(node, tree.Condition):
            self.condition(node)
        else:
            for part in node.children():
                self.expression(part)

    def condition(self, node: tree.Condition) -> None:
        words = SELECTOR_WORDS.get(node.key.text)
        if node.value is None:
            return
        if words is None:
            self.expression(node.value)
        else:
            self.word("P0301", f"{node.key.text}=", words, node.value)

    def comprehension(self, node: tree.Comprehension) -> None:
        with self.scope("inner"):
            for clause in node.clauses:
                if isinstance(clause, tree.Each):
                    self.expression(clause.iterable)
                    for name in clause.names:
                        self.bind(name, shadow=True)
                else:
                    self.expression(clause.test)
            self.expression(node.element)


_STATEMENTS: dict[type, Callable[[Names, Any], None]] = {
    tree.FromImport: Names.imports,
    tree.ImportModule: Names.import_module,
    tree.Param: Names.param,
    tree.Let: Names.let,
    tree.MeshOf: Names.mesh,
    tree.Define: Names.define,
    tree.OrderBlock: Names.order,
    tree.Steps: Names.steps,
    tree.For: Names.loop,
    tree.Repeat: Names.repeat,
    tree.If: Names.branch,
    tree.Return: Names.give,
}
"""Statements that bind names, open a scope or are not allowed everywhere; of the others only the parts are checked."""

_TOP_ONLY = (tree.FromImport, tree.ImportModule, tree.Param, tree.Define)
_NOT_IN_ORDER = (*_TOP_ONLY, tree.Directive)


def _word(node: tree.Node) -> str:
    return node.span.text.split(maxsplit=1)[0]


def _name_leaves(node: tree.Node) -> Iterator[tree.Name]:
    """The names that a value may be: not those inside a selector or a comprehension."""
    if isinstance(node, tree.Name):
        yield node
    elif not isinstance(node, tree.SelectorOf | tree.Pick | tree.Comprehension):
        for part in node.children():
            yield from _name_leaves(part)


def _bound_anywhere(statements: Iterable[tree.Statement]) -> Iterator[str]:
    """Names that the module binds outside of functions and loops."""
    for node in statements:
        if isinstance(node, tree.FromImport):
            yield from (imported.bound.text for imported in node.names)
        elif isinstance(node, tree.Let):
            yield from (name.text for name in node.names)
        elif isinstance(node, tree.ImportModule | tree.Param | tree.MeshOf | tree.Define):
            yield node.name.text
        elif isinstance(node, tree.If):
            for _, body in node.branches:
                yield from _bound_anywhere(body.statements)
            if node.otherwise:
                yield from _bound_anywhere(node.otherwise.statements)


def bound_by(statement: tree.Statement) -> frozenset[str]:
    """The names that a statement binds, for statements that failed."""
    return frozenset(_bound_anywhere([statement]))
