"""The pages of `piperc explain CODE`: one per code, with scripts that a test runs.

A page is Markdown. The info string of its fenced blocks tells their role: ```piper failing``` must give the code,
```piper repaired``` must give no diagnostic. Further words of the info string, in this order:

- `file=b.piper`: the name of the file (otherwise schedule.piper). Consecutive blocks of one role with different names
  are the files of one example; the first of them is the script that is run, and its words apply to the example.
- `encoding=latin-1`: the encoding of the file, if not UTF-8.
- `times=100_000`: the text is repeated that many times, for files too long to print.
- The command line without `piperc`: `orders`, `-p ranks=2`, `check other.piper`. The first word is the command unless
  it is an option (then `check`); the script's name is added if no `.piper` file is named.

A page that needs a model has one block ```python model```: it is the model.py that all scripts of the page are
checked with.

The pages of P08 are about models: their blocks are ```python failing``` and ```python repaired```, each a model.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```piper +(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_MODEL = re.compile(r"^```python +(\w+)\n((?:.*\n)*?)```$", re.MULTILINE)
_FIELDS = ("file", "encoding", "times")
MODEL = "model.py"


@dataclass(frozen=True)
class Example:
    role: str
    """`failing` or `repaired`."""
    arguments: tuple[str, ...]
    """The words of the command line on the page."""
    files: dict[str, bytes]
    """The files by name; the first is the script that is run. A model is called model.py."""

    def command(self) -> list[str]:
        """The arguments `piperc` is run with, in the folder of the files."""
        words = list(self.arguments)
        command = "check" if not words or words[0].startswith("-") else words.pop(0)
        named = command == "explain" or any(word.endswith(".piper") for word in words)
        model = [MODEL] if MODEL in self.files else []
        return [command, *model, *([] if named else [next(iter(self.files))]), *words]


@dataclass(frozen=True)
class Page:
    code: str
    text: str

    @property
    def title(self) -> str:
        """The first line, `P0302: selector matches no nodes`."""
        return self.text.partition("\n")[0].removeprefix("# ")

    def models(self) -> list[tuple[str, str]]:
        """The model.py files of the page: role and text."""
        return _MODEL.findall(self.text)

    def examples(self) -> list[Example]:
        found: list[Example] = []
        models = [text for role, text in self.models() if role == "model"]
        shared = {MODEL: models[0].encode()} if models else {}
        for role, info, body in _BLOCK.findall(self.text):
            fields = {
                key: value
                for key, sign, value in (word.partition("=") for word in info.split())
                if sign and key in _FIELDS
            }
            words = tuple(word for word in info.split() if word.partition("=")[0] not in _FIELDS)
            name = fields.get("file", "schedule.piper")
            data = (body * int(fields.get("times", "1"))).encode(fields.get("encoding", "utf-8"))
            if found and found[-1].role == role and name not in found[-1].files:
                found[-1].files[name] = data
            else:
                found.append(Example(role, words, {name: data, **shared}))
        return found


def page(code: str) -> Page:
    path = Path(__file__).parent / "pages" / f"{code}.md"
    return Page(code, path.read_text(encoding="utf-8"))
