"""`keep`: passes that follow each other share one gather of ZeRO-3's weights, and the mathematics stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from piperlang.core.value_id import Kind, ValueId
from piperlang.diagnostics import PiperError
from piperlang.ir.graph import Graph
from piperlang.plan.instructions import GatherParameters
from piperlang.plan.lower import lower
from piperlang.plan.plan import DevicePlan
from piperlang.plan.rewrite.forward import forward
from tests.support.equivalence import assert_same, compiled, program
from tests.support.models import CASES
from tests.support.plan_runs import right_plan

KEEPS = ("pass", "stage", "turn")
LIBRARY = {
    "gpipe": ("loop", 4, "4"),
    "one_f_one_b": ("loop", 4, "4"),
    "zero_bubble": ("loop", 4, "4"),
    "looped_bfs": ("loop", 2, "2, 2"),
    "interleaved": ("loop", 2, "2, 2"),
    "interleaved_zero_bubble": ("loop", 2, "2, 2"),
    "zbv": ("vee", 2, "2"),
    "dualpipev": ("vee", 2, "2"),
    "dualpipe": ("mirror", 4, "4, 4"),
}


def script(name: str, options: str, more: str = "", data: str = "replicate [pass=*] over gpu.dp") -> str:
    place, ranks, arguments = LIBRARY[name]
    return (
        f"from std.pipeline import {name}, {place}\nmesh gpu = pp: {ranks}, dp: 2\nsplit batch into 4 as mb\n"
        f"{place}(gpu, {arguments})\n{data} with params=sharded{options}\n{more}{name}(gpu, {ranks}, 4)\n"
    )


def graph_of(text: str, model: str = "mlp") -> Graph:
    return compiled(program(model), text)[0]


def gathers(graph: Graph) -> list[str]:
    """Of weights."""
    return [node.name for node in graph.nodes if node.op == "all_gather" and node.writes[0] in graph.held]


# -------------------------------------------------------------------------------------------------- how many gathers


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # Four stages and four microbatches; the backward of the first stage reads no weights.
        ("gpipe", (28, 7, 4)),
        ("looped_bfs", (28, 7, 5)),
        # On rank r the first 4 - r forwards follow each other, and as many of the last backwards.
        ("one_f_one_b", (28, 19, 4)),
        ("zero_bubble", (28, 19, 4)),
        ("interleaved", (28, 23, 13)),
        ("interleaved_zero_bubble", (28, 24, 15)),
        ("zbv", (28, 26, 16)),
        ("dualpipev", (28, 26, 24)),
        ("dualpipe", (28, 26, 18)),
    ],
)
def test_passes_that_follow_each_other_share_a_gather(name: str, counts: tuple[int, ...]) -> None:
    found = [graph_of(script(name, f", keep={keep}")) for keep in KEEPS]
    assert tuple(len(gathers(graph)) for graph in found) == counts
    assert len(gathers(graph_of(script(name, "")))) == counts[1]


def test_breadth_first_gathers_each_stage_once_for_each_direction() -> None:
    for micro in (2, 4):
        text = script("looped_bfs", "").replace("into 4", f"into {micro}").replace("2, 4)", f"2, {micro})")
        assert len(gathers(graph_of(text))) == 4 + 3


ONE = (
    "mesh gpu = dp: 2\nsplit batch into 2 as mb\nplace [pass=*] on gpu\n"
    "replicate [pass=*] over gpu.dp with params=sharded"
)


def gathered(keep: str, *steps: str) -> set[str]:
    """The gathers of stages 1 to 3, under an order that has these steps between all forwards and all backwards of
    stage 0: `1F0` is the forward of stage 1 for microbatch 0."""
    lines = [
        "[stage=0, pass=F]",
        *(
            " & ".join(f"[stage={one[0]}, pass={one[1]}, mb={one[2]}]" for one in step.split("&"))
            for step in " ".join(steps).split()
        ),
        "[stage=0, pass=B]",
    ]
    graph = graph_of(f"{ONE}, keep={keep}\norder on gpu:\n" + "".join(f"    {line}\n" for line in lines))
    return {
        f"{node.template.tags['stage']}{node.template.phase}{node.point[0]}"
        for node in graph.nodes
        if node.op == "all_gather" and node.template.tags["stage"] != 0
    }


FORWARDS, LAST, BACKWARDS = "1F0 1F1 2F0 2F1", "3F0 3F1 3B0 3B1", "2B0 2B1 1B0 1B1"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((FORWARDS, LAST, BACKWARDS), "1F0 2F0 3F0 3B0 2B0 1B0"),
        (("1F1 1F0 2F0 2F1", LAST, BACKWARDS), "1F1 2F0 3F0 3B0 2B0 1B0"),
        # A pass of another chunk between them.
        (("1F0 2F0 1F1 2F1", LAST, BACKWARDS), "1F0 2F0 1F1 2F1 3F0 3B0 2B0 1B0"),
        # The passes of one step have no order.
        (("1F0&1F1 2F0 2F1", LAST, BACKWARDS), "1F0 2F0 3F0 3B0 2B0 1B0"),
        (("1F0 1F1&2F0 2F1", LAST, BACKWARDS), "1F0 1F1 2F0 2F1 3F0 3B0 2B0 1B0"),
        # Weight halves read no weights; one of the same chunk ends nothing, one of another does.
        ((FORWARDS, LAST, "2I0 2W0 2I1 2W1 1I0 1W0 1I1 1W1"), "1F0 2F0 3F0 3B0 2I0 1I0"),
        ((FORWARDS, LAST, "2I0 2I1 1I0 2W0 1I1 2W1 1W0 1W1"), "1F0 2F0 3F0 3B0 2I0 1I0 1I1"),
    ],
)
def test_what_comes_between_ends_it(steps: tuple[str, ...], expected: str) -> None:
    assert gathered("stage", *steps) == set(expected.split())


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("stage", "1F0 2F0 3F0 3B0 2B0 1B0 1F1 2F1 3F1 3B1 2B1 1B1"), ("turn", "1F0 2F0 3F0 2B0 1B0 2F1 3F1 2B1 1B1")],
)
def test_the_turn(keep: str, expected: str) -> None:
    """A backward right after the forward of its chunk, as 3B0, or a forward right after a backward, as 1F1."""
    assert gathered(keep, "1F0 2F0 3F0 3B0 2B0 1B0 1F1 2F1 3F1 3B1 2B1 1B1") == set(expected.split())


def test_the_devices_of_a_gather_have_to_agree() -> None:
    """Half of them run another stage between two forwards."""
    text = """mesh gpu = dp: 4
split batch into 2 as mb
place [stage=0] on gpu
place [stage=1:4] on gpu[dp=0:2]
replicate [pass=*] over gpu.dp with params=sharded
order on gpu[dp=0:2]:
    {}
order on gpu[dp=2:4]:
    [stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]
"""
    alike = "[stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]"
    between = "[stage=0, pass=F, mb=0], [stage=1, pass=F, mb=0], [stage=0, pass=F, mb=1]"
    some = text.format(alike).partition("order on gpu[dp=2:4]")[0]
    for written, count in ((text.format(alike), 1), (text.format(between), 2), (some, 2)):
        found = [name for name in gathers(graph_of(written)) if name.startswith("all_gather.F[stage=0")]
        assert len(found) == count, written


def test_without_an_order_every_pass_has_its_own() -> None:
    assert len(gathers(graph_of(f"{ONE}, keep=turn\n"))) == len(gathers(graph_of(f"{ONE}, keep=pass\n"))) == 14


def test_a_recomputed_forward_reads_what_its_backward_reads() -> None:
    more = "recompute [pass=*]\n"
    assert [len(gathers(graph_of(script("gpipe", f", keep={keep}", more)))) for keep in KEEPS] == [44, 8, 4]
    # Without an order: one for each forward, one for each backward with its forward again.
    assert [len(gathers(graph_of(f"{ONE}, keep={keep}\n{more}"))) for keep in KEEPS] == [22, 16, 16]


def test_a_selector_that_names_the_gather_of_a_pass_means_the_one_it_shares() -> None:
    text = script("gpipe", "") + "order [stage=2, pass=B, mb=3] -> [comm=all_gather, stage=1, pass=B, mb={}]\n"
    for microbatch in range(4):
        graph = graph_of(text.format(microbatch))
        (gather,) = (node for node in graph.nodes if node.name.startswith("all_gather.B[stage=1"))
        assert "B[stage=2, mb=3]" in {graph.nodes[other].name for other in graph.after[gather.id]}


# -------------------------------------------------------------------------------------------------- the same results


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("more", ["", "recompute [stage=1:3]\noffload [stage=0]\n"], ids=["", "recompute"])
def test_losses_and_weights_are_those_of_plain_training(name: str, keep: str, more: str) -> None:
    prefetch = len(name) % 3
    right_plan(assert_same(CASES["gpt"], program("gpt"), script(name, f", keep={keep}, prefetch={prefetch}", more)))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("options", ["", ", accumulate=sharded", ", partition=weights"])
def test_with_other_options(keep: str, options: str) -> None:
    right_plan(assert_same(CASES["mlp"], program("mlp"), script("looped_bfs", f", keep={keep}{options}")))


@pytest.mark.parametrize("keep", KEEPS)
def test_weights_that_are_divided_by_features_too(keep: str) -> None:
    passes = [f"[stage={s}, pass=F, mb={m}]" for s in range(4) for m in range(2)]
    passes += [f"[stage={s}, pass=B, mb={m}]" for s in (3, 2, 1, 0) for m in range(2)]
    text = (
        f"{ONE.replace('dp: 2', 'dp: 2, tp: 2')}, keep={keep}\nshard [stage=1] over gpu.tp with style=columns\n"
        "replicate [stage!=1] over gpu.tp\norder on gpu:\n" + "".join(f"    {one}\n" for one in passes)
    )
    graph = assert_same(CASES["mlp"], program("mlp"), text)
    right_plan(graph)
    assert len(gathers(graph)) == {"pass": 14, "stage": 7, "turn": 6}[keep]


@pytest.mark.parametrize("keep", KEEPS)
def test_experts_that_are_divided(keep: str) -> None:
    passes = ["stage=0, pass=F, mb=0", "stage=0, pass=F, mb=1"]
    passes += [f"expert=*, pass={op}, mb={m}" for op in "FB" for m in range(2)]
    text = (
        f"{ONE.replace('dp: 2', 'dp: 2, ep: 2')}, keep={keep}\nshard [expert=*] over gpu.ep\n"
        "replicate [!expert] over gpu.ep\norder on gpu:\n" + "".join(f"    [{one}]\n" for one in passes)
    )
    graph = assert_same(CASES["moe"], program("moe"), text)
    right_plan(graph)
    assert sum("expert=" in name for name in gathers(graph)) == {"pass": 4, "stage": 2, "turn": 1}[keep]


# ------------------------------------------------------------------------------------------------------------ memory


def whole_at_once(device: DevicePlan) -> Iterator[set[int]]:
    """The chunks whose gathered weights a device has, at every instruction."""
    last: Mapping[ValueId, int] = {key: i for i, x in enumerate(device.instructions) for key in x.reads}
    live: set[ValueId] = set()
    for i, x in enumerate(device.instructions):
        if isinstance(x, GatherParameters):
            live |= {key for key in x.writes if key.kind is Kind.WEIGHT}
        yield {key.owner[1] for key in live}
        live = {key for key in live if last.get(key, -1) > i}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["looped_bfs", "interleaved", "interleaved_zero_bubble"])
def test_no_more_are_whole_at_once_than_prefetch_allows(name: str, keep: str, prefetch: int) -> None:
    text = script(name, f", keep={keep}, prefetch={prefetch}")
    for old, new in (("pp: 2", "pp: 1"), ("loop(gpu, 2, 2)", "loop(gpu, 1, 4)"), ("(gpu, 2, 4)", "(gpu, 1, 4, 4)")):
        text = text.replace(old, new)
    plan = lower(graph_of(text))
    for device in plan.devices:
        most = max(map(len, whole_at_once(device)))
        assert most <= prefetch + 1
        assert most == prefetch + 1 or prefetch == 2 or keep == "turn"


LAYER_BY_LAYER = (
    "mesh gpu = dp: 2\nsplit batch into 2 as mb\nplace [pass=*] on gpu\n"
    "replicate [pass=*] over gpu.dp with params=sharded{options}\n{orders}"
)


def by_layers(device: str, stages: list[int]) -> str:
    """All forwards, and the backwards of a stage after those of another."""
    lines = [f"    repeat 2: [stage={s}, pass=F, mb=next]" for s in range(4)]
    lines += [f"    repeat 2: [stage={s}, pass=B, mb=next]" for s in stages]
    return f"order on {device}:\n" + "\n".join(lines) + "\n"


def held_back(graph: Graph) -> set[tuple[object, ...]]:
    """Backwards, by stage and microbatch, with the stage whose gradients are to be in parts before."""
    made = {
        node.id: graph.nodes[graph.made[node.reads[0][0]]].template.tags["stage"]
        for node in graph.nodes
        if node.op == "reduce_scatter"
    }
    return {
        (graph.nodes[node].template.tags["stage"], graph.nodes[node].point, made[earlier])
        for node, befores in graph.after.items()
        for earlier in befores
        if graph.nodes[node].op == "B" and earlier in made
    }


def test_gradients_of_layers_do_not_pile_up_behind_slow_reductions() -> None:
    """Two of them may be whole: a layer waits until the gradients of the last but one are in parts."""
    graph = graph_of(LAYER_BY_LAYER.format(options=", bucket=1KB", orders=by_layers("gpu", [3, 2, 1, 0])))
    assert held_back(graph) == {(1, (0,), 3), (0, (0,), 2)}
    right_plan(graph)


def test_where_weights_are_whole_all_gradients_may_be() -> None:
    text = LAYER_BY_LAYER.format(options=", bucket=1KB", orders=by_layers("gpu", [3, 2, 1, 0]))
    assert not held_back(graph_of(text.replace("params=sharded", "grads=sharded")))


@pytest.mark.parametrize("keep", KEEPS)
def test_evaluation_shares_them_too(keep: str) -> None:
    plan = forward(lower(graph_of(script("looped_bfs", f", keep={keep}"))))
    found = {x.node for device in plan.devices for x in device.instructions if isinstance(x, GatherParameters)}
    assert len(found) == (16 if keep == "pass" else 4)


# ------------------------------------------------------------------------------------------------------- diagnostics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("params=sharded, keep=step", "unknown value `keep=step`"),
        ("params=sharded, keep=1", "`keep` cannot be `1`"),
        ("params=sharded, keep=pass, keep=turn", "`keep` is given twice"),
        ("grads=sharded, keep=turn", "`keep` requires sharded weights"),
        ("keep=pass", "`keep` requires sharded weights"),
        ("prefetch=2", "`prefetch` requires sharded weights"),
    ],
)
def test_bad_values(options: str, message: str) -> None:
    with pytest.raises(PiperError) as caught:
        graph_of(f"mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with {options}\n")
    (problem,) = caught.value.diagnostics
    assert problem.code == "P0405"
    assert problem.message == message
    assert problem.span is not None
    assert problem.span.start > 0
