"""The Pygments lexer: the class of every word on real scripts, the grammar as the judge, and text that is no script at
all."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Whitespace, _TokenType
from rich.console import Console
from rich.syntax import Syntax

from piperlang.directives import OPTION_WORDS
from piperlang.highlight import KEYWORD_TOKENS, PiperLexer
from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.build import ESCAPES
from piperlang.syntax.parse import laid_out, parse
from piperlang.syntax.words import BUILTINS, COMMUNICATIONS, KEYWORDS, PASSES, SELECTOR_WORDS, SIZE_UNITS
from tests.support import ROOT

EDITOR_TESTS = ROOT / "editor-support" / "vscode" / "tests"
SCRIPTS = sorted(
    [
        *ROOT.glob("stdlib/**/*.piper"),
        *ROOT.glob("examples/**/*.piper"),
        *(EDITOR_TESTS / f"{name}.piper" for name in ("schedule", "library", "selectors")),
    ]
)


def raw(text: str) -> list[tuple[int, _TokenType, str]]:
    return list(PiperLexer().get_tokens_unprocessed(text))


def lex(text: str) -> list[tuple[str, _TokenType]]:
    """Words and classes, without white space."""
    return [(value, token) for _, token, value in raw(text) if value.strip() and token is not Whitespace]


def classes(text: str) -> dict[str, _TokenType]:
    """Class of each word; a word of two classes is a mistake in the test."""
    found: dict[str, _TokenType] = {}
    for value, token in lex(text):
        assert found.setdefault(value, token) is token, f"{value} is both {found[value]} and {token}"
    return found


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------------------------------------------- token classes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("place x on y  # why", "Keyword Name Keyword.Pseudo Name Comment.Single"),
        ('"""Two\nlines."""', "String.Doc String.Doc String.Doc"),
        (r'print "a\tb"', "Keyword.Reserved String.Double String.Double String.Escape String.Double String.Double"),
        ("'it'", "String.Single String.Single String.Single"),
        ("25MB 2GiB 8B 1.5TB", "Number Number Number Number"),
        ("8 1_000 0.5 1e-3", "Number.Integer Number.Integer Number.Float Number.Float"),
        ("not a and b or True", "Operator.Word Name Operator.Word Name Operator.Word Keyword.Constant"),
        (
            "from std.pipeline import zbv as v",
            "Keyword.Namespace Name.Namespace Keyword.Namespace Name Keyword.Pseudo Name.Variable",
        ),
        ("from 'a' import b", "Keyword.Namespace String.Single String.Single String.Single Keyword.Namespace Name"),
        ("import std.data as d", "Keyword.Namespace Name.Namespace Keyword.Pseudo Name.Variable"),
        ("param n = min", "Keyword.Declaration Name.Variable Operator Name"),
        ("let a, b = c", "Keyword.Declaration Name.Variable Punctuation Name.Variable Operator Name"),
        (
            "mesh g = pp: n, dp: 2",
            (
                "Keyword.Declaration Name.Variable Operator Name.Attribute Punctuation Name Punctuation Name.Attribute"
                " Punctuation Number.Integer"
            ),
        ),
        (
            "mesh g = pp: 2\npp: 2",
            (
                "Keyword.Declaration Name.Variable Operator Name.Attribute Punctuation Number.Integer Name Punctuation"
                " Number.Integer"
            ),
        ),
        (
            "def f(x): min(x)",
            (
                "Keyword.Declaration Name.Function Punctuation Name Punctuation Punctuation Name.Builtin Punctuation"
                " Name Punctuation"
            ),
        ),
        ("gpu.max(2)", "Name Punctuation Name Punctuation Number.Integer Punctuation"),
        ("model.order", "Name Punctuation Name"),
        ("A -> B & C | D", "Name Operator Name Operator Name Operator Name"),
        (
            "split batch into 4 as mb",
            "Keyword Keyword.Pseudo Keyword.Pseudo Number.Integer Keyword.Pseudo Name.Variable",
        ),
        ("tag s=a at a", "Keyword Name.Attribute Operator Name Keyword.Pseudo Name"),
        ("tag s=a at a=1", "Keyword Name.Attribute Operator Name Keyword.Pseudo Name Operator Number.Integer"),
        ("from std.data 3", "Keyword.Namespace Name.Namespace Number.Integer"),
    ],
)
def test_classes(text: str, expected: str) -> None:
    assert " ".join(str(token).removeprefix("Token.").removeprefix("Literal.") for _, token in lex(text)) == expected


def test_selector() -> None:
    found = classes("[stage=0, pass=F, !expert, mb=next?, order!=k, top=*, update]")
    for key in ("stage", "pass", "expert", "mb", "order", "top"):
        assert found[key] is Name.Attribute, key
    assert found["F"] is Name.Constant
    assert found["next"] is found["*"] is found["update"] is Keyword.Constant
    assert found["!"] is found["!="] is found["?"] is Operator
    assert found["k"] is Name


@pytest.mark.parametrize("value", ["{0}", "{{x, {0}}}", "({0})", "{0} | x", "x if y else {0}", "\n    {0}"])
@pytest.mark.parametrize(("key", "word"), [(key, word) for key, words in SELECTOR_WORDS.items() for word in words])
def test_words_of_a_key(key: str, word: str, value: str) -> None:
    """They are words anywhere in the value of their key, and nowhere else."""
    assert classes(f"[{key}={value.format(word)}, k=1]")[word] is Name.Constant
    assert classes(f"[{key}!={value.format(word)}, k=1]")[word] is Name.Constant
    assert lex(f"[{key}=x, k={word}]")[-2] == (word, Name)
    assert lex(f"f({key}={word})")[-2] == (word, Name)


def test_a_function_named_like_a_pass() -> None:
    assert lex("F(s)")[0] == ("F", Name)
    assert classes("[pass=F(s)]")["F"] is Name


def test_keys_stand_directly_in_square_brackets() -> None:
    assert classes("[f(x=1), g[y=2]]") == {
        "[": Punctuation,
        "f": Name,
        "(": Punctuation,
        "x": Name,
        "=": Operator,
        "1": Number.Integer,
        ")": Punctuation,
        ",": Punctuation,
        "g": Name,
        "y": Name.Attribute,
        "2": Number.Integer,
        "]": Punctuation,
    }
    assert classes("[a == b]")["a"] is Name
    assert classes("[x for x in y if z != 1]")["z"] is Name
    assert classes("[\n    # why\n    stage\n    = 0,\n\n    mb=1\n]")["stage"] is Name.Attribute


@pytest.mark.parametrize(
    "text",
    [
        "[ stage = 0 , pass = { F , B } , mb = * , comm = ( send ) ]",
        "[ pass = F | B , stage = { 0 , 1 } ]",
        "f( 1 , x = [ 2 ] )",
        "gpu[ pp = 0 , ! dp ]",
        "x[ * ]",
    ],
)
def test_brackets_go_on_over_lines(text: str) -> None:
    spaces = lex(text)
    assert Error not in [token for _, token in spaces]
    assert lex(text.replace(" ", "")) == spaces
    broken = re.sub(r"(?<![!]) ", "\n    ", text)
    assert lex(broken) == spaces
    commented = re.sub(r"([\[,({])\n", r"\1  # why\n", broken)
    assert [pair for pair in lex(commented) if pair[1] is not Comment.Single] == spaces


def test_wildcards_are_not_products() -> None:
    assert [token for value, token in lex("[a=*, b=2*c] layers[*] 2 * [*]") if value == "*"] == [
        Keyword.Constant,
        Operator,
        Keyword.Constant,
        Operator,
        Keyword.Constant,
    ]


@pytest.mark.parametrize(
    ("option", "word"), [(option, word) for option, words in OPTION_WORDS.items() for word in words]
)
def test_words_of_an_option(option: str, word: str) -> None:
    found = classes(f"replicate x over y with {option}={word}, bucket=25MB")
    assert found[option] is found["bucket"] is Name.Attribute
    assert found[word] is Name.Constant
    assert classes(f"replicate x over y with bucket={word}")[word] is Name
    assert lex(f"replicate x over y with bucket=1\n{word}")[-1] == (word, Name), "options end with their line"


def test_options_over_lines() -> None:
    found = classes("replicate x over y with prefetch=max(\n    1, 2), reduce=mean")
    assert found["reduce"] is Name.Attribute
    assert found["mean"] is Name.Constant


@pytest.mark.parametrize("word", KEYWORDS)
def test_every_keyword(word: str) -> None:
    assert lex(word) == [(word, KEYWORD_TOKENS[word])]
    assert lex(f"{word}_x x_{word} {word}1") == [(f"{word}_x", Name), (f"x_{word}", Name), (f"{word}1", Name)]
    assert lex(f"m.{word}")[-1] == (word, Name)
    assert lex(f"[{word}=1]")[1] == (word, Name.Attribute)


@pytest.mark.parametrize("word", BUILTINS)
def test_builtins_are_calls(word: str) -> None:
    assert lex(f"{word}(x)")[0] == (word, Name.Builtin)
    assert lex(f"{word} (x)")[0] == (word, Name.Builtin)
    assert lex(f"{word}, {word}_(x)")[0] == (word, Name)
    assert lex(f"{word}_(x)")[0] == (f"{word}_", Name)


@pytest.mark.parametrize("unit", SIZE_UNITS)
def test_every_unit(unit: str) -> None:
    assert lex(f"12{unit}") == [(f"12{unit}", Number)]


# ----------------------------------------------------------------------------------------- against the real grammar


def test_there_are_scripts() -> None:
    assert all(path.exists() for path in SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=shown)
def test_valid_scripts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse(Source(path.name, text))[1] == [], "the script is not valid, so it says nothing about Error tokens"
    assert [(at, value) for at, token, value in raw(text) if token is Error] == []
    assert "".join(value for _, _, value in raw(text)) == text
    assert "".join(value for _, value in PiperLexer(stripnl=False, ensurenl=False).get_tokens(text)) == text


@pytest.mark.parametrize("path", SCRIPTS, ids=shown)
def test_the_grammar_agrees(path: Path) -> None:
    """Each token of the parser begins where the lexer has a token of the class that belongs to it."""
    text = path.read_text(encoding="utf-8")
    here = {at: token for at, token, value in raw(text) if value}
    layout = laid_out(Source(path.name, text))
    here |= _inside_names(text)
    for token in [*layout.comments, *(t for statement in layout.statements for t in statement.tokens)]:
        if token.type in ("NEWLINE", "INDENT", "DEDENT"):
            continue
        found = here.get(token.start_pos or 0, Error)
        assert _fits(token.type, str(token), found), f"{token.type} {token!r} at line {token.line} is {found}"


def _inside_names(text: str) -> dict[int, _TokenType]:
    """`std.pipeline` is one token here and three in the grammar."""
    return {
        at + m.start(): token
        for at, token, value in raw(text)
        if token is Name.Namespace
        for m in re.finditer(r"\w+|\.", value)
    }


def _fits(kind: str, text: str, found: _TokenType) -> bool:
    exact = {
        "KEY": Name.Attribute,
        "INT": Number.Integer,
        "FLOAT": Number.Float,
        "SIZE": Number,
        "TEXT": String.Doc,
        "COMMENT": Comment.Single,
    }
    if kind in exact:
        return found is exact[kind]
    if kind == "STRING":
        return found in (String.Double, String.Single)
    if kind == "NAME":
        return found in Name and (found is not Name.Builtin or text in BUILTINS)
    if kind in grammar.keyword_types():
        return found is KEYWORD_TOKENS[text]
    if kind == "STAR":
        return found in (Operator, Keyword.Constant)
    return found in (Operator, Punctuation, Name.Namespace)


def test_every_sign_of_the_grammar_is_known() -> None:
    closers = {")": "(", "]": "[", "}": "{"}
    signs = [
        t.pattern.value
        for t in grammar.parser().terminals
        if t.pattern.type == "str" and not t.pattern.value[0].isalpha()
    ]
    assert len(signs) > 20
    for sign in [*signs, "+", "-", "//", "/", "%"]:
        text = {"!": "[!x]", "?": "[mb=next?]", '"""': '"""x"""'}.get(sign, closers.get(sign, "") + sign)
        assert Error not in [token for _, token in lex(text)], sign


def test_escapes_are_those_of_the_language() -> None:
    for char in map(chr, range(32, 127)):
        if char in "\"'":
            continue
        assert ((f"\\{char}", String.Escape) in lex(f'"\\{char}"')) == (f"\\{char}" in ESCAPES), char
    assert (r"\"", String.Escape) in lex(r'"\""')
    assert (r"\'", String.Escape) in lex(r"'\''")
    assert [t for _, t, v in raw('"""\\\n"""') if v == "\\\n"] == [String.Escape]


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("let a = 25Mb", ["25Mb"]),
        ("12abc", ["12abc"]),
        ("1__0", ["1__0"]),
        ('print "open', ['"open']),
        ("print 'open", ["'open"]),
        (r'"\q"', [r"\q"]),
        ("a; b", [";"]),
        ("$", ["$"]),
        ("é", ["é"]),
        (")", [")"]),
        ("[1)", [")"]),
        ("!x", ["!"]),
        ("x?", ["?"]),
    ],
)
def test_mistakes_show(text: str, wrong: list[str]) -> None:
    assert [value for value, token in lex(text) if token is Error] == wrong


@pytest.mark.parametrize(
    "opened", ["[stage=0, pass=F,", "f(1,", "[pass={F,", "[comm=", "max(\n    [", "x over y with bucket=f("]
)
def test_an_open_bracket_ends_before_a_statement(opened: str) -> None:
    after = "    place [stage=0] on gpu[pp=0]\nlet a, b = 1, 2"
    assert lex(f"replicate {opened}\n{after}")[-len(lex(after)) :] == lex(after)


def test_a_reserved_word_is_no_name() -> None:
    assert lex("let order = 1")[1] == ("order", Keyword)
    assert lex("def for(): 1")[1] == ("for", Keyword.Reserved)
    assert lex("param if = 1")[1] == ("if", Keyword.Reserved)


# ------------------------------------------------------------------------------------------------------ any text at all

PIECES = [
    *KEYWORDS,
    *BUILTINS,
    *PASSES,
    *COMMUNICATIONS,
    *"[](){}=!<>,.:#\"'\\*&|-+/%? \t\n\r",
    '"""',
    "pass=",
    "with grads=",
    "25MB",
    "1.5",
    "1_",
    "é",
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4))).map("".join))
def test_any_text_comes_back(text: str) -> None:
    tokens = raw(text)
    assert "".join(value for _, _, value in tokens) == text
    assert [at for at, _, _ in tokens] == sorted(at for at, _, _ in tokens)


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "[a",
        "[pass={",
        "(",
        '"',
        '"""',
        "'",
        "\\",
        "a,",
        "[a ",
        "with grads=",
        "1_",
        "1.",
        "\n ",
        "mesh a=b:",
        ")",
        "let a,",
    ],
)
def test_time_is_linear(piece: str) -> None:
    """What a stranger's file can hold must not stall an editor: about 15 µs a token, whatever the text."""
    began = time.process_time()  # what others do on this machine does not count
    for _ in PiperLexer().get_tokens_unprocessed(piece * (40_000 // len(piece))):
        pass
    assert time.process_time() - began < 5


# ---------------------------------------------------------------------------------------------------------- the tools


def test_rich_renders() -> None:
    text = "place [stage=0] on gpu[pp=0]  # here"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=80, legacy_windows=False)
    console.print(Syntax(text, PiperLexer(), theme="monokai"))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain.strip() == text
    styles = dict(re.findall(r"\x1b\[([0-9;]+)m([^\x1b]+)", out.getvalue())[i][::-1] for i in range(4))
    assert styles["place"] != styles["stage"], "a directive and a key have their own colours"


def _entry_point() -> bool:
    return any(
        e.name == "piper" and e.value == "piperlang.highlight:PiperLexer"
        for e in metadata.entry_points(group="pygments.lexers")
    )


@pytest.mark.skipif(
    not _entry_point(), reason="piperlang is not installed with its pygments.lexers entry point: pip install -e ."
)
@pytest.mark.parametrize("by_name", [True, False], ids=["-l piper", "file name"])
def test_pygmentize(tmp_path: Path, by_name: bool) -> None:
    script = tmp_path / "a.piper"
    script.write_text("place [stage=0] on gpu\n", encoding="utf-8")
    command = [sys.executable, "-m", "pygments", *(["-l", "piper"] if by_name else []), "-f", "raw", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "Token.Keyword\t'place'" in done.stdout
    assert "Token.Name.Attribute\t'stage'" in done.stdout


def test_the_lexer_says_what_it_is_for() -> None:
    assert (PiperLexer.name, PiperLexer.aliases) == ("Piper", ["piper"])
    assert (PiperLexer.filenames, PiperLexer.mimetypes) == (["*.piper"], ["text/x-piper"])
