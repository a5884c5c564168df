"""Run the language server: diagnostics while you type, completion, documentation of directives and functions, go to
definition, formatting. The editor starts this command and uses the language server protocol on stdin and stdout."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from piperlang.interrupts import unwatched


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="the default; accepted because some editors pass it")


def run(options: argparse.Namespace) -> int:
    from piperlang.lsp.server import server

    unwatched()
    logging.getLogger("pygls").setLevel(logging.ERROR)
    # A copy, because it is closed at the end, and we have standard output to flush then.
    server().start_io(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    return 0
