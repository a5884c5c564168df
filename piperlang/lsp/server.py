"""The language server protocol: answers an editor's messages from a `Script`.

Scripts run when they are checked, and may take seconds. So they run in other threads than the one that reads
messages, and diagnostics are published after a short pause in typing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from piperlang.diagnostics import Diagnostic
from piperlang.lsp.document import Document
from piperlang.source import Source, Span
from piperlang.version import __version__

PAUSE = 0.2
"""Seconds without typing after which a script is checked."""
NAME = "piperc"
START = lsp.Range(lsp.Position(0, 0), lsp.Position(0, 0))
T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """In a daemon thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, problem: Exception | None) -> None:
        if future.cancelled():
            return
        if problem is not None:
            future.set_exception(problem)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except Exception as found:
            problem = found
        loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=run, daemon=True).start()
    return await future


class Server(LanguageServer):
    def __init__(self) -> None:
        super().__init__(NAME, __version__, text_document_sync_kind=lsp.TextDocumentSyncKind.Incremental)
        self.waiting: asyncio.TimerHandle | None = None
        self.checking: asyncio.Task[None] | None = None

    def script(self, uri: str) -> Document:
        path = to_fs_path(uri) if uri.startswith("file:") else None
        document = self.workspace.text_documents.get(uri)
        return Document(document.source if document is not None else "", Path(path) if path else None)

    def offset(self, script: Document, position: lsp.Position) -> int:
        lines = script.text.splitlines(keepends=True)
        if position.line >= len(lines):
            return len(script.text)
        plain = self.workspace.position_codec.position_from_client_units(lines, position)
        line = lines[plain.line].rstrip("\n")
        return script.source.line_starts[plain.line] + min(plain.character, len(line))

    def range(self, span: Span) -> lsp.Range:
        """Positions as editors count them: from 0, usually in UTF-16 units."""
        lines = span.source.text.splitlines(keepends=True)
        plain = (lsp.Position(place.line - 1, place.column - 1) for place in (span.first, span.last))
        return self.workspace.position_codec.range_to_client_units(lines, lsp.Range(*plain))

    # ------------------------------------------------------------------------------------------------- diagnostics

    def check_soon(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
        self.waiting = asyncio.get_running_loop().call_later(PAUSE, self.check)

    def check(self) -> None:
        """Check all open scripts: one may import another. A running check used older texts."""
        if self.checking is not None:
            self.checking.cancel()
        self.checking = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        documents = dict(self.workspace.text_documents)
        scripts = {uri: self.script(uri) for uri in documents}
        texts = {script.path.resolve(): script.text for script in scripts.values() if script.path is not None}
        for uri, script in scripts.items():
            wrong, missing = await aside(lambda script=script: script.problems(texts))  # type: ignore[misc]
            found = [self.diagnostic(problem, lsp.DiagnosticSeverity.Error, script, uri) for problem in wrong]
            found += [self.diagnostic(problem, lsp.DiagnosticSeverity.Warning, script, uri) for problem in missing]
            version = documents[uri].version
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, found, version))

    def diagnostic(
        self, problem: Diagnostic, severity: lsp.DiagnosticSeverity, script: Document, uri: str
    ) -> lsp.Diagnostic:
        """A problem in an imported file is shown at the start of this one, with the location in that file."""
        here = problem.span is not None and problem.span.source is script.source
        also = [(label.span, label.text) for label in problem.also]
        if problem.span is not None and not here:
            also.insert(0, (problem.span, problem.message))
        lines = [problem.message, *([problem.label] if problem.label else []), *problem.notes]
        return lsp.Diagnostic(
            range=self.range(problem.span) if problem.span is not None and here else START,
            message="\n".join([*lines, *(f"help: {help}" for help in problem.helps)]),
            severity=severity,
            code=problem.code,
            source=NAME,
            related_information=[
                lsp.DiagnosticRelatedInformation(lsp.Location(place, self.range(span)), text)
                for span, text in also
                if (place := self.place(span.source, script, uri))
            ],
        )

    @staticmethod
    def place(source: Source, script: Document, uri: str) -> str | None:
        if source is script.source:
            return uri
        return from_fs_path(str(Path(source.name).absolute())) if Path(source.name).exists() else None


def server() -> Server:
    made = Server()
    _follow_documents(made)
    _answer_requests(made)
    return made


def _follow_documents(made: Server) -> None:
    @made.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        made.check()

    @made.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        made.check_soon()

    @made.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    async def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        made.check()

    @made.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        made.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(params.text_document.uri, []))
        made.check()


def _answer_requests(made: Server) -> None:
    @made.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=["[", ".", "=", "("]))
    async def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        script = made.script(params.text_document.uri)
        offset = made.offset(script, params.position)
        return [
            lsp.CompletionItem(
                label=found.display or found.text,
                detail=found.about or None,
                filter_text=found.text,
                sort_text=f"{i:04}",
                text_edit=lsp.TextEdit(made.range(script.source.span(offset - found.replaces, offset)), found.text),
            )
            for i, found in enumerate(await aside(lambda: script.completions(offset)))
        ]

    @made.feature(lsp.TEXT_DOCUMENT_HOVER)
    async def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        script = made.script(params.text_document.uri)
        offset = made.offset(script, params.position)
        text = await aside(lambda: script.about(offset))
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.PlainText, text)) if text else None

    @made.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    async def definition(params: lsp.DefinitionParams) -> lsp.Location | None:
        uri = params.text_document.uri
        script = made.script(uri)
        offset = made.offset(script, params.position)
        found = await aside(lambda: script.definition(offset))
        if found is None:
            return None
        path, span = found
        return lsp.Location(from_fs_path(str(path)) or "" if path else uri, made.range(span))

    @made.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    async def formatting(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        script = made.script(params.text_document.uri)
        text = await aside(script.formatted)
        if text is None or text == script.given:
            return []
        return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(script.text.count("\n") + 1, 0)), text)]
