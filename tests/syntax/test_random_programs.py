"""Random programs from the grammar: they parse, they format safely, and they end in a result or in diagnostics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from piperlang.diagnostics import PiperError
from piperlang.directives import BY_WORD, OPTION_WORDS
from piperlang.pipeline import outline
from piperlang.source import Source
from piperlang.syntax import tree
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import decode, parse
from piperlang.syntax.words import COMMUNICATIONS, KEYWORDS, PASSES
from tests.support.mutate import examine_diagnostics, examine_layout, examine_meaning, judge, shorten

GAP = "\x01"
"""Where a line may be broken: inside brackets. What is put there is drawn last."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


def some(count: int) -> settings:
    """The same examples on every run. Texts are shortened by `holds`, which is faster than shrinking every choice."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def holds(text: str, *examinations: Callable[[Source], object]) -> None:
    """Every examination of the text passes; what fails is shown as short as it gets."""

    def examine(text: str) -> list[str]:
        source = Source("random.piper", text)
        for examination in examinations:
            examination(source)
        return []

    failure = judge(text, examination=examine, seconds=10)[1]
    assert failure is None, f"{failure.what}\n{shorten(failure, 1_000, examine)}\n{failure.detail}"


# ------------------------------------------------------------------------------------------------------------ programs


@dataclass
class Writer:
    """Writes a program of the grammar. Names are mostly those in scope; kinds of values mostly fit."""

    draw: Draw
    names: dict[str, list[str]] = field(
        default_factory=lambda: {"int": [], "list": [], "mesh": [], "selector": [], "function": []}
    )
    count: int = 0
    in_order: bool = False
    in_function: bool = False

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def fresh(self, kind: str | None = None) -> str:
        self.count += 1
        name = f"{self.pick('x', 'long_name_', 'F', '_p')}{self.count}"
        if kind is not None:
            self.names[kind].append(name)
        return name

    def bound(self, kind: str, value: str, before: str = "let") -> str:
        """A binding; the name is known only behind it."""
        return f"{before} {self.fresh(kind)} = {value}"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Names bound inside are not known outside."""
        outer = {kind: list(names) for kind, names in self.names.items()}
        yield
        self.names = outer

    def known(self, kind: str, otherwise: str) -> str:
        names = self.names[kind]
        return str(self.pick(*names)) if names and self.number(0, 9) else otherwise

    def several(self, part: Callable[[], str], low: int = 1, high: int = 3) -> str:
        return f",{GAP}".join(part() for _ in range(self.number(low, high)))

    # -------------------------------------------------------------------------------------------------- expressions

    def expr(self, depth: int) -> str:
        kind = self.pick("int", "int", "int", "int", "list", "list", "selector", "bool", "string", "any")
        return {
            "int": self.integer,
            "list": self.items,
            "selector": self.selector,
            "bool": self.truth,
            "string": self.string,
            "any": self.any,
        }[kind](depth)

    def integer(self, depth: int) -> str:
        if depth <= 0:
            return self.known(
                "int",
                str(
                    self.pick(0, 1, 1, 2, 2, 3)
                    if self.number(0, 9)
                    else self.pick("1_000", "1.5", "2e3", "25MB", "1GiB")
                ),
            )
        inner = depth - 1
        return str(
            self.pick(
                lambda: f"{self.integer(inner)} {self.pick('+', '-', '*', '//', '/', '%')} {self.integer(inner)}",
                lambda: f"({GAP}{self.integer(inner)}{GAP})",
                lambda: f"{self.pick('-', '- ', '+')}{self.atom(inner)}",
                lambda: f"{self.atom(inner)}**{self.pick('', '-')}{self.atom(0)}",
                lambda: f"{self.items(0)}[{GAP}{self.integer(inner)}{GAP}]",
                lambda: (
                    f"{self.pick('len', 'sum', 'min', 'max', 'abs')}"
                    f"({GAP}{self.several(lambda: self.items(inner), 1, 2)}{GAP})"
                ),
                lambda: f"({self.conditional(inner)})",
                lambda: self.call(inner),
                lambda: f"{self.atom(inner)} * {self.atom(inner)} - {self.atom(inner)}",
            )()
        )

    def atom(self, depth: int) -> str:
        return self.known("int", "2") if depth <= 0 else f"({self.integer(depth - 1)})"

    def conditional(self, depth: int) -> str:
        return f"{self.integer(depth)} if {self.truth(depth)} else {self.integer(depth)}"

    def truth(self, depth: int) -> str:
        if depth <= 0:
            return str(self.pick("True", "False", f"{self.integer(0)} == {self.integer(0)}"))
        inner = depth - 1
        return str(
            self.pick(
                lambda: f"{self.integer(inner)} {self.pick('<', '<=', '==', '>=', '>')} {self.integer(inner)}",
                lambda: (
                    f"{self.pick('2', f'({self.atom(inner)})')} != {self.atom(inner)}"
                ),  # a name before it would be a condition where this is an item of a list
                lambda: f"{self.atom(inner)} {self.pick('in', 'not in')} {self.items(inner)}",
                lambda: f"not {self.truth(inner)}",
                lambda: f"({GAP}{self.truth(inner)} {self.pick('and', 'or')} {self.truth(inner)}{GAP})",
                lambda: f"{self.integer(0)} < {self.integer(0)} <= {self.integer(0)}",
            )()
        )

    def string(self, depth: int) -> str:
        return str(
            self.pick(
                '"text"',
                "'single'",
                r'"a\n\"b\""',
                "'it\"s'",
                '"\u00e9 # no comment"',
                '"""three\nlines"""',
                "''",
                '"%"',
            )
        )

    def items(self, depth: int) -> str:
        if depth <= 0:
            return self.known("list", f"range({GAP}{self.number(0, 4)}{GAP})")
        inner = depth - 1
        return str(
            self.pick(
                lambda: (
                    f"[{GAP}{self.several(lambda: self.expr(inner), 0, 4)}"
                    f"{self.pick('', f',{GAP}') if self.number(0, 1) else ''}{GAP}]"
                ),
                lambda: f"range({GAP}{self.several(lambda: self.integer(inner), 1, 3)}{GAP})",
                lambda: self.comprehension(inner),
                lambda: f"{self.items(0)}[{GAP}{self.integer(0)}{GAP}:{GAP}{self.pick('', self.integer(0))}{GAP}]",
                lambda: f"{self.pick('sorted', 'reversed', 'enumerate', 'zip')}({GAP}{self.items(inner)}{GAP})",
                lambda: f"({self.items(inner)} + {self.items(inner)})",
                lambda: f'tags("{self.pick("stage", "expert")}")',
            )()
        ).replace(f"[{GAP},", f"[{GAP}")

    def comprehension(self, depth: int) -> str:
        source = self.items(depth)
        with self.scope():
            name = self.fresh("int")
            element = self.integer(depth)
            test = f" if {self.truth(depth)}" if self.number(0, 1) else ""
        return f"[{GAP}{element}{GAP} for {name} in {source}{test}{GAP}]"

    def call(self, depth: int) -> str:
        name = self.known("function", "abs")
        named = self.pick("", f",{GAP}y={self.integer(depth)}")
        return f"{name}({GAP}{self.several(lambda: self.integer(depth), 1, 2)}{named if name != 'abs' else ''}{GAP})"

    def selector(self, depth: int) -> str:
        if depth <= 0 and self.number(0, 1):
            return self.known("selector", "[stage=0]")
        if depth > 0 and not self.number(0, 3):
            return f"({GAP}{self.selector(depth - 1)} {self.pick('&', '|')}{GAP} {self.selector(depth - 1)}{GAP})"
        return f"[{GAP}{self.several(lambda: self.condition(depth), 1, 3)}{GAP}]"

    def condition(self, depth: int) -> str:
        return str(
            self.pick(
                lambda: f"{self.pick('stage', 'expert', 'order', 'mb')}={self.value(depth)}",
                lambda: f"{self.pick('stage', 'mb')}!={self.integer(0)}",
                lambda: f"!{self.pick('expert', 'stage')}",
                lambda: "update",
                lambda: f"pass={self.pick(*PASSES, '{F, B}', '*')}",
                lambda: f"comm={self.pick(*COMMUNICATIONS)}",
                lambda: f"mb={self.pick('next', 'next?')}" if self.in_order else "mb=*",
            )()
        )

    def value(self, depth: int) -> str:
        return str(
            self.pick(
                "*",
                f"{self.integer(0)}",
                f"{self.integer(0)}:{self.integer(0)}",
                ":",
                f"{{{self.integer(0)}, {self.integer(0)}}}",
                '"a"',
            )
        )

    def where(self) -> str:
        return self.known("mesh", "gpu") + str(
            self.pick("", f"[{GAP}pp={self.integer(0)}{GAP}]", "[dp=*]", f"[pp=0:{self.integer(0)}]")
        )

    def any(self, depth: int) -> str:
        return str(
            self.pick(
                lambda: self.known("mesh", "gpu"),
                lambda: f"{self.known('mesh', 'gpu')}.pp",
                lambda: self.known("function", "len"),
                self.where,
                lambda: f"count({self.selector(0)})",
                lambda: "unknown",
            )()
        )

    # ---------------------------------------------------------------------------------------------------- statements

    def simple(self) -> str:
        if self.in_order:
            return self.steps()
        options, resources = (str(self.pick("", f" with {self.options(one)}")) for one in ("replicate", "stream"))
        axis = f"{self.known('mesh', 'gpu')}.{self.pick('pp', 'dp')}"
        return str(
            self.pick(
                lambda: self.bound("int", self.integer(2)),
                lambda: self.bound("list", self.items(2)),
                lambda: self.bound("selector", self.selector(2)),
                lambda: f"let {self.fresh()}, {self.fresh()} = {self.expr(2)}, {self.expr(1)}",
                lambda: self.bound("mesh", f"pp: {self.integer(1)}, dp: {self.integer(0)}", "mesh"),
                lambda: (
                    f"tag stage={self.integer(0)} at embed,"
                    f' layers[{self.integer(0)}:{self.integer(0)}].{self.pick("attn", "0", "in")}, "a.b"'
                ),
                lambda: f"place {self.selector(1)} on {self.where()}",
                lambda: f"replicate {self.selector(1)} over {axis}{options}",
                lambda: f"shard {self.selector(1)} over {axis} with style={self.pick(*OPTION_WORDS['style'])}",
                lambda: (
                    f"split {self.pick('batch', self.selector(0))} into {self.integer(1)} as {self.pick('mb', 'part')}"
                ),
                lambda: f"stream {self.selector(1)} on {self.string(0)}{resources}",
                lambda: f"order {self.step(1)} -> {self.step(1)}",
                lambda: f"recompute {self.selector(1)} with policy={self.pick(*OPTION_WORDS['policy'])}",
                lambda: f"offload {self.selector(1)} with prefetch={self.integer(0)}",
                lambda: f"require {self.truth(2)}, {self.string(0)}",
                lambda: f"print {self.expr(2)}, {self.expr(1)}",
                lambda: self.call(1),
                lambda: f"return {self.expr(2)}" if self.in_function else f"print {self.string(0)}",
            )()
        )

    def options(self, directive: str) -> str:
        name = str(self.pick(*BY_WORD[directive].legal))
        words = OPTION_WORDS.get(name)
        return f"{name}={self.pick(*words) if words else '25MB' if name == 'bucket' else self.integer(0)}"

    def step(self, depth: int) -> str:
        return str(self.pick(self.selector(depth), f"{self.selector(0)} & {self.selector(0)}", self.call(0)))

    def steps(self) -> str:
        return ", ".join(self.step(1) for _ in range(self.number(1, 3)))

    def statement(self, depth: int) -> list[str]:
        kind = "simple"
        if depth > 0 and self.number(0, 3):
            kind = self.pick("simple", "simple", "simple", "for", "repeat", "if", "order", "def")
        if kind == "for":
            iterable = self.items(1)
            with self.scope():
                return self.suite(f"for {self.fresh('int')} in {iterable}:", depth)
        if kind == "repeat":
            with self.scope():
                return self.suite(f"repeat {self.integer(1)}:", depth)
        if kind == "if":
            with self.scope():
                lines = self.suite(f"if {self.truth(2)}:", depth)
                lines += self.suite(f"elif {self.truth(1)}:", depth) if self.number(0, 1) else []
                return lines + (self.suite("else:", depth) if self.number(0, 1) else [])
        if kind == "order" and not self.in_order:
            head = f"order on {self.where()}:"
            self.in_order = True
            with self.scope():
                lines = self.suite(head, depth)
            self.in_order = False
            return lines
        if kind == "def" and not self.in_function and not self.in_order:
            return self.define(depth)
        return [self.simple()]

    def define(self, depth: int) -> list[str]:
        name = self.fresh()
        default = self.integer(0)
        self.in_function = True
        with self.scope():
            head = f"def {name}({GAP}{self.fresh('int')},{GAP}y={default}{GAP}):"
            self.names["int"].append("y")
            lines = self.suite(head, depth, self.pick(None, '"""Doc."""'))
        self.names["function"].append(name)
        self.in_function = False
        return lines

    def suite(self, head: str, depth: int, first: str | None = None) -> list[str]:
        if not first and not self.number(0, 2):
            return [f"{head} {self.simple()}"]
        body = [line for _ in range(self.number(1, 3)) for line in self.statement(depth - 1)]
        blank = str(self.pick("    ", "  ", "        "))
        return [head, *(blank + line for line in ([first] if first else []) + body)]

    def program(self) -> str:
        lines = [str(self.pick('"""What it does."""', "# nothing to say", ""))]
        self.names["mesh"].append("gpu")
        lines += [
            "mesh gpu = pp: 2, dp: 2",
            "split batch into 4 as mb",
            "place [stage=0] on gpu[pp=0]",
            "place [stage=1] on gpu[pp=1]",
        ]
        lines += ["replicate [stage=*] over gpu.dp"]
        for _ in range(self.number(1, 6)):
            lines += self.statement(2)
            lines += [""] * self.number(0, 2)
        return self.laid_out(lines)

    def laid_out(self, lines: list[str]) -> str:
        """Breaks, blanks and comments where the language allows them."""
        notes = 0

        def gap(found: re.Match[str]) -> str:
            nonlocal notes
            notes += 1
            return str(self.pick("", "", "", "", " ", "\n", f" # note {notes}\n", f"\n  #note {notes}\n\n"))

        text = ""
        for i, line in enumerate(lines):
            text += re.sub(GAP, gap, line) + str(self.pick("", "", "", f"  # beside {i}", f" #{i}"))
            text += str(self.pick("\n", "\n", "\n", "\n\n\n", f"\n# own line {i}\n", f"\n        # far {i}\n"))
        return text


@st.composite
def programs(draw: Draw) -> str:
    return Writer(draw).program()


# ---------------------------------------------------------------------------------------------------------- properties


def clean_layout(source: Source) -> None:
    text = format_source(source)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    outside_of_texts = re.sub(r'"""(?s:.*?)"""', "text", text)
    assert not re.search(r"[ \t]+$", outside_of_texts, re.MULTILINE)
    assert "\n\n\n" not in outside_of_texts


def spans_fit(source: Source) -> None:
    """Every node lies inside the source, and a name's span is the name."""
    for statement in parse(source)[0].statements:
        _inside(statement)


def _inside(node: tree.Node) -> None:
    assert 0 <= node.span.start <= node.span.end <= len(node.span.source.text)
    if isinstance(node, tree.Name | tree.Ident):
        assert node.span.text == node.text
    for name in getattr(node, "__slots__", ()):
        parts = [getattr(node, name, None)]
        while parts:
            part = parts.pop()
            if isinstance(part, tuple):
                parts.extend(part)
            elif isinstance(part, tree.Node):
                _inside(part)


def whole(text: str) -> None:
    """It parses, with spans that fit, formats safely and cleanly, and ends in a result or in diagnostics. All of it on
    the same program: making them takes most of the time."""
    failure = judge(text, examination=lambda text: [d.message for d in parse(Source("random.piper", text))[1]])
    assert failure == ([], None), text
    holds(text, spans_fit, examine_layout, clean_layout, examine_meaning)


@some(30)
@given(programs())
def test_programs(text: str) -> None:
    whole(text)


@pytest.mark.slow
@some(1000)
@given(programs())
def test_a_thousand_programs(text: str) -> None:
    whole(text)


@some(30)
@given(programs(), st.data())
def test_programs_cut_anywhere(text: str, data: st.DataObject) -> None:
    """What an editor sees while somebody types."""
    holds(text[: data.draw(st.integers(0, len(text)))], examine_layout, examine_meaning)


@some(30)
@given(programs(), programs(), st.data())
def test_programs_spliced(first: str, second: str, data: st.DataObject) -> None:
    text = first[: data.draw(st.integers(0, len(first)))] + second[data.draw(st.integers(0, len(second))) :]
    holds(text, examine_layout, examine_meaning)


def noisy(text: str, noise: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    holds(text[:at] + noise + text[at:], examine_layout, examine_meaning)


NOISE = st.text(alphabet="\n \t\f\v\u00a0\u2028\ufeff#\"'()[]{}=\\$;", min_size=1, max_size=3)


@some(30)
@given(programs(), NOISE, st.data())
def test_programs_with_noise(text: str, noise: str, data: st.DataObject) -> None:
    noisy(text, noise, data)


@pytest.mark.slow
@some(1000)
@given(programs(), NOISE, st.data())
def test_a_thousand_programs_with_noise(text: str, noise: str, data: st.DataObject) -> None:
    noisy(text, noise, data)


WORDS = st.sampled_from(
    [
        *KEYWORDS,
        "x",
        "gpu",
        "stage",
        "0",
        "1",
        "2MB",
        '"s"',
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "=",
        "!=",
        "!",
        "?",
        "*",
        "**",
        "-",
        "->",
        "&",
        "|",
        ".",
        "\n",
        "\n    ",
        "\n        ",
        "# c\n",
        "range",
        "mb",
        "pass",
        "F",
    ]
)


@some(400)
@given(st.lists(WORDS, max_size=40).map(" ".join))
def test_words_in_any_order(text: str) -> None:
    holds(text, examine_layout, examine_meaning)


@some(400)
@given(st.text(max_size=80))
def test_any_text(text: str) -> None:
    holds(text.replace("\r\n", "\n").replace("\r", "\n"), examine_layout, examine_meaning)


@some(200)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    try:
        source = decode(data, "random.piper")
    except PiperError as problem:
        examine_diagnostics(problem.diagnostics)
        return
    examine_meaning(source)


@some(100)
@given(st.text(alphabet="ab\"'\\\n#xn\u00e9", max_size=30))
def test_strings(inside: str) -> None:
    for text in (f'print "{inside}"\n', f"print '{inside}', 1\n", f'"""{inside}"""\n'):
        holds(text, examine_layout)


@some(150)
@given(
    st.integers(-(2**70), 2**70), st.sampled_from(["+", "-", "*", "//", "/", "%", "**"]), st.integers(-(2**70), 2**70)
)
def test_integers(left: int, op: str, right: int) -> None:
    """Integers are those of Python, up to 64 bits; past that, or without a result, there is a diagnostic."""
    said: list[str] = []
    found = outline(Source("random.piper", f"print ({left}) {op} ({right})\n"), say=said.append)
    examine_diagnostics(found.problems)
    assert len(said) + len(found.problems) == 1
    if said and op in ("+", "-", "*", "//", "%"):
        assert (
            int(said[0])
            == {
                "+": left + right,
                "-": left - right,
                "*": left * right,
                "//": right and left // right,
                "%": right and left % right,
            }[op]
        )


@some(150)
@given(st.floats(), st.sampled_from(["+", "-", "*", "//", "/", "%", "**", "<", "=="]), st.floats())
def test_floats(left: float, op: str, right: float) -> None:
    shown = [f"{x:.17e}" if x == x and abs(x) != float("inf") else "1e999" for x in (left, right)]
    for a, b in (shown, ["1MB", shown[1]], [shown[0], "3B"]):
        found = outline(Source("random.piper", f"let x = ({a}) {op} ({b})\nprint x\n"), say=lambda line: None)
        examine_diagnostics(found.problems)
