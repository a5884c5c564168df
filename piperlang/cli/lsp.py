"""Serve an editor: diagnostics while you type, completion, what a directive or a function is, where it is defined,
formatting. The editor starts this command and speaks the language server protocol on its standard input and output."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from piperlang.interrupts import unwatched


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="what it does anyway; some editors say so")


def run(options: argparse.Namespace) -> int:
    from piperlang.lsp.server import server

    unwatched()
    logging.getLogger("pygls").setLevel(logging.ERROR)
    # A copy, because it is closed at the end, and we have standard output to flush then.
    server().start_io(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    return 0
