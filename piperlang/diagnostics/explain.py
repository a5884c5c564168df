"""The pages behind `piperc explain CODE`: a text per code with scripts that a test runs.

A page is Markdown. Its fenced blocks say in the info string what they are: ```piper failing``` must give the code,
```piper repaired``` must check clean. A block can be a second file (`file=b.piper`) and can name the arguments it is
checked with (`-p ranks=2`), and the command when it is not `check` (`orders`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```piper +(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    role: str
    """`failing` or `repaired`."""
    arguments: tuple[str, ...]
    files: dict[str, str]
    """The scripts by name; the first is the one that is checked."""


@dataclass(frozen=True)
class Page:
    code: str
    text: str

    def examples(self) -> list[Example]:
        found: list[Example] = []
        for role, info, body in _BLOCK.findall(self.text):
            words = info.split()
            name = next((word[5:] for word in words if word.startswith("file=")), "schedule.piper")
            if found and found[-1].role == role and name not in found[-1].files:
                found[-1].files[name] = body
            else:
                found.append(Example(role, tuple(w for w in words if not w.startswith("file=")), {name: body}))
        return found


def page(code: str) -> Page:
    path = Path(__file__).parent / "pages" / f"{code}.md"
    return Page(code, path.read_text(encoding="utf-8"))
