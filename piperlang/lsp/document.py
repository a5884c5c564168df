"""A script open in an editor, possibly unsaved or incomplete: diagnostics, completion, hover, definitions."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.directives import BY_WORD
from piperlang.elaborate.values import Function, Value
from piperlang.pipeline import outline
from piperlang.repl.answer import signature
from piperlang.repl.commands import library_function
from piperlang.repl.completion import Completion, complete
from piperlang.repl.reading import Grouped
from piperlang.repl.session import Session
from piperlang.repl.state import SessionSettings, State
from piperlang.source import Source, Span
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import newlines, parse

WORD = re.compile(r"[A-Za-z_]\w*")
BINDS = r"^\s*(?:let|param|mesh|def)\s+({})\b"
ATTEMPTS = 5
"""How many times failing statements are removed from a script before giving up."""


@dataclass(frozen=True)
class Document:
    given: str
    path: Path | None = None
    """None for text that was never saved: it can import the library only."""

    @cached_property
    def text(self) -> str:
        return newlines(self.given.removeprefix("\ufeff"))

    @cached_property
    def source(self) -> Source:
        return Source(str(self.path or "script"), self.text)

    # --------------------------------------------------------------------------------------------------- diagnostics

    def problems(self, texts: Mapping[Path, str] | None = None) -> tuple[list[Diagnostic], list[Diagnostic]]:
        """The diagnostics of `piperc check`: errors, or else what is missing, possibly because it is
        not written yet. `texts`: of other files that are open."""
        try:
            found = outline(self.source, self.path, say=lambda _: None, texts=texts)
            wrong, missing = found.problems, () if found.problems else found.outline.finish()
        except PiperError as problem:
            wrong, missing = problem.diagnostics, ()
        return [problem.seen_by_user() for problem in wrong], [problem.seen_by_user() for problem in missing]

    def formatted(self) -> str | None:
        """None if it does not parse."""
        try:
            return format_source(self.source)
        except PiperError:
            return None

    # ------------------------------------------------------------------------------------------------------ completion

    def completions(self, offset: int) -> list[Completion]:
        """For the statement at the cursor; the ones before it are evaluated."""
        *before, line = self.text[:offset].split("\n")
        grouped = Grouped()
        said = [statement for text in before for statement in grouped.take(text)]
        begun = "\n".join([*grouped.lines, line])
        return complete(_session(tuple(said), self.path), begun)

    # ----------------------------------------------------------------------------------------------------- words

    def word(self, offset: int) -> str:
        return next((found[0] for found in WORD.finditer(self.text) if found.start() <= offset <= found.end()), "")

    def _value(self, word: str) -> Value | None:
        grouped = Grouped()
        said = [statement for text in self.text.split("\n") for statement in grouped.take(text)]
        return _session((*said, *grouped.rest()), self.path).state.names.get(word)

    def about(self, offset: int) -> str:
        """The syntax of a directive, or the signature and documentation of a function."""
        word = self.word(offset)
        if word in BY_WORD:
            return BY_WORD[word].help()
        function = self._value(word) or library_function(word) if word else None
        if not isinstance(function, Function):
            return ""
        return f"{signature(function)}\n\n{(function.define.doc or '').strip()}".strip()

    def definition(self, offset: int) -> tuple[Path | None, Span] | None:
        """Where the name at the cursor is bound: the file (None for this one) and the position in it."""
        word = self.word(offset)
        bound = re.search(BINDS.format(word), self.text, re.MULTILINE) if word else None
        if bound is not None:
            return None, self.source.span(*bound.span(1))
        function = self._value(word) if word else None
        if isinstance(function, Function) and function.module.path is not None:
            return function.module.path, function.define.name.span
        return None


@lru_cache(maxsize=8)
def _session(said: tuple[str, ...], path: Path | None) -> Session:
    """A session state with the names that these statements bind, as far as they are valid."""
    session = Session()
    session.setting = replace(session.setting, path=path)
    session.statements = _right(tuple(statement for statement in said if _parses(statement)), session.setting)
    return session


def _parses(statement: str) -> bool:
    try:
        return not parse(Source("", statement + "\n"))[1]
    except PiperError:
        return False


def _right(statements: tuple[str, ...], setting: SessionSettings) -> tuple[str, ...]:
    """Without statements that use unknown names: a script with one of them is not evaluated at all."""
    for _ in range(ATTEMPTS):
        state = State(setting, statements)
        if state.interpreter is not None:
            return statements
        starts = [0, *accumulate(len(statement) + 1 for statement in statements)]
        wrong = {bisect_right(starts, problem.span.start) - 1 for problem in state.problems if problem.span is not None}
        statements = tuple(statement for i, statement in enumerate(statements) if i not in wrong)
    return ()
