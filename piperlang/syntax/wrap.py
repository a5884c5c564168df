"""One logical line as text: on one line if it fits, else broken at its brackets with one item per line."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lark import Token

from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.spacing import CLOSERS, OPENERS, join, nesting
from piperlang.syntax.tokens import end, start

WIDTH = 100
INDENT = "    "


@dataclass
class _Item:
    """One item of a bracket, between two commas."""

    tokens: list[Token] = field(default_factory=list)
    above: list[str] = field(default_factory=list)
    beside: str = ""


def wrap(source: Source, tokens: Sequence[Token], comments: Sequence[Token], depth: int) -> list[str]:
    """The line's text; `comments` are those inside it, before its last token."""
    tokens = without_last_comma(tokens)
    text = join(tokens, tokens)
    if not comments and ("\n" in text or len(INDENT * depth) + len(text) <= WIDTH):
        return [INDENT * depth + text]
    lines = _break(source, tokens, tokens, comments, depth)
    missing = _missing(comments, lines)
    if not missing:
        return lines
    # A comment that belongs to no item of a broken bracket (two brackets in a row, empty brackets) goes above the line,
    # which then may not need to be broken.
    left = Counter(missing)
    others = []
    for comment in comments:
        left[comment_text(comment)] -= 1
        if left[comment_text(comment)] < 0:
            others.append(comment)
    return [*(INDENT * depth + text for text in missing), *wrap(source, tokens, others, depth)]


def _missing(comments: Sequence[Token], lines: list[str]) -> list[str]:
    wanted = Counter(comment_text(comment) for comment in comments)
    wanted.subtract(str(token) for token in grammar.tokens("\n".join(lines)) if token.type == "COMMENT")
    return list(wanted.elements())


def without_last_comma(tokens: Sequence[Token]) -> list[Token]:
    """On one line, brackets and lists of steps have no trailing comma."""
    kept: list[Token] = []
    for i, token in enumerate(tokens):
        after = tokens[i + 1] if i + 1 < len(tokens) else None
        if token == "," and (after is None or after in CLOSERS):
            continue
        kept.append(token)
    return kept


def _break(
    source: Source,
    tokens: Sequence[Token],
    line: Sequence[Token],
    comments: Sequence[Token],
    depth: int,
    level: int = 0,
) -> list[str]:
    """`level`: how many brackets are broken already around the tokens."""
    opening, closing = _widest(tokens, comments)
    if opening < 0:
        return [INDENT * depth + join(tokens, line, level)]
    inner = _between(comments, tokens[opening], tokens[closing])
    items, loose = _items(source, tokens[opening : closing + 1], inner)
    own = {start(c) for c in loose}
    nested = [c for c in inner if start(c) not in own]
    head = join(tokens[: opening + 1], line, level)
    tail = join(tokens[closing:], line, level + 1)
    lines = [INDENT * depth + head]
    separator = "," if _takes_last_comma(tokens, opening, closing, items) else ""
    for i, item in enumerate(items):
        lines += [INDENT * (depth + 1) + comment for comment in item.above]
        within = _between(nested, item.tokens[0], item.tokens[-1])
        text = INDENT * (depth + 1) + join(item.tokens, line, level + 1)
        fits = len(text) < WIDTH and not within
        body = [text] if fits else _break(source, item.tokens, line, within, depth + 1, level + 1)
        body[-1] += separator if i == len(items) - 1 else ","
        body[-1] += f"  {item.beside}" if item.beside else ""
        lines += body
    lines += [INDENT * (depth + 1) + comment for comment in _after_last(source, tokens[closing], items, inner, loose)]
    return [*lines, INDENT * depth + tail]


def _between(comments: Sequence[Token], first: Token, last: Token) -> Sequence[Token]:
    return comments[bisect_right(comments, start(first), key=start) : bisect_left(comments, start(last), key=start)]


def _widest(tokens: Sequence[Token], comments: Sequence[Token]) -> tuple[int, int]:
    """The outermost bracket to break: one that holds a comment, else the longest."""
    found: list[tuple[bool, int, int, int]] = []
    stack: list[int] = []
    for i, token in enumerate(tokens):
        if token in OPENERS:
            stack.append(i)
        elif token in CLOSERS:
            first = stack.pop()
            if not stack and i > first + 1:
                held = bool(_between(comments, tokens[first], token))
                found.append((held, i - first, -first, i))
    if not found:
        return -1, -1
    _, _, first, last = max(found)
    return -first, last


def _items(source: Source, group: Sequence[Token], comments: Sequence[Token]) -> tuple[list[_Item], list[Token]]:
    """The items of a bracket, each with its comments; and the comments that no nested bracket holds."""
    items = [_Item()]
    comprehension = _has_for(group[1:-1])  # the commas of `for a, b in` do not separate items
    level = 0
    nested: list[tuple[Token, Token]] = []
    opened = group[0]
    ends: list[int] = []
    for token in group[1:-1]:
        if token in OPENERS:
            opened = token if level == 0 else opened
            level += 1
        elif token in CLOSERS:
            level -= 1
            if level == 0:
                nested.append((opened, token))
        if token == "," and level == 0 and not comprehension:
            ends.append(end(token))
            items.append(_Item())
        else:
            items[-1].tokens.append(token)
    items = [item for item in items if item.tokens]
    within = {start(c) for first, last in nested for c in _between(comments, first, last)}
    loose = [c for c in comments if start(c) not in within]
    for comment in loose:
        _attach(source, comment, items, ends)
    return items, loose


def _has_for(tokens: Sequence[Token]) -> bool:
    level = 0
    for token in tokens:
        level += nesting(token)
        if level == 0 and token == "for":
            return True
    return False


def _attach(source: Source, comment: Token, items: list[_Item], ends: list[int]) -> None:
    at = start(comment)
    line_start = source.text.rfind("\n", 0, at) + 1
    i = bisect_right(items, at, key=lambda item: start(item.tokens[0])) - 1
    if i >= 0:  # the item before the comment takes it if the two share a line
        over = max(end(items[i].tokens[-1]), ends[i] if i < len(ends) and ends[i] <= at else 0)
        if line_start <= over <= at and not items[i].beside and source.text[line_start:at].strip():
            items[i].beside = comment_text(comment)
            return
    following = bisect_right(items, at, key=lambda item: end(item.tokens[-1]))
    if following < len(items):
        items[following].above.append(comment_text(comment))


def _after_last(
    source: Source, closing: Token, items: list[_Item], comments: Sequence[Token], loose: list[Token]
) -> list[str]:
    """Comments on their own lines after the last item."""
    last = items[-1]
    after = [c for c in loose if end(last.tokens[-1]) <= start(c) < start(closing)]
    return [comment_text(c) for i, c in enumerate(after) if not (i == 0 and last.beside == comment_text(c))]


def _takes_last_comma(tokens: Sequence[Token], opening: int, closing: int, items: list[_Item]) -> bool:
    """Lists, calls, selectors and sets may end in a comma; an index, a grouping and a comprehension may not."""
    if len(items) > 1:
        return True
    inside = items[0].tokens
    if _has_for(inside):
        return False
    called = opening > 0 and tokens[opening - 1].type in ("NAME", "RPAR", "RSQB")
    if tokens[opening] == "(":
        return called
    return not called or inside[0].type == "KEY"


def comment_text(comment: Token) -> str:
    text = str(comment).rstrip()
    return f"# {text[1:]}" if len(text) > 1 and text[1] not in " #!-=" else text
