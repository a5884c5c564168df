"""Editor support: generated files are fresh, know exactly the words of the grammar, and colour as the Pygments lexer
does.

VS Code's grammar runs in its own engine through npm, Vim's in Vim. Where one is missing the test says how to get it; on
CI (environment variable CI) a missing one is a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, _TokenType

from piperlang.directives import OPTION_WORDS
from piperlang.highlight import KEYWORD_TOKENS, PiperLexer
from piperlang.syntax import grammar
from piperlang.syntax.words import BUILTINS, KEYWORDS, SELECTOR_WORDS
from tests.support import ROOT

EDITORS = ROOT / "editor-support"
VSCODE = EDITORS / "vscode"
VIM = EDITORS / "vim"
SCRIPTS = sorted([*ROOT.glob("stdlib/**/*.piper"), *ROOT.glob("examples/**/*.piper"), *VSCODE.glob("tests/*.piper")])


def missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600, **options)


@cache
def textmate() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((VSCODE / "syntaxes" / "piper.tmLanguage.json").read_text(encoding="utf-8"))
    return loaded


@cache
def vim_syntax() -> str:
    return (VIM / "syntax" / "piper.vim").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------ generated files


def test_generated_files_are_fresh() -> None:
    done = run([sys.executable, str(EDITORS / "generate.py"), "--check"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["vscode/syntaxes/piper.tmLanguage.json", "vim/syntax/piper.vim"])
def test_a_stale_file_is_named(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "editor-support"
    shutil.copytree(EDITORS, copy, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    generate = [sys.executable, str(copy / "generate.py")]
    assert run([*generate, "--check"], env=environment).returncode == 0
    fresh = (copy / name).read_bytes()
    for change in (b"\n", None):
        (copy / name).unlink() if change is None else (copy / name).write_bytes(fresh + change)
        done = run([*generate, "--check"], env=environment)
        assert done.returncode == 1
        assert f"editor-support/{name} is stale" in done.stderr
        assert done.stderr.count("stale") == 1
        assert run(generate, env=environment).returncode == 0
        assert (copy / name).read_bytes() == fresh


# ---------------------------------------------------------------------------------------------------------------- words


def alternatives(pattern: str, opening: str = r"\b(?:", between: str = "|", closing: str = r")\b") -> list[str]:
    assert pattern.startswith(opening), pattern
    assert pattern.endswith(closing), pattern
    return pattern.removeprefix(opening).removesuffix(closing).split(between)


def vim_words(group: str) -> list[list[str]]:
    found = re.findall(
        rf"^syntax match {group} (?:contained )?/.*?(\\<\\%\((?:\w|\\\|)+\\\)\\>)", vim_syntax(), re.MULTILINE
    )
    return [alternatives(pattern, r"\<\%(", r"\|", r"\)\>") for pattern in found]


def test_every_list_has_the_keywords_of_the_grammar() -> None:
    keywords = sorted(grammar.keyword_types().values())
    cluster = re.search(r"^syntax cluster piperKeyword contains=(\S+)$", vim_syntax(), re.MULTILINE)
    assert cluster is not None
    lists = {
        "words.py": KEYWORDS,
        "Pygments": KEYWORD_TOKENS,
        "VS Code": [
            word for rule in textmate()["repository"]["keywords"]["patterns"] for word in alternatives(rule["match"])
        ],
        "Vim": [word for group in cluster[1].split(",") for words in vim_words(group) for word in words],
    }
    assert {name: sorted(words) for name, words in lists.items()} == dict.fromkeys(lists, keywords)


def test_builtins_and_words_of_keys() -> None:
    rules = textmate()["repository"]
    assert alternatives(rules["builtin"]["match"].removesuffix(r"(?=\s*\()")) == list(BUILTINS)
    assert vim_words("piperBuiltin") == [list(BUILTINS)]
    for key, words in SELECTOR_WORDS.items():
        assert alternatives(rules[f"value-{key}"]["patterns"][0]["match"].removesuffix(r"(?!\s*\()")) == list(words)
        assert vim_words(f"piperWord_{key}") == [list(words)]
    assert vim_words("piperOptionWord") == [list(words) for words in OPTION_WORDS.values()]


# -------------------------------------------------------------------------------------------------------------- VS Code


def need_node() -> str:
    npm = shutil.which("npm")
    if npm is None:
        missing("npm is missing: install Node.js 20 or later")
    if not (VSCODE / "node_modules").is_dir():
        missing("the grammar's test tool is missing: npm install --prefix editor-support/vscode")
    return str(npm)


def test_vscode_scopes() -> None:
    done = run([need_node(), "test"], cwd=VSCODE, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("run success") == len(list(VSCODE.glob("tests/*.piper"))), done.stdout


def test_vscode_tests_cover_every_scope() -> None:
    asserted = {
        scope
        for path in VSCODE.glob("tests/*.piper")
        for scopes in re.findall(r"^# *(?:\^+|<[~-]+)\s+([^-\s].*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for scope in scopes.split()
    }
    assert asserted == set(named(textmate()["repository"]))


def named(rule: Any) -> Iterator[str]:
    if isinstance(rule, dict):
        if isinstance(rule.get("name"), str):
            yield rule["name"]
        for part in rule.values():
            yield from named(part)
    elif isinstance(rule, list):
        for part in rule:
            yield from named(part)


def test_vscode_manifest() -> None:
    manifest = json.loads((VSCODE / "package.json").read_text(encoding="utf-8"))
    (language,), (colours,) = manifest["contributes"]["languages"], manifest["contributes"]["grammars"]
    assert (language["id"], language["extensions"]) == (colours["language"], [".piper"]) == ("piper", [".piper"])
    assert colours["scopeName"] == textmate()["scopeName"] == "source.piper"
    for path in (language["configuration"], colours["path"]):
        assert (VSCODE / path).is_file(), path
    assert (manifest["license"], manifest["publisher"]) == ("Apache-2.0", "piperlang")
    for version in manifest["devDependencies"].values():
        assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version), "exact, because no lock file is kept"


@pytest.mark.parametrize(
    ("line", "increase", "decrease"),
    [
        ("for r in range(2):", True, False),
        ("    order on gpu[pp=s]:  # steps", True, False),
        ("else:", True, True),
        ("    elif a == 1:  # or", True, True),
        ("repeat 2: F(s)", False, False),
        ("# note:", False, False),
        ("mesh gpu = pp: 2", False, False),
        ("elsewhere(1)", False, False),
    ],
)
def test_vscode_indentation(line: str, increase: bool, decrease: bool) -> None:
    rules = json.loads((VSCODE / "language-configuration.json").read_text(encoding="utf-8"))["indentationRules"]
    assert bool(re.search(rules["increaseIndentPattern"], line)) is increase
    assert bool(re.search(rules["decreaseIndentPattern"], line)) is decrease


# ----------------------------------------------------------------------------------------------------------------- Vim


@cache
def editor(name: str) -> str | None:
    path = shutil.which(name)
    return path if path and (name == "nvim" or "+syntax" in run([path, "--version"]).stdout) else None


def in_vim(tmp_path: Path, script: Path, *commands: str, name: str = "vim") -> Any:
    """What `g:answer` holds after `commands`, in an editor that knows nothing but our folder."""
    program = editor(name)
    if program is None and name == "nvim":
        pytest.skip("nvim is not installed; the same files are tested in vim")
    if program is None:
        missing("vim is missing: install Vim with +syntax (Debian: apt install vim)")
    answer = tmp_path / "answer.json"
    done = run(
        [
            str(program),
            "-N",
            "-u",
            "NONE",
            "-i",
            "NONE",
            "-n",
            "-es",
            "--cmd",
            f"set runtimepath^={VIM}",
            "--cmd",
            "filetype plugin indent on",
            "--cmd",
            "syntax on",
            "-c",
            f"edit {script}",
            *(part for command in commands for part in ("-c", command)),
            "-c",
            f"call writefile([json_encode(g:answer)], '{answer}')",
            "-c",
            "qall!",
        ],
        env={**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
    )
    assert answer.exists(), f"the commands failed: {done.stdout} {done.stderr}"
    return json.loads(answer.read_text(encoding="utf-8"))


GROUPS = (
    "let g:answer = map(range(1, line('$')), {_, l -> map(range(1, col([l, '$']) - 1), {_, c -> synIDattr(synID(l, c,"
    " 1), 'name')})})"
)


def groups_at(tmp_path: Path, text: str, name: str = "vim") -> list[tuple[str, str]]:
    """The words of an ASCII text, each with its group, without those that have none."""
    script = tmp_path / "groups.piper"
    script.write_text(text, encoding="ascii")
    rows = in_vim(tmp_path, script, GROUPS, name=name)
    found: list[tuple[str, str]] = []
    for line, row in zip(text.split("\n"), rows, strict=False):
        for word in re.finditer(r"\w+|[^\w\s]", line):
            if row[word.start()] in coloured():
                found.append((word[0], row[word.start()].removeprefix("piper")))
    return found


@cache
def coloured() -> frozenset[str]:
    return frozenset(re.findall(r"^highlight default link (\w+) ", vim_syntax(), re.MULTILINE)) - {"piperBracket"}


BOTH = pytest.mark.parametrize("name", ["vim", "nvim"])


@BOTH
def test_vim_groups(tmp_path: Path, name: str) -> None:
    text = (
        "mesh gpu = pp: ranks\n"
        "place [stage=0, pass={F, x}, !expert, mb=next?] on gpu[pp=r]  # why\n"
        "shard [expert=*] over gpu.order with style=rows, bucket=25MB\n"
        'def F(s): max(s, 1.5) & "a"\n'
    )
    assert groups_at(tmp_path, text, name) == [
        ("mesh", "Declaration"),
        ("gpu", "Bound"),
        ("=", "Operator"),
        ("pp", "Axis"),
        ("place", "Directive"),
        ("stage", "Key"),
        ("=", "Operator"),
        ("0", "Integer"),
        ("pass", "Key"),
        ("=", "Operator"),
        ("F", "Word_pass"),
        ("!", "Absent"),
        ("expert", "Key"),
        ("mb", "Key"),
        ("=", "Operator"),
        ("next", "Constant"),
        ("?", "Operator"),
        ("on", "Connective"),
        ("pp", "Key"),
        ("=", "Operator"),
        ("#", "Comment"),
        ("why", "Comment"),
        ("shard", "Directive"),
        ("expert", "Key"),
        ("=", "Operator"),
        ("*", "Wildcard"),
        ("over", "Connective"),
        ("with", "Connective"),
        ("style", "Option"),
        ("=", "Operator"),
        ("rows", "OptionWord"),
        ("bucket", "Option"),
        ("=", "Operator"),
        ("25MB", "Size"),
        ("def", "Declaration"),
        ("F", "Function"),
        ("max", "Builtin"),
        ("1", "Float"),
        (".", "Float"),
        ("5", "Float"),
        ("&", "Operator"),
        ('"', "String"),
        ("a", "String"),
        ('"', "String"),
    ]


@BOTH
def test_vim_recovers_from_an_open_bracket(tmp_path: Path, name: str) -> None:
    after = "order on x: y\nlet a, b = order"
    alone = groups_at(tmp_path, after, name)
    assert ("order", "Directive") in alone
    assert ("b", "BoundOne") in alone
    for opened in (
        "place [stage=0, pass=F,",
        "shard x over y with bucket=f(",
        "mesh g = pp: (2",
        "let x = [pass={F,",
        "print [x={",
    ):
        assert groups_at(tmp_path, f"{opened}\n{after}", name)[-len(alone) :] == alone, opened


@BOTH
def test_vim_filetype_and_settings(tmp_path: Path, name: str) -> None:
    settings = "let g:answer = [&filetype, &shiftwidth, &softtabstop, &expandtab, &commentstring, b:current_syntax]"
    assert in_vim(tmp_path, tmp_path / "new.piper", settings, name=name) == ["piper", 4, 4, 1, "# %s", "piper"]
    undone = "let g:answer = [&filetype, &expandtab, &indentexpr]"
    assert in_vim(tmp_path, tmp_path / "new.piper", "setfiletype piper", "set filetype=text", undone, name=name) == [
        "text",
        0,
        "",
    ]
    assert in_vim(tmp_path, tmp_path / "new.pipe", "let g:answer = &filetype", name=name) != "piper"


LAYOUT = '''\
"""Text that ends in a colon:
  stays as it is.
"""
def f(gpu, n=1):  # why:
    """Doc."""
    for s in range(n):
        let warm = min(
            n,
            [
                1,
            ],
        )
        # a note:
        if warm == 0:
            order on gpu[pp=s]:
                repeat warm: F(s)
                F(s), B(s)
        elif warm > 3:
            print ":"
        else:
            return warm
        print s
mesh gpu = pp: 2
'''


@BOTH
def test_vim_indentation(tmp_path: Path, name: str) -> None:
    """What Enter gives on every line: its layout, but for lines inside a text (-1: as typed) and the one that leaves a
    block."""
    script = tmp_path / "indent.piper"
    script.write_text(LAYOUT, encoding="ascii")
    indents = in_vim(tmp_path, script, "let g:answer = map(range(1, line('$')), {_, l -> PiperIndent(l)})", name=name)
    lines = LAYOUT.splitlines()
    for line, indent in zip(lines, indents, strict=True):
        width = len(line) - len(line.lstrip())
        assert indent == {"  stays as it is.": -1, '"""': -1, "mesh gpu = pp: 2": 8}.get(line, width), line


@BOTH
def test_vim_indents_while_typing(tmp_path: Path, name: str) -> None:
    typed = r'execute "normal! ifor s in range(2):\<CR>if s == 0:\<CR>place [stage=s] on gpu\<CR>else:\<CR>print s"'
    lines = in_vim(tmp_path, tmp_path / "typed.piper", typed, "let g:answer = getline(1, '$')", name=name)
    assert lines == [
        "for s in range(2):",
        "    if s == 0:",
        "        place [stage=s] on gpu",
        "    else:",
        "        print s",
    ]


# -------------------------------------------------------------------------------------------- all three colour the same

AGREED: dict[_TokenType, tuple[set[str], set[str]]] = {
    # Pygments: Vim, VS Code
    Comment.Single: ({"Comment"}, {"comment.line.number-sign"}),
    String.Doc: ({"Doc"}, {"string.quoted.docstring"}),
    String.Double: ({"String"}, {"string.quoted.double"}),
    String.Single: ({"String"}, {"string.quoted.single"}),
    String.Escape: ({"Escape"}, {"constant.character.escape"}),
    Number: ({"Size"}, {"constant.numeric.size"}),
    Number.Integer: ({"Integer"}, {"constant.numeric.integer"}),
    Number.Float: ({"Float"}, {"constant.numeric.float"}),
    Keyword: ({"Directive"}, {"keyword.control.directive"}),
    Keyword.Declaration: ({"Declaration"}, {"storage.type"}),
    Keyword.Namespace: ({"Import"}, {"keyword.control.import"}),
    Keyword.Reserved: ({"Control"}, {"keyword.control.flow"}),
    Keyword.Pseudo: ({"Connective"}, {"keyword.other.connective"}),
    Keyword.Constant: ({"Constant", "Wildcard"}, {"constant.language", "constant.language.wildcard"}),
    Operator.Word: ({"OperatorWord"}, {"keyword.operator.logical"}),
    Operator: (
        {"Operator", "Absent"},
        {
            f"keyword.operator.{kind}"
            for kind in ("order", "join", "comparison", "arithmetic", "assignment", "absent", "optional")
        },
    ),
    Name.Builtin: ({"Builtin"}, {"support.function.builtin"}),
    Name.Function: ({"Function"}, {"entity.name.function"}),
    Name.Variable: ({"Bound", "BoundOne"}, {"variable.other.declaration"}),
    Name.Namespace: ({"Module"}, {"entity.name.namespace"}),
    Name.Attribute: (
        {"Key", "Axis", "Tag", "Option"},
        {f"entity.other.attribute-name.{kind}" for kind in ("selector", "axis", "tag", "option")},
    ),
    Name.Constant: (
        {"OptionWord", *(f"Word_{key}" for key in SELECTOR_WORDS)},
        {"support.constant.selector", "support.constant.option"},
    ),
    Error: (
        {"BadNumber", "BadEscape", "Unclosed"},
        {f"invalid.illegal.{kind}" for kind in ("number", "escape", "unclosed-string")},
    ),
    Name: ({""}, {"", "variable.other.member"}),
    Punctuation: (
        {""},
        {
            "punctuation.separator.comma",
            "punctuation.separator.colon",
            "punctuation.accessor",
            "punctuation.section.bracket.begin",
            "punctuation.section.bracket.end",
        },
    ),
}

TOKENIZE = """
const { readFileSync } = require("fs")
const { Registry, parseRawGrammar, INITIAL } = require("vscode-textmate")
const oniguruma = require("vscode-oniguruma")
const [grammar, ...scripts] = process.argv.slice(1)
const wasm = readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm")).buffer
const onigLib = oniguruma.loadWASM(wasm).then(() => ({
  createOnigScanner: patterns => new oniguruma.OnigScanner(patterns),
  createOnigString: text => new oniguruma.OnigString(text),
}))
const loadGrammar = async () => parseRawGrammar(readFileSync(grammar, "utf8"), grammar)
const registry = new Registry({ onigLib, loadGrammar })
registry.loadGrammar("source.piper").then(piper => {
  const answer = scripts.map(script => {
    let state = INITIAL
    return readFileSync(script, "utf8").split("\\n").map(line => {
      const done = piper.tokenizeLine(line, state)
      state = done.ruleStack
      return done.tokens.map(t => [t.startIndex, t.endIndex, t.scopes[t.scopes.length - 1]])
    })
  })
  console.log(JSON.stringify(answer))
})
"""


def pygments_says(text: str) -> Iterator[tuple[int, int, str, _TokenType]]:
    """Line and column (from 0), character and class of everything visible."""
    for at, token, value in PiperLexer().get_tokens_unprocessed(text):
        if token in AGREED:
            for i, char in enumerate(value, at):
                if char.strip() and char.isascii():
                    before = text.rfind("\n", 0, i) + 1
                    yield text.count("\n", 0, i), i - before, char, token


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@BOTH
@pytest.mark.parametrize("path", SCRIPTS, ids=shown)
def test_vim_agrees_with_pygments(path: Path, tmp_path: Path, name: str) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    rows = in_vim(tmp_path, path, GROUPS, name=name)
    wrong = []
    for line, column, char, token in pygments_says(text):
        group = rows[line][len(lines[line][:column].encode())]
        group = group.removeprefix("piper") if group in coloured() else ""
        if group not in AGREED[token][0]:
            wrong.append(f"{line + 1}:{column + 1}: {char} is {token} and {group or 'plain'}")
    assert wrong == []


def test_vscode_agrees_with_pygments() -> None:
    need_node()
    node = shutil.which("node")
    assert node is not None
    done = run(
        [node, "-e", TOKENIZE, str(VSCODE / "syntaxes" / "piper.tmLanguage.json"), *map(str, SCRIPTS)], cwd=VSCODE
    )
    assert done.returncode == 0, done.stderr
    wrong = []
    for path, rows in zip(SCRIPTS, json.loads(done.stdout), strict=True):
        for line, column, char, token in pygments_says(path.read_text(encoding="utf-8")):
            scope = next(scope for start, end, scope in rows[line] if start <= column < end)
            scope = "" if scope == "source.piper" else scope.removesuffix(".piper")
            if scope not in AGREED[token][1]:
                wrong.append(f"{shown(path)}:{line + 1}:{column + 1}: {char} is {token} and {scope or 'plain'}")
    assert wrong == []
