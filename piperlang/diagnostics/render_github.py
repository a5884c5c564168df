"""Diagnostics as workflow commands of GitHub Actions: each becomes an annotation at its line of a pull request."""

from __future__ import annotations

from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.diagnostic import Diagnostic
from piperlang.diagnostics.paths import relative
from piperlang.diagnostics.printable import printable


def github(d: Diagnostic) -> str:
    """`::error file=a.piper,line=9,col=7,endColumn=33,title=P0302%3A selector matches no nodes::message`."""
    properties: dict[str, str] = {}
    if d.span is not None:
        first, last = d.span.first, d.span.last
        properties = {"file": relative(d.span.source.name), "line": str(first.line), "endLine": str(last.line)}
        if first.line == last.line:  # columns are only understood within one line; the last one is part of the range
            properties |= {"col": str(first.column), "endColumn": str(max(first.column, last.column - 1))}
    properties["title"] = f"{d.code}: {CODES[d.code]}"
    fields = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::error {fields}::{_data(printable(paragraphs(d), keep=chr(10)))}"


def paragraphs(d: Diagnostic) -> str:
    """All texts of a diagnostic, as lines."""
    return "\n".join(
        [
            d.message + (f": {d.label}" if d.label else ""),
            *(f"note: {note}" for note in d.notes),
            *(f"help: {help}" for help in d.helps),
        ]
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
