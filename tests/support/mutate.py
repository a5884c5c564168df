"""Mutated scripts: whatever the text, the answer is a result or diagnostics, in time, and formatting is safe.

    python -m tests.support.mutate --count 50000 --seed 1 --jobs 2 --out /tmp/mutants

Takes every script of the repository (library, examples, documentation, explain pages), damages it, and examines what
comes of it. Mutant number `i` of seed `s` is always made by the same random numbers. Failures are grouped by what
failed and where; of each group the first is made as short as it gets, and all texts are saved under --out.
"""

from __future__ import annotations

import argparse
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.diagnostics.render import FORMATS, Paint, render
from piperlang.pipeline import outline
from piperlang.simulate.unit import simulate
from piperlang.source import Source
from piperlang.syntax.format import format_source
from piperlang.syntax.parse import laid_out, parse
from piperlang.syntax.words import KEYWORDS
from piperlang.view.grid import grid, plain, summary
from tests.support import ROOT

SECONDS = 2.0
BATCH = 50

# ---------------------------------------------------------------------------------------------------------- examination


class Broken(Exception):
    """A promise that was not kept; the message says which, in words that do not depend on the script."""


class _Slow(BaseException):
    """Raised by the alarm; no `except Exception` stops it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Processor time, so that other work on the machine does not count."""

    def late(number: int, frame: object) -> None:
        raise _Slow

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def examine(text: str) -> list[str]:
    """The codes of the diagnostics a script gets; anything but a result or diagnostics is raised."""
    source = Source("mutant.piper", text)
    examine_layout(source)
    return [d.code for d in examine_meaning(source)]


def examine_meaning(source: Source) -> tuple[Diagnostic, ...]:
    """What `check` and `orders` do, without the terminal."""
    said: list[str] = []
    found = outline(source, None, None, say=said.append)
    problems = found.problems or tuple(found.outline.finish())
    if not problems:
        try:
            lanes = found.outline.orders()
            timeline = simulate(lanes)
            if timeline.ran:
                list(plain(lanes))
                grid(lanes, timeline, 140, Paint())
                summary(lanes, timeline)
        except PiperError as problem:
            problems = problem.diagnostics
    examine_diagnostics(problems)
    return tuple(problems)


def examine_diagnostics(problems: tuple[Diagnostic, ...]) -> None:
    for problem in problems:
        for d in (problem, problem.seen_by_user()):
            if not d.message:
                raise Broken(f"{d.code} without a message")
            for span in [
                *([d.span] if d.span else []),
                *(label.span for label in d.also),
                *(call.span for call in d.trail),
            ]:
                if not 0 <= span.start <= span.end <= len(span.source.text):
                    raise Broken(f"{d.code} points outside of the source")
        if problem.span is None:
            raise Broken(f"{problem.code} without a place")
    for format in FORMATS:
        if problems and not render(problems, format).strip():
            raise Broken(f"nothing is shown as {format}")


def examine_layout(source: Source) -> None:
    """What parses is formatted, once and for all, to the same tree and with all its comments."""
    try:
        script, problems = parse(source)
    except PiperError as problem:
        examine_diagnostics(problem.diagnostics)
        return
    if problems:
        examine_diagnostics(tuple(problems))
        return
    text = format_source(source)
    pretty = Source(source.name, text)
    again, problems = parse(pretty)
    if problems:
        raise Broken("the formatted script does not parse")
    if again != script:
        raise Broken("the formatted script is another tree")
    if comments(pretty) != comments(source):
        raise Broken("formatting loses or makes a comment")
    if format_source(pretty) != text:
        raise Broken("formatting twice gives another text")


def comments(source: Source) -> Counter[str]:
    return Counter(str(token)[1:].strip() for token in laid_out(source).comments)


Examination = Callable[[str], list[str]]


@dataclass(frozen=True)
class Failure:
    index: int
    what: str
    """The exception and where it arose: one group of failures."""
    text: str
    detail: str = ""


def judge(
    text: str, index: int = 0, seconds: float = SECONDS, examination: Examination = examine
) -> tuple[list[str], Failure | None]:
    """The codes a text gets, or what went wrong."""
    try:
        with time_limit(seconds):
            return examination(text), None
    except _Slow as late:
        return [], Failure(index, f"slower than {seconds:.0f} s in {_where(late)}", text)
    except Broken as broken:
        return [], Failure(index, str(broken), text)
    except Exception as problem:
        detail = "".join(traceback.format_exception(problem)[-6:])
        return [], Failure(index, f"{type(problem).__name__} in {_where(problem)}", text, detail)


def _where(problem: BaseException) -> str:
    """The innermost function of the product on the stack."""
    frames = [
        f
        for f in traceback.extract_tb(problem.__traceback__)
        if "piperlang" in f.filename and "tests" not in f.filename
    ]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "the examination"


# ------------------------------------------------------------------------------------------------------------- scripts

SEEDS = (
    (
        '"""All statements."""\nfrom std.pipeline import one_f_one_b, loop as place_all\nparam ranks = 2\nparam micro ='
        " 4\nmesh gpu = pp: ranks, dp: 2  # devices\nsplit batch into micro as mb\nplace_all(gpu,"
        " ranks)\none_f_one_b(gpu, ranks, micro)\nreplicate [!expert] over gpu.dp with grads=sharded,"
        ' bucket=25MB\nstream [comm=p2p] on "pp"\n'
    ),
    (
        "mesh gpu = pp: 2\nsplit batch into 2 as mb\nfor r in range(2): place [stage=r] on gpu[pp=r]\n\ndef F(s):"
        " [stage=s, pass=F, mb=next]\ndef B(s): [stage=s, pass=B, mb=next]\n\nfor r in range(2):\n    order on"
        " gpu[pp=r]:\n        repeat 2: F(r)\n        repeat 2: B(r)\norder [stage=0, pass=F, mb=0] -> [comm=send] ->"
        " [comm=recv] & [update]\n"
    ),
    (
        'tag stage=0 at embed, layers[0:6]\ntag stage=1, kind="head" at layers[6:], head.out, "model.norm"\nprint'
        ' count([stage=*]), tags("stage")\nmesh gpu = pp: 2, dp: 4\nplace [stage={0, 1}] on gpu[pp=0:2]\nrecompute'
        ' [stage=0]\noffload [stage=1] with prefetch=2\nshard [kind="head"] over gpu.dp with style=columns\n'
    ),
    (
        "let a, b = [1, 2]\nlet c = [x * y // 2 for x in range(4) for y in [1, 2] if x != y and not x == 3]\ndef f(x,"
        ' y=1):\n    """Doc."""\n    if x > y:\n        return x - y\n    elif x == y: return 0\n    else:\n       '
        ' return y - x\n\nrequire f(3) == 2, "three less one"\nprint a if b > 1 else c[0], -2**2, 25MB * 2, min(c),'
        " sorted(c)[0:2], 'text', 1.5e3, len(c) % 3\n"
    ),
    (
        "let big = [  # a list\n    1,  # one\n    # two\n    2,\n    [3, 4, 5], f(\n        6,\n    ),\n    #"
        " end\n]\ndef f(x): x\n\n\n# last\n"
    ),
    (
        "mesh gpu = pp: 2\nsplit batch into 4 as mb\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nlet"
        " near, far = [stage=0], [stage=1]\ndef G(part): (part & [pass=F, mb=next?])\norder on gpu[pp=0]:\n    repeat"
        " 4: G(near)\n    for m in reversed(range(4)):\n        [stage=0, pass=I, mb=m], [stage=0, pass=W, mb=m]\norder"
        " on gpu[pp=1]:\n    repeat 4:\n        G(far)\n        [stage=1, pass=B, mb=next]\n"
    ),
)

_DRIVERS = (
    "gpipe(gpu, 2, 3)",
    "one_f_one_b(gpu, 2, 4)",
    "zero_bubble(gpu, 2, 4)",
    "looped_bfs(gpu, 2, 3)",
    "interleaved(gpu, 2, 4)",
    "interleaved_zero_bubble(gpu, 2, 4)",
    "zbv(gpu, 2, 4)",
    "dualpipev(gpu, 2, 4)",
    "dualpipe(gpu, 2, 4)",
)
_PLACES = ("loop(gpu, 2)", "loop(gpu, 2, 2)", "vee(gpu, 2)", "mirror(gpu, 2, 4)")
_FENCE = re.compile(r"^```piper.*\n((?:.*\n)*?)```$", re.MULTILINE)


@cache
def scripts() -> tuple[str, ...]:
    """Whole scripts, in a fixed order."""
    found = list(SEEDS)
    for pattern in ("stdlib/*.piper", "examples/**/*.piper", "editor-support/**/tests/*.piper"):
        found += [
            path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)) if "node_modules" not in path.parts
        ]
    for pattern in ("docs/*.md", "examples/**/*.md", "piperlang/diagnostics/pages/*.md", "README.md"):
        for path in sorted(ROOT.glob(pattern)):
            found += _FENCE.findall(path.read_text(encoding="utf-8"))
    return tuple(text for text in found if text.strip())


@cache
def blocks(text: str) -> tuple[str, ...]:
    """The top-level statements of a script, each with the comments above it."""
    return tuple(part for part in re.split(r"(?m)^(?=[A-Za-z#\"])", text) if part.strip())


def base(random: Random) -> str:
    """A script to start from: a whole one, some statements of one, or a part of the library with calls of it."""
    text = random.choice(scripts())
    parts = blocks(text)
    if len(parts) <= 12:
        return text
    if "def loop(" in text and random.random() < 0.5:
        place, order = random.choice(_PLACES), random.choice(_DRIVERS)
        wanted = [
            p for p in parts if re.match(rf"def (_\w+|[FBIW]|{place.partition('(')[0]}|{order.partition('(')[0]})\(", p)
        ]
        return "".join(wanted) + f"mesh gpu = pp: 2\nsplit batch into 4 as mb\n{place}\n{order}\n"
    start = random.randrange(len(parts))
    return "".join(parts[start : start + random.randint(1, 8)])


# ----------------------------------------------------------------------------------------------------------- mutations

_TOKEN = re.compile(r'"""|\n[ \t]*|[ \t]+|\w+|->|\*\*|//|[=!<>]=|.', re.DOTALL)
_WORDS = (
    *KEYWORDS,
    "x",
    "F",
    "B",
    "gpu",
    "stage",
    "pass",
    "mb",
    "range",
    "len",
    "min",
    "sorted",
    "count",
    "tags",
    "f(",
    "std.pipeline",
    "->",
    "&",
    "|",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "=",
    "==",
    "!=",
    "!",
    "?",
    "*",
    "**",
    "+",
    "-",
    "/",
    "//",
    "%",
    "<",
    ">=",
    ".",
    "#",
    "# note\n",
    '"',
    "'",
    '"""',
    "\\",
    "\n",
    "\n    ",
    "\n\n",
    "0",
    "1",
    "2",
    "-1",
    "10**9",
    "9223372036854775807",
    "1e308",
    "1e999",
    "0.5",
    "25MB",
    "0B",
    "True",
    '"text"',
    "[]",
    "()",
    "[stage=0]",
    "[pass=F]",
    "[update]",
    "mb=next",
    "mb=next?",
    "[0:2]",
    "[*]",
    " if x else ",
    " for x in ",
    " not in ",
    "\t",
    "\r",
    "\f",
    "\ufeff",
    "\u00a0",
    "\u2028",
    "\x00",
    "\U0001f600",
    "e\u0301",
)
_NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "100",
    "-1",
    "1000000",
    "10**12",
    "9223372036854775807",
    "9223372036854775808",
    "0.5",
    "1e308",
    "1MB",
    "True",
)

Mutation = Callable[[str, Random], str]


def _tokens(change: Callable[[list[str], int, Random], None]) -> Mutation:
    def mutate(text: str, random: Random) -> str:
        parts = _TOKEN.findall(text)
        if parts:
            change(parts, random.randrange(len(parts)), random)
        return "".join(parts)

    return mutate


def _lines(change: Callable[[list[str], int, Random], None]) -> Mutation:
    def mutate(text: str, random: Random) -> str:
        parts = text.splitlines(keepends=True)
        if parts:
            change(parts, random.randrange(len(parts)), random)
        return "".join(parts)

    return mutate


def _delete(parts: list[str], at: int, random: Random) -> None:
    del parts[at : at + random.choice((1, 1, 1, 2, 5))]


def _duplicate(parts: list[str], at: int, random: Random) -> None:
    count = random.choice((1, 1, 2, 4))
    parts[at:at] = parts[at : at + count] * random.choice((1, 1, 2, 20))


def _swap(parts: list[str], at: int, random: Random) -> None:
    other = random.choice((min(at + 1, len(parts) - 1), random.randrange(len(parts))))
    parts[at], parts[other] = parts[other], parts[at]


def _insert(parts: list[str], at: int, random: Random) -> None:
    parts.insert(at, random.choice(_WORDS))


def _replace(parts: list[str], at: int, random: Random) -> None:
    parts[at] = random.choice(_WORDS)


def _copy(parts: list[str], at: int, random: Random) -> None:
    parts[at] = random.choice(parts)


_ALIKE = (
    "== != < <= > >= in",
    "+ - * // / % **",
    "& | ,",
    "and or",
    "F B I W",
    "stage mb pass comm expert",
    "gpu x s r",
    '0 1 2 3 5 8 True 0.5 2MB "x" range(3) [] [1] [stage=0] gpu F',
    "place recompute offload",
    "replicate shard",
    "[0] [0:2] (1) [*] .pp [pp=0]",
    "next next? * 0 0:2 {0,1} F {F,B}",
    "repeat if",
    "sharded replicated columns rows mean",
    "send recv all_reduce all_to_all",
    "min max sum len sorted",
)
"""Words that can stand for each other: the result often parses, and means something else."""


def _alike(text: str, random: Random) -> str:
    group = random.choice(_ALIKE).split()
    words = sorted(group, key=len, reverse=True)
    found = list(re.finditer("|".join(rf"\b{w}\b" if w.isalnum() else re.escape(w) for w in words), text))
    if not found:
        return text
    chosen = random.choice(found)
    return text[: chosen.start()] + random.choice(group) + text[chosen.end() :]


def _foreign_line(parts: list[str], at: int, random: Random) -> None:
    parts.insert(at, random.choice(random.choice(scripts()).splitlines(keepends=True)))


def _indent(parts: list[str], at: int, random: Random) -> None:
    blank = random.choice(("    ", "    ", " ", "  ", "\t", "        "))
    for i in range(at, min(len(parts), at + random.choice((1, 1, 2, 4)))):
        parts[i] = blank + parts[i]


def _dedent(parts: list[str], at: int, random: Random) -> None:
    count = random.choice((1, 4, 4, 8))
    for i in range(at, min(len(parts), at + random.choice((1, 1, 2, 4)))):
        parts[i] = re.sub(f"^ {{0,{count}}}", "", parts[i])


def _comment(parts: list[str], at: int, random: Random) -> None:
    note = random.choice(("# note", "#note", "#", "#!x", "#   far   ", "#\t"))
    parts[at] = parts[at].rstrip("\n") + random.choice(("  ", " ", "", "\n", "\n    ")) + note + "\n"


def _number(text: str, random: Random) -> str:
    found = list(re.finditer(r"\b\d+\b", text))
    if not found:
        return text
    chosen = random.choice(found)
    return text[: chosen.start()] + random.choice(_NUMBERS) + text[chosen.end() :]


def _break(text: str, random: Random) -> str:
    """A line end, perhaps behind a comment, where a bracket allows it."""
    found = list(re.finditer(r"[\[({,]|(?=[\])}])", text))
    if not found:
        return text
    at = random.choice(found).end()
    return text[:at] + random.choice(("\n", "\n    ", "  # note\n", " #\n\n", "\n# own line\n", ",\n")) + text[at:]


def _character(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    kind = random.randrange(4)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return (
            text[:at]
            + chr(random.choice((random.randrange(32, 127), random.randrange(0x250), random.randrange(0xD800))))
            + text[at:]
        )
    if kind == 2:
        return text[:at] + text[at : at + 1] * random.choice((2, 2, 3, 70)) + text[at + 1 :]
    return text[:at] + text[at : at + 1].swapcase() + text[at + 1 :]


def _splice(text: str, random: Random) -> str:
    other = base(random)
    if random.random() < 0.5:
        return text[: random.randrange(len(text) + 1)] + other[random.randrange(len(other) + 1) :]
    mine, theirs = text.splitlines(keepends=True), other.splitlines(keepends=True)
    return "".join(mine[: random.randrange(len(mine) + 1)] + theirs[random.randrange(len(theirs) + 1) :])


def _join_lines(text: str, random: Random) -> str:
    found = [m.start() for m in re.finditer("\n", text)]
    if not found:
        return text
    at = random.choice(found)
    return text[:at] + random.choice(("", " ", ", ", " & ")) + text[at + 1 :].lstrip()


MUTATIONS: tuple[Mutation, ...] = (
    *(_tokens(change) for change in (_delete, _duplicate, _swap, _insert, _insert, _replace, _replace, _copy)),
    *(_lines(change) for change in (_delete, _duplicate, _swap, _foreign_line, _indent, _dedent, _comment)),
    _alike,
    _alike,
    _alike,
    _alike,
    _alike,
    _alike,
    _number,
    _number,
    _break,
    _break,
    _character,
    _splice,
    _join_lines,
)


GENTLE: tuple[Mutation, ...] = (
    _alike,
    _alike,
    _alike,
    _number,
    _lines(_delete),
    _lines(_duplicate),
    _lines(_swap),
    _lines(_comment),
    _break,
)
"""Those that often leave something that parses: they find what is behind the parser."""


def mutant(seed: int, index: int) -> str:
    random = Random(f"{seed}:{index}")
    text = base(random)
    kinds = random.choice((MUTATIONS, GENTLE))
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        text = random.choice(kinds)(text, random)
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ------------------------------------------------------------------------------------------------------------ campaign


@dataclass
class Tally:
    count: int = 0
    fine: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.count += other.count
        self.fine += other.fine
        self.codes += other.codes
        self.failures += other.failures


def batch(start: int, seed: int, stop: int) -> Tally:
    """Mutants from `start` on, at most BATCH of them."""
    tally = Tally()
    for index in range(start, min(start + BATCH, stop)):
        codes, failure = judge(mutant(seed, index), index)
        tally.count += 1
        tally.codes.update(set(codes))
        tally.fine += not codes and failure is None
        if failure is not None:
            tally.failures.append(failure)
    return tally


def shorten(failure: Failure, attempts: int = 5_000, examination: Examination = examine) -> str:
    """A shorter text that fails the same way: fewer lines, then fewer tokens, until nothing more can go."""
    left = 30 if "slower" in failure.what else attempts

    def same(text: str) -> bool:
        nonlocal left
        left -= 1
        found = judge(text, examination=examination)[1] if left >= 0 else None
        return found is not None and found.what == failure.what

    text, before = failure.text, ""
    while text != before and left > 0:
        before = text
        for split in (partial(str.splitlines, keepends=True), _TOKEN.findall):
            text = "".join(_fewer(split(text), same))
    return text


def _fewer(parts: list[str], same: Callable[[str], bool]) -> list[str]:
    size = max(1, len(parts) // 2)
    while size >= 1:
        at = 0
        while at < len(parts):
            fewer = parts[:at] + parts[at + size :]
            if same("".join(fewer)):
                parts = fewer
            else:
                at += size
        size //= 2
    return parts


def _guard() -> None:
    """What runs away is stopped before it hurts the machine: MemoryError is a failure like any other."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def run(count: int, seed: int, jobs: int = 1, tell: Callable[[str], None] | None = None) -> Tally:
    total = Tally()
    starts = range(0, count, BATCH)
    work = partial(batch, seed=seed, stop=count)
    started = time.monotonic()

    def took(part: Tally) -> None:
        total.add(part)
        if tell is not None and (total.count % 1000 < BATCH or part.failures):
            tell(
                f"{total.count:,} of {count:,}  {total.fine:,} fine  {len(total.failures)} failures "
                f" {time.monotonic() - started:.0f} s"
            )

    if jobs == 1:
        for start in starts:
            took(work(start))
        return total
    with ProcessPoolExecutor(jobs, initializer=_guard) as pool:
        for part in pool.map(work, starts):
            took(part)
    return total


def report(total: Tally, seed: int, out: Path, seconds: float) -> None:
    """The codes met, and every group of failures with its shortest text; all texts are saved."""
    print(
        f"\n{total.count:,} mutants of {len(scripts())} scripts in {seconds:.0f} s, seed {seed}: {total.fine:,} fine,"
        f" {len(total.failures)} failures"
    )
    for code, times in sorted(total.codes.items()):
        print(f"  {code} {times:>7,}")
    groups: dict[str, list[Failure]] = {}
    for failure in total.failures:
        groups.setdefault(failure.what, []).append(failure)
    for number, (what, members) in enumerate(sorted(groups.items(), key=lambda item: -len(item[1]))):
        print(
            f"\n{len(members)} times: {what}\n  seed {seed}, numbers"
            f" {', '.join(str(f.index) for f in members[:10])}{', ...' if len(members) > 10 else ''}"
        )
        short = shorten(min(members, key=lambda f: len(f.text)))
        (out / f"{number:03}.piper").write_text(short, encoding="utf-8")
        for failure in members:
            (out / f"{number:03}-{failure.index}.piper").write_text(failure.text, encoding="utf-8")
        print(
            "".join(f"  | {line}\n" for line in short.splitlines())
            + "".join(f"  {line}\n" for line in members[0].detail.splitlines()),
            end="",
        )
    if groups:
        print(f"\ntexts are in {out}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=None, help="where failing texts are saved; a temporary folder unless given"
    )
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="mutants-"))
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    total = run(options.count, options.seed, options.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    report(total, options.seed, out, time.monotonic() - started)
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
