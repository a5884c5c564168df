"""What is offered next, how input is cut into statements, and how an answer is laid out."""

from __future__ import annotations

import time

import pytest

from piperlang.repl.completion import complete
from piperlang.repl.model import open_model
from piperlang.repl.reading import Grouped, is_complete, next_indent, statements
from piperlang.repl.session import Session
from piperlang.repl.show import Row, Shown
from piperlang.source import Source
from tests.support import ROOT


@pytest.fixture(scope="module")
def session() -> Session:
    found = Session(open_model(ROOT / "examples" / "02_gpt" / "model.py"))
    for text in (
        "mesh gpu = pp: 2, dp: 2",
        "from std.pipeline import loop",
        "split batch into 4 as mb",
        'stream [pass=F] on "early"',
        "let both = [stage=0:2]",
    ):
        found.execute(text)
    return found


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("pl", ["place"]),
        ("place ", ["[stage=", "[mb=", "[pass=", "[comm=", "[update", "[!stage", "both"]),
        ("place [", ["stage=", "mb=", "pass=", "comm=", "update", "!stage"]),
        ("place [stage=", ["0", "1", "2", "3", "*"]),
        ("place [stage={0, ", ["0", "1", "2", "3", "*"]),
        ("place [stage=0] ", ["on"]),
        ("place [stage=0] on ", ["gpu", "gpu[pp=", "gpu[dp="]),
        ("place [stage=0] on gpu[", ["pp=", "dp="]),
        ("place [stage=0] on gpu[pp=", ["0", "1"]),
        ("replicate [pass=*] over ", ["gpu.pp", "gpu.dp"]),
        ("replicate [pass=*] over gpu.", ["pp", "dp"]),
        ("replicate [pass=*] over gpu.dp ", ["with"]),
        ("replicate [pass=*] over gpu.dp with states=sharded, g", ["grads="]),
        ("shard [pass=*] over gpu.dp with style=", ["experts", "columns", "rows", "sequence"]),
        ("stream [comm=all_", ["all_reduce", "all_gather", "all_to_all"]),
        ("stream [pass=B] on ", ['"early"']),
        ('stream [pass=B] on "early" ', ["with"]),
        ('stream [pass=B] on "early" with ', ["ctas=", "priority="]),
        ('stream [pass=B] on "early" with priority=', ["high", "normal"]),
        ("split ", ["batch"]),
        ("split batch ", ["into"]),
        ("from ", ["std.data", "std.expert", "std.pipeline", "std.tensor"]),
        ("from std.pipeline import loop, one", ["one_f_one_b"]),
        ("tag stage=0 at ", ["blocks", "embed", "head", "norm", "position"]),
        ("tag stage=0 at embed, blocks[*].u", ["blocks[*].up"]),
        ("loop(gpu, ", ["ranks=", "chunks="]),
        ("let x", []),
        ("let x = co", ["count", "columns"]),
        ("order on gpu[pp=0]:\n    rep", ["repeat"]),
        ("order on gpu[pp=0]:\n    [stage=0, pass=", ["F", "B", "I", "W"]),
        ("order on gpu[pp=0]:\n    [stage=0, pass=F, mb=", ["next", "next?", "0", "1", "2", "3", "*"]),
        ("for s in range(2):\n    let warm = 1\n    w", ["warm"]),
        ("# pl", []),
        ('print "pl', []),
        ("place place ", []),
        (":sh", [":show"]),
        (":show [st", ["stage="]),
        (":why [stage=0] ", ["before "]),
        (":explain P0302", ["P0302"]),
        (":help vee", ["vee"]),
        (":at 1 :o", [":orders"]),
        (":run 3 i", ["inline"]),
    ],
)
def test_candidates(session: Session, text: str, first: list[str]) -> None:
    assert [one.text for one in complete(session, text)][: len(first) or None] == first


def test_functions_come_with_signature_and_documentation(session: Session) -> None:
    (one,) = complete(session, "from std.pipeline import one")
    assert (one.display, one.about) == (
        "one_f_one_b(gpu, ranks, microbatches)",
        "One forward, one backward: at most ranks - r microbatches alive on rank r.",
    )
    (loop,) = (one for one in complete(session, "loo") if one.text == "loop")
    assert loop.display == "loop(gpu, ranks, chunks=1)"


def test_any_beginning_of_any_example_can_be_completed(session: Session) -> None:
    """Nothing raises, and it is quick: the slowest of several thousand takes far less than a blink."""
    complete(session, "x")
    slowest = 0.0
    for path in (ROOT / "examples" / "02_gpt").glob("*.piper"):
        for text in statements(Source("s", path.read_text())):
            for end in range(len(text)):
                started = time.process_time()
                complete(session, text[:end])
                slowest = max(slowest, time.process_time() - started)
    assert slowest < 0.05


@pytest.mark.parametrize(
    ("text", "complete", "indent"),
    [
        ("let x = 1", True, 0),
        ("order on gpu:", False, 4),
        ("order on gpu:\n    F(0)", False, 4),
        ("order on gpu:\n    repeat 2:", False, 8),
        ("order on gpu:\n    F(0)\n", True, 4),
        ("let x = [1,", False, 4),
        ("let x = [1,\n    2]", True, 0),
        ("def F(s): [stage=s]", True, 0),
        ('"""a text', False, 0),
        ("print ':'  # not a block:", True, 0),
        (":orders", True, 0),
        ("", True, 0),
    ],
)
def test_when_input_is_complete(text: str, complete: bool, indent: int) -> None:
    assert is_complete(text) == complete
    assert text.endswith("\n") or next_indent(text) == indent


def test_statements_of_a_text_keep_their_comments() -> None:
    text = '"""doc"""\n\n# first\nlet a = 1  # one\nif a > 0:\n    let b = 2\n\nelse:\n    let b = 3\n# last\n'
    found = statements(Source("s", text))
    assert found == [
        '"""doc"""',
        "\n# first\nlet a = 1  # one",
        "if a > 0:\n    let b = 2\n\nelse:\n    let b = 3\n# last",
    ]
    assert "\n".join(found) + "\n" == text


def test_lines_of_a_pipe_are_grouped() -> None:
    grouped = Grouped()
    lines = [
        "let a = [",
        "  1,",
        "]",
        "if a[0] == 1:",
        "    print 1",
        "else:",
        "    print 2",
        "",
        ":list",
        "for i in a: print i",
        "repeat 2:",
        "    print 3",
    ]
    found = [text for line in lines for text in grouped.take(line)] + grouped.rest()
    assert found == [
        "let a = [\n  1,\n]",
        "if a[0] == 1:\n    print 1\nelse:\n    print 2\n",
        ":list",
        "for i in a: print i",
        "repeat 2:\n    print 3",
    ]


def test_long_rows_go_on_under_their_text() -> None:
    shown = Shown((Row("missing", "one two three four five six seven"),))
    assert shown.text(width=32) == "  missing   one two three four\n            five six seven"
    assert "<td" in shown._repr_html_()
