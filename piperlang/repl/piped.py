"""A session without a terminal: statements and commands from standard input, answers on standard output, diagnostics
on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.repl.commands import Quit
from piperlang.repl.reading import Grouped
from piperlang.repl.session import Session


def piped(session: Session, lines: Iterable[str], strict: bool, report: Callable[[Iterable[Diagnostic]], None]) -> int:
    """Run every input; return 1 if any was rejected. With `strict`, the first rejected one ends the session."""
    grouped, failed = Grouped(), 0

    def inputs() -> Iterable[str]:
        for line in lines:
            yield from grouped.take(line.rstrip("\r\n"))
        yield from grouped.rest()

    try:
        for text in inputs():
            try:
                answer = session.execute(text).text(session.screen.paint)
                if answer:
                    print(answer, flush=True)
            except PiperError as problem:
                failed = 1
                sys.stdout.flush()
                report(problem.diagnostics)
                sys.stderr.flush()
                if strict:
                    break
    except Quit:
        pass
    finally:
        session.close()
    return failed
