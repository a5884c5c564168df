"""Evaluation: values, names, functions, imports, directives with their trail; and the outline's answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import Diagnostic
from piperlang.directives.mesh import UseMesh
from piperlang.directives.place import Place
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.interpret import Interpreter
from piperlang.elaborate.modules import from_source
from piperlang.pipeline import outline
from piperlang.source import Source
from tests.support.schedules import outline as right_outline


class Recorder:
    """A graph that keeps directives and gives fixed answers."""

    def __init__(self) -> None:
        self.directives: list[Directive] = []
        self.asked: list[int] = []

    def apply(self, directive: Directive) -> None:
        self.directives.append(directive)

    def count(self, selector: Selector) -> int:
        self.asked.append(len(self.directives))
        return 7

    def tags(self, name: str) -> Iterable[TagValue]:
        return {2, 0, 1}


def printed(text: str) -> list[str]:
    lines: list[str] = []
    found = outline(Source("s.piper", text), say=lines.append)
    assert not found.problems, [x.message for x in found.problems]
    return lines


def problems(text: str, path: Path | None = None, **overrides: str) -> list[Diagnostic]:
    found = outline(Source("s.piper", text), path, overrides, say=lambda line: None)
    return list(found.problems or found.outline.finish())


def codes(text: str, **overrides: str) -> list[str]:
    return [x.code for x in problems(text, **overrides)]


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("7 // 2 + 7 % 4 - -2 ** 2", "10"),
        ("2 ** 10", "1024"),
        ("7 / 2", "3.5"),
        ("1 < 2 <= 2 != 3", "True"),
        ("1 < 2 > 3", "False"),
        ("not True or 1 == 1 and 2 in [1, 2]", "True"),
        ("3 not in range(3)", "True"),
        ("'a' + \"b\"", "ab"),
        ("[1, 2] + [3]", "[1, 2, 3]"),
        ("[1] * 3", "[1, 1, 1]"),
        ("1 if 2 > 1 else 0", "1"),
        ("[x + y for x in range(2) for y in range(2) if x != y]", "[1, 1]"),
        ("[[1, 2], [3]][0][-1]", "2"),
        ("range(10)[2:4]", "[2, 3]"),
        ("max(3, 1, 2)", "3"),
        ("min([3, 1])", "1"),
        ("sum([25MB, 5MB])", "30MB"),
        ("abs(-3)", "3"),
        ("sorted([3, 1, 2])", "[1, 2, 3]"),
        ("enumerate([5, 6])", "[[0, 5], [1, 6]]"),
        ("zip([1, 2], [3, 4])", "[[1, 3], [2, 4]]"),
        ("reversed(range(3))", "[2, 1, 0]"),
        ("len('abc')", "3"),
        ("1GiB // 256MiB", "4"),
        ("1.5KB", "1500B"),
        ("512MiB * 2", "1GiB"),
        ("[stage=0, pass=F|B] | [expert=*]", "[stage=0, pass={F, B}] | [expert=*]"),
        ("[a=1] & [b=2:4]", "[a=1, b=2:4]"),
        ('[!x, y!="z"]', '[!x, y!="z"]'),
        ("True == 1", "False"),
        ("[comm=p2p]", "[comm={send, recv}]"),
    ],
)
def test_expressions(expression: str, shown: str) -> None:
    assert printed(f"print {expression}\n") == [shown]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print 1 // 0\n", "P0212"),
        ("print 2 ** 63\n", "P0211"),
        ("print 1 + 'a'\n", "P0204"),
        ("print [1][3]\n", "P0213"),
        ("if 1:\n    print 2\n", "P0204"),
        ("print x\n", "P0201"),
        ("let x = 1\nlet x = 2\n", "P0202"),
        ("let t = 0\nfor i in range(3):\n    let t = i\n", "P0202"),
        ("let max = 1\n", "P0202"),
        ("if 1 > 2:\n    let y = 1\nprint y\n", "P0203"),
        ("def f(): g()\ndef g(): f()\nf()\n", "P0206"),
        ("def f(n): f(n)\nf(1)\n", "P0206"),
        ("require 1 > 2, 'no'\n", "P0207"),
        ("def f(a, b=1): a\nprint f()\n", "P0205"),
        ("def f(a): a\nprint f(1, 2)\n", "P0205"),
        ("def f(a): a\nprint f(b=2)\n", "P0205"),
        ("def f(a): a\nprint f(1, a=2)\n", "P0205"),
        ("from std.pipelin import gpipe\n", "P0209"),
        ("from std.pipeline import gpip\n", "P0209"),
        ("import 'nothing.piper' as n\n", "P0209"),
        ("print range(10 ** 12)\n", "P0208"),
        ("for i in range(10000):\n    for j in range(10000):\n        let k = j\n", "P0208"),
        ("mesh g = a: 0\n", "P0408"),
        ("mesh g = a: 2, a: 2\n", "P0408"),
        ("mesh g = a: 2\nplace [stage=0] on g[b=0]\n", "P0305"),
        ("mesh g = a: 2\nplace [stage=0] on g[a=2]\n", "P0305"),
        ("mesh g = a: 2\nreplicate [stage=0] over g.b\n", "P0305"),
        ("mesh g = a: 2\nreplicate [stage=0] over g\n", "P0204"),
        ("mesh g = a: 2\nplace 3 on g\n", "P0204"),
        ("mesh g = a: 2\nreplicate [stage=0] over g.a with grad=sharded\n", "P0405"),
        ("mesh g = a: 2\nreplicate [stage=0] over g.a with grads=shared\n", "P0405"),
        ("mesh g = a: 2\nreplicate [stage=0] over g.a with bucket=25\n", "P0405"),
        ("stream [pass=G] on 's'\n", "P0301"),
        ("stream [pass='G'] on 's'\n", "P0301"),
        ("stream [stage=0, mb=next] on 's'\n", "P0304"),
        ("stream [comm=p2p] on 's' with priority=low\n", "P0405"),
        ("stream [comm=p2p] on 's' with ctas=0\n", "P0405"),
        ("stream [comm=p2p] on 's' with ctas=33\n", "P0405"),
        ("stream [comm=p2p] on 's' with ctas=high\n", "P0201"),
        ("stream [comm=p2p] on 's' with blocks=8\n", "P0405"),
        ("stream [comm=p2p] on 's' with ctas=8\nstream [comm=all_reduce] on 's' with ctas=4\n", "P0405"),
        ("return 1\n", "P0111"),
        ("for i in range(2):\n    param x = 1\n", "P0111"),
        ("[stage=0]\n", "P0111"),
        ("mesh g = a: 2\norder on g:\n    place [stage=0] on g\n", "P0111"),
        ("split batch into 0 as mb\n", "P0204"),
        ("split batch into 2 as mb\nsplit batch into 2 as mb\n", "P0406"),
        ("repeat -1: print 1\n", "P0204"),
        ("let a, b = [1, 2, 3]\n", "P0204"),
        ("let x = print_it(1)\n", "P0201"),
        ("def f(x):\n    print x\nlet y = f(1)\n", "P0204"),
    ],
)
def test_mistakes(text: str, code: str) -> None:
    found = problems(text)
    assert [x.code for x in found] == [code], [x.message for x in found]
    assert found[0].span is not None


MESH = "mesh gpu = pp: 2\nsplit batch into 2 as mb\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("order on gpu[pp=0]:\n    [stage=2, pass=F, mb=0]\n", "P0302"),
        ("order on gpu[pp=0]:\n    [stage=1, pass=F, mb=0]\n", "P0403"),
        ("order on gpu[pp=0]:\n    repeat 3: [stage=0, pass=F, mb=next]\n", "P0304"),
        ("order on gpu[pp=0]:\n    [stage=0, pass=F, seq=next]\n", "P0303"),
        ("order on gpu[pp=0]:\n    repeat 2: [stage=0, pass=F, mb=0]\n", "P0407"),
        ("order on gpu[pp=0]:\n    [stage=0, pass=B, mb=0], [stage=0, pass=W, mb=0]\n", "P0407"),
        ("place [stage=0] on gpu[pp=1]\n", "P0401"),
        ("mesh other = dp: 3\n", "P0404"),
        ("order on gpu[pp=0]:\n    [part=0, pass=F]\n", "P0302"),
        ("order on gpu[pp=0]:\n    [stage=0, pass=F, mb=7]\n", "P0302"),
        ("place [stage=4:2] on gpu[pp=0]\n", "P0302"),
        ("split batch into 3 as x\nplace [stage=5, x=0:2] on gpu\n", "P0402"),
        ("order on gpu[pp=0]:\n    [stage=0, pass=F, pass=B]\n", "P0302"),
        ("tag stage=7 at x\n", "P0402"),
        ("def F(s): [stage=s]\nF(0)\n", "P0111"),
        ("order on gpu[pp=0]:\n    [stage=0, pass=F, mb=0]\nsplit batch into 2 as seq\n", "P0410"),
        ("place [stage=5, seq=0] on gpu\nsplit batch into 2 as seq\n", "P0410"),
        ("tag pass='F' at x\n", "P0301"),
        ("split batch into 2 as comm\n", "P0301"),
        ("stream [update=3] on 's'\n", "P0301"),
        ("stream [stage=0] on ''\n", "P0204"),
        ("order on gpu[pp=0]:\n    [pass=next]\n", "P0301"),
        ("split batch into 100000 as x\n", "P0204"),
        ("from std.pipeline import _sizes\n", "P0209"),
        ("replicate [stage=0] over gpu.pp with reduce=sum\n", "P0405"),
        ("print 1e308 * 10\n", "P0211"),
        ("print 9223372036854775808\n", "P0211"),
    ],
)
def test_what_does_not_fit_together(text: str, code: str) -> None:
    assert codes(MESH + text) == [code]


def test_several_mistakes_in_one_run_without_echoes() -> None:
    text = "let a = 1 // 0\nlet b = a + 1\nprint b\nmesh g = x: 0\nplace [stage=0] on g\nlet c = [1][5]\n"
    assert codes(text) == ["P0212", "P0408", "P0213"]


def test_names_are_checked_where_nothing_runs() -> None:
    assert codes("def f(x):\n    return y\nif 1 > 2:\n    print z\n") == ["P0201", "P0201"]


def test_suggestions() -> None:
    def helped(text: str) -> tuple[str, ...]:
        return problems(text)[0].helps

    assert helped("let microbatches = 4\nprint microbatchs\n") == ("did you mean `microbatches`?",)
    assert helped("gpipe(1, 2, 3)\n") == ("add `from std.pipeline import gpipe`",)
    assert helped("from std.pipeline import one_f_on_b\n") == ("did you mean `one_f_one_b`?",)
    assert helped("from std.pipline import gpipe\n") == ("did you mean `std.pipeline`?",)
    assert helped("print true\n") == ("did you mean `True`?",)
    assert helped(MESH + "order on gpu[pp=0]:\n    [stage=2, pass=F, mb=0]\n") == ("did you mean `stage=1`?",)


def test_parameters() -> None:
    script = (
        "param n = 4\nparam rate = 0.5\nparam name = 'x'\nparam on_ = True\nparam size = 25MB\nprint n, rate, name,"
        " on_, size\n"
    )
    lines: list[str] = []
    found = outline(
        Source("s", script),
        overrides={"n": "8", "rate": "2", "name": "y=1", "on_": "false", "size": "1GiB"},
        say=lines.append,
    )
    assert not found.problems
    assert lines == ["8 2.0 y=1 False 1GiB"]
    assert codes(script, n="four") == ["P0903"]
    assert codes(script, n="0.5") == ["P0903"]
    (unknown,) = problems(script, nn="3")
    assert unknown.code == "P0903"
    assert unknown.helps == ("did you mean `n`?",)


def test_directives_come_one_at_a_time_with_span_and_trail() -> None:
    text = (
        "def inner(g): place [stage=0] on g\ndef outer(g):\n    inner(g)\nmesh gpu = pp: 2\nouter(gpu)\nprint"
        " count([stage=0])\n"
    )
    graph = Recorder()
    lines: list[str] = []
    assert not Interpreter(graph, from_source(Source("s", text)), say=lines.append).run()
    mesh, place = graph.directives
    assert isinstance(mesh, UseMesh)
    assert isinstance(place, Place)
    assert place.span.text == "place [stage=0] on g"
    assert [(call.function, call.span.first.line) for call in place.trail] == [("outer", 5), ("inner", 3)]
    assert graph.asked == [2]
    assert lines == ["7"]


def test_the_graph_is_asked_between_directives() -> None:
    lines = printed(
        "mesh g = pp: 2\nprint tags('stage')\nplace [stage={0, 1}] on g[pp=0]\nprint tags('stage'),"
        " count([stage=*])\nsplit batch into 4 as mb\nprint count([stage=0, pass=F])\n"
    )
    assert lines == ["[]", "[0, 1] 4", "4"]


def test_imports(tmp_path: Path) -> None:
    (tmp_path / "common.piper").write_text("let width = 3\ndef double(x): 2 * x\n")
    script = tmp_path / "s.piper"
    script.write_text(
        'import "./common.piper" as c\nfrom "./common.piper" import double as twice\nprint c.width, c.double(2),'
        " twice(5)\n"
    )
    lines: list[str] = []
    found = outline(Source("s.piper", script.read_text()), script, say=lines.append)
    assert not found.problems
    assert lines == ["3 4 10"]


def test_import_cycles_show_the_path(tmp_path: Path) -> None:
    for name, other in [("a", "b"), ("b", "c"), ("c", "a")]:
        (tmp_path / f"{name}.piper").write_text(f'import "./{other}.piper" as x\n')
    path = tmp_path / "a.piper"
    (found,) = problems(path.read_text(), path)
    assert found.code == "P0210"
    assert found.label == "a.piper -> b.piper -> c.piper -> a.piper"


def test_an_error_in_the_library_points_at_the_users_call_first() -> None:
    text = "from std.pipeline import gpipe\nmesh gpu = pp: 2\nsplit batch into 2 as mb\ngpipe(gpu, 3, 2)\n"
    (found,) = problems(text)
    seen = found.seen_by_user()
    assert seen.span is not None
    assert (seen.span.source.name, seen.span.first.line) == ("s.piper", 4)
    assert seen.also[0].span.source.name == "std/pipeline.piper"


def test_steps_through_functions_and_lists() -> None:
    text = (
        "mesh gpu = pp: 1\nsplit batch into 4 as mb\nplace [stage=0] on gpu\ndef F(s): [stage=s, pass=F, mb=next]\ndef"
        " B(s): [stage=s, pass=B, mb=next]\ndef pair(s): F(s) & B(s)\ndef many(s, n):\n    repeat n: F(s)\norder on"
        " gpu:\n    many(0, 2)\n    [F(0) for i in range(1)]\n    pair(0)\n    B(0), B(0)\n"
    )
    (lane,) = right_outline(text).orders()
    assert [[f"{item['pass']}{item['mb']}" for item in work.items] for work in lane.steps] == [
        ["F0"],
        ["F1"],
        ["F2"],
        ["F3", "B0"],
        ["B1"],
        ["B2"],
    ]


def test_next_shares_backwards_and_keeps_to_its_range() -> None:
    text = (
        "mesh gpu = pp: 1\nsplit batch into 6 as mb\nplace [stage=0] on gpu\norder on gpu:\n    [stage=0, pass=I,"
        " mb=next], [stage=0, pass=B, mb=next], [stage=0, pass=I, mb=next]\n    [stage=0, pass=W, mb=next], [stage=0,"
        " pass=W, mb=next], [stage=0, pass=B, mb=4:, mb=next], [stage=0, pass=B, mb=0:3, mb=next?]\n"
    )
    (lane,) = right_outline(text).orders()
    assert [f"{item['pass']}{item['mb']}" for work in lane.steps for item in work.items] == [
        "I0",
        "B1",
        "I2",
        "W0",
        "W2",
        "B4",
    ]


def test_lanes_divide_only_when_orders_differ() -> None:
    text = (
        "mesh gpu = pp: 2, dp: 64\nsplit batch into 2 as mb\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on"
        " gpu[pp=1]\n"
    )
    text += "order on gpu[pp=0]:\n    [stage=0, pass=F, mb=0]\norder on gpu[pp=0, dp=3]:\n    [stage=0, pass=F, mb=1]\n"
    lanes = right_outline(text).orders()
    assert [(len(lane.devices), len(lane.steps)) for lane in lanes] == [(63, 1), (1, 2), (64, 0)]


def test_an_order_before_its_place_is_held_against_it() -> None:
    text = "mesh gpu = pp: 2\norder on gpu[pp=1]:\n    [stage=0, pass=F]\nplace [stage=0] on gpu[pp=0]\n"
    assert codes(text) == ["P0403"]
    assert codes(text.replace("place [stage=0] on gpu[pp=0]\n", "")) == ["P0402", "P0404"]


def test_a_tag_that_may_lie_inside_what_is_placed_is_no_mistake() -> None:
    text = (
        "mesh gpu = dp: 2\ntag stage=0 at model\ntag part='in' at model.mlp\nplace [stage=0] on gpu\nreplicate"
        " [stage=0] over gpu.dp\n"
    )
    assert codes(text) == []
    assert codes(text.replace("part='in'", "stage=1")) == ["P0402"]


def test_a_placement_only_a_model_can_list_is_no_mistake() -> None:
    text = (
        "mesh gpu = pp: 2\nsplit batch into 2 as mb\nplace [stage=*] on gpu[pp=0]\norder on gpu[pp=0]:\n    [stage=0,"
        " pass=F, mb=0], [stage=*, pass=B]\n"
    )
    assert codes(text) == []


def test_a_step_of_a_library_function_points_at_the_users_line() -> None:
    text = MESH + "from std.pipeline import F\norder on gpu[pp=0]:\n    repeat 3: F(0)\n"
    (found,) = problems(text)
    seen = found.seen_by_user()
    assert seen.code == "P0304"
    assert seen.span is not None
    assert seen.span.text == "F(0)"


def test_a_failed_import_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "bad.piper").write_text("let a = nope\n")
    path = tmp_path / "s.piper"
    text = 'import "./bad.piper" as a\nimport "./bad.piper" as b\nprint a.x, b.x\n'
    assert [x.code for x in problems(text, path)] == ["P0201"]


def test_long_call_chains_end_in_a_diagnostic() -> None:
    text = "".join(f"def f{i}(x): f{i + 1}(x)\n" for i in range(500)) + "def f500(x): x\nprint f0(1)\n"
    assert codes(text) == ["P0107"]


def test_two_splits() -> None:
    text = "mesh gpu = pp: 1\nsplit batch into 2 as mb\nsplit [stage=0] into 2 as seq\nplace [stage={0, 1}] on gpu\n"
    text += (
        "order on gpu:\n    [stage=0, pass=F, mb=0, seq=next], [stage=0, pass=F, mb=0, seq=next], [stage=1, pass=F,"
        " mb=next]\n"
    )
    (lane,) = right_outline(text).orders()
    assert [dict(item) for work in lane.steps for item in work.items] == [
        {"stage": 0, "pass": "F", "mb": 0, "seq": 0},
        {"stage": 0, "pass": "F", "mb": 0, "seq": 1},
        {"stage": 1, "pass": "F", "mb": 0},
    ]


def test_a_requirement_without_words() -> None:
    """An empty message is no message: the error still says what it is about."""
    (problem,) = outline(Source("s.piper", 'require 1 == 2, ""\n')).problems
    assert problem.code == "P0207"
    assert problem.message == "requirement not met"
