"""Diagnostics as SARIF 2.1.0, which code scanning services and editors read.

One run with one result per diagnostic, a rule per code that occurs with its page of `piperc explain` as help text, and
columns in code points as ours are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.diagnostic import Diagnostic
from piperlang.diagnostics.explain import page
from piperlang.diagnostics.paths import relative
from piperlang.diagnostics.render_github import paragraphs
from piperlang.source import Span
from piperlang.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(diagnostics: Sequence[Diagnostic]) -> dict[str, Any]:
    codes = sorted({d.code for d in diagnostics})
    driver = {
        "name": "piperc",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_rule(code) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(d, codes.index(d.code)) for d in diagnostics],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    text = page(code).text
    return {
        "id": code,
        "shortDescription": {"text": CODES[code]},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": "error"},
    }


def _result(d: Diagnostic, rule: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ruleId": d.code, "ruleIndex": rule, "level": "error", "message": {"text": paragraphs(d)}}
    if d.span is not None:
        found["locations"] = [_location(d.span)]
    also = [
        label for label in d.also if not label.span.source.library
    ]  # the library is not a file of the user's repository
    if also:
        found["relatedLocations"] = [
            {"id": number, "message": {"text": label.text}, **_location(label.span)}
            for number, label in enumerate(also)
        ]
    return found


def _location(span: Span) -> dict[str, Any]:
    first, last = span.first, span.last
    region = {"startLine": first.line, "startColumn": first.column, "endLine": last.line, "endColumn": last.column}
    return {"physicalLocation": {"artifactLocation": _artifact(span.source.name), "region": region}}


def _artifact(name: str) -> dict[str, str]:
    path = relative(name)
    if Path(path).is_absolute():
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(path.encode("utf-8", "surrogateescape")), "uriBaseId": "%SRCROOT%"}
