"""Prints directives as a flat script: no parameters, loops or imports, one directive after
the other."""

from __future__ import annotations

from collections.abc import Iterable

from piperlang.elaborate.directive import Directive


def resolved(directives: Iterable[Directive]) -> str:
    return "".join(f"{directive}\n" for directive in directives)
