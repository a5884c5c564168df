"""Rendering of diagnostics: exact in full, one line in concise, complete in JSON."""

from __future__ import annotations

import json

import pytest

from piperlang.diagnostics import Diagnostic, Label, did_you_mean, nearest
from piperlang.diagnostics.render import Paint, render
from piperlang.pipeline import outline
from piperlang.source import Source, Span


def shown(text: str, format: str = "full", name: str = "moe.piper") -> str:
    found = outline(Source(name, text), say=lambda line: None)
    return render(found.problems or found.outline.finish(), format)


def test_full_as_the_language_page_shows_it() -> None:
    text = (
        "mesh gpu = pp: 2\nsplit batch into 2 as mb\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on"
        " gpu[pp=1]\n\norder on gpu[pp=1]:\n    [stage=4, pass=F]\n"
    )
    assert (
        shown(text) == "error[P0302]: selector matches no nodes\n"
        " --> moe.piper:7:5\n"
        "  |\n"
        "7 |     [stage=4, pass=F]\n"
        "  |     ^^^^^^^^^^^^^^^^^ the script places stage=0 to stage=3\n"
        "  = help: did you mean `stage=3`?"
    )


def test_secondary_labels_in_the_same_and_in_other_files() -> None:
    text = (
        "from std.pipeline import loop\nmesh gpu = pp: 2\nplace [stage=0] on gpu[pp=1]\nlet a = 1\nlet b = 2\nloop(gpu,"
        " 2)\n"
    )
    lines = shown(text).splitlines()
    assert lines[0] == "error[P0401]: stage=0 is placed twice"
    assert lines[1].strip() == "--> moe.piper:6:1"
    assert any(line.strip() == "..." for line in lines)
    assert any(line.strip().startswith("3 | place [stage=0]") for line in lines)
    assert any("::: std/pipeline.piper:" in line for line in lines)
    assert lines[-1].strip().startswith("= help: a chunk has one placement")


def test_calls_of_the_users_own_functions_are_shown() -> None:
    lines = shown("def f(x): x // 0\ndef g(x): f(x)\nprint g(1)\n").splitlines()
    assert lines[1] == " --> moe.piper:1:11"
    assert sum("in this call of" in line for line in lines) == 2


def test_concise_is_one_line_each() -> None:
    text = shown("print x\nprint 1 +\n", "concise")
    assert text.splitlines()[0].startswith("moe.piper:1:7: P0201 unknown name `x`")
    assert len(text.splitlines()) == 2


def test_json_has_every_place() -> None:
    data = json.loads(shown("let x = 1\nlet x = 2\n", "json"))
    (one,) = data["diagnostics"]
    assert one["code"] == "P0202"
    assert (one["file"], one["line"], one["column"], one["end_line"], one["end_column"]) == ("moe.piper", 2, 5, 2, 6)
    assert one["also"][0]["line"] == 1
    assert one["helps"]


def test_at_most_twenty_are_shown() -> None:
    text = shown("".join(f"print x{i}\n" for i in range(30)), "concise")
    assert len(text.splitlines()) == 21
    assert text.splitlines()[-1] == "... and more"


def test_long_and_odd_lines_stay_readable() -> None:
    line = "let a = " + "1 + " * 300 + "nope"
    text = shown(line + "\n")
    assert max(map(len, text.splitlines())) < 200
    assert "^^^^ not defined here" in text
    wide = shown('let 長 = "x"\n')
    caret = next(part for part in wide.splitlines() if "^" in part)
    quoted = next(part for part in wide.splitlines() if part.startswith("1 |"))
    assert caret.index("^") == quoted.index("長")


def test_colours_only_when_asked() -> None:
    d = Diagnostic("P0201", "m", Span(Source("s", "abc"), 0, 1))
    assert "\x1b[" not in render([d])
    assert "\x1b[" in render([d], paint=Paint(True))


def test_codes_are_from_the_table() -> None:
    with pytest.raises(KeyError):
        Diagnostic("P9999", "m")


def test_a_label_outside_the_line_does_not_break_rendering() -> None:
    source = Source("s", "abc\ndef\n")
    d = Diagnostic("P0201", "m", Span(source, 1, 6), "over the line", (Label(Span(source, 8, 8), "the end"),))
    assert "1 | abc" in render([d])


@pytest.mark.parametrize(
    ("word", "legal", "near"),
    [
        ("plase", ["place", "split"], "place"),
        ("onto", ["on", "in"], "on"),
        ("xyz", ["place"], None),
        ("Stage", ["stage"], "stage"),
        ("palce", ["place"], "place"),
        ("form", ["for", "from"], "from"),
        ("a", ["b"], None),
    ],
)
def test_did_you_mean(word: str, legal: list[str], near: str | None) -> None:
    assert nearest(word, legal) == near
    assert did_you_mean(word, legal) == (f"did you mean `{near}`?" if near else None)
