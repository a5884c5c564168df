"""Faults that a published system had, each with a test that would catch it here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import Graph, Node
from piperlang.ir.layout import devices_of
from piperlang.ir.verify import InvalidGraph, verify
from piperlang.runtime.reference.boxes import boxes
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.equivalence import SAMPLES, assert_same, compiled, optimizer, program
from tests.support.models import CASES, WIDTH

DP = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp{}\nsplit batch into 4 as mb\n"
PIPE = "mesh gpu = pp: 4\nfor s in range(4):\n    place [stage=s] on gpu[pp=s]\nsplit batch into 4 as mb\n"


def graph_of(model: str, script: str) -> Graph:
    return compiled(program(model), script)[0]


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_every_sample_is_seen_once() -> None:
    """Microbatches and replicas that all see the same data."""
    graph = graph_of("mlp", DP.format(""))
    seen: Counter[int] = Counter()
    for node in graph.nodes:
        if node.op == "F" and node.template.chunk == 0:
            (key,) = (keys[0] for slot, keys in zip(node.template.slots, node.reads, strict=True) if slot[0] == "batch")
            for (low, high), *_ in boxes(graph.values[key]):
                seen.update(range(low, high))
    assert seen == Counter(range(SAMPLES))


def test_the_loss_comes_back() -> None:
    graph, captured = compiled(program("mlp"), DP.format(""))
    torch.manual_seed(0)
    case = CASES["mlp"]
    model, batch = case.model(), case.batch(SAMPLES)
    loss = GraphInterpreter(graph, captured, model, optimizer).step(batch).loss
    assert loss == pytest.approx(case.loss(model(batch[0]), batch[1]).item(), rel=1e-6)


def test_replicas_start_and_stay_equal() -> None:
    graph, captured = compiled(program("mlp"), DP.format(""))
    run = GraphInterpreter(graph, captured, CASES["mlp"].model(), optimizer)
    for _ in range(2):
        for parts in run.shards.current.values():
            assert len(parts) == 2
            assert torch.equal(parts[0], parts[1])
        run.step(CASES["mlp"].batch(SAMPLES))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_gradients_are_reduced_once_a_step(microbatches: int) -> None:
    graph = graph_of("mlp", DP.format(" with bucket=1GB").replace("into 4", f"into {microbatches}"))
    assert ops(graph)["all_reduce"] == 1  # of the weights of all four stages


def test_buckets_bound_a_reduction() -> None:
    one, many = (ops(graph_of("gpt", DP.format(f" with bucket={size}")))["all_reduce"] for size in ("1GB", "1KB"))
    assert one < many


def test_zero1_divides_optimizer_states() -> None:
    graph, captured = compiled(program("mlp"), DP.format(" with states=sharded"))
    run = GraphInterpreter(graph, captured, CASES["mlp"].model(), optimizer)
    run.step(CASES["mlp"].batch(SAMPLES))
    states = [state["momentum_buffer"].numel() for state in run.shards.optimizers.states()]
    whole = sum(w.numel() for w in CASES["mlp"].model().parameters())
    assert sum(states) == whole  # on two devices together


@pytest.mark.parametrize("level", ["states", "grads"])
def test_updated_weights_are_gathered(level: str) -> None:
    graph = graph_of("mlp", DP.format(f" with {level}=sharded"))
    gathered = {key for node in graph.nodes if node.op == "all_gather" for key in node.writes}
    assert set(graph.next.values()) == gathered
    assert all(not graph.held[key].flat for key in gathered)


def test_zero2_scatters_and_zero3_keeps_parts() -> None:
    assert ops(graph_of("mlp", DP.format(" with grads=sharded")))["reduce_scatter"] == 1
    graph = graph_of("mlp", DP.format(" with params=sharded"))
    assert all(graph.held[key].flat == ("dp",) for key in graph.next)
    assert all(graph.held[key].flat == ("dp",) for key in graph.next.values())


def test_what_is_not_sharded_is_updated_too() -> None:
    script = (
        "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [stage=0] over gpu.dp with params=sharded\nreplicate"
        " [stage!=0] over gpu.dp\n"
    )
    assert len(graph_of("mlp", script).next) == 8
    assert_same(CASES["mlp"], program("mlp"), script)


def test_experts_are_divided() -> None:
    script = "mesh gpu = ep: 4\nplace [pass=*] on gpu\nshard [expert=*] over gpu.ep\nreplicate [!expert] over gpu.ep\n"
    graph, captured = compiled(program("moe"), script)
    run = GraphInterpreter(graph, captured, CASES["moe"].model(), optimizer)
    parts = {graph.held[key].weight: [tuple(part.shape) for part in parts] for key, parts in run.shards.current.items()}
    assert parts["up"] == [(1, WIDTH, 2 * WIDTH)] * 4
    assert ops(graph)["all_to_all"] == 4  # to the experts and back, forward and backward


def test_the_expert_axis_is_its_own() -> None:
    script = """mesh gpu = ep: 2, dp: 2
place [pass=*] on gpu
shard [expert=*] over gpu.ep
replicate [!expert] over gpu.ep
replicate [pass=*] over gpu.dp
"""
    assert {node.template.axes for node in graph_of("moe", script).nodes if node.op == "all_to_all"} == {("ep",)}
    assert_same(CASES["moe"], program("moe"), script)


@pytest.mark.parametrize("model", CASES)
def test_a_split_backward_computes_nothing_twice(model: str) -> None:
    for chunk in program(model).cut().model.chunks:
        if {"I", "W"} <= set(chunk.passes):
            assert chunk.passes["I"].flops + chunk.passes["W"].flops == chunk.passes["B"].flops


def test_a_skip_goes_straight_to_its_reader() -> None:
    """Forward DAGs forced into a chain: stage 0's output is read by stages 1, 2 and 3, and nobody passes it on."""
    graph = graph_of("unet", PIPE.replace("4 as mb", "1 as mb"))
    (name,) = program("unet").cut().model.chunks[0].outputs
    sent = [
        node
        for node in graph.nodes
        if node.op == "send" and node.reads[0][0] is ValueId(Kind.ACTIVATION, name, (), (0,))
    ]
    assert {str(node.template.where) for node in sent} == {"gpu[pp=0]"}
    assert len(sent) == 3


def test_parts_may_differ_in_their_devices() -> None:
    script = """mesh gpu = d: 4
place [stage=0] on gpu[d=3]
place [stage=1] on gpu[d=0:2]
place [stage=2:4] on gpu
replicate [stage!=0] over gpu.d with grads=sharded
split batch into 2 as mb
"""
    assert_same(CASES["unet"], program("unet"), script)


def test_what_is_received_is_what_was_sent() -> None:
    graph = graph_of("unet", PIPE)
    received = [node for node in graph.nodes if node.op == "recv"]
    assert received
    for node in received:
        sent = graph.nodes[graph.made[node.reads[0][0]]]
        assert sent.op == "send"
        assert sent.point == node.point
        assert graph.values[sent.writes[0]].tensor is graph.values[node.writes[0]].tensor
        assert graph.values[node.writes[0]].first == graph.values[sent.reads[0][0]].first


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero3_gathers_no_further_ahead_than_asked(prefetch: int) -> None:
    """Run as early as the edges allow: of a forward through four chunks, at most prefetch + 1 are gathered before the
    first has run."""
    graph = graph_of(
        "mlp",
        "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded,"
        f" prefetch={prefetch}\n",
    )
    before_any = {node.id for node in graph.nodes if node.op == "all_gather" and not graph.after.get(node.id)}
    assert len(before_any) == prefetch + 1


def test_several_meshes_may_name_the_same_devices() -> None:
    script = """mesh dense = dp: 4
mesh moe = dp: 2, ep: 2
place [!expert] on dense
place [expert=*] on moe
replicate [!expert] over dense.dp
replicate [expert=*] over moe.dp
shard [expert=*] over moe.ep
"""
    assert_same(CASES["moe"], program("moe"), script)


# --------------------------------------------------------------------------------------------------- the verifier


def without(graph: Graph, gone: Node) -> Graph:
    nodes = [node for node in graph.nodes if node.id != gone.id]
    return replace(graph, nodes=nodes, made={key: maker for key, maker in graph.made.items() if maker != gone.id})


def changed(graph: Graph, node: Node, **how: object) -> Graph:
    nodes = list(graph.nodes)
    nodes[node.id] = node._replace(**how)  # type: ignore[arg-type]
    return replace(graph, nodes=nodes)


FULL = (
    "mesh gpu = pp: 2, dp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nsplit batch into 2 as"
    " mb\nreplicate [pass=*] over gpu.dp with grads=sharded\n"
)


@pytest.mark.parametrize("op", ["F", "B", "send", "recv", "reduce_scatter", "update", "all_gather"])
def test_the_verifier_misses_no_node(op: str) -> None:
    graph = graph_of("unet", FULL)
    verify(graph)
    for node in [node for node in graph.nodes if node.op == op][:4]:
        with pytest.raises(InvalidGraph):
            verify(without(graph, node))


def test_the_verifier_knows_who_reads_what() -> None:
    graph = graph_of("unet", FULL)
    backward = next(node for node in graph.nodes if node.op == "B" and any(len(keys) > 1 for keys in node.reads))
    fewer = tuple(keys[:1] for keys in backward.reads)
    with pytest.raises(InvalidGraph, match="is read 0 times"):
        verify(changed(graph, backward, reads=fewer))
    twice = tuple(keys * 2 if keys[0].kind is Kind.GRADIENT else keys for keys in backward.reads)
    with pytest.raises(InvalidGraph, match="is read 2 times"):
        verify(changed(graph, backward, reads=twice))
    send = next(node for node in graph.nodes if node.op == "send")
    with pytest.raises(InvalidGraph):
        verify(changed(graph, send, template=replace(send.template, op="all_gather")))
    update = next(node for node in graph.nodes if node.op == "update")
    assert set(devices_of(update.template.where)) == {2, 3}
    with pytest.raises(InvalidGraph, match="updated 0 times"):
        verify(changed(graph, update, template=replace(update.template, op="F")))


def test_the_verifier_counts_samples() -> None:
    graph = graph_of("unet", FULL)
    (template,) = (template for template in graph.templates if template.op == "F" and template.chunk == 0)
    templates = [replace(f, samples=2 * f.samples) if f is template else f for f in graph.templates]
    with pytest.raises(InvalidGraph, match="chunk 0 sees 16 samples of 8"):
        verify(replace(graph, templates=templates))


def test_the_verifier_compares_layouts() -> None:
    graph = graph_of("unet", FULL)
    send = next(node for node in graph.nodes if node.op == "send")
    key = send.writes[0]
    values = dict(graph.values)
    values[key] = values[key]._replace(first=values[key].first + 1)
    with pytest.raises(InvalidGraph, match="turns samples"):
        verify(replace(graph, values=values))
