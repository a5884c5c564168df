"""The output of a session: text for terminals and pipes, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

from piperlang.diagnostics.printable import printable
from piperlang.diagnostics.render import Paint

LABEL = 9
"""Width of the label column."""

STYLE = """<style>
.piper{font:13px/1.45 system-ui,sans-serif;color:var(--jp-content-font-color1,#1f2328);max-width:100%;overflow-x:auto}
.piper pre{font:12px/1.35 ui-monospace,Menlo,Consolas,monospace;margin:.3em 0;color:inherit;background:none;
  white-space:pre;overflow-x:auto}
.piper table{border-collapse:collapse;margin:.2em 0}
.piper td,.piper th{text-align:left;padding:.05em .9em .05em 0;border:0;background:none;vertical-align:top;
  color:inherit}
.piper th{font-weight:600;color:#57606a}
.piper .add{color:#116329}
.piper .gone{color:#a40e26}
.piper .todo{color:#7d4e00}
.piper svg{max-width:none}
@media (prefers-color-scheme:dark){
.piper{color:var(--jp-content-font-color1,#e6edf3)}
.piper th{color:#9da7b3}
.piper .add{color:#7ee787}
.piper .gone{color:#ff938a}
.piper .todo{color:#f0c674}
}
</style>"""


@dataclass(frozen=True)
class Row:
    label: str
    text: str
    kind: str = ""
    """`add`, `gone` or `todo`: its color."""


@dataclass(frozen=True, repr=False)
class Shown:
    """An answer: labelled rows, then a block of plain text."""

    rows: tuple[Row, ...] = ()
    block: str = ""
    drawing: str = ""
    """HTML that replaces the block in a notebook."""

    def text(self, paint: Paint | None = None, width: int | None = None) -> str:
        """`width`: of the screen; longer rows are wrapped under their text."""
        paint = paint or Paint()
        lines = []
        for i, row in enumerate(self.rows):
            label = row.label if not i or self.rows[i - 1].label != row.label else ""
            colour = {"add": "32", "gone": "31", "todo": "33"}.get(row.kind)
            text = printable(row.text, keep="\t")  # rows may quote scripts
            for part in wrap(text, max(20, width - LABEL - 3), break_on_hyphens=False) if width else [text]:
                lines.append(f"  {paint.bold(f'{label:<{LABEL}}')} {paint(part, colour) if colour else part}".rstrip())
                label = ""
        return "\n".join([*lines, *([self.block.rstrip("\n")] if self.block else [])])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__
    """For frontends without HTML."""

    def _repr_html_(self) -> str:
        labels = [row.label if not i or self.rows[i - 1].label != row.label else "" for i, row in enumerate(self.rows)]
        cells = "".join(
            f'<tr><th>{escape(label)}</th><td class="{row.kind}">{escape(row.text)}</td></tr>'
            for label, row in zip(labels, self.rows, strict=True)
        )
        table = f"<table>{cells}</table>" if cells else ""
        return html(table + (self.drawing or (f"<pre>{escape(self.block)}</pre>" if self.block else "")))


def html(body: str) -> str:
    """Self-contained: light and dark."""
    return f'{STYLE}<div class="piper">{body}</div>'


@dataclass
class Rows:
    """Rows being collected."""

    found: list[Row] = field(default_factory=list)

    def add(self, label: str, text: str, kind: str = "") -> None:
        self.found.append(Row(label, text, kind))

    def all(self, label: str, texts: Iterable[str], most: int, kind: str = "", more: str = "") -> None:
        """Add at most `most` of them; `more` tells where the rest is."""
        every = list(texts)
        for text in every[:most]:
            self.add(label, text, kind)
        if len(every) > most:
            self.add(label, f"... and {len(every) - most:,} more{more}", kind)
