"""A session as front ends use it: statements and commands in, answers out."""

from __future__ import annotations

from dataclasses import replace

from piperlang.diagnostics import PiperError
from piperlang.repl.commands import COMMANDS, run
from piperlang.repl.core import Screen, SessionCore
from piperlang.repl.reading import is_command
from piperlang.repl.show import Shown

__all__ = ["Screen", "Session"]


class Session(SessionCore):
    def execute(self, text: str) -> Shown:
        """Run a command or statements. Errors are raised, and leave the state unchanged."""
        if self._cutting is not None:
            self._cutting.join()
        try:
            if is_command(text):
                return run(self, text.strip())
            return self.apply(text)
        except PiperError as problem:
            self.last_code = problem.diagnostics[0].code if problem.diagnostics else self.last_code
            hint = self._command_meant(text)
            if hint is None:
                raise
            raise PiperError(*(replace(x, helps=(hint,)) for x in problem.diagnostics)) from None

    def _command_meant(self, text: str) -> str | None:
        """A command without its colon: `undo`, `undo 2`."""
        word, _, rest = text.strip().partition(" ")
        if is_command(text) or "\n" in text.strip() or rest.lstrip().startswith(("=", "(")) or word in self.state.names:
            return None
        command = ":quit" if word == "exit" else f":{word}"
        return f"commands start with a colon: `{f'{command} {rest}'.strip()}`" if command in COMMANDS else None
