""" "Did you mean" suggestions: the valid word closest to a misspelled one."""

from __future__ import annotations

from collections.abc import Iterable

MANY = 500
LONGEST = 60
"""Maximum length of a misspelled word; longer ones are not compared."""


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The closest of `legal` to `word`, or None if nothing is close enough."""
    if len(word) > LONGEST:
        return None
    options = sorted({option for option in legal if option and len(option) <= LONGEST and not option.startswith("_")})
    for option in options:
        if option.lower() == word.lower():
            return option
    for option in options:  # two letters swapped: `form` is `from`, not `for`
        if len(option) == len(word) and sorted(option) == sorted(word) and distance(word, option, 1) == 1:
            return option
    for option in options:
        if len(option) > 1 and len(word) > 1 and (word.startswith(option) or option.startswith(word)):
            return option
    allowed = max(1, len(word) // 3)
    if len(options) > MANY:  # only those with the same beginning
        options = [option for option in options if option[0] == word[0]][:MANY]
    scored = [
        (distance(word, option, allowed), option) for option in options if abs(len(option) - len(word)) <= allowed
    ]
    best = min(scored, default=(allowed + 1, ""))
    if best[0] > allowed or best[0] >= len(word):
        return None
    return best[1]


def did_you_mean(word: str, legal: Iterable[str]) -> str | None:
    near = nearest(word, legal)
    return f"did you mean `{near}`?" if near else None


def distance(a: str, b: str, limit: int) -> int:
    """Edit distance (insert, delete, replace, swap of neighbors) from a to b; more than `limit` is `limit + 1`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row, older = row, [i], before
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
        before = last
        if min(row) > limit:
            return limit + 1
    return row[-1]


def listed(words: Iterable[str], last: str = "or") -> str:
    """`a`, `b` or `c`."""
    quoted = [f"`{word}`" for word in words]
    if len(quoted) < 2:
        return "".join(quoted)
    return f"{', '.join(quoted[:-1])} {last} {quoted[-1]}"
