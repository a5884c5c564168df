"""The grammar has no conflict, its keywords are the language's words, and its tables are cached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.parse import parse
from piperlang.syntax.words import BUILTINS, KEYWORDS, STATEMENT_STARTS


def test_lalr_without_conflict_or_colliding_terminals() -> None:
    assert grammar.build(strict=True).options.strict


def test_keywords_are_those_of_the_grammar() -> None:
    assert set(grammar.keyword_types().values()) == set(KEYWORDS)
    assert len(KEYWORDS) == len(set(KEYWORDS))
    assert set(STATEMENT_STARTS) < set(KEYWORDS)
    assert not set(BUILTINS) & set(KEYWORDS)


def test_keywords_are_whole_words_and_reserved() -> None:
    script, problems = parse(Source("s", "let placement = 1\nlet onto = 2\nlet order_of = 3\n"))
    assert not problems
    assert len(script.statements) == 3
    for word in KEYWORDS:
        _, problems = parse(Source("s", f"let {word} = 1\n"))
        assert [d.code for d in problems] == ["P0102"], word


def test_tables_are_cached_and_a_broken_cache_is_rebuilt(tmp_path: Path) -> None:
    def check() -> subprocess.CompletedProcess[str]:
        script = tmp_path / "s.piper"
        script.write_text("let a = 1\n")
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": ""}
        return subprocess.run(
            [sys.executable, "-m", "piperlang", "check", str(script)],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )

    assert check().returncode == 0
    (tables,) = (tmp_path / "cache" / "piperlang").iterdir()
    written = tables.read_bytes()
    assert check().returncode == 0
    assert tables.read_bytes() == written
    tables.write_bytes(b"not tables")
    broken = check()
    assert broken.returncode == 0
    assert broken.stderr == ""
    assert tables.read_bytes()[:40] == written[:40]
