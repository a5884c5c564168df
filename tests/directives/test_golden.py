"""The docstring of every directive shows a script, and the graph without and with the directive as `piperc graph`
prints it."""

from __future__ import annotations

import re
from functools import cache
from textwrap import dedent

import pytest

from piperlang.capture.program import Program, capture
from piperlang.directives import BY_WORD
from piperlang.ir.text import brief
from piperlang.pipeline import schedule
from piperlang.source import Source
from tests.support import ROOT
from tests.support.models import Mlp, Moe, square, tokens, vectors, words

SHAPE = re.compile(r".*?\n\n(    .*?)\n\nBefore:\n\n(    .*?)\n\nAfter:\n\n(    .*?)\n\n\S", re.DOTALL)
"""A script, and the graph before and after the directive. A line `...` stands for any lines."""


@cache
def program(experts: bool) -> Program:
    return capture(Moe, words, tokens(8)) if experts else capture(lambda: Mlp(stages=2), square, vectors(8))


def pattern(block: str) -> str:
    return "".join(r"(?:.*\n)*?" if line == "..." else f"{re.escape(line)}\n" for line in dedent(block).splitlines())


def graph(word: str, script: str) -> str:
    return brief(schedule(program(word == "shard"), Source("s.piper", script)).graph())


def shown(word: str) -> tuple[str, str, str]:
    text = (ROOT / "piperlang" / "directives" / f"{word}.py").read_text(encoding="utf-8").split('"""')[1]
    found = SHAPE.match(text)
    assert found is not None, f"{word}.py: expected a script, then `Before:` and `After:` with a graph each"
    script, before, after = found.groups()
    return f"{dedent(script)}\n", before, after


def without(word: str, script: str) -> str:
    """The script without the statements of one directive."""
    statements = re.split(r"\n(?=\S)", script)
    return "\n".join(one for one in statements if one.split(maxsplit=1)[0] != word) + "\n"


@pytest.mark.parametrize("word", BY_WORD)
def test_graph_before_and_after(word: str) -> None:
    script, before, after = shown(word)
    for applied, block in ((without(word, script), before), (script, after)):
        printed = graph(word, applied)
        assert re.fullmatch(pattern(block), printed), f"{word}.py shows\n{block}\nbut the graph is\n{printed}"


@pytest.mark.parametrize("word", BY_WORD)
def test_help_and_documentation(word: str) -> None:
    """The first line of the help is the syntax, and the documentation has the directive in an example."""
    syntax, *about = BY_WORD[word].help().splitlines()
    assert syntax.startswith(f"{word} ")
    assert about
    assert BY_WORD[word].__module__ == f"piperlang.directives.{word}"
    language = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    assert re.search(rf"^(\| `)?{word}\b", language, re.MULTILINE)
