"""A session in a terminal: colors, completion, multi-line blocks, searchable history, suggestions
from it."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, get_common_complete_suffix
from prompt_toolkit.document import Document
from prompt_toolkit.filters import has_selection, is_searching
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import Lexer, PygmentsLexer, SimpleLexer
from prompt_toolkit.styles import Style

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.highlight import PiperLexer
from piperlang.progress.lines import counted
from piperlang.repl.commands import Quit
from piperlang.repl.completion import complete
from piperlang.repl.reading import INDENT, inputs, is_command, is_complete, next_indent
from piperlang.repl.session import Session
from piperlang.repl.state import UNPLACED
from piperlang.version import __version__

STYLE = Style.from_dict(
    {
        "prompt": "bold ansiblue",
        "bottom-toolbar": "noreverse ansibrightblack",
        "pygments.keyword": "bold ansiblue",
        "pygments.name.attribute": "ansicyan",
        "pygments.name.constant": "ansimagenta",
        "pygments.name.function": "ansigreen",
        "pygments.literal.string": "ansigreen",
        "pygments.literal.number": "ansimagenta",
        "pygments.comment": "italic ansibrightblack",
        "command": "bold ansiyellow",
    }
)


LONG = 400
"""Length of the input in characters above which completion only runs on Tab."""


class _Completing(Completer):
    def __init__(self, session: Session) -> None:
        self.session = session

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        if event.text_inserted and not document.current_line_before_cursor.strip():
            return  # do not complete an empty line unless Tab is pressed
        if len(document.text_before_cursor) > LONG and not event.completion_requested:
            return  # the parser would read the whole input at every key
        for one in complete(self.session, document.text_before_cursor):
            yield Completion(one.text, -one.replaces, display=one.display or one.text, display_meta=one.about)


class _Colours(Lexer):
    """Highlights statements as piperlang and commands in one color."""

    def __init__(self) -> None:
        self.statements, self.commands = PygmentsLexer(PiperLexer), SimpleLexer("class:command")

    def lex_document(self, document: Document) -> Callable[[int], StyleAndTextTuples]:
        return (self.commands if is_command(document.text) else self.statements).lex_document(document)


def history() -> History:
    """In the user's state folder; in memory if that is not writable."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    folder = Path(base) / "piperlang"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "history"
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=~has_selection & ~is_searching)
    def _enter(event: KeyPressEvent) -> None:
        """Ends the input if it is complete, or starts an indented line."""
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None  # accept the selected completion
            return
        document = buffer.document
        at_end = not document.text_after_cursor.strip()
        if at_end and is_complete(document.text_before_cursor):
            buffer.validate_and_handle()
            return
        buffer.insert_text("\n" + " " * next_indent(document.text_before_cursor))

    @keys.add("escape", "enter")
    def _accept(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("tab", filter=~is_searching)
    def _tab(event: KeyPressEvent) -> None:
        """Indents at the start of a line, completes elsewhere."""
        buffer = event.current_buffer
        if not buffer.document.current_line_before_cursor.strip() and "\n" in buffer.text:
            buffer.insert_text(" " * INDENT)
        elif buffer.complete_state:
            buffer.complete_next()
        else:
            _complete_now(buffer)

    @keys.add("backspace", filter=~has_selection & ~is_searching)
    def _backspace(event: KeyPressEvent) -> None:
        """Removes a whole indentation."""
        buffer = event.current_buffer
        before = buffer.document.current_line_before_cursor
        buffer.delete_before_cursor(INDENT if before and not before.strip() and len(before) % INDENT == 0 else 1)

    return keys


def _complete_now(buffer: Buffer) -> None:
    """Insert what all completions share at once: prompt_toolkit would look for it in the background, and forget it at
    the next key."""
    found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
    if len(found) == 1:
        buffer.apply_completion(found[0])
        return
    shared = get_common_complete_suffix(buffer.document, found)
    if shared:
        buffer.insert_text(shared)
    buffer.start_completion()


class Terminal:
    def __init__(
        self, session: Session, model: str | None, script: str | None, report: Callable[[Iterable[Diagnostic]], None]
    ) -> None:
        self.session, self.model, self.script, self.report = session, model, script, report
        self.warned = False
        """Whether the last input was a request to leave that was answered with the warning about unsaved statements."""
        complete(session, "x")  # reads the library, so that the first key is not delayed
        session.screen.width = lambda: shutil.get_terminal_size((80, 24)).columns
        self.prompt: PromptSession[str] = PromptSession(
            message=self._message,
            multiline=True,
            history=history(),
            lexer=_Colours(),
            style=STYLE,
            key_bindings=bindings(),
            completer=_Completing(session),
            complete_while_typing=True,
            auto_suggest=AutoSuggestFromHistory(),
            prompt_continuation=lambda width, line, wrapped: " " * max(0, width - 4) + "... ",
            bottom_toolbar=self._toolbar,
            reserve_space_for_menu=6,
            enable_suspend=True,
        )

    def _message(self) -> Any:
        return [("class:prompt", f"piper:{len(self.session.statements) + 1}> ")]

    def _toolbar(self) -> str:
        session = self.session
        parts = [
            self.model or "no model",
            counted(len(session.statements), "statement") + ("" if not session.unsaved else ", not saved"),
        ]
        unplaced = sum(x.code == UNPLACED for x in session.state.missing)
        if unplaced:
            parts.append(f"{unplaced} chunk{'s' if unplaced != 1 else ''} not placed")
        elif session.model is not None and session.state.estimate is not None:
            devices = len(session.state.estimate.memory)
            parts.append(f"{devices} device{'s' if devices != 1 else ''}")
        return " " + " · ".join(parts)

    def _greeting(self) -> str:
        loaded = f", {counted(len(self.session.statements), 'statement')} of {self.script}" if self.script else ""
        what = self.model or "no model: orders and placements only"
        return f"piperlang {__version__}, {what}{loaded}\n`:help` lists the commands, Tab completes, Ctrl-D quits."

    def run(self) -> int:
        print(self._greeting())
        while True:
            try:
                text = self.prompt.prompt()
            except KeyboardInterrupt:  # clears the line
                continue
            except EOFError:
                if self._may_leave("Ctrl-D"):
                    return 0
                continue
            try:
                self._execute(text)
                self.session.cut_ahead()
                self.warned = self.warned and not text.strip()
            except Quit:
                if self._may_leave("`:quit`"):
                    return 0

    def _may_leave(self, again: str) -> bool:
        """With unsaved statements, leaving needs a second request."""
        if self.warned or not self.session.unsaved or not self.session.statements:
            return True
        self.warned = True
        print(f"{counted(len(self.session.statements), 'statement')} not saved: `:save FILE`, or {again} again to quit")
        return False

    def _execute(self, text: str) -> None:
        try:
            for one in inputs(text.rstrip()):
                answer = self.session.execute(one).text(self.session.screen.paint, self.session.screen.width())
                if answer:
                    print(answer)
        except PiperError as problem:
            sys.stdout.flush()
            self.report(problem.diagnostics)
        except KeyboardInterrupt:
            print("interrupted")
        except Quit:
            raise
        except Exception:  # a bug of piperc must not end the user's session
            traceback.print_exc()
            print(
                "\nThis is a bug in piperc, not in your script. Please report it with the lines above.", file=sys.stderr
            )
