"""`piperc lsp` as an editor uses it: a real process, spoken to by a client of the protocol."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient
from pygls.uris import from_fs_path

from tests.support import ROOT

SECONDS = 60.0
GOOD = (
    "from std.pipeline import loop, one_f_one_b\n\nmesh gpu = pp: 2\nloop(gpu, 2)\n"
    "split batch into 4 as mb\none_f_one_b(gpu, 2, 4)\n"
)


class Editor:
    """One open file, and what the server said of it last."""

    def __init__(self, client: LanguageClient, path: Path) -> None:
        self.client, self.uri, self.version = client, from_fs_path(str(path)) or "", 0
        self.told: asyncio.Queue[lsp.PublishDiagnosticsParams] = asyncio.Queue()

        @client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def told(params: lsp.PublishDiagnosticsParams) -> None:
            self.told.put_nowait(params)

    @property
    def document(self) -> lsp.TextDocumentIdentifier:
        return lsp.TextDocumentIdentifier(self.uri)

    async def opens(self, text: str) -> list[lsp.Diagnostic]:
        self.client.text_document_did_open(
            lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(self.uri, "piper", self.version, text))
        )
        return await self.diagnostics()

    async def types(self, text: str) -> list[lsp.Diagnostic]:
        """Instead of everything that is there."""
        self.version += 1
        self.client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(self.version, self.uri),
                [lsp.TextDocumentContentChangeWholeDocument(text)],
            )
        )
        return await self.diagnostics()

    async def diagnostics(self) -> list[lsp.Diagnostic]:
        found = await asyncio.wait_for(self.told.get(), SECONDS)
        assert found.uri == self.uri
        return list(found.diagnostics)


def edited(path: Path, use: Callable[[Editor], Awaitable[None]]) -> None:
    """Start the server, use it, and see it end as it should."""

    async def run() -> None:
        client = LanguageClient("test", "1")
        await client.start_io(sys.executable, "-m", "piperlang", "lsp", "--stdio")
        folder = from_fs_path(str(path.parent))
        await client.initialize_async(lsp.InitializeParams(capabilities=lsp.ClientCapabilities(), root_uri=folder))
        client.initialized(lsp.InitializedParams())
        await use(Editor(client, path))
        await client.shutdown_async(None)
        client.exit(None)
        process = client._server
        assert process is not None
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
        await client.stop()

    asyncio.run(run())


def place(text: str, word: str) -> lsp.Position:
    before = text[: text.index(word)]
    return lsp.Position(before.count("\n"), len(before.rpartition("\n")[2]))


def test_diagnostics_while_typing(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        assert await editor.opens(GOOD) == []
        (found,) = await editor.types(GOOD.replace("loop(gpu", "lop(gpu"))
        assert (found.code, found.source, found.severity) == ("P0201", "piperc", lsp.DiagnosticSeverity.Error)
        assert found.range == lsp.Range(lsp.Position(3, 0), lsp.Position(3, 3))
        assert "did you mean `loop`" in found.message
        (found,) = await editor.types("mesh gpu = \n")
        assert found.code == "P0102"
        (found,) = await editor.types("mesh gpu = pp: 2\n")  # not finished, and no mistake
        assert (found.code, found.severity) == ("P0404", lsp.DiagnosticSeverity.Warning)
        assert await editor.types(GOOD) == []
        # Columns are counted as the protocol counts: a character outside of the first plane is two.
        (found,) = await editor.types('print "\U0001f40d", nothing\n')
        assert found.range.start == lsp.Position(0, 12)
        editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(editor.document))
        assert await editor.diagnostics() == []

    edited(tmp_path / "a.piper", use)


def test_mistakes_in_an_imported_script_and_in_the_library(tmp_path: Path) -> None:
    (tmp_path / "mine.piper").write_text("def twice(x):\n    return x * nothing\n")
    text = 'from "./mine.piper" import twice\nlet a = twice(2)\n'

    async def use(editor: Editor) -> None:
        (found,) = await editor.opens(text)
        assert (found.code, found.range.start) == ("P0201", lsp.Position(0, 0))
        beside, *_ = found.related_information or ()
        assert beside.location.uri == from_fs_path(str(tmp_path / "mine.piper"))
        assert beside.location.range.start == lsp.Position(1, 15)
        # Repaired and saved there, this one is checked again.
        (tmp_path / "mine.piper").write_text("def twice(x):\n    return x * 2\n")
        editor.client.text_document_did_save(lsp.DidSaveTextDocumentParams(editor.document))
        assert await editor.diagnostics() == []
        # A call that fails inside of the library is the user's line.
        (found,) = await editor.types("from std.pipeline import loop\nmesh gpu = pp: 2\nloop(gpu, 3)\n")
        assert found.range.start.line == 2

    edited(tmp_path / "a.piper", use)


def test_unsaved_imports_and_lines_of_windows(tmp_path: Path) -> None:
    (tmp_path / "mine.piper").write_text("let width = 2\n")

    async def use(editor: Editor) -> None:
        assert await editor.opens('\ufefffrom "./mine.piper" import width\r\nlet a = width\r\n') == []
        other = from_fs_path(str(tmp_path / "mine.piper")) or ""
        editor.client.text_document_did_open(
            lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(other, "piper", 0, "let height = 2\n"))
        )
        told = {}
        while len(told) < 2:  # both are checked again
            found = await asyncio.wait_for(editor.told.get(), SECONDS)
            told[found.uri] = [diagnostic.code for diagnostic in found.diagnostics]
        assert told == {editor.uri: ["P0209"], other: []}
        asked = lsp.DocumentFormattingParams(editor.document, lsp.FormattingOptions(4, True))
        edits = await editor.client.text_document_formatting_async(asked)
        assert edits is not None
        assert [edit.new_text for edit in edits] == ['from "./mine.piper" import width\nlet a = width\n']

    edited(tmp_path / "a.piper", use)


def test_completion_hover_definition_and_formatting(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        client = editor.client

        async def completes(text: str) -> dict[str, lsp.CompletionItem]:
            await editor.types(text)
            at = lsp.Position(text.count("\n"), len(text.rpartition("\n")[2]))
            items = await client.text_document_completion_async(lsp.CompletionParams(editor.document, at))
            assert isinstance(items, list)
            return {item.filter_text or item.label: item for item in items}

        await editor.opens(GOOD)
        # What is wrong before does not keep names from being known.
        found = await completes("let x = nothing\nmesh gpu = pp: 2, dp: 2\npla")
        assert "place SELECTOR on" in str(found["place"].detail)
        found = await completes("mesh gpu = pp: 2, dp: 2\nplace [stage=0] on gpu[")
        assert {"pp=", "dp="} <= found.keys()
        found = await completes("from std.pipeline import one_f")
        edit = found["one_f_one_b"].text_edit
        assert isinstance(edit, lsp.TextEdit)
        assert (edit.range.start.character, edit.range.end.character) == (25, 30)

        await editor.types(GOOD)
        hover = await client.text_document_hover_async(lsp.HoverParams(editor.document, place(GOOD, "one_f_one_b(")))
        assert hover is not None
        assert isinstance(hover.contents, lsp.MarkupContent)
        assert hover.contents.value.startswith("one_f_one_b(gpu, ranks, microbatches)\n\nOne forward, one backward")
        hover = await client.text_document_hover_async(lsp.HoverParams(editor.document, place(GOOD, "split")))
        assert hover is not None
        assert "split" in str(hover.contents)
        nothing = await client.text_document_hover_async(lsp.HoverParams(editor.document, place(GOOD, "pp: 2")))
        assert nothing is None

        async def defined(word: str) -> lsp.Location:
            at = lsp.DefinitionParams(editor.document, place(GOOD, word))
            found = await client.text_document_definition_async(at)
            assert isinstance(found, lsp.Location)
            return found

        library = await defined("one_f_one_b(")
        assert library.uri.endswith("/pipeline.piper")
        assert (
            "def one_f_one_b"
            in Path(library.uri.removeprefix("file://")).read_text().splitlines()[library.range.start.line]
        )
        assert (await defined("gpu, 2)")).range.start == lsp.Position(2, 5)

        await editor.types("mesh   gpu=pp:2\n")
        options = lsp.FormattingOptions(4, True)
        edits = await client.text_document_formatting_async(lsp.DocumentFormattingParams(editor.document, options))
        assert edits is not None
        assert [edit.new_text for edit in edits] == ["mesh gpu = pp: 2\n"]
        await editor.types("mesh gpu = (\n")
        assert not await client.text_document_formatting_async(lsp.DocumentFormattingParams(editor.document, options))

    edited(tmp_path / "a.piper", use)


@pytest.mark.parametrize("text", ["", "\n", "é", "mesh gpu = pp: 2", "order on gpu:\n    ", "def f(x):\n", "[" * 50])
def test_any_text_gets_an_answer(text: str, tmp_path: Path) -> None:
    from piperlang.lsp.document import Document

    script = Document(text, tmp_path / "a.piper")
    for offset in range(len(text) + 1):
        assert all(candidate.text for candidate in script.completions(offset))
        assert isinstance(script.about(offset), str)
        found = script.definition(offset)
        assert found is None or found[0] is None  # nothing is imported
    wrong, _ = script.problems()
    assert (script.formatted() is None) == any(problem.code.startswith("P01") for problem in wrong)


NEOVIM = """
local client = vim.lsp.start_client({ name = "piperc", cmd = { PYTHON, "-m", "piperlang", "lsp" }, root_dir = "." })
vim.lsp.buf_attach_client(0, client)
local function diagnostics() return vim.diagnostic.get(0) end
vim.wait(60000, function() return #diagnostics() > 0 end, 20)
for _, found in ipairs(diagnostics()) do print(found.lnum, found.col, found.code) end
vim.api.nvim_buf_set_lines(0, 1, 2, false, { "let  a=1" })
vim.wait(60000, function() return #diagnostics() == 0 end, 20)
print("left", #diagnostics())
local document = { uri = vim.uri_from_bufnr(0) }
local asked = { textDocument = document, options = { tabSize = 4, insertSpaces = true } }
for _, answer in pairs(vim.lsp.buf_request_sync(0, "textDocument/formatting", asked, 60000)) do
  vim.lsp.util.apply_text_edits(answer.result, 0, "utf-16")
end
print(table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), "|"))
vim.lsp.stop_client(client)
vim.wait(60000, function() return vim.lsp.get_client_by_id(client) == nil end, 20)
vim.cmd("qa!")
"""


@pytest.mark.skipif(shutil.which("nvim") is None, reason="needs Neovim")
def test_in_neovim(tmp_path: Path) -> None:
    script, steps = tmp_path / "a.piper", tmp_path / "steps.lua"
    script.write_text("let b = 2\nlet a = nothing\n")
    steps.write_text(NEOVIM.replace("PYTHON", repr(sys.executable)))
    done = subprocess.run(
        ["nvim", "--headless", "--clean", str(script), "-c", f"luafile {steps}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=ROOT,
    )
    lines = (done.stdout + done.stderr).replace("\r", "").splitlines()
    assert [line.split() for line in lines] == [
        ["1", "8", "P0201"],
        ["left", "0"],
        ["let", "b", "=", "2|let", "a", "=", "1"],
    ]
