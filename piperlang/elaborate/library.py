"""The standard library as files: which modules there are and what each defines."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from piperlang.resources import resource


@cache
def modules() -> dict[str, Path]:
    """The library modules, such as `std.pipeline`, by name."""
    return {f"std.{path.stem}": path for path in sorted(resource("stdlib").glob("*.piper"))}


@cache
def _exports() -> dict[str, str]:
    found: dict[str, str] = {}
    for module, path in modules().items():
        for name in re.findall(r"^def ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, module)
    return found


def exporting(name: str) -> str | None:
    """The library module that defines `name`, read only when a diagnostic needs it."""
    return _exports().get(name)
