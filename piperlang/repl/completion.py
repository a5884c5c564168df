"""Completion: the words that the grammar allows next, and the matching names of the session.

The parser reads the line up to the cursor and lists the terminals that it accepts next. They determine which kinds
of words are
offered; the session provides the candidates: tags and their values, splits, mesh axes, module paths, functions with
their signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lark import Token
from lark.exceptions import UnexpectedToken

from piperlang.core.mesh import Mesh
from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import PiperError
from piperlang.diagnostics.codes import CODES
from piperlang.directives import BY_WORD, OPTION_WORDS
from piperlang.directives.split import Split
from piperlang.directives.stream import Stream
from piperlang.directives.tag import Tag
from piperlang.elaborate.library import modules
from piperlang.elaborate.modules import Module, load
from piperlang.elaborate.values import Function, Value, brief, kind
from piperlang.repl.answer import signature
from piperlang.repl.commands import COMMANDS
from piperlang.repl.reading import is_command, last_line
from piperlang.repl.session import Session
from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.tokens import retyped
from piperlang.syntax.tree import Define
from piperlang.syntax.words import BUILTINS, CONSTANTS, DECLARATIONS, KEYWORDS, OPERATORS, RESERVED_KEYS, SELECTOR_WORDS

WORD = re.compile(r"[A-Za-z_]\w*$")
PATH = re.compile(r"[\w.\[\]*:]+$")
MODULE = re.compile(r"[\w.]+$")
BINDING = ("LET", "PARAM", "DEF", "MESH", "AS", "FOR")
"""A new name follows these words."""
SELECTS = frozenset(BY_WORD) - {"mesh", "tag"}
"""These words select nodes."""
SCRATCH = Source("completion", "")
"""The parser builds a tree as a side effect, which is discarded here."""
SELECTING = (":show", ":count", ":why")


@dataclass(frozen=True)
class Completion:
    text: str
    replaces: int
    """The number of characters before the cursor that it replaces."""
    display: str = ""
    about: str = ""


def complete(session: Session, text: str) -> list[Completion]:
    """Candidates for the end of `text`, most likely first."""
    if is_command(text):
        return list(_command(session, text.lstrip()))
    return _statement(session, text)


# ------------------------------------------------------------------------------------------------------------- commands


def _command(session: Session, text: str) -> Iterator[Completion]:
    name, space, argument = text.partition(" ")
    if not space:
        yield from (
            Completion(one, len(name), command.usage, command.summary)
            for one, command in COMMANDS.items()
            if one.startswith(name)
        )
    elif name in SELECTING:
        if name == ":why" and argument.rstrip().endswith("]") and " before " not in argument and argument.endswith(" "):
            yield Completion("before ", 0, "before")
        yield from _statement(session, argument.rpartition(" before ")[2])
    elif name == ":explain":
        yield from (
            Completion(code, len(argument), code, title)
            for code, title in CODES.items()
            if code.startswith(argument.upper())
        )
    elif name == ":help":
        words = {one: command.summary for one, command in COMMANDS.items()}
        words |= {word: about(word) for word in BY_WORD} | _library()
        yield from (
            Completion(word, len(argument), word, about) for word, about in words.items() if word.startswith(argument)
        )
    elif name == ":at":
        _, space, command = argument.partition(" ")
        if space:
            yield from _command(session, command)
    elif name == ":run":
        if argument.partition(" ")[1]:
            yield from _starting(
                {"inline": "threads of this process instead of Ray workers"}, argument.rpartition(" ")[2]
            )
    elif name in (":load", ":save", ":save!", ":graph"):
        yield from _files(argument, ("",) if name == ":graph" else (".piper",))


def _starting(words: Mapping[str, str], begun: str) -> Iterator[Completion]:
    yield from (Completion(word, len(begun), word, about) for word, about in words.items() if word.startswith(begun))


def _files(begun: str, endings: tuple[str, ...]) -> Iterator[Completion]:
    folder, _, name = begun.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}/" if folder or begun.startswith("/") else ".").expanduser().iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            if entry.is_dir():
                yield Completion(f"{entry.name}/", len(name), f"{entry.name}/")
            elif entry.name.endswith(endings):
                yield Completion(entry.name, len(name), entry.name)


# ----------------------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True)
class Here:
    """The place of the cursor in its line."""

    tokens: tuple[Token, ...]
    """Before the word that is being typed."""
    word: str
    accepted: frozenset[str]

    @property
    def first(self) -> str:
        return str(self.tokens[0]) if self.tokens else ""

    @property
    def last(self) -> Token | None:
        return self.tokens[-1] if self.tokens else None

    def has(self, kind: str) -> bool:
        return any(token.type == kind for token in self.tokens)

    def bracket(self) -> int | None:
        """Which token is the innermost bracket that is open."""
        found: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.type in ("LSQB", "LPAR", "LBRACE"):
                found.append(i)
            elif token.type in ("RSQB", "RPAR", "RBRACE") and found:
                found.pop()
        return found[-1] if found else None


def _statement(session: Session, text: str) -> list[Completion]:
    special = _paths(session, text)
    if special is not None:
        return special
    if next((token.type for token in reversed(list(grammar.tokens(text)))), "") == "COMMENT":
        return []
    typed = WORD.search(text)
    word = typed[0] if typed else ""
    line = last_line(text[: len(text) - len(word)])
    if any(
        token.type in ("BAD_TEXT", "BAD_STRING", "BAD_NUMBER") for token in (*line.unclosed[-1:], *line.tokens[-1:])
    ):
        return []
    tokens = tuple(_keyed(line.tokens))
    here = Here(tokens, word, _accepted(tokens))
    found: dict[str, Completion] = {}
    for one in _offers(session, here, text):
        if one.text.startswith(word) and one.text != word:
            found.setdefault(one.text, one)
    return list(found.values())


def _keyed(tokens: Iterable[Token]) -> Iterator[Token]:
    """As in syntax/lines.py: words before `=` in square brackets are keys, keywords after a dot are names."""
    found = list(tokens)
    depth: list[str] = []
    for i, token in enumerate(found):
        if token.type in ("LSQB", "LPAR", "LBRACE"):
            depth.append(token.type)
        elif token.type in ("RSQB", "RPAR", "RBRACE") and depth:
            depth.pop()
        following = found[i + 1] if i + 1 < len(found) else None
        if (
            depth[-1:] == ["LSQB"]
            and token.isidentifier()
            and following is not None
            and following in ("=", "!=")
            and found[i - 1].type in ("LSQB", "COMMA")
        ):
            yield retyped(token, "KEY")
        elif token in KEYWORDS and token.type != "NAME" and i and found[i - 1].type == "DOT":
            yield retyped(token, "NAME")
        else:
            yield token


def _accepted(tokens: Iterable[Token]) -> frozenset[str]:
    """The terminals that are accepted next; none if the line has a syntax error."""
    grammar.BUILDER.source = SCRATCH
    parser = grammar.fresh()
    try:
        for token in tokens:
            parser.feed_token(token)
    except (UnexpectedToken, PiperError):
        return frozenset()
    return frozenset(grammar.accepted(parser))


def _offers(session: Session, here: Here, text: str) -> Iterator[Completion]:
    at = here.bracket()
    last = here.last
    if last is not None and last.type == "DOT":
        yield from _attributes(session, here)
        return
    if last is not None and (
        last.type in BINDING or (here.first in ("let", "mesh", "param") and "EQUAL" in here.accepted)
    ):
        return
    if here.has("WITH"):
        yield from _options(here)
        return
    expected = [*(_in_brackets(session, here, at) if at is not None else ()), *_after(session, here)]
    yield from expected
    if expected and not here.word:
        return
    if not here.tokens:
        yield from _keywords(here, text)
    if "NAME" in here.accepted and here.first != "tag":
        yield from _names(session, here, text)
    if here.tokens:
        yield from _keywords(here, text)


def about(word: str) -> str:
    """The syntax of a directive."""
    return BY_WORD[word].help().partition("\n")[0] if word in BY_WORD else ""


def _keywords(here: Here, text: str) -> Iterator[Completion]:
    """The keywords that the grammar accepts here and that are allowed in the enclosing block."""
    types = grammar.keyword_types()
    words = {types[terminal] for terminal in here.accepted if terminal in types}
    in_block = "\n" in text
    if in_block and text.lstrip().startswith("order"):
        words -= {*BY_WORD, *DECLARATIONS} - {"let"}
    if here.bracket() is not None or here.first in SELECTS:
        words -= {"update", "next", "True", "False", "not"}  # the first two are offered with their keys
    if not here.word:  # too many candidates for an empty word
        words -= {*OPERATORS, *CONSTANTS, *(("if",) if here.tokens else ())}
    for word in (*KEYWORDS, *(("else:",) if in_block and not here.tokens else ())):
        if word in words or word == "else:" or (word == "elif" and in_block and not here.tokens):
            yield Completion(word, len(here.word), word, about(word))


# ------------------------------------------------------------------------------------------------------------ selectors


def _in_brackets(session: Session, here: Here, at: int) -> Iterator[Completion]:
    """Keys of a selector or axes of a mesh, and their values."""
    before = here.tokens[at - 1] if at else None
    if here.tokens[at].type == "LPAR":
        yield from _arguments(session, here, at)
        return
    mesh = session.state.names.get(str(before)) if before is not None and before.type == "NAME" else None
    size = len(here.word)
    key = _key(here.tokens, at)
    if key is not None:
        values = _axis_values(mesh, key) if isinstance(mesh, Mesh) else _values(session, here, key)
        yield from (Completion(value, size, value, about) for value, about in values)
    elif here.last is not None and here.last.type in ("LSQB", "COMMA") and here.tokens[at].type == "LSQB":
        if isinstance(mesh, Mesh):
            yield from (Completion(f"{axis}=", size, f"{axis}=", f"{length} devices") for axis, length in mesh.axes)
        elif before is None or before.type not in ("NAME", "RSQB", "RPAR"):
            yield from (Completion(one, size, one, about) for one, about in _keys(session))


def _arguments(session: Session, here: Here, at: int) -> Iterator[Completion]:
    """Named parameters of the function that is being called."""
    function = session.state.names.get(str(here.tokens[at - 1])) if at else None
    if isinstance(function, Function) and here.last is not None and here.last.type in ("LPAR", "COMMA"):
        done = sum(token.type == "COMMA" for token in here.tokens[at:])
        for parameter in function.define.parameters[done:]:
            yield Completion(f"{parameter.name.text}=", len(here.word), f"{parameter.name.text}=", signature(function))


def _key(tokens: tuple[Token, ...], at: int) -> str | None:
    """The key whose value is being written."""
    for token in reversed(tokens[at:]):
        if token.type == "KEY":
            return str(token)
        if token.type == "COMMA" and tokens[at].type == "LSQB":
            return None
    outer = tokens[: at + 1]  # `stage={0, `: the key is before the brace
    return str(outer[-3]) if len(outer) > 2 and outer[-1].type == "LBRACE" and outer[-3].type == "KEY" else None


def _keys(session: Session) -> Iterator[tuple[str, str]]:
    for name, values in tags_of(session).items():
        yield f"{name}=", f"a tag: {_few(values)}"
    for name, count in splits_of(session).items():
        yield f"{name}=", f"a split: 0 to {count - 1}"
    yield "pass=", "F, B, I or W"
    yield "comm=", "communication"
    yield "update", "the optimizer update"
    for name in tags_of(session):
        yield f"!{name}", f"without the tag {name}"


def _few(values: Iterable[TagValue]) -> str:
    words = [str(value) for value in values]
    return ", ".join(words[:6]) + (", ..." if len(words) > 6 else "")


def _values(session: Session, here: Here, key: str) -> Iterator[tuple[str, str]]:
    if key in SELECTOR_WORDS:
        about = {"F": "forward", "B": "backward", "I": "gradient of the inputs", "W": "gradient of the weights"}
        yield from ((word, about.get(word, "")) for word in SELECTOR_WORDS[key])
        return
    splits = splits_of(session)
    if key in splits:
        yield "next", "the lowest microbatch not yet ordered"
        yield "next?", "the same, or nothing if none is left"
        yield from ((str(i), "") for i in range(min(splits[key], 64)))
    yield from ((f'"{value}"' if isinstance(value, str) else str(value), "") for value in tags_of(session).get(key, ()))
    if key not in RESERVED_KEYS:
        yield "*", "any value"


def _axis_values(mesh: Mesh, key: str) -> Iterator[tuple[str, str]]:
    yield from ((str(i), "") for i in range(min(mesh.shape.get(key, 0), 64)))


def tags_of(session: Session) -> dict[str, list[TagValue]]:
    """Tags of the model and of the script, without cutting the model."""
    found: dict[str, set[TagValue]] = {}
    state = session.state
    if state.scheduler is not None:
        for chunk in session.at(0).scheduler.schedule.model.chunks:  # type: ignore[union-attr]
            for key, value in chunk.tags.items():
                found.setdefault(key, set()).add(value)
    else:
        for chunk in state.outline.tagged:
            for key, value in chunk:
                found.setdefault(key, set()).add(value)
    for directive in state.directives:
        for key, value in directive.tags if isinstance(directive, Tag) else ():
            found.setdefault(key, set()).add(value)
    return {key: sorted(values, key=lambda v: (isinstance(v, str), v)) for key, values in sorted(found.items())}


def splits_of(session: Session) -> dict[str, int]:
    return {x.name: x.count for x in session.state.directives if isinstance(x, Split)}


# ---------------------------------------------------------------------------------------------------------------- names


def _after(session: Session, here: Here) -> Iterator[Completion]:
    """Candidates that depend on the preceding word: devices after `on`, axes after `over`."""
    last, size = here.last, len(here.word)
    if last is not None and len(here.tokens) == 1 and str(last) in SELECTS and "LSQB" in here.accepted:
        if "BATCH" in here.accepted:
            yield Completion("batch", size, "batch")
        if "ON" in here.accepted:
            yield Completion("on", size, "on", "the devices to order")
        yield from (Completion(f"[{key}", size, f"[{key}", about) for key, about in _keys(session))
        yield from (
            _named(name, value, here.word) for name, value in session.state.names.items() if isinstance(value, Selector)
        )
        return
    meshes = {name: mesh for name, mesh in session.state.names.items() if isinstance(mesh, Mesh)}
    if last is not None and (
        last.type == "OVER" or (last.type == "COMMA" and here.has("OVER") and not here.has("WITH"))
    ):
        for name, mesh in meshes.items():
            yield from (
                Completion(f"{name}.{axis}", size, f"{name}.{axis}", f"{length} devices") for axis, length in mesh.axes
            )
    elif last is not None and last.type == "ON" and here.first == "stream":
        streams = dict.fromkeys(x.stream for x in session.state.directives if isinstance(x, Stream))
        yield from (Completion(f'"{stream}"', size, f'"{stream}"', "a stream") for stream in streams)
    elif last is not None and last.type == "ON":
        for name, mesh in meshes.items():
            yield Completion(name, size, name, f"{mesh.size} devices")
            yield from (
                Completion(f"{name}[{axis}=", size, f"{name}[{axis}=", f"{length} devices")
                for axis, length in mesh.axes
            )
    elif here.first == "tag" and not here.has("AT") and (last is None or last.type in ("TAG", "COMMA")):
        yield from (
            Completion(f"{name}=", size, f"{name}=", f"a tag: {_few(values)}")
            for name, values in tags_of(session).items()
        )


def _attributes(session: Session, here: Here) -> Iterator[Completion]:
    base = session.state.names.get(str(here.tokens[-2])) if len(here.tokens) > 1 else None
    if isinstance(base, Mesh):
        yield from (Completion(axis, len(here.word), axis, f"{length} devices") for axis, length in base.axes)
    elif isinstance(base, Module):
        yield from (_named(name, value, here.word) for name, value in base.names.items() if not name.startswith("_"))


def _options(here: Here) -> Iterator[Completion]:
    """After `with`: the options of the directive, and the values of each."""
    last = here.last
    if last is not None and last.type == "EQUAL":
        name = str(here.tokens[-2])
        yield from (Completion(word, len(here.word), word) for word in OPTION_WORDS.get(name, ()))
    elif last is not None and last.type in ("WITH", "COMMA"):
        given = {str(token) for token in here.tokens}
        for name in BY_WORD[here.first].legal if here.first in BY_WORD else ():
            if name not in given:
                yield Completion(f"{name}=", len(here.word), f"{name}=", ", ".join(OPTION_WORDS.get(name, ())))


def _names(session: Session, here: Here, text: str) -> Iterator[Completion]:
    known = session.state.names
    for name in _local(text):
        yield Completion(name, len(here.word), name, "defined here")
    functions_first = sorted(known.items(), key=lambda item: not isinstance(item[1], Function))
    yield from (_named(name, value, here.word) for name, value in functions_first if not name.startswith("_"))
    if here.word:
        yield from (Completion(name, len(here.word), name, "built-in function") for name in BUILTINS)
        for name, about in _library().items():
            if name not in known:
                yield Completion(name, len(here.word), name, about)


def _named(name: str, value: Value, word: str) -> Completion:
    if isinstance(value, Function):
        return Completion(name, len(word), signature(value, name), (value.define.doc or "").strip().partition("\n")[0])
    return Completion(
        name, len(word), name, brief(value) if isinstance(value, int | float | str | tuple) else kind(value)
    )


def _local(text: str) -> Iterator[str]:
    """Names that earlier lines of this input bind."""
    earlier = text.rpartition("\n")[0]
    for names in re.findall(r"\b(?:let|for)\s+([\w, ]+?)\s*(?:=|\bin\b)", earlier):
        yield from (name.strip() for name in names.split(","))
    for parameters in re.findall(r"\bdef\s+\w+\(([^)]*)\)", earlier):
        yield from (parameter.partition("=")[0].strip() for parameter in parameters.split(",") if parameter.strip())


@cache
def _exported() -> dict[str, dict[str, tuple[str, str]]]:
    """By module of the library: each function's signature and the first line of its documentation."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for module, path in modules().items():
        loaded = load(path, f"std/{path.name}", library=True)
        defines = [x for x in loaded.script.statements if isinstance(x, Define) and not x.name.text.startswith("_")]
        found[module] = {
            x.name.text: (signature(Function(x, loaded)), (x.doc or "").strip().partition("\n")[0]) for x in defines
        }
    return found


def _library() -> dict[str, str]:
    """Functions that can be imported."""
    return {
        name: f"{shown} from {module}"
        for module, functions in _exported().items()
        for name, (shown, _) in functions.items()
        if len(name) > 1
    }


# ---------------------------------------------------------------------------------------------------------------- paths


def _paths(session: Session, text: str) -> list[Completion] | None:
    """Places where dots are part of a word: modules of the library, and of the model."""
    line = text.rpartition("\n")[2].lstrip()
    imported = re.match(r"from\s+([\w.]+)\s+import\s+(?:[\w, ]*,\s*)?(\w*)$", line)
    if imported:
        functions = _exported().get(imported[1], {})
        return [
            Completion(name, len(imported[2]), shown, about)
            for name, (shown, about) in functions.items()
            if name.startswith(imported[2])
        ]
    if re.match(r"(from|import)\s+[\w.]*$", line):
        begun = (MODULE.search(line.partition(" ")[2]) or [""])[0]
        return [
            Completion(name, len(begun), name, f"{len(_exported()[name])} functions")
            for name in modules()
            if name.startswith(begun)
        ]
    if session.model is not None and re.match(r"tag\b.*\bat\b\s*(?:.*,)?\s*[\w.\[\]*:]*$", line):
        found = PATH.search(line)
        begun = found[0] if found and line[found.start() - 1] in " ," and line[found.start() :] != "at" else ""
        return list(_module_paths(session.model.modules, begun))
    return None


def _module_paths(paths: Iterable[tuple[str, ...]], begun: str) -> Iterator[Completion]:
    """One level further than what is typed: `blocks` gives `blocks[0]`, `blocks[*]`."""
    depth = len(re.findall(r"[^.\[\]]+", begun)) - (0 if begun.endswith((".", "[")) or not begun else 1)
    star = "[*]" in begun
    seen: dict[str, int] = {}
    for parts in paths:
        for shown in _written(parts[: depth + 1], star):
            if shown.startswith(begun) and shown != begun:
                seen[shown] = seen.get(shown, 0) + 1
    if begun and not begun.endswith((".", "[")):  # and its children, once the name is complete
        for parts in paths:
            for shown in _written(parts[: depth + 2], star):
                if shown.startswith((f"{begun}.", f"{begun}[")):
                    seen[shown] = seen.get(shown, 0) + 1
    for shown, count in seen.items():
        yield Completion(shown, len(begun), shown, "a module" if count == 1 else f"{count} modules inside")


def _written(parts: tuple[str, ...], star: bool) -> Iterator[str]:
    """A module path as scripts write it; numbers also as `[*]`."""
    for every in {star, star or any(part.isdecimal() for part in parts)}:
        text = ""
        for part in parts:
            text += ("[*]" if every else f"[{part}]") if part.isdecimal() else (f".{part}" if text else part)
        if text:
            yield text
