"""Paths as programs want them: relative to the current folder where they are inside it, with forward slashes."""

from __future__ import annotations

from pathlib import Path


def relative(name: str) -> str:
    path = Path(name)
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix() if path.is_absolute() else path.as_posix()
    except (OSError, ValueError):
        return path.as_posix()
