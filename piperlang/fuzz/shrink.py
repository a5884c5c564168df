"""Reduces a failing script: removes lines while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

LIMIT = 300
"""Maximum number of scripts to try."""


def shrink(script: str, fails: Callable[[str], bool], limit: int = LIMIT) -> str:
    """Remove whole statements first (an order with all its steps), then single steps; many at once, then fewer."""
    left = [limit]

    def still(blocks: Sequence[Sequence[str]]) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(_joined(blocks))

    blocks = _blocks(script)
    before = None
    while before != blocks and left[0] > 0:
        before = blocks
        blocks = _fewer(blocks, still)
        for i in range(len(blocks)):
            head, steps = blocks[i][:1], [[line] for line in blocks[i][1:]]

            def with_steps(
                kept: Sequence[Sequence[str]],
                i: int = i,
                head: Sequence[str] = head,
                among: Sequence[Sequence[str]] = blocks,
            ) -> bool:
                return bool(kept) and still(
                    [*among[:i], [*head, *(line for step in kept for line in step)], *among[i + 1 :]]
                )

            blocks = [
                *blocks[:i],
                [*head, *(line for step in _fewer(steps, with_steps) for line in step)],
                *blocks[i + 1 :],
            ]
    return _joined(blocks)


def _blocks(script: str) -> list[list[str]]:
    """Statements, each with the lines indented under it."""
    found: list[list[str]] = []
    for line in script.splitlines():
        if line.startswith(" ") and found:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def _joined(blocks: Sequence[Sequence[str]]) -> str:
    return "".join(f"{line}\n" for block in blocks for line in block)


def _fewer(parts: list[list[str]], still: Callable[[Sequence[Sequence[str]]], bool]) -> list[list[str]]:
    """Remove runs of parts, long ones first, from the end."""
    size = max(1, len(parts) // 2)
    while True:
        for start in reversed(range(0, len(parts), size)):
            fewer = parts[:start] + parts[start + size :]
            if len(fewer) < len(parts) and still(fewer):
                parts = fewer
        if size == 1:
            return parts
        size //= 2
