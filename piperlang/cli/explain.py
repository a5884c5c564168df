"""Explain a diagnostic code: its meaning, a script that fails with it, and the corrected script."""

from __future__ import annotations

import argparse

from piperlang.diagnostics import did_you_mean, error
from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.explain import page


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="for example P0302; without it, list all codes")


def run(options: argparse.Namespace) -> int:
    if options.code is None:
        for code, title in CODES.items():
            print(f"{code}  {title}")
        return 0
    code = options.code.upper()
    if code not in CODES:
        full = f"P{code.removeprefix('P').zfill(4)}"  # 302 for P0302
        near = f"did you mean `{full}`?" if full in CODES else did_you_mean(code, CODES)
        raise error("P0904", f"unknown code `{options.code}`", help=near or "`piperc explain` lists all codes")
    print(page(code).text.rstrip())
    return 0
