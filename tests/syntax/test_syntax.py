"""Parsing: what is accepted, and one diagnostic at its true place for every broken top-level statement."""

from __future__ import annotations

import pytest

from piperlang.source import Source
from piperlang.syntax import tree
from piperlang.syntax.parse import parse


def problems(text: str) -> list[tuple[str, int, int]]:
    _, found = parse(Source("s.piper", text))
    return [(d.code, d.span.first.line, d.span.first.column) for d in found if d.span]


def statement(text: str) -> tree.Statement:
    script, found = parse(Source("s.piper", text))
    assert not found, found
    (only,) = script.statements
    return only


def test_one_error_for_each_broken_statement_at_its_line() -> None:
    text = (
        "plase [stage=0] on gpu\n"  # 1
        "let a = 1\n"
        "let b = (1 + 2\n"  # 3
        "let c = 3\n"
        "place [stage=1 on gpu\n"  # 5
        "x = 3\n"  # 6
        "for i in range(3)\n"  # 7
        "    print i\n"
        "def f(x):\n"
        "    print x\n"
        "   print x\n"  # 11
        "let d = 25mb\n"  # 12
        'let e = "open\n'  # 13
        "let f = 1\n"
    )
    assert problems(text) == [
        ("P0102", 1, 1),
        ("P0105", 3, 9),
        ("P0105", 5, 7),
        ("P0102", 6, 3),
        ("P0102", 7, 18),
        ("P0104", 11, 4),
        ("P0110", 12, 9),
        ("P0106", 13, 9),
    ]
    script, _ = parse(Source("s.piper", text))
    assert [s.names[0].text for s in script.statements if isinstance(s, tree.Let)] == ["a", "c", "f"]


@pytest.mark.parametrize(
    ("text", "help"),
    [
        ("plase [stage=0] on gpu\n", "did you mean `place`?"),
        ("place [stage=0] onto gpu\n", "did you mean `on`?"),
        ("split batch in 8 as mb\n", None),
        ("x = 3\n", "bind a name with `let x = ...`; it cannot change afterwards"),
        ("while True:\n    print 1\n", "loops are bounded: use `for x in ...:` or `repeat n:`"),
        ("if a = 1:\n    print 1\n", "compare with `==`"),
        ("for i in range(3)\n    print i\n", "end the line with `:`"),
        ("for i in range(3):\nprint i\n", "indent the block by four spaces"),
        ("let place = 3\n", "`place` is a keyword; choose another name"),
        ("let a = “x”\n", 'replace it with `"`'),
        ("let а = 1\n", "replace it with `a`"),
        ("let a = 25mb\n", "did you mean `25MB`?"),
        ("let a = 1 \\\n  + 2\n", "a line continues inside brackets; no backslash is needed"),
        (
            "order on gpu:\n    [stage=0] | [stage=1]\n",
            "inside an order, join selectors in parentheses: `([stage=0] | [stage=1])`",
        ),
    ],
)
def test_repairs(text: str, help: str | None) -> None:
    _, found = parse(Source("s.piper", text))
    assert len(found) == 1
    if help is not None:
        assert found[0].helps == (help,)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n", "  \n", "\n# end", "\n    # end\n"])
def test_the_end_of_a_file_does_not_matter(end: str) -> None:
    from piperlang.syntax.parse import decode

    source = decode(f"for i in range(3):\n    print i{end}".encode(), "s.piper")
    script, found = parse(source)
    assert not found
    assert len(script.statements) == 1


def test_overlap_in_steps_and_intersection_in_expressions() -> None:
    step = statement("order on gpu:\n    a & b, c\n")
    assert isinstance(step, tree.OrderBlock)
    (steps,) = step.body.statements
    assert isinstance(steps, tree.Steps)
    assert isinstance(steps.steps[0], tree.Overlap)
    bound = statement("let x = a & b | c\n")
    assert isinstance(bound, tree.Let)
    assert isinstance(bound.values[0], tree.Join)
    assert bound.values[0].operator == "|"


def test_selectors_lists_and_comparisons_share_brackets() -> None:
    for text, kind in [
        ("[a, b]", tree.ListOf),
        ("[a=1, b!=2, !c]", tree.SelectorOf),
        ("[a != b]", tree.SelectorOf),
        ("[(a != b)]", tree.ListOf),
        ("[a == b]", tree.ListOf),
        ("[update]", tree.SelectorOf),
        ("[x for x in y]", tree.Comprehension),
        ("[order=1]", tree.SelectorOf),
    ]:
        let = statement(f"let v = {text}\n")
        assert isinstance(let, tree.Let)
        assert type(let.values[0]) is kind, text


def test_spans_are_exact() -> None:
    text = "place [stage=2*r, mb=next] on gpu[pp=r]  # where\n"
    place = statement(text)
    assert isinstance(place, tree.PlaceOn)
    assert place.span.text == "place [stage=2*r, mb=next] on gpu[pp=r]"
    assert place.selector.span.text == "[stage=2*r, mb=next]"
    assert isinstance(place.selector, tree.SelectorOf)
    assert [c.span.text for c in place.selector.conditions] == ["stage=2*r", "mb=next"]
    assert place.where.span.text == "gpu[pp=r]"


def test_trees_are_frozen_and_compare_without_spans() -> None:
    one, other = statement("let a = 1 + 2\n"), statement("let  a = 1+2  # c\n")
    assert one == other
    assert hash(one) == hash(other)
    assert one != statement("let a = 1 - 2\n")
    with pytest.raises(AttributeError):
        one.span = other.span  # type: ignore[misc]


def test_module_paths() -> None:
    tag = statement('tag stage=0, part="x" at embed, layers[0:6].attn, model.layers.0.order, h[*], "a.b"\n')
    assert isinstance(tag, tree.TagAt)
    assert [len(path.parts) for path in tag.paths] == [1, 3, 4, 2, 2]
    assert tag.paths[1].span.text == "layers[0:6].attn"
