"""Builds the syntax tree from the parser's reductions: one method per rule of grammar/piper.lark.

Lark calls the method named like the rule (or its alias) with every child, punctuation included, so a node's span is
that of its first to its last child. No intermediate tree is made.
"""

from __future__ import annotations

import re
import threading
from math import isinf
from typing import Any

from lark import Token

from piperlang.diagnostics import error
from piperlang.source import Source, Span
from piperlang.syntax import tokens, tree
from piperlang.syntax.words import SIZE_UNITS

Children = list[Any]

MAX_DIGITS = 19
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\", r"\"": '"', r"\'": "'", "\\\n": ""}


def _nodes(children: Children) -> tuple[Any, ...]:
    return tuple(child for child in children if not isinstance(child, Token))


def _names(children: Children) -> list[Token]:
    return [child for child in children if isinstance(child, Token) and child.type == "NAME"]


class Builder(threading.local):
    """Set `source` before parsing, in every thread that parses: spans point into it."""

    source: Source

    # ------------------------------------------------------------------------------------------------- spans

    def span(self, children: Children) -> Span:
        first, last = children[0], children[-1]
        low = tokens.start(first) if isinstance(first, Token) else first.span.start
        high = tokens.end(last) if isinstance(last, Token) else last.span.end
        return Span(self.source, low, high)

    def at(self, token: Token) -> Span:
        return tokens.span(self.source, token)

    def ident(self, token: Token) -> tree.Ident:
        return tree.Ident(str(token), span=self.at(token))

    def idents(self, children: Children) -> tuple[tree.Ident, ...]:
        return tuple(self.ident(token) for token in _names(children))

    # -------------------------------------------------------------------------------------------- statements

    def plain(self, c: Children) -> Any:
        return c[0]

    def statement(self, c: Children) -> Any:
        return c[0]

    def inline_suite(self, c: Children) -> tree.Block:
        return tree.Block((c[0],), True, span=c[0].span)

    def block(self, c: Children) -> tree.Block:
        statements = _nodes(c)
        return tree.Block(statements, span=statements[0].span.to(statements[-1].span))

    def library(self, c: Children) -> tree.Library:
        return tree.Library(tuple(str(t) for t in _names(c)), span=self.span(c))

    def file(self, c: Children) -> tree.File:
        return tree.File(self.text(c[0]), span=self.at(c[0]))

    def imported(self, c: Children) -> tree.Imported:
        return tree.Imported(self.ident(c[0]), self.ident(c[-1]), span=self.span(c))

    def from_import(self, c: Children) -> tree.FromImport:
        module, *names = _nodes(c)
        return tree.FromImport(module, tuple(names), span=self.span(c))

    def import_module(self, c: Children) -> tree.ImportModule:
        return tree.ImportModule(c[1], self.ident(c[3]), span=self.span(c))

    def param(self, c: Children) -> tree.Param:
        return tree.Param(self.ident(c[1]), c[3], span=self.span(c))

    def let(self, c: Children) -> tree.Let:
        return tree.Let(self.idents(c), _nodes(c), span=self.span(c))

    def mesh(self, c: Children) -> tree.MeshOf:
        return tree.MeshOf(self.ident(c[1]), _nodes(c), span=self.span(c))

    def axis(self, c: Children) -> tree.Axis:
        return tree.Axis(self.ident(c[0]), c[2], span=self.span(c))

    def parameter(self, c: Children) -> tree.Parameter:
        return tree.Parameter(self.ident(c[0]), c[2] if len(c) > 1 else None, span=self.span(c))

    def define(self, c: Children) -> tree.Define:
        *parameters, body = _nodes(c)
        doc, body = _documentation(body)
        first = body.statements[0] if body.statements else None
        result = first if body.inline and isinstance(first, tree.Steps) else None
        return tree.Define(self.ident(c[1]), tuple(parameters), body, result, doc, span=self.span(c))

    # -------------------------------------------------------------------------------------------- directives

    def setting(self, c: Children) -> tree.Setting:
        return tree.Setting(self.ident(c[0]), c[2], span=self.span(c))

    assignment = option = setting

    def options(self, c: Children) -> Children:
        return list(_nodes(c))

    def tag(self, c: Children) -> tree.TagAt:
        nodes = _nodes(c)
        tags = tuple(n for n in nodes if isinstance(n, tree.Setting))
        return tree.TagAt(tags, nodes[len(tags) :], span=self.span(c))

    def child(self, c: Children) -> Token:
        return c[1]  # type: ignore[no-any-return]

    def element(self, c: Children) -> tuple[Any, Token]:
        return c[1], c[2]

    def dotted_path(self, c: Children) -> tree.Path:
        parts = tuple(str(part) if isinstance(part, Token) else part[0] for part in c)
        last = c[-1] if isinstance(c[-1], Token) else c[-1][1]
        return tree.Path(parts, span=self.span([c[0], last]))

    def quoted_path(self, c: Children) -> tree.Path:
        return tree.Path(tuple(self.text(c[0]).split(".")), span=self.at(c[0]))

    def place(self, c: Children) -> tree.PlaceOn:
        return tree.PlaceOn(c[1], c[3], span=self.span(c))

    def replicate(self, c: Children) -> tree.ReplicateOver:
        (selector, *axes), options, span = self._with_options(c)
        return tree.ReplicateOver(selector, tuple(axes), options, span=span)

    def shard(self, c: Children) -> tree.ShardOver:
        (selector, *axes), options, span = self._with_options(c)
        return tree.ShardOver(selector, tuple(axes), options, span=span)

    def _with_options(self, c: Children) -> tuple[tuple[Any, ...], tuple[tree.Setting, ...], Span]:
        """The operands of a directive, its options after `with`, and the span of all."""
        before, options = (c[:-1], c[-1]) if isinstance(c[-1], list) else (c, [])
        return _nodes(before), tuple(options), self.span([*before, *options])

    def split(self, c: Children) -> tree.SplitInto:
        selector = None if isinstance(c[1], Token) else c[1]
        return tree.SplitInto(selector, c[3], self.ident(c[5]), span=self.span(c))

    def stream(self, c: Children) -> tree.StreamOn:
        (selector, name), options, span = self._with_options(c)
        return tree.StreamOn(selector, name, options, span=span)

    def recompute(self, c: Children) -> tree.Recompute:
        (selector,), options, span = self._with_options(c)
        return tree.Recompute(selector, options, span=span)

    def offload(self, c: Children) -> tree.Offload:
        (selector,), options, span = self._with_options(c)
        return tree.Offload(selector, options, span=span)

    def order_block(self, c: Children) -> tree.OrderBlock:
        return tree.OrderBlock(c[2], c[4], span=self.span(c[:3]))

    def order_chain(self, c: Children) -> tree.OrderChain:
        return tree.OrderChain(_nodes(c), span=self.span(c))

    def steps(self, c: Children) -> tree.Steps:
        return tree.Steps(_nodes(c), span=self.span(c))

    def overlap(self, c: Children) -> tree.Overlap:
        return tree.Overlap(_nodes(c), span=self.span(c))

    # ----------------------------------------------------------------------------------------------- control

    def for_each(self, c: Children) -> tree.For:
        iterable, body = _nodes(c)
        return tree.For(self.idents(c), iterable, body, span=self.span([c[0], iterable]))

    def repeat(self, c: Children) -> tree.Repeat:
        return tree.Repeat(c[1], c[3], span=self.span(c[:2]))

    def branch(self, c: Children) -> tree.If:
        nodes = _nodes(c)
        pairs = tuple(zip(nodes[0::2], nodes[1::2], strict=False))
        otherwise = nodes[-1] if len(nodes) % 2 else None
        return tree.If(pairs, otherwise, span=self.span(c[:2]))

    def give(self, c: Children) -> tree.Return:
        return tree.Return(c[1] if len(c) > 1 else None, span=self.span(c))

    def require(self, c: Children) -> tree.Require:
        return tree.Require(c[1], c[3], span=self.span(c))

    def say(self, c: Children) -> tree.Print:
        return tree.Print(_nodes(c), span=self.span(c))

    # ------------------------------------------------------------------------------------------- expressions

    def union(self, c: Children) -> tree.Join:
        return tree.Join("|", _nodes(c), span=self.span(c))

    def meeting(self, c: Children) -> tree.Join:
        return tree.Join("&", _nodes(c), span=self.span(c))

    def choice(self, c: Children) -> tree.Choice:
        return tree.Choice(c[0], c[2], c[4], span=self.span(c))

    def any_of(self, c: Children) -> tree.Logic:
        return tree.Logic(str(c[1]), _nodes(c), span=self.span(c))

    all_of = any_of

    def unary(self, c: Children) -> tree.Unary:
        return tree.Unary(str(c[0]), c[1], span=self.span(c))

    def comparator(self, c: Children) -> str:
        return " ".join(str(token) for token in c)

    def compare(self, c: Children) -> tree.Compare:
        rest = tuple(zip((str(op) for op in c[1::2]), c[2::2], strict=True))
        return tree.Compare(c[0], rest, span=self.span(c))

    def chain(self, c: Children) -> tree.Chain:
        rest = tuple(zip((str(op) for op in c[1::2]), c[2::2], strict=True))
        return tree.Chain(c[0], rest, span=self.span(c))

    def power(self, c: Children) -> tree.Power:
        return tree.Power(c[0], c[2], span=self.span(c))

    def call(self, c: Children) -> tree.CallOf:
        function, *arguments = _nodes(c)
        return tree.CallOf(function, tuple(arguments), span=self.span(c))

    def argument(self, c: Children) -> tree.Argument:
        return tree.Argument(None, c[0], span=c[0].span)

    def named_argument(self, c: Children) -> tree.Argument:
        return tree.Argument(self.ident(c[0]), c[2], span=self.span(c))

    def attribute(self, c: Children) -> tree.Attribute:
        return tree.Attribute(c[0], self.ident(c[2]), span=self.span(c))

    def index(self, c: Children) -> tree.IndexOf:
        return tree.IndexOf(c[0], c[2], span=self.span(c))

    def at_index(self, c: Children) -> Any:
        return c[0]

    def between(self, c: Children) -> tree.Range:
        colon = next(i for i, child in enumerate(c) if isinstance(child, Token))
        low = c[0] if colon else None
        return tree.Range(low, c[-1] if colon + 1 < len(c) else None, span=self.span(c))

    at_range = between

    def present(self, c: Children) -> tree.Everything:
        return tree.Everything(span=self.at(c[0]))

    at_all = present

    def pick(self, c: Children) -> tree.Pick:
        return tree.Pick(c[0], tuple(c[2]), span=self.span(c))

    # ------------------------------------------------------------------------------------------------- atoms

    def name(self, c: Children) -> tree.Name:
        return tree.Name(str(c[0]), span=self.at(c[0]))

    def integer(self, c: Children) -> tree.Literal:
        digits = c[0].replace("_", "").lstrip("0") or "0"
        if len(digits) > MAX_DIGITS or int(digits) >= 2**63:
            raise error("P0211", "this number is too large", self.at(c[0]), "integers are limited to 64 bits")
        return tree.Literal(int(digits), span=self.at(c[0]))

    def floating(self, c: Children) -> tree.Literal:
        value = float(c[0])
        if isinf(value):
            raise error("P0211", "this number is too large", self.at(c[0]), "floats are limited to 64 bits")
        return tree.Literal(value, span=self.at(c[0]))

    def size(self, c: Children) -> tree.Literal:
        digits = c[0].rstrip("BKMGTi")
        count = float(digits) * SIZE_UNITS[c[0][len(digits) :]]
        if count >= 2**63:
            raise error("P0211", "this size is too large", self.at(c[0]), "sizes are limited to 64 bits")
        return tree.Literal(tree.Size(int(count)), span=self.at(c[0]))

    def text(self, token: Token) -> str:
        """The decoded text of a string token."""
        quotes = 3 if token.type == "TEXT" else 1

        def plain(match: re.Match[str]) -> str:
            if match[0] not in ESCAPES:
                start = tokens.start(token) + quotes + match.start()
                raise error(
                    "P0106",
                    f"`{match[0]}` is not a valid escape sequence",
                    Span(self.source, start, start + 2),
                    help="write `\\\\` for a backslash",
                )
            return ESCAPES[match[0]]

        return re.sub(r"\\(.|\n)", plain, str(token)[quotes:-quotes])

    def string(self, c: Children) -> tree.Literal:
        return tree.Literal(self.text(c[0]), span=self.at(c[0]))

    def truth(self, c: Children) -> tree.Literal:
        return tree.Literal(c[0] == "True", span=self.at(c[0]))

    def group(self, c: Children) -> Any:
        return c[1].over(self.span(c))

    def list(self, c: Children) -> tree.ListOf:
        return tree.ListOf(_nodes(c), span=self.span(c))

    def each(self, c: Children) -> tree.Each:
        return tree.Each(self.idents(c), c[-1], span=self.span(c))

    def given(self, c: Children) -> tree.Given:
        return tree.Given(c[1], span=self.span(c))

    def comprehension(self, c: Children) -> tree.Comprehension:
        element, *clauses = _nodes(c)
        return tree.Comprehension(element, tuple(clauses), span=self.span(c))

    # --------------------------------------------------------------------------------------------- selectors

    def selector(self, c: Children) -> tree.SelectorOf:
        return tree.SelectorOf(tuple(c[1]), span=self.span(c))

    def conditions(self, c: Children) -> Children:
        return [child for child in c if not isinstance(child, Token)]

    def equals(self, c: Children) -> tree.Condition:
        return tree.Condition(self.ident(c[0]), str(c[1]), c[2], span=self.span(c))

    differs = equals

    def absent(self, c: Children) -> tree.Condition:
        return tree.Condition(self.ident(c[1]), "absent", None, span=self.span(c))

    def is_update(self, c: Children) -> tree.Condition:
        return tree.Condition(self.ident(c[0]), "update", None, span=self.at(c[0]))

    def one(self, c: Children) -> Any:
        return c[0]

    def next_one(self, c: Children) -> tree.Next:
        return tree.Next(len(c) > 1, span=self.span(c))

    def one_of(self, c: Children) -> tree.Choices:
        return tree.Choices(_nodes(c), span=self.span(c))


def _documentation(body: tree.Block) -> tuple[str | None, tree.Block]:
    """A string as the first statement of a function documents it."""
    first = body.statements[0]
    text = documentation(first)
    if text is None or body.inline:
        return None, body
    rest = body.statements[1:]
    return text, tree.Block(rest, body.inline, span=rest[0].span.to(rest[-1].span) if rest else first.span)


def documentation(statement: tree.Statement) -> str | None:
    if isinstance(statement, tree.Steps) and len(statement.steps) == 1:
        only = statement.steps[0]
        if isinstance(only, tree.Literal) and isinstance(only.value, str):
            return only.value
    return None
