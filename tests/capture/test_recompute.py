"""`recompute ... with policy=cheap`: the backward computes again what is cheap, from as few bytes as can be."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random
from typing import TypeAlias

import pytest
import torch
from torch import fx, nn
from torch._ops import OpOverload

from piperlang.capture.annotate import annotate
from piperlang.capture.autodiff.cost import bytes_of
from piperlang.capture.autodiff.cut import Subgraph, cut
from piperlang.capture.autodiff.differentiate import differentiate
from piperlang.capture.autodiff.min_cut import CHEAP, VIEWS, fewest_bytes, is_cheap
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.batch.sizes import trace_sizes
from piperlang.capture.program import Program
from piperlang.capture.trace.trace import Traced, trace
from piperlang.pipeline import schedule
from piperlang.source import Source
from tests.support.chunks import run
from tests.support.models import CASES, WIDTH, Case, square, vectors

torch.set_num_threads(1)
aten = torch.ops.aten


Captured: TypeAlias = tuple[Traced, list[Subgraph], list[PassGraphs]]


def chunks_of(name: str) -> tuple[Captured, Captured]:
    """With backwards that recompute nothing, and what is cheap."""
    case = CASES[name]
    traced = trace(case.model, case.loss, case.batch(4))
    chunks = cut(traced)
    return (traced, chunks, differentiate(traced, chunks)), (traced, chunks, differentiate(traced, chunks, cheap=True))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_bitwise(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    batch, model = case.batch(4), case.model()
    plain, cheap = chunks_of(name)
    for halves in (False, True):
        loss, gradients = run(*plain, model, batch, halves=halves)
        again_loss, again = run(*cheap, model, batch, halves=halves)
        assert again_loss == loss
        assert again.keys() == gradients.keys()
        assert all(torch.equal(again[one], gradient) for one, gradient in gradients.items())
    _takes_no_longer(plain[2], cheap[2])


class Split(nn.Module):
    """An operator with a list of results, all of which the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.layer(x).split(WIDTH, -1)
        return torch.tanh(a) * torch.sigmoid(b) * torch.cos(c)


@pytest.mark.parametrize("name", [*CASES, "split"])
@pytest.mark.parametrize("cheap", [False, True])
def test_passes_take_and_give_single_tensors(name: str, cheap: bool) -> None:
    """Not lists of them: those would be kept as a whole, and a compiler takes them one by one."""
    case = CASES[name] if name in CASES else Case("split", Split, square, vectors, 1)
    traced = trace(case.model, case.loss, case.batch(4))
    for graphs in differentiate(traced, cut(traced), cheap=cheap):
        for one in (graphs.F, graphs.B, graphs.I, graphs.W):
            if one is not None:
                (given,) = [node.args[0] for node in one.module.graph.nodes if node.op == "output"]
                assert isinstance(given, tuple)
                results = [node.meta["val"] for node in given if isinstance(node, fx.Node) and "val" in node.meta]
                assert all(isinstance(value, torch.Tensor) for value in results)


def _takes_long(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target not in CHEAP | VIEWS and torch.Tag.pointwise not in target.tags


def _takes_no_longer(plain: list[PassGraphs], cheap: list[PassGraphs]) -> None:
    """Matrix products, attention, random numbers: no backward has more of them than one that recomputes nothing."""

    def work(*pieces: PassGraph | None) -> Counter[str]:
        nodes = [node for piece in pieces if piece for node in piece.module.graph.nodes]
        return Counter(str(node.target) for node in nodes if _takes_long(node))

    for one, other in zip(plain, cheap, strict=True):
        assert work(other.F) == work(one.F)
        assert work(other.B) <= work(one.B)
        assert work(other.I, other.W) <= work(one.I, one.W)
        # Inputs that the backward reads are not counted: they are kept instead of what is computed from them.
        assert other.saved()[0] <= one.saved()[0]
        assert other.saved_bytes + other.kept_bytes <= one.saved_bytes + one.kept_bytes


class Block(nn.Module):
    """A layer normalisation, a layer, an activation and another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, block in enumerate(self.blocks):
            with annotate("stage", stage):
                x = block(x)
        return x


def test_what_is_saved_of_a_block() -> None:
    """What the first layer gives: not the normalised input, nor the activation, which B, and I and W, compute once more
    from that and from the input of the block."""
    case = Case("blocks", Blocks, square, vectors, 3)
    traced = trace(case.model, case.loss, case.batch(4))
    chunks = cut(traced)
    (_, plain, _), (_, cheap, _) = (differentiate(traced, chunks, policy) for policy in (False, True))
    values = 4 * WIDTH * 4
    assert plain.saved_bytes >= (1 + 4 + 4) * values
    assert cheap.saved_bytes == 4 * values
    assert cheap.B is not None
    assert ("input", 0) in cheap.B.inputs
    # The gradient of what the first layer gives, and of the normalisation's weight and bias; and its result.
    assert cheap.kept_bytes == 4 * values + 2 * WIDTH * 4 + values


class LastToken(nn.Module):
    """What is read of a large value is small, and what is computed from that a little larger."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH // 8, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x.view(len(x), 8, WIDTH // 8))[:, -1].double()
        return self.down((h.sin() * h.cos()).float())


def test_a_view_keeps_all_that_it_is_a_view_of() -> None:
    case = Case("last", LastToken, square, vectors, 1)
    traced = trace(case.model, case.loss, case.batch(4))
    chunks = cut(traced)
    (plain,), (cheap,) = (differentiate(traced, chunks, policy) for policy in (False, True))
    held, before = cheap.saved()[0], plain.saved()[0]
    assert 4 * 8 * WIDTH * 8 <= held <= before < 4 * 8 * 8 * WIDTH * 4


# ------------------------------------------------------------------------------------------------- the cut itself

OPERATORS = [aten.mul.Tensor, aten.mm.default, aten.cat.default, aten.mul.Tensor]


def drawn(draw: Random) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Operators on values of any size, the inputs, and what a backward reads."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(3)]
    nodes = list(inputs)
    for _ in range(draw.randrange(2, 8)):
        sources = draw.sample(nodes, min(len(nodes), draw.randrange(1, 3)))
        nodes.append(graph.call_function(draw.choice(OPERATORS), tuple(sources)))
    for node in nodes:
        node.meta["val"] = torch.empty(draw.randrange(1, 9))
    return nodes[len(inputs) :], inputs, draw.sample(nodes, draw.randrange(1, 4))


def suffices(saved: set[fx.Node], read: list[fx.Node], made: list[fx.Node]) -> bool:
    there = set(saved)
    for node in made:
        if is_cheap(node) and there.issuperset(node.all_input_nodes):
            there.add(node)
    return there.issuperset(read)


@pytest.mark.parametrize("seed", range(60))
def test_no_other_choice_saves_fewer_bytes(seed: int) -> None:
    """Against all choices there are."""
    draw = Random(seed)
    made, inputs, read = drawn(draw)
    free = set(draw.sample(inputs, draw.randrange(3)))
    found = fewest_bytes(read, made, free)
    values = [node for node in [*inputs, *made] if node not in free]
    least = min(
        bytes_of(choice)
        for count in range(len(values) + 1)
        for choice in combinations(values, count)
        if suffices(free.union(choice), read, made)
    )
    assert suffices(found | free, read, made)
    assert bytes_of(found) == least
    assert found == fewest_bytes(read, made, free)


class Compiling(Program):
    """As if it were traced on CUDA, which needs one."""

    compiles = True


@pytest.mark.parametrize(
    ("said", "first", "others"),
    [
        ("", True, True),
        ("recompute [stage=0] with policy=none\n", False, True),
        ("recompute [stage=0]\n", False, True),
        ("recompute [pass=*] with policy=none\nrecompute [stage=0] with policy=cheap\n", True, False),
    ],
)
def test_where_programs_are_compiled_cheap_is_the_default(said: str, first: bool, others: bool) -> None:
    case = CASES["mlp"]
    program = Compiling(trace_sizes(case.model, case.loss, case.batch(4)))
    found = schedule(program, Source("s.piper", f"mesh gpu = d: 1\nplace [pass=*] on gpu\n{said}"))
    assert not found.problems
    one, *rest = found.graph().model.chunks
    assert rest
    assert one.recomputes == first
    assert {chunk.recomputes for chunk in rest} == {others}
