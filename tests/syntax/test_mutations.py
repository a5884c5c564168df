"""A few hundred mutants of the repository's scripts on every run; `python -m tests.support.mutate` makes as many as
wanted."""

from __future__ import annotations

import pytest

from tests.support.mutate import Broken, examine, judge, mutant, scripts, shorten, time_limit

COUNT = 300
SEED = 7
PATIENCE = 4.0
"""Seconds of processor time, twice what is promised: other tests leave threads in this process that take some of it."""


def test_there_are_scripts() -> None:
    assert len(scripts()) > 10


@pytest.mark.parametrize("start", range(0, COUNT, 50))
def test_mutants(start: int) -> None:
    failures = [
        failure for i in range(start, start + 50) if (failure := judge(mutant(SEED, i), i, PATIENCE)[1]) is not None
    ]
    assert not failures, "\n\n".join(f"number {f.index}: {f.what}\n{shorten(f, 300)}\n{f.detail}" for f in failures[:3])


def test_mutants_repeat() -> None:
    assert [mutant(SEED, i) for i in range(20)] == [mutant(SEED, i) for i in range(20)]


def test_most_mutants_differ() -> None:
    assert len({mutant(SEED, i) for i in range(200)}) > 190


@pytest.mark.parametrize("text", ["", "let a = 1\n", "let\n", "let a = 1 // 0\n", "# only\n"])
def test_examination_of_plain_texts(text: str) -> None:
    assert len(examine(text)) <= 1


def test_a_failure_is_found_and_shortened() -> None:
    def complain(text: str) -> list[str]:
        if "seven" in text:
            raise Broken("it holds seven")
        return []

    failure = judge("let a = 1\nlet b = [seven, 8]\nlet c = 3\n", examination=complain)[1]
    assert failure is not None
    assert failure.what == "it holds seven"
    assert shorten(failure, examination=complain) == "seven"


def test_what_is_slow_is_stopped() -> None:
    def endless(text: str) -> list[str]:
        while True:
            pass

    failure = judge("", seconds=0.05, examination=endless)[1]
    assert failure is not None
    assert "slower" in failure.what


def test_time_limit_ends_with_its_block() -> None:
    with time_limit(5):
        pass
    assert examine("let a = 1\n") == []
