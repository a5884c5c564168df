"""From raw tokens to top-level statements: newlines, indentation, brackets.

Lark's own Indenter gives no position with a bad dedent, fails without a final newline and counts tabs silently; and a
parser that is handed a whole file can report one error. This layer cuts the file into top-level statements first, so
that each is parsed alone and reports its own error at its own line.

It makes NEWLINE, INDENT, DEDENT, and KEY (a word before `=` or `!=` directly inside `[`), and it reports what
the grammar cannot report well: tabs, inconsistent indentation, mismatched brackets, nesting that is too deep, and input
that is too long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lark import Token

from piperlang.diagnostics import LIMIT, Diagnostic, Label
from piperlang.source import Source, Span
from piperlang.syntax.tokens import end, made, retyped, span, start
from piperlang.syntax.words import KEYWORDS, NEVER_IN_BRACKETS

MAX_DEPTH = 60
"""Limit on nested brackets and on nested blocks, so that later passes over the tree may use recursion."""
MAX_TOKENS = 100_000
MAX_STATEMENTS = 15_000

OPEN = {"(": ")", "[": "]", "{": "}"}
CLOSE = {")", "]", "}"}


@dataclass
class StatementTokens:
    """The tokens of one top-level statement, and the first thing wrong with their layout."""

    tokens: list[Token] = field(default_factory=list)
    problem: Diagnostic | None = None


@dataclass
class TokenLayout:
    statements: list[StatementTokens]
    comments: list[Token]


def lay_out(source: Source, raw: Iterable[Token]) -> TokenLayout:
    layer = _Layer(source)
    for token in raw:
        layer.take(token)
        if layer.full:
            break
    layer.finish()
    return TokenLayout(layer.statements, layer.comments)


class _Layer:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.statements: list[StatementTokens] = []
        self.comments: list[Token] = []
        self.statement = StatementTokens()
        self.indents = [0]
        self.brackets: list[Token] = []
        self.line_start: Token | None = None
        """The line end before the current token, while no token of its line was taken yet."""
        self.fresh = True
        self.count = 0
        self.rereads = 0
        self.full = False

    def take(self, token: Token) -> None:
        kind = token.type
        self.count += 1
        if self.count > MAX_TOKENS:
            self._too_long(token)
            return
        if kind == "LINE_END":
            self.line_start, self.fresh = token, True
            return
        if kind == "COMMENT":
            self.comments.append(token)
            return
        if self.fresh:
            self.fresh = False
            self._begin_line(token)
        self._add(token)

    def _too_long(self, token: Token) -> None:
        """Replaces any other problem of the statement that exceeds the limit."""
        self.full = True
        self.statement.tokens.append(token)
        self.statement.problem = None
        self._complain(
            "P0108",
            "the script is too long",
            token,
            f"at most {MAX_STATEMENTS:,} statements, and {MAX_TOKENS:,} tokens, comments and line ends",
            help="split it into several files and `import` them",
        )

    def _add(self, token: Token) -> None:
        text = str(token)
        if text in OPEN:
            self._open(token)
        elif text in CLOSE:
            self._close(token)
        elif text in ("=", "!=") and self.brackets and self.brackets[-1] == "[":
            self._make_key()
        elif (
            self.statement.tokens
            and token.type != "NAME"
            and text in KEYWORDS
            and self.statement.tokens[-1].type == "DOT"
        ):
            token = retyped(token, "NAME")  # after a dot every word is a name: model.order
        self.statement.tokens.append(token)

    def _make_key(self) -> None:
        before = self.statement.tokens
        if len(before) > 1 and before[-2].type in ("LSQB", "COMMA") and before[-1].isidentifier():
            before[-1] = retyped(before[-1], "KEY")

    # ------------------------------------------------------------------------------------------------ brackets

    def _open(self, token: Token) -> None:
        self.brackets.append(token)
        if len(self.brackets) == MAX_DEPTH:
            self._complain(
                "P0107",
                "brackets are nested too deeply",
                token,
                f"{MAX_DEPTH} brackets are open here",
                help="name the inner parts with `let`",
            )

    def _close(self, token: Token) -> None:
        if not self.brackets:
            self._complain(
                "P0105",
                f"unmatched `{token}`",
                token,
                "no bracket is open here",
                help=f"delete `{token}`, or add the opening bracket",
            )
            return
        opened = self.brackets.pop()
        if OPEN[str(opened)] != token:
            self._complain(
                "P0105",
                f"`{token}` does not close `{opened}`",
                token,
                f"expected `{OPEN[str(opened)]}`",
                also=(Label(span(self.source, opened), "opened here"),),
            )

    def _unclosed(self) -> None:
        opened = self.brackets[-1]
        if self.statement.problem is not None or self.rereads > LIMIT:
            self.brackets.clear()
            return
        string = next((t for t in self.statement.tokens if t.type == "BAD_STRING" and start(t) > start(opened)), None)
        if string is not None:  # the closing bracket is inside the unterminated string
            self._complain(
                "P0106", "unterminated string", string, "no closing quote on this line", help=f"add `{string[0]}`"
            )
        self._complain(
            "P0105",
            f"`{opened}` is never closed",
            opened,
            f"no closing `{OPEN[str(opened)]}` found",
            help=f"add `{OPEN[str(opened)]}`",
        )
        self.brackets.clear()
        self._reread_after(opened)

    def _reread_after(self, opened: Token) -> None:
        """Read the lines inside an unclosed bracket again, from the first one that starts in column one."""
        swallowed = self.statement.tokens
        back = next((i for i, t in enumerate(swallowed) if start(t) > start(opened) and self._column_one(t)), None)
        self.rereads += 1
        if back is None:
            return
        tail = swallowed[back:]
        del swallowed[back:]
        self._flush()
        for token in tail:
            before = self.source.text.rfind("\n", 0, start(token))
            blank = self.source.text[before + 1 : start(token)]
            if not blank.strip(" \t"):
                self.line_start, self.fresh = Token("LINE_END", "\n" + blank, before), True
            self.take(retyped(token, "NAME") if token.type == "KEY" else token)

    def _column_one(self, token: Token) -> bool:
        return start(token) == 0 or self.source.text[start(token) - 1] == "\n"

    # -------------------------------------------------------------------------------------------------- lines

    def _begin_line(self, token: Token) -> None:
        if self.brackets:
            if str(token) not in NEVER_IN_BRACKETS or self._is_key(token):
                return
            self._unclosed()
        blank = self.line_start.rpartition("\n")[2] if self.line_start is not None else self.source.text[: start(token)]
        at = start(token) - len(blank)
        if "\t" in blank:
            tab = at + blank.index("\t")
            self._complain(
                "P0103",
                "tab in indentation",
                Span(self.source, tab, tab + 1),
                "the width of a tab is ambiguous",
                help="indent with four spaces",
            )
        width = len(blank.replace("\t", "    "))
        if width == 0:
            self._begin_statement(token)
        else:
            self._indent(token, width)

    def _is_key(self, token: Token) -> bool:
        """Inside a selector even a keyword can be a key: `[order=1]`. No statement has `=` after its first word."""
        behind = self.source.text[end(token) : end(token) + 40].lstrip()
        return behind.startswith(("=", "!="))

    def _begin_statement(self, token: Token) -> None:
        if self.statement.tokens:
            self._newline()
            self._dedent_to(0, token)
            if str(token) in ("elif", "else") and self.statement.tokens[0] == "if":
                return
        self._flush()

    def _indent(self, token: Token, width: int) -> None:
        if self.statement.tokens:
            self._newline()
        if width > self.indents[-1]:
            self.indents.append(width)
            self.statement.tokens.append(Token.new_borrow_pos("INDENT", "", token))
            if len(self.indents) > MAX_DEPTH:
                self._complain(
                    "P0107",
                    "blocks are nested too deeply",
                    token,
                    f"{MAX_DEPTH} blocks are open here",
                    help="move the inner part to a function",
                )
        else:
            self._dedent_to(width, token)

    def _dedent_to(self, width: int, token: Token) -> None:
        while width < self.indents[-1]:
            self.indents.pop()
            self.statement.tokens.append(Token.new_borrow_pos("DEDENT", "", token))
        if width != self.indents[-1]:
            levels = ", ".join(str(level) for level in self.indents)
            self._complain(
                "P0104",
                "this line's indentation does not match any block",
                token,
                f"{width} spaces; the enclosing blocks are indented by {levels}",
                help="align the line with the block it belongs to",
            )
            self.indents.append(width)

    def _newline(self) -> None:
        last = self.statement.tokens[-1]
        self.statement.tokens.append(made("NEWLINE", end(last)))

    # ------------------------------------------------------------------------------------------------ statements

    def _flush(self) -> None:
        if self.statement.tokens:
            self.statements.append(self.statement)
            if len(self.statements) == MAX_STATEMENTS and not self.full:
                self._too_long(self.statement.tokens[-1])
        self.statement = StatementTokens()
        self.indents = [0]
        self.brackets.clear()

    def finish(self) -> None:
        if self.brackets and self.statement.tokens and not self.full:
            self._unclosed()
        if self.statement.tokens:
            self._newline()
            self._dedent_to(0, made("END", len(self.source.text)))
        self._flush()

    def _complain(
        self, code: str, message: str, where: Token | Span, label: str, *, help: str = "", also: tuple[Label, ...] = ()
    ) -> None:
        if self.statement.problem is None:
            at = where if isinstance(where, Span) else span(self.source, where)
            self.statement.problem = Diagnostic(code, message, at, label, also, helps=(help,) if help else ())
