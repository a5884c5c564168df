"""The canonical layout: exact on a sample, idempotent, comments kept, meaning unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from piperlang.diagnostics import PiperError
from piperlang.source import Source
from piperlang.syntax import lines
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import parse, read
from tests.support import ROOT

UGLY = '''"""Doc."""
from std.pipeline import dualpipev,vee   # imports
param ranks=2
mesh gpu=pp:ranks,dp : 2

# a comment


vee( gpu,ranks , )
replicate [!expert] over gpu.dp with grads=sharded,bucket = 25MB   # one
shard [expert = *] over gpu.dp#two
stream [comm=p2p] on 'pp' with priority = high ,ctas= 8
def f(x,y = -1):
        let z=x[0:2]   #zz
        # inside
        return z if not x!=y else [ # why
           1,2,
           # three
           3]
        # the end of f
# after f
let t = [f(i)*2 for i in range(ranks) if i != 22222222222 and i > -33333333333 or i == 33333333333]
if a : print - 1
'''

PRETTY = '''"""Doc."""
from std.pipeline import dualpipev, vee  # imports
param ranks = 2
mesh gpu = pp: ranks, dp: 2

# a comment

vee(gpu, ranks)
replicate [!expert] over gpu.dp with grads=sharded, bucket=25MB  # one
shard [expert=*] over gpu.dp                                     # two
stream [comm=p2p] on "pp" with priority=high, ctas=8

def f(x, y=-1):
    let z = x[0:2]  # zz
    # inside
    return z if not x != y else [
        # why
        1,
        2,
        # three
        3,
    ]
    # the end of f

# after f
let t = [
    f(i) * 2 for i in range(ranks) if i != 22222222222 and i > -33333333333 or i == 33333333333
]
if a: print -1
'''


def test_sample() -> None:
    assert format_source(Source("s", UGLY)) == PRETTY
    assert format_source(Source("s", PRETTY)) == PRETTY


@pytest.mark.parametrize("path", sorted(ROOT.glob("stdlib/*.piper")), ids=lambda p: p.name)
def test_library_is_canonical(path: Path) -> None:
    source = read(path)
    assert format_source(source) == source.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("let x = f( a )( b )[ 0 ] . c\n", "let x = f(a)(b)[0].c\n"),
        ("let x = -  1 - - 2 ** - 3\n", "let x = -1 - -2**-3\n"),
        ("let x = [a!=1 , b = {1,2 ,},c=0 : 4,d=*, mb = next ?]\n", "let x = [a!=1, b={1, 2}, c=0:4, d=*, mb=next?]\n"),
        ("let x = a!=b\n", "let x = a != b\n"),
        ("order  a->b&c\n", "order a -> b & c\n"),
        ("repeat  n :F( s ),B(s) ,\n", "repeat n: F(s), B(s)\n"),
        ("tag stage = 0 at a . b [ 0 : 6 ],c\n", "tag stage=0 at a.b[0:6], c\n"),
        ("let a , b=1,2\n", "let a, b = 1, 2\n"),
        ("let s = 'it' + 'a \"b\"'\n", 'let s = "it" + \'a "b"\'\n'),
        ("let x = not( a and b)\n", "let x = not (a and b)\n"),
        ("\n\n\nlet x = 1\n\n\n\nlet y = 2", "let x = 1\n\nlet y = 2\n"),
    ],
)
def test_spacing(before: str, after: str) -> None:
    assert format_source(Source("s", before)) == after
    assert format_source(Source("s", after)) == after


def test_long_lines_break_at_brackets() -> None:
    arguments = ", ".join(f"argument_{i}=[stage={i}, pass=F]" for i in range(6))
    text = format_source(Source("s", f"call({arguments})\n"))
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("call(\n    argument_0=[stage=0, pass=F],\n")
    assert text.endswith(",\n)\n")
    assert parse(Source("a", text))[0] == parse(Source("b", f"call({arguments})\n"))[0]


def test_ranges_in_a_broken_selector_stay_ranges() -> None:
    text = "let x = [\n    [\n        stage=0:2,  # two\n        mb=1:,\n    ],\n    [stage=0:2],\n]\n"
    assert format_source(Source("s.piper", text)) == text


def test_equal_comments_in_and_after_a_nested_bracket_stay() -> None:
    text = "let x = [\n    [\n        1,  # one\n        2,\n    ],  # one\n    3,  # one\n]\n"
    assert format_source(Source("s.piper", text)) == text


def test_a_script_that_would_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item is on a line of its own, with a comma of its own: more tokens than a script may have."""
    monkeypatch.setattr(lines, "MAX_TOKENS", 100)
    text = "let x = [\n" + "[1,  # one\n2],\n" * 9 + "]\n"
    with pytest.raises(PiperError, match="the script is too long") as caught:
        format_source(Source("s.piper", text))
    assert caught.value.diagnostics[0].code == "P0108"


def test_a_comment_moved_above_its_line_leaves_the_one_beside_aligned() -> None:
    text = format_source(Source("s", "if x:\n    [  # inside\n    ]()  # beside\n    [] # next\n"))
    assert text == "if x:\n    # inside\n    []()  # beside\n    []    # next\n"
    assert format_source(Source("s", text)) == text


def test_a_broken_script_is_not_formatted() -> None:
    with pytest.raises(PiperError):
        format_source(Source("s", "let x = (1\n"))
