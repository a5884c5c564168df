"""The language server protocol: an editor's messages in, what a `Script` says out. Everything is worked out when asked
for, but for diagnostics, which come when nothing has been typed for a moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path
from pygls.workspace import TextDocument

from piperlang import __version__
from piperlang.diagnostics import Diagnostic
from piperlang.lsp.document import Script
from piperlang.source import Source, Span

PAUSE = 0.2
"""Seconds without a key after which a script is checked."""
NAME = "piperc"
START = lsp.Range(lsp.Position(0, 0), lsp.Position(0, 0))


class Server(LanguageServer):
    def __init__(self) -> None:
        super().__init__(NAME, __version__, text_document_sync_kind=lsp.TextDocumentSyncKind.Incremental)
        self.waiting: dict[str, asyncio.TimerHandle] = {}

    def script(self, uri: str) -> Script:
        path = to_fs_path(uri) if uri.startswith("file:") else None
        return Script(self.workspace.get_text_document(uri).source, Path(path) if path else None)

    def offset(self, params: lsp.CompletionParams | lsp.HoverParams | lsp.DefinitionParams) -> int:
        return self.workspace.get_text_document(params.text_document.uri).offset_at_position(params.position)

    def range(self, span: Span) -> lsp.Range:
        """As editors count, from 0, and most of them in units of UTF-16."""
        first, last = span.first, span.last
        lines = span.source.text.splitlines(keepends=True)
        codec = self.workspace.position_codec
        plain = (lsp.Position(place.line - 1, place.column - 1) for place in (first, last))
        return codec.range_to_client_units(lines, lsp.Range(*plain))

    # ------------------------------------------------------------------------------------------------- diagnostics

    def check_soon(self, uri: str) -> None:
        self.forget(uri)
        self.waiting[uri] = asyncio.get_running_loop().call_later(PAUSE, self.check, uri)

    def forget(self, uri: str) -> None:
        timer = self.waiting.pop(uri, None)
        if timer is not None:
            timer.cancel()

    def check(self, uri: str) -> None:
        script = self.script(uri)
        severities = (lsp.DiagnosticSeverity.Error, lsp.DiagnosticSeverity.Warning)
        kinds = zip(script.problems(), severities, strict=True)
        found = [self.diagnostic(problem, severity, script, uri) for problems, severity in kinds for problem in problems]
        version = self.workspace.get_text_document(uri).version
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, found, version))

    def diagnostic(self, problem: Diagnostic, severity: lsp.DiagnosticSeverity, script: Script, uri: str) -> lsp.Diagnostic:
        """In another file, an import's, it is shown at the start of this one, and that place beside it."""
        here = problem.span is not None and problem.span.source.text == script.text
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
    def place(source: Source, script: Script, uri: str) -> str | None:
        if source.text == script.text:
            return uri
        return from_fs_path(str(Path(source.name).absolute())) if Path(source.name).exists() else None


def whole(document: TextDocument) -> lsp.Range:
    return lsp.Range(lsp.Position(0, 0), lsp.Position(len(document.lines), 0))


def server() -> Server:
    made = Server()

    @made.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        made.check(params.text_document.uri)

    @made.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        made.check_soon(params.text_document.uri)

    @made.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        """Scripts that are imported may be other ones now: all that are open are checked."""
        for uri in made.workspace.text_documents:
            made.check(uri)

    @made.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        made.forget(params.text_document.uri)
        made.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(params.text_document.uri, []))

    @made.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=["[", ".", "=", "("]))
    def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        document = made.workspace.get_text_document(params.text_document.uri)
        offset = made.offset(params)
        source = Source("", document.source)
        return [
            lsp.CompletionItem(
                label=found.display or found.text,
                detail=found.about or None,
                filter_text=found.text,
                sort_text=f"{i:04}",
                text_edit=lsp.TextEdit(made.range(source.span(offset - found.replaces, offset)), found.text),
            )
            for i, found in enumerate(made.script(params.text_document.uri).completions(offset))
        ]

    @made.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        text = made.script(params.text_document.uri).about(made.offset(params))
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.PlainText, text)) if text else None

    @made.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def definition(params: lsp.DefinitionParams) -> lsp.Location | None:
        found = made.script(params.text_document.uri).definition(made.offset(params))
        if found is None:
            return None
        path, span = found
        return lsp.Location(from_fs_path(str(path)) or "" if path else params.text_document.uri, made.range(span))

    @made.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        uri = params.text_document.uri
        text = made.script(uri).formatted()
        document = made.workspace.get_text_document(uri)
        return [] if text is None or text == document.source else [lsp.TextEdit(whole(document), text)]

    return made
