"""Texts that are no script: not text at all, too much, too deep, badly laid out. Each gets a located diagnostic, in
bounded time and memory (tests/support/bounded.py)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from piperlang.syntax.lines import MAX_TOKENS
from piperlang.syntax.parse import MAX_BYTES, MAX_LINE
from tests.support.bounded import (
    MB10,
    Text,
    both,
    bounded,
    cases,
    check,
    lines,
    measured,
    most,
    piperc,
    refused,
    save,
    texts,
)

pytestmark = measured

# ----------------------------------------------------------------------------------------------------- files of no text


@cases(
    {
        "random bytes": (random.Random(1).randbytes(50_000), ("P0101",)),
        "elf": (b"\x7fELF\x02\x01\x01\x00" + bytes(8) + random.Random(2).randbytes(5_000), ("P0101", "P0109")),
        "nuls": (bytes(5_000), ("P0109",)),
        "ten megabytes of nuls": (lambda: bytes(MB10), ("P0101", "P0108", "P0109")),
        "nul in a name": (b"let a\0b = 1\n", ("P0109",)),
        "utf-16": ("let a = 1\n".encode("utf-16"), ("P0101",)),
        "utf-16 without mark": ("let a = 1\n".encode("utf-16-le"), ("P0109",)),
        "latin-1": ("let a = 1 # caf\u00e9\n".encode("latin-1"), ("P0101",)),
        "gzip": (b"\x1f\x8b\x08\x00" + random.Random(3).randbytes(2_000), ("P0101",)),
        "lone surrogate": (b'print "\xed\xa0\x80"\n', ("P0101",)),
        "overlong": (b"print \xc0\x80\n", ("P0101",)),
        "cut in a character": ("let a = 1 # \u20ac".encode()[:-1], ("P0101",)),
        "bad byte on the third line": (b"let a = 1\nlet b = 2\nlet c\xff = 3\n", ("P0101",)),
        "control characters": (bytes(range(1, 9)) + bytes(range(14, 32)), ("P0109",)),
        "escape sequences": (b"\x1b[2J\x1b]0;title\x07 let a = 1\n", ("P0109",)),
    }
)
def test_not_text(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


def test_not_text_is_located(tmp_path: Path) -> None:
    outcome = refused(check(tmp_path, b"let a = 1\nlet b = 2\nlet c\xff = 3\n"), "P0101")
    assert outcome.places == [("bad.piper", 3, 6)]


@texts(
    {
        "nothing": b"",
        "mark only": b"\xef\xbb\xbf",
        "line end": b"\n",
        "blank lines": b"\n  \n\t\n\n",
        "spaces": b"    ",
        "comment": b"# nothing here",
        "comments": b"   # one\n# two\n\t# three\n",
        "documentation": b'"""Only words."""\n',
        "mark before a statement": "\ufefflet a = 1\n".encode(),
        "no final newline": b"let a = 1",
        "no final newline in a block": b"for i in range(2):\n    print i",
        "windows line ends": b"for i in range(2):\r\n    print i\r\nlet a = 1\r\n",
        "old mac line ends": b"for i in range(2):\r    print i\rlet a = 1\r",
        "mixed line ends": b"let a = 1\r\nlet b = 2\rlet c = 3\n",
        "blank before the line end": b"let a = 1   \t \n",
        "comment under a block": b"for i in range(2):\n    print i\n  # between\n# below\n",
        "line end in brackets": b"let a = [\n1,\n\n  # why\n2\n]\n",
        "one space a block": b"if True:\n if True:\n  print 1\n",
    }
)
def test_fine(tmp_path: Path, text: Text) -> None:
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0, outcome.err


# ------------------------------------------------------------------------------------------------------------- too much


@cases(
    {
        "identifier": (lambda: "a" * MB10, ("P0108",)),
        "sum": (lambda: "let a = " + "1+" * (MB10 // 2) + "1\n", ("P0108",)),
        "list": (lambda: "let a = [" + "1," * (MB10 // 2) + "1]\n", ("P0108",)),
        "open list": (lambda: "let a = [" + "1," * (MB10 // 2), ("P0108",)),
        "open parentheses": (lambda: "(" * MB10, ("P0108",)),
        "string": (lambda: 'let a = "' + "x" * MB10 + '"\n', ("P0108",)),
        "open string": (lambda: 'let a = "' + "x" * MB10, ("P0108",)),
        "text": (lambda: '"""' + "x" * MB10 + '"""\n', ("P0108",)),
        "quotes": (lambda: '"' * MB10, ("P0108",)),
        "comment": (lambda: "#" * MB10, ("P0108",)),
        "spaces": (lambda: " " * MB10, ("P0108",)),
        "tabs": (lambda: "\t" * MB10, ("P0108",)),
        "digits": (lambda: "9" * MB10, ("P0108",)),
        "dots": (lambda: "." * MB10, ("P0108",)),
        "emoji": (lambda: "\U0001f600" * (MB10 // 4), ("P0108",)),
        "two bytes a character": (lambda: "\u00e9" * (MB10 // 2), ("P0108",)),
        "three bytes a character": (lambda: "\u20ac" * (MB10 // 3), ("P0108",)),
    }
)
def test_ten_megabyte_line(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@cases(
    {
        "lets": (lambda: lines(*(f"let x{i} = {i}" for i in range(MB10 // 20))), ("P0108",)),
        "blank lines": (lambda: "\n" * MB10, ("P0108",)),
        "comments": (lambda: "# x\n" * (MB10 // 4), ("P0108",)),
        "open brackets": (lambda: "(\n" * (MB10 // 2), ("P0108",)),
        "accents": (lambda: "# \u00e9\u00e9\u00e9\n" * (MB10 // 9), ("P0108",)),
    }
)
def test_ten_megabyte_file(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@cases(
    {
        "identifier": (lambda: "let " + "a" * 30_000 + " = 1\n", ("P0108",)),
        "comment": (lambda: "#" * 30_000 + "\n", ("P0108",)),
        "further down": (lambda: "let a = 1\n" * 2 + "x" * 30_000, ("P0108",)),
    }
)
def test_long_line(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


def test_long_line_is_located(tmp_path: Path) -> None:
    outcome = refused(check(tmp_path, lambda: "let a = 1\nlet b = 2\n" + "x" * 30_000), "P0108")
    assert outcome.places[0][1] == 3


@pytest.mark.slow
@texts(
    {
        "blank lines": most("\n", statements=0),
        "comments": most("# x\n", statements=0),
        "long comments": lambda: ("# " + "x" * (MAX_LINE - 10) + "\n") * (MAX_BYTES // MAX_LINE - 1),
        "lets": most("let x{i} = {i}\n"),
        "prints without a value": most("print\n"),
        "calls": most("f()\n"),
        "words": most("word\n"),
        "different words": most("word{i}\n"),
        "unknown names": most("print unknown{i}\n"),
        "many names and unknown names": both(most("let x{i} = {i}\n", share=0.45), most("print y{i}\n", share=0.45)),
        "unknown names in a function": both(
            most("let name{i} = {i}\n", share=0.45), most("    print nume{i}\n", "def f():\n", statements=0, share=0.4)
        ),
        "the same name": most("let x = 1\n"),
        "broken lets": most("let\n"),
        "broken in a block": most("    let\n", "for i in range(2):\n", statements=0),
        "bad characters": most("$\n"),
        "bad characters in a line": lambda: ("$ " * (MAX_LINE // 2 - 5) + "\n") * (MAX_TOKENS // MAX_LINE),
        "bad numbers": most("1x\n"),
        "bad strings": most("'\n"),
        "bad escapes": most("print '\\q'\n"),
        "bad sizes": most("let x = 99999999999TB\n"),
        "closing brackets": most(")\n"),
        "open brackets": most("(\n", statements=0),
        "open bracket before each statement": most("(\nlet x = 1\n", statements=2),
        "open brackets in a block": most("    (\n    let x = 1\n", "def f():\n", statements=0),
        "open brackets in blocks": most("if x:\n    (\nlet y = [\n", statements=3),
        "open bracket swallows all": most("x\n", "(\n", statements=0),
        "open bracket swallows statements": most("x = (y)\n", "(\n", statements=0),
        "one sum over lines": most("1+1+1+1+1+1+1+1+\n", "let a = (\n", "1)\n", statements=0),
        "one list over lines": most("1, 1, 1, 1, 1, 1, 1, 1,\n", "let a = [\n", "]\n", statements=0),
        "one list of selectors": most("[stage=0, mb=1:2],\n", "let a = [\n", "]\n", statements=0),
        "one call": most("a=1, b=2, c=3,\n", "f(\n", ")\n", statements=0),
        "one call of named arguments": most("a{i}=1,\n", "def f(x): x\nlet y = f(\n", ")\n", statements=0),
        "one call of arguments": most("1, 2, 3,\n", "def f(x): x\nlet y = f(\n", ")\n", statements=0),
        "one function of parameters": most("a{i}=1,\n", "def f(\n", "): 1\nprint f()\n", statements=0),
        "the same parameter": most("a,\n", "def f(\n", "): 1\n", statements=0),
        "one long function": most("    print 1\n", "def f():\n", statements=0),
        "one function of names": most("    let a{i} = {i}\n", "def f():\n", "f()\n", statements=0),
        "one function of unknown names": most("    print b{i}\n", "def f():\n", "f()\n", statements=0),
        "functions": most("def f{i}(x): x\n"),
        "functions that call": most("def f{i}(x): f{i}(x)\n", tail="f1(1)\n"),
        "comprehensions": most("[x{i} for x{i} in range({i})],\n", "let a = [\n", "]\n", statements=0),
        "selector keys": most("k{i}=1,\n", "place [\n", "] on gpu\n", statements=0),
        "the same key": most("k=1,\n", "print [\n", "]\n", statements=0),
        "passes": most("F,\n", "print [pass={\n", "F}]\n", statements=0),
        "unknown passes": most("G{i},\n", "print [pass={\n", "F}]\n", statements=0),
        "axes": lambda: "mesh g = " + ", ".join(f"a{i}: 1" for i in range(MAX_LINE // 12)) + "\nprint g.b1\n",
        "options": lambda: (
            "mesh g = a: 2\nreplicate [b=1] over g.a with "
            + ", ".join(f"grads{i}=1" for i in range(MAX_LINE // 20))
            + "\n"
        ),
        "tags": lambda: "tag " + ", ".join(f"a{i}={i}" for i in range(MAX_LINE // 20)) + " at m\n",
        "paths": lambda: "tag a=1 at " + ", ".join(f"m[{i}].x" for i in range(MAX_LINE // 20)) + "\n",
        "indented twice": most("if x:\n        print 1\n    print 2\n"),
        "bad dedents": lambda: "if x:\n" + "".join(f"{' ' * (9 - i % 7)}y\n" for i in range(MAX_TOKENS // 4)),
        "uneven indents": lambda: "".join(f"{' ' * (i % 30)}x\n" for i in range(min(MAX_TOKENS // 3, MAX_BYTES // 20))),
        "elses": most("else: x\n"),
        "texts": most('"""x"""\n'),
        "broken texts": lambda: ('\\"""' * 100 + "\n") * min(MAX_TOKENS // 210, MAX_BYTES // 410),
        "escaped quotes": lambda: ('"\\' * 400 + "\n") * (MAX_BYTES // 900),
        "one broken text": lambda: '"""' + ("\\" * 1_001 + "\n") * (MAX_BYTES // 1_010),
        "quotes": lambda: ("'" * (MAX_LINE - 1) + "\n") * (MAX_BYTES // MAX_LINE - 1),
        "digits": lambda: ("9" * (MAX_LINE - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "digits and underscores": lambda: ("9_" * (MAX_LINE // 2 - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "digits and dots": lambda: ("9." * (MAX_LINE // 2 - 1) + "x\n") * (MAX_BYTES // MAX_LINE - 2),
        "branches and names": both(most("let x{i} = 1\n", share=0.5), most("if True: print 1\n", share=0.4)),
        "branches of names": most("    if True: let x{i} = 1\n", "def f():\n", statements=0),
        "elifs and names": both(
            most("let x{i} = 1\n", share=0.5),
            most("elif x1 == {i}: print 1\n", "if False: print 1\n", statements=0, share=0.4),
        ),
        "loops and names": both(most("let x{i} = 1\n", share=0.5), most("for y in [1]: print y\n", share=0.4)),
        "misspelt long name": lambda: lines(
            "let " + "ab" * (MAX_LINE // 2 - 10) + " = 1", "print " + "ab" * (MAX_LINE // 2 - 11) + "cb"
        ),
        "misspelt long names": lambda: lines(
            *(f"let {'ab' * 300}{i} = 1" for i in range(300)), *(f"print {'ba' * 300}{i}" for i in range(100))
        ),
        "misspelt names": both(
            most("let abcdefgh{i} = 1\n", share=0.6), lambda: lines(*(f"print badcfehg{i}" for i in range(100)))
        ),
        "misspelt long keyword": lambda: "replicat" * (MAX_LINE // 8 - 10) + " x\n",
        "misspelt attribute": both(
            lambda: "mesh g = " + ", ".join(f"abcdef{i}: 1" for i in range(MAX_LINE // 15)) + "\n",
            most("print g.badcfe{i}\n"),
        ),
        "failing statements": most("let x{i} = 1 // 0\n"),
        "failing loops": most("for i in range(1000): let x = i // 1\n"),
    }
)
def test_as_much_as_the_limits_admit(tmp_path: Path, text: Text) -> None:
    """Just below the limits of size the answer may be anything, but it comes in time."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code in (0, 1)
    assert outcome.code == 0 or outcome.places
    assert len(outcome.codes) <= 20


# ------------------------------------------------------------------------------------------------------------ too deep


def nested(opening: str, middle: str, closing: str, depth: int = 10_000) -> Callable[[], str]:
    """Over as many lines as the longest line wants."""

    def text() -> str:
        per_line = 500
        left = "".join(opening + ("\n" if i % per_line == per_line - 1 else "") for i in range(depth))
        right = "".join(closing + ("\n" if i % per_line == per_line - 1 else "") for i in range(depth))
        return f"let a = {left}{middle}{right}\n"

    return text


@cases(
    {
        "parentheses": (nested("(", "1", ")"), ("P0107",)),
        "square brackets": (nested("[", "1", "]"), ("P0107",)),
        "braces": (nested("{", "1", "}"), ("P0107",)),
        "mixed brackets": (nested("([{", "1", "}])", 3_400), ("P0107",)),
        "open parentheses": (nested("(", "1", ""), ("P0107",)),
        "open square brackets": (nested("[", "1", ""), ("P0107",)),
        "open braces": (nested("{", "1", ""), ("P0107",)),
        "open mixed": (nested("([{", "", "", 3_400), ("P0107",)),
        "closing only": (lambda: "let a = 1" + (")" * 500 + "\n") * 20, ("P0105",)),
        "crossed": (nested("([", "1", ")]", 5_000), ("P0107", "P0105")),
        "crossed and shallow": ("let a = ([1)]\n", ("P0105",)),
        "calls": (nested("f(", "1", ")"), ("P0107",)),
        "selectors": (nested("[a=", "1", "]"), ("P0107",)),
        "sets in selectors": (nested("[a={", "1", "}]", 5_000), ("P0107",)),
        "comprehensions": (nested("[x for x in ", "[1]", "]"), ("P0107",)),
        "indices": (nested("a[", "0", "]"), ("P0107",)),
        "not": (lambda: "let a = (" + ("not " * 500 + "\n") * 10 + "True)\n", ("P0107",)),
        "minus": (lambda: "let a = (" + ("- " * 500 + "\n") * 10 + "1)\n", ("P0107",)),
        "minus without blanks": (lambda: "let a = " + "-" * 9_000 + "1\n", ("P0107",)),
        "not on one line": (lambda: "let a = " + "not " * 4_500 + "True\n", ("P0107",)),
        "attributes": (lambda: "let a = range" + ".b" * 5_000 + "\n", ("P0107",)),
        "attributes over lines": (lambda: "let a = (range" + (".b" * 500 + "\n") * 20 + ")\n", ("P0107",)),
        "index chain": (lambda: "let a = [1]" + "[0]" * 5_000 + "\n", ("P0107",)),
        "call chain": (lambda: "let a = range" + "()" * 5_000 + "\n", ("P0107",)),
        "pick chain": (lambda: "mesh g = p: 1\nlet a = g" + "[p=0]" * 3_000 + "\n", ("P0107",)),
        "conditional chain": (lambda: "let a = (" + "1 if True else\n" * 5_000 + "1)\n", ("P0107",)),
        "power chain": (lambda: "let a = " + "2**" * 5_000 + "2\n", ("P0107",)),
        "power over lines": (lambda: "let a = (" + ("2**" * 500 + "\n") * 10 + "2)\n", ("P0107",)),
        "path": (lambda: "tag a=1 at " + "m" + "[(" * 500 + "0" + ")]" * 500 + "\n", ("P0107",)),
        "repeats": (lambda: lines(*(" " * i + "repeat 1:" for i in range(190)), " " * 190 + "print 1"), ("P0107",)),
        "ifs": (lambda: lines(*(" " * i + "if True:" for i in range(190)), " " * 190 + "print 1"), ("P0107",)),
        "loops without end": (lambda: lines(*(" " * i + f"for x{i} in range(2):" for i in range(150))), ("P0107",)),
        "functions": (
            lambda: lines(*(" " * i + f"def f{i}():" for i in range(150)), " " * 150 + "print 1"),
            ("P0107", "P0111"),
        ),
        "a block a line and back": (
            lambda: lines(*(" " * i + "if True:" for i in [*range(100), *range(100, 0, -1)])),
            ("P0107",),
        ),
    }
)
def test_too_deep(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


@texts(
    {
        "elifs": lambda: (
            "let a = 1\nif a == 0: print 0\n" + "".join(f"elif a == {i}: print {i}\n" for i in range(5_000))
        ),
        "elif blocks": lambda: (
            "let a = 1\nif a == 0:\n    print 0\n" + "".join(f"elif a == {i}:\n    print {i}\n" for i in range(5_000))
        ),
        "sum": lambda: "let a = " + "+".join(["1"] * 9_000) + "\n",
        "product": lambda: "let a = " + "*".join(["1"] * 9_000) + "\n",
        "and": lambda: "let a = " + " and ".join(["True"] * 2_000) + "\n",
        "or": lambda: "let a = " + " or ".join(["False"] * 2_000) + "\n",
        "comparison": lambda: "let a = " + "<=".join(["1"] * 6_000) + "\n",
        "union": lambda: "let a = (" + " |\n".join(f"[s={i}]" for i in range(9_000)) + ")\n",
        "meeting": lambda: "let a = (" + " &\n".join(f"[s{i}=1]" for i in range(9_000)) + ")\n",
        "axes": lambda: "mesh g = " + ", ".join(f"a{i}: 1" for i in range(1_500)) + "\n",
        "parameters": lambda: "def f(" + ",\n".join(f"a{i}" for i in range(9_000)) + "): 1\n",
        "names": lambda: "let " + ", ".join(f"a{i}" for i in range(2_000)) + " = range(2000)\n",
        "imports": lambda: "from std.pipeline import " + ", ".join(f"F as f{i}" for i in range(1_200)) + "\n",
        "clauses": lambda: "let a = [0 " + "\n".join(f"for x{i} in [0]" for i in range(300)) + "]\n",
        "conditions": lambda: "let a = [" + ",\n".join(f"s{i}=1" for i in range(20_000)) + "]\n",
        "steps": lambda: "mesh g = p: 1\norder on g: " + ", ".join("[comm=send]" for _ in range(1_400)) + "\n",
        "arrows": lambda: "order " + " -> ".join("[comm=send]" for _ in range(1_200)) + "\n",
        "overlaps": lambda: "order [comm=send] -> " + " & ".join("[comm=send]" for _ in range(1_200)) + "\n",
    }
)
def test_long_but_flat(tmp_path: Path, text: Text) -> None:
    """Long chains of one level are no deep tree: they check, or they are refused like anything else."""
    outcome = bounded(check(tmp_path, text))
    assert outcome.code == 0 or refused(outcome)


# --------------------------------------------------------------------------------------------------------------- layout


@cases(
    {
        "tab": ("if True:\n\tprint 1\n", ("P0103",)),
        "tab after spaces": ("if True:\n  \tprint 1\n", ("P0103",)),
        "tabs and spaces": ("if True:\n    print 1\n\tprint 2\n", ("P0103",)),
        "tab in the first line": ("\tlet a = 1\n", ("P0103",)),
        "indent at the start": ("    let a = 1\n", ("P0102", "P0104")),
        "indent without a block": ("let a = 1\n    let b = 2\n", ("P0102", "P0104")),
        "bad dedent": ("if True:\n        print 1\n    print 2\n", ("P0104",)),
        "bad dedent to less": ("if True:\n    if True:\n        print 1\n   print 2\n", ("P0104",)),
        "no block": ("if True:\nprint 1\n", ("P0102",)),
        "no block at the end": ("if True:\n", ("P0102",)),
        "no block and no line end": ("if True:", ("P0102",)),
        "only a comment in the block": ("if True:\n    # nothing\n", ("P0102",)),
        "else alone": ("else:\n    print 1\n", ("P0102",)),
        "else after a loop": ("for i in range(2):\n    print i\nelse:\n    print 2\n", ("P0102",)),
        "else deeper": ("if True:\n    print 1\n    else:\n    print 2\n", ("P0102",)),
        "form feed": ("let a = 1\n\f\nlet b = 2\n", ("P0109",)),
        "vertical tab": ("let a =\v1\n", ("P0109",)),
        "backslash": ("let a = 1 + \\\n    2\n", ("P0109",)),
        "semicolon": ("let a = 1; let b = 2\n", ("P0109",)),
        "unicode line end": ("let a = 1\u2028let b = 2\n", ("P0109",)),
        "next line character": ("let a = 1\x85let b = 2\n", ("P0109",)),
    }
)
def test_layout(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    refused(check(tmp_path, text), *codes)


# ------------------------------------------------------------------------------------------------------- strings, signs


@cases(
    {
        "string": ('print "abc\n', ("P0106",)),
        "string at the end": ('print "abc', ("P0106",)),
        "single quotes": ("print 'abc\n", ("P0106",)),
        "quote at the end": ('print "', ("P0106",)),
        "escaped quote": ('print "abc\\"\n', ("P0106",)),
        "escape at the end": ('print "abc\\', ("P0106",)),
        "text": ('"""abc\nlet a = 1\n', ("P0106",)),
        "text at the end": ('"""', ("P0106",)),
        "text escaped": ('"""abc\\"""\n', ("P0106",)),
        "four quotes": ('""""\n', ("P0106",)),
        "bad escape": ('print "a\\qb"\n', ("P0106",)),
        "hex escape": ('print "\\x41"\n', ("P0106",)),
        "surrogate escape": ('print "\\ud800"\n', ("P0106",)),
        "bad escape in a text": ('"""a\n\\q"""\n', ("P0106",)),
        "bad escape in an import": ('import "./\\q.piper" as q\n', ("P0106",)),
        "curly quotes": ("print \u201cabc\u201d\n", ("P0109",)),
        "cyrillic name": ("let \u0430bc = 1\n", ("P0109",)),
        "cyrillic in a name": ("let b\u0430c = 1\n", ("P0109",)),
        "greek name": ("let \u03b1 = 1\n", ("P0109",)),
        "full width": ("let a \uff1d 1\n", ("P0109",)),
        "arabic digits": ("let a = \u0661\u0662\n", ("P0109",)),
        "superscript": ("let a = 2\u00b2\n", ("P0109", "P0110")),
        "minus sign": ("let a = 3 \u2212 1\n", ("P0109",)),
        "no-break space": ("let a\u00a0= 1\n", ("P0109",)),
        "zero width space": ("let a\u200b = 1\n", ("P0109",)),
        "mark inside": ("let a = \ufeff1\n", ("P0109",)),
        "right to left": ("let a = 1 \u202e# hidden\n", ("P0109",)),
        "right to left mark": ("\u200flet a = 1\n", ("P0109",)),
        "emoji": ("let \U0001f600 = 1\n", ("P0109",)),
        "emoji joined": ("let a = \U0001f468\u200d\U0001f469\n", ("P0109",)),
        "combining": ("let e\u0301 = 1\n", ("P0109",)),
        "combining only": ("\u0301\u0301\u0301\n", ("P0109",)),
        "private use": ("let a = \ue000\n", ("P0109",)),
        "not a character": ("let a = \uffff\n", ("P0109",)),
        "accent in a name": ("let caf\u00e9 = 1\n", ("P0109",)),
        "leading zero letter": ("let a = 0x10\n", ("P0110",)),
        "number and name": ("let a = 10abc\n", ("P0110",)),
        "two dots": ("let a = 1.2.3\n", ("P0110", "P0102")),
        "bare exponent": ("let a = 1e\n", ("P0110",)),
        "underscores": ("let a = 1__0\n", ("P0110",)),
        "wrong unit": ("let a = 25mb\n", ("P0110",)),
        "unicode digits in a number": ("let a = 1\u0661\n", ("P0109", "P0110")),
    }
)
def test_strings_and_signs(tmp_path: Path, text: Text, codes: tuple[str, ...]) -> None:
    outcome = refused(check(tmp_path, text), *codes)
    assert not re.search("[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]", outcome.err), (
        "an invisible character is shown as it is"
    )


@texts(
    {
        "string": 'print "\u00e9 \u4e2d \U0001f600 \u05d0 \u202e e\u0301"\n',
        "comment": "let a = 1  # \u00e9 \u4e2d \U0001f600 \u05d0 \u202e e\u0301 \x1b[31m\n",
        "text": '"""\u00e9 \u4e2d\n\U0001f600\u2028\x85"""\n',
        "tag": 'mesh g = p: 1\nplace [stage="\u00e9\U0001f600"] on g\n',
    }
)
def test_unicode_where_it_belongs(tmp_path: Path, text: Text) -> None:
    assert bounded(check(tmp_path, text)).code == 0


@texts(
    {
        "require": 'require False, "\x1b]0;title\x07\x1b[2J"\n',
        "pass": 'order [pass="\x1b[31m"] -> [pass=F]\n',
        "import": 'import "./\x1b[31m.piper" as x\n',
        "right to left": 'require False, "\u202eabc"\n',
        "print": 'print "\x1b]0;title\x07"\n',
        "path": 'order [stage="\x1b[31m"] -> [pass=G]\n',
        "option": 'mesh g = p: 2\nreplicate [a=0] over g.p with grads="\x1b[31m"\n',
    }
)
def test_no_control_of_the_terminal(tmp_path: Path, text: Text) -> None:
    """A stranger's script must not write escape sequences to the terminal of whoever checks it."""
    outcome = bounded(check(tmp_path, text))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", outcome.out + outcome.err)


def test_a_message_is_one_line(tmp_path: Path) -> None:
    """`concise` is for grep: one diagnostic a line, whatever the script's own words are."""
    save(tmp_path, 'require False, "first\\nbad.piper:9:9: P0999 forged"\n')
    outcome = bounded(piperc("check", "--format", "concise", "bad.piper", cwd=tmp_path))
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) == 1
