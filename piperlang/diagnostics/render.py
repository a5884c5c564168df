"""Diagnostics as text: `full` for people, `concise` for grep, `json` for programs, `github` and `sarif` for tools
that show them next to the code."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from piperlang.diagnostics.diagnostic import LIMIT, Diagnostic, Label
from piperlang.diagnostics.printable import printable
from piperlang.diagnostics.render_github import github
from piperlang.diagnostics.render_sarif import sarif
from piperlang.source import Source, Span

FORMATS = ("full", "concise", "json", "github", "sarif")
FOR_PROGRAMS = ("json", "github", "sarif")
WIDTH = 140
"""Maximum number of quoted characters of a source line."""


@dataclass(frozen=True)
class Paint:
    """Terminal colors, or none."""

    on: bool = False

    def __call__(self, text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.on and text else text

    def error(self, text: str) -> str:
        return self(text, "1", "31")

    def frame(self, text: str) -> str:
        return self(text, "1", "34")

    def help(self, text: str) -> str:
        return self(text, "1", "32")

    def bold(self, text: str) -> str:
        return self(text, "1")


def render(diagnostics: Iterable[Diagnostic], format: str = "full", paint: Paint | None = None) -> str:
    every = [diagnostic.seen_by_user() for diagnostic in diagnostics]
    if format in FOR_PROGRAMS:
        return _for_programs(_first_of_each_file(every), format)
    one = concise if format == "concise" else full
    parts = [one(_printable(d), paint or Paint()) for d in every[:LIMIT]]
    if len(every) > LIMIT:
        parts.append("... and more")
    return ("\n" if format == "concise" else "\n\n").join(parts)


def _for_programs(diagnostics: list[Diagnostic], format: str) -> str:
    if format == "github":
        return "\n".join(map(github, diagnostics))
    if format == "sarif":
        return json.dumps(sarif(diagnostics), indent=2)
    return json.dumps({"diagnostics": [as_json(d) for d in diagnostics]}, indent=2)


def _first_of_each_file(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """Limit the diagnostics per file: one script of a folder must not hide the others."""
    seen = Counter[str]()
    found = []
    for d in diagnostics:
        name = d.span.source.name if d.span is not None else ""
        seen[name] += 1
        if seen[name] <= LIMIT or not name:
            found.append(d)
    return found


def _printable(d: Diagnostic) -> Diagnostic:
    """Escape terminal control characters: messages may quote scripts."""
    return replace(
        d,
        message=printable(d.message),
        label=printable(d.label),
        also=tuple(Label(x.span, printable(x.text)) for x in d.also),
        notes=tuple(map(printable, d.notes)),
        helps=tuple(map(printable, d.helps)),
    )


def concise(d: Diagnostic, paint: Paint) -> str:
    where = f"{printable(str(d.span))}: " if d.span else ""
    more = f" ({'; '.join(x for x in (d.label, *d.notes) if x)})" if d.label or d.notes else ""
    helps = "".join(f" help: {text}" for text in d.helps)
    return f"{where}{paint.error(d.code)} {d.message}{more}{helps}"


def as_json(d: Diagnostic) -> dict[str, Any]:
    return {
        "code": d.code,
        "severity": "error",
        "message": d.message,
        **_place(d.span),
        "label": d.label,
        "also": [{**_place(label.span), "label": label.text} for label in d.also],
        "notes": list(d.notes),
        "helps": list(d.helps),
    }


def _place(span: Span | None) -> dict[str, Any]:
    if span is None:
        return {"file": None}
    first, last = span.first, span.last
    return {
        "file": span.source.name,
        "line": first.line,
        "column": first.column,
        "end_line": last.line,
        "end_column": last.column,
    }


# ------------------------------------------------------------------------------------------------------------ full


@dataclass(frozen=True)
class _Mark:
    line: int
    start: int
    """Columns from 0 in the line's text."""
    end: int
    text: str
    primary: bool


def full(d: Diagnostic, paint: Paint) -> str:
    lines = [f"{paint.error(f'error[{d.code}]')}{paint.bold(f': {d.message}')}"]
    gutter = 1
    if d.span is not None:
        labels = [Label(d.span, d.label), *d.also]
        sources = list(dict.fromkeys(label.span.source for label in labels))
        gutter = max(len(str(label.span.first.line)) for label in labels)
        for source in sources:
            mine = [label for label in labels if label.span.source is source]
            lines += _snippet(source, mine, d.span, gutter, paint, first=source is sources[0])
    for kind, texts in (("note", d.notes), ("help", d.helps)):
        color = paint.help if kind == "help" else paint.bold
        lines += [f"{' ' * gutter} {paint.frame('=')} {color(kind)}: {text}" for text in texts]
    return "\n".join(lines)


def _snippet(
    source: Source, labels: list[Label], primary: Span, gutter: int, paint: Paint, *, first: bool
) -> list[str]:
    at = labels[0].span.first
    arrow = "-->" if first else ":::"
    pad = " " * gutter
    lines = [f"{pad}{paint.frame(arrow)} {printable(source.name)}:{at.line}:{at.column}", f"{pad} {paint.frame('|')}"]
    marks = sorted((_mark(label, label.span is primary) for label in labels), key=lambda m: (m.line, m.start))
    previous = 0
    for number in dict.fromkeys(mark.line for mark in marks):
        if previous and number > previous + 1:
            lines.append(f"{pad}{paint.frame('...')}")
        previous = number
        here = [mark for mark in marks if mark.line == number]
        text, shift = _window(source.line(number), here[0].start)
        lines.append(f"{paint.frame(f'{number:>{gutter}} |')} {text}".rstrip())
        for mark in here:
            lines.append(f"{pad} {paint.frame('|')} {_underline(text, mark, shift, paint)}".rstrip())
    return lines


def _mark(label: Label, primary: bool) -> _Mark:
    first, last = label.span.first, label.span.last
    line_end = len(label.span.source.line(first.line))
    end = last.column - 1 if last.line == first.line else line_end
    return _Mark(first.line, first.column - 1, max(end, first.column), label.text, primary)


def _window(line: str, start: int) -> tuple[str, int]:
    """The part of a long line around `start`, and how far it was shifted. Control characters become spaces."""
    clean = "".join(char if char.isprintable() else " " for char in line)
    if len(clean) <= WIDTH:
        return clean, 0
    shift = max(0, start - WIDTH // 2)
    return clean[shift : shift + WIDTH], shift


def _underline(text: str, mark: _Mark, shift: int, paint: Paint) -> str:
    start = mark.start - shift
    end = min(mark.end - shift, max(len(text), start + 1))
    blank = " " * _columns(text[:start]) + " " * max(0, start - len(text))
    sign = ("^" if mark.primary else "-") * max(1, _columns(text[start:end]))
    color = paint.error if mark.primary else paint.frame
    return blank + color(f"{sign} {mark.text}".rstrip())


def _columns(text: str) -> int:
    """Cells a terminal uses: wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
