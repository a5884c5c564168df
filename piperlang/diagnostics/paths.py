"""Paths for machine-readable output: relative to the current folder if inside it, with forward slashes."""

from __future__ import annotations

from pathlib import Path


def relative(name: str) -> str:
    path = Path(name)
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix() if path.is_absolute() else path.as_posix()
    except (OSError, ValueError):
        return path.as_posix()
