"""Where a job runs: the options --executor and --backend."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from piperlang.diagnostics import error
from piperlang.runtime.comm.registry import BACKENDS, Unusable, chosen

if TYPE_CHECKING:
    from piperlang.runtime.comm.backend import Backend


def add_executor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--executor",
        choices=("ray", "inline"),
        default="ray",
        help="Ray workers, or threads of this process (default: ray)",
    )


RUN_ON = {"gloo": "gloo runs on CPU", "nccl": "nccl on CUDA", "threads": "threads in one process"}
OF_WORKERS = tuple(name for name in BACKENDS if name != "threads")


def add_backend(parser: argparse.ArgumentParser, names: Sequence[str] = BACKENDS) -> None:
    where = ", ".join(RUN_ON[name] for name in names)
    parser.add_argument("--backend", choices=names, help=f"{where} (default: nccl if torch finds a GPU)")


def chosen_backend(options: argparse.Namespace) -> Backend:
    """Imports torch."""
    try:
        return chosen(options.executor, options.backend)
    except Unusable as problem:
        raise error(
            "P0902", f"cannot use `--backend {options.backend}`: {problem.why}", help="omit --backend, or use gloo"
        ) from None
