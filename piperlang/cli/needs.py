"""What runs a model is an extra of the package: torch, numpy and Ray. Everything else works without them."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from piperlang.diagnostics import error, listed

INSTALL = "pip install 'piperlang[run]'"
OLDEST = {"torch": (2, 11), "ray": (2, 40), "numpy": (1, 26)}
"""What the extra installs, and since which version each is known to work."""


def check(options: argparse.Namespace) -> None:
    """Refuse a command whose packages are not installed before it does anything else."""
    missing = [name for name in wanted(options) if not installed(name)]
    if missing:
        raise error(
            "P0905",
            f"{listed(missing, 'and')} {'is' if len(missing) == 1 else 'are'} not installed",
            help=f"{INSTALL} installs what traces and trains models; `piperc doctor` tells what this machine has",
        )


def wanted(options: argparse.Namespace) -> list[str]:
    """Packages for what the command line asks for: torch wherever there is a model, Ray where there are workers."""
    given = vars(options)
    first = [given.get("model"), *(given.get("scripts") or ())[:1], *(given.get("files") or ())[:1]]
    if given.get("plan") is None and not any(str(name).endswith(".py") for name in first):
        return []
    return ["torch", "numpy", *(["ray"] if given.get("executor") == "ray" else [])]


def installed(name: str) -> bool:
    return find_spec(name) is not None
