"""Locates grammar/ and stdlib/: next to the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
"""As Python writes it in tracebacks, symbolic links included."""


def resource(*parts: str) -> Path:
    """The file or folder `parts`, of an installed wheel (force-included) or of the checkout."""
    inside = PACKAGE.joinpath("_data", *parts)
    return inside if inside.exists() else PACKAGE.parent.joinpath(*parts)
