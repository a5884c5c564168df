"""torch, numpy and Ray, which run models, are an extra of the package. Everything else works without them."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from piperlang.diagnostics import error, listed

INSTALL = "pip install 'piperlang[run]'"
OLDEST = {"torch": (2, 11), "ray": (2, 40), "numpy": (1, 26), "safetensors": (0, 4)}
"""The packages of the extra, with the oldest supported version of each."""


def check(options: argparse.Namespace) -> None:
    """Reject a command early if its packages are not installed."""
    missing = [name for name in wanted(options) if not installed(name)]
    if missing:
        raise error(
            "P0905",
            f"{listed(missing, 'and')} {'is' if len(missing) == 1 else 'are'} not installed",
            help=f"{INSTALL} installs the packages for tracing and training; `piperc doctor` checks this machine",
        )


def wanted(options: argparse.Namespace) -> list[str]:
    """The packages that the command line needs: torch for models, Ray for workers."""
    given = vars(options)
    if given.get("command") in ("ckpt", "export", "import"):
        return ["torch", "numpy", "safetensors"]
    first = [given.get("model"), *(given.get("scripts") or ())[:1], *(given.get("files") or ())[:1]]
    if given.get("plan") is None and not any(str(name).endswith(".py") for name in first):
        return []
    return ["torch", "numpy", "safetensors", *(["ray"] if given.get("executor") == "ray" else [])]


def installed(name: str) -> bool:
    return find_spec(name) is not None
