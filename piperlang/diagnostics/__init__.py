"""Errors as data: codes, diagnostics, suggestions, rendering, explanations."""

from piperlang.diagnostics.diagnostic import LIMIT, Diagnostic, Frame, Label, PiperError, error, noted_errors
from piperlang.diagnostics.suggest import did_you_mean, listed, nearest

__all__ = [
    "LIMIT",
    "Diagnostic",
    "Frame",
    "Label",
    "PiperError",
    "did_you_mean",
    "error",
    "listed",
    "nearest",
    "noted_errors",
]
