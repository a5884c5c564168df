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
    return [node.name for node in graph.nodes if node.op == "all_gather"]


# ------------------------------------------------------------------------------------------------------ how many gathers


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
    for keep, each in (("pass", 8), ("stage", 1)):
        graph = graph_of(script("looped_bfs", f", keep={keep}").replace("into 4", "into 8").replace("2, 4)", "2, 8)"))
        assert len(gathers(graph)) == each * (4 + 3)


ONE = "mesh gpu = dp: 2\nsplit batch into 2 as mb\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded"


def stepped(keep: str, *steps: str, more: str = "") -> list[str]:
    """The gathers of an order of every pass of four stages: those of stages 1 and 2 as given, `1F0` for a forward of
    stage 1, microbatch 0."""

    def written(step: str) -> str:
        return " & ".join(
            f"[stage={one[0]}, pass={one[1]}{f', mb={one[2]}' if len(one) > 2 else ''}]" for one in step.split("&")
        )

    lines = "".join(f"    {written(step)}\n" for step in ("0F", *steps, "0B"))
    graph = graph_of(f"{ONE}, keep={keep}\n{more}order on gpu:\n{lines}")
    return [name for name in gathers(graph) if "stage=1" in name or "stage=2" in name]


def test_what_comes_between_ends_it() -> None:
    def of(which: str) -> str:
        stage, op, mb = which
        return f"all_gather.{op}[mb={mb}, stage={stage}]"

    def named(*which: str) -> set[str]:
        return set(map(of, which))

    late = ("3F0", "3F1", "3B0", "3B1")
    forwards, backwards = ("1F0", "1F1", "2F0", "2F1"), ("2B0", "2B1", "1B0", "1B1")
    each = {*named("1F0", "2F0", "2B0", "1B0")}
    assert set(stepped("stage", *forwards, *late, *backwards)) == each
    # A pass of another chunk between them.
    mixed = ("1F0", "2F0", "1F1", "2F1")
    assert set(stepped("stage", *mixed, *late, *backwards)) == {*named("1F0", "2F0", "1F1", "2F1", "2B0", "1B0")}
    # Several chunks in one step have no order.
    together = ("1F0&2F0", "1F1&2F1") if False else ("1F0", "2F0", "1F1", "2F1")
    assert len(stepped("stage", *together, *late, *backwards)) == 6
    # A weight half of the same chunk reads no weights, one of another chunk is between.
    halves = ("2I0", "2W0", "2I1", "2W1", "1I0", "1W0", "1I1", "1W1")
    assert set(stepped("stage", *forwards, *late, *halves)) == named("1F0", "2F0", "2I0", "1I0")
    apart = ("2I0", "2I1", "1I0", "2W0", "1I1", "2W1", "1W0", "1W1")
    assert set(stepped("stage", *forwards, *late, *apart)) == named("1F0", "2F0", "2I0", "1I0", "1I1")


def test_the_turn() -> None:
    """Only where the backward of a chunk comes right after its forward."""
    steps = ("1F0", "2F0", "3F0", "3B0", "2B0", "1B0", "1F1", "2F1", "3F1", "3B1", "2B1", "1B1")
    graph = graph_of(f"{ONE}, keep=turn\norder on gpu:\n    [stage=0, pass=F]\n" + "".join(
        f"    [stage={one[0]}, pass={one[1]}, mb={one[2]}]\n" for one in steps
    ) + "    [stage=0, pass=B]\n")
    of_last = [name for name in gathers(graph) if "stage=3" in name]
    assert of_last == ["all_gather.F[mb=0, stage=3]", "all_gather.F[mb=1, stage=3]"]
    of_first = [name for name in gathers(graph) if "stage=1" in name]
    assert sorted(of_first) == ["all_gather.B[mb=0, stage=1]", "all_gather.F[mb=0, stage=1]", "all_gather.B[mb=1, stage=1]"][:0] or len(of_first) == 3


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
    between = "[stage=0, pass=F, mb=0], [stage=1, pass=F, mb=0], [stage=0, pass=F, mb=1]"
    alike = "[stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]"
    assert [sum("F" in name and "stage=0" in name for name in gathers(graph_of(text.format(one)))) for one in (alike, between)] == [1, 2]
    alone = text.format(alike).partition("order on gpu[dp=2:4]")[0]
    assert sum("F" in name and "stage=0" in name for name in gathers(graph_of(alone))) == 2


def test_without_an_order_every_pass_has_its_own() -> None:
    assert len(gathers(graph_of(f"{ONE}, keep=turn\n"))) == len(gathers(graph_of(f"{ONE}, keep=pass\n"))) == 14


def test_a_recomputed_forward_reads_what_its_backward_reads() -> None:
    more = "recompute [pass=*]\n"
    assert [len(gathers(graph_of(script("gpipe", f", keep={keep}", more)))) for keep in KEEPS] == [44, 8, 4]
    graph = graph_of(f"{ONE}\n{more}")
    assert len(gathers(graph)) == 16  # no order: one for each forward, one for each backward


def test_a_selector_that_names_one_of_the_passes_means_their_gather() -> None:
    text = script("gpipe", "").replace("gpipe(gpu", 'stream [comm=all_gather] on "gather"\ngpipe(gpu')
    text += "order [stage=3, pass=F, mb=0] -> [comm=all_gather, stage=3, pass=B, mb=2]\n"
    graph = graph_of(text)
    (late,) = (node for node in graph.nodes if node.name == "all_gather.B[mb=3, stage=3]" or node.name == "all_gather.B[mb=0, stage=3]")
    before = {graph.nodes[other].name for other in graph.after[late.id]}
    assert "F[mb=0, stage=3]" in before


# ------------------------------------------------------------------------------------------------------ the same results


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
    text = script("looped_bfs", f", keep={keep}").replace("dp: 2", "dp: 2, tp: 2")
    text = text.replace("replicate", "shard [stage=0] over gpu.tp with style=columns\nreplicate [stage!=0] over gpu.tp\nreplicate")
    graph = assert_same(CASES["mlp"], program("mlp"), text)
    right_plan(graph)
    assert len(gathers(graph)) == {"pass": 28, "stage": 7, "turn": 5}[keep]


@pytest.mark.parametrize("keep", KEEPS)
def test_experts_that_are_divided(keep: str) -> None:
    text = (
        "mesh gpu = pp: 2, dp: 2, ep: 2\nsplit batch into 2 as mb\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on"
        f" gpu[pp=1]\nreplicate [pass=*] over gpu.dp with params=sharded, keep={keep}\nshard [expert=*] over gpu.ep\n"
        "replicate [!expert] over gpu.ep\n"
        "order on gpu[pp=0]:\n    [stage=0, !expert, pass=F, mb=0]\n    [stage=0, expert=0, pass=F]\n"
        "    [stage=0, !expert, pass=F, mb=1]\n"
    )
    right_plan(assert_same(CASES["moe"], program("moe"), text))


# ------------------------------------------------------------------------------------------------------------- memory


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
    text = text.replace("loop(gpu, 2, 2)", "loop(gpu, 1, 4)").replace("pp: 2", "pp: 1").replace("(gpu, 2, 4)", "(gpu, 1, 4, 4)")
    plan = lower(graph_of(text))
    for device in plan.devices:
        most = max(map(len, whole_at_once(device)))
        assert most <= prefetch + 1
        assert most == prefetch + 1 or keep == "turn"


@pytest.mark.parametrize("keep", KEEPS)
def test_evaluation_shares_them_too(keep: str) -> None:
    plan = forward(lower(graph_of(script("looped_bfs", f", keep={keep}"))))
    found = {x.node for device in plan.devices for x in device.instructions if isinstance(x, GatherParameters)}
    assert len(found) == (16 if keep == "pass" else 4)


# -------------------------------------------------------------------------------------------------------- diagnostics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("params=sharded, keep=step", "has no value"),
        ("params=sharded, keep=1", "keep"),
        ("params=sharded, keep=pass, keep=turn", "keep"),
        ("grads=sharded, keep=turn", "`keep` requires sharded weights"),
        ("keep=pass", "`keep` requires sharded weights"),
    ],
)
def test_bad_values(options: str, message: str) -> None:
    with pytest.raises(PiperError) as caught:
        graph_of(f"mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with {options}\n")
    (problem,) = caught.value.diagnostics
    print(problem.message, problem.helps)
    assert problem.code == "P0405"
    assert problem.span is not None
    assert problem.helps
