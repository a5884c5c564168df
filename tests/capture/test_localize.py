"""Divided chunks: what the devices compute, put together, is what one device computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import fx, nn

from piperlang.capture.annotate import annotate
from piperlang.capture.autodiff.cut import Subgraph, cut
from piperlang.capture.autodiff.joint import Joint
from piperlang.capture.spmd.features import features_of
from piperlang.capture.spmd.localize import Local, localize
from piperlang.capture.trace.keep import keep, signed, uniform
from piperlang.capture.trace.random import mix
from piperlang.capture.trace.trace import Traced, trace
from piperlang.core.placement import PARTIAL, REPLICATE, Placement, Shard
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.ir.model import Divide, Slot
from tests.support.models import CASES, LENGTH, WIDTH, square

torch.set_num_threads(1)
SAMPLES = 4


# ------------------------------------------------------------------------------------------------------ the devices


@dataclass(frozen=True)
class Given:
    """A chunk and its joint graph."""

    traced: Traced
    chunk: Subgraph
    joint: fx.GraphModule
    inputs: list[Slot]
    outputs: list[Slot | None]

    def local(self, *divides: Divide, arriving: Mapping[Slot, tuple[Placement, ...]] | None = None) -> Local:
        return localize(
            self.joint, self.inputs, self.outputs, features_of(self.traced, self.chunk), divides, arriving or {}
        )

    def values(self, seed: int = 0) -> dict[Slot, torch.Tensor]:
        """Numbers of the right shapes for all that the joint graph takes."""
        torch.manual_seed(seed)
        places = [node for node in self.joint.graph.nodes if node.op == "placeholder"]
        found = {slot: number(node.meta["val"]) for slot, node in zip(self.inputs, places, strict=True)}
        return found | {slot: torch.tensor([mix(3, 5), 8]) for slot in found if slot[0] == "rng"}

    def run(self, joint: fx.GraphModule, values: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        with torch.no_grad():
            results = fx.Interpreter(joint).run(*(values[slot] for slot in self.inputs), enable_io_processing=False)
        return {slot: value for slot, value in zip(self.outputs, results, strict=True) if slot is not None}


def number(fake: torch.Tensor) -> torch.Tensor:
    if fake.is_floating_point():
        return torch.randn(fake.shape, dtype=fake.dtype)
    return torch.rand(fake.shape) < 0.8 if fake.dtype is torch.bool else torch.randint(2, fake.shape, dtype=fake.dtype)


def apart(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a chunk of its own."""
    with annotate("part", "loss"):
        return square(output, target)


def given(
    model: Callable[[], nn.Module], tag: str = "part", value: int | str = 0, batch: Any = None, loss: Any = apart
) -> Given:
    traced = trace(model, loss, batch or (torch.randn(SAMPLES, LENGTH, WIDTH), torch.randn(SAMPLES, LENGTH, WIDTH)))
    (chunk,) = (chunk for chunk in cut(traced) if dict(chunk.tags).get(tag) == value)
    joint = Joint(traced, chunk)
    return Given(traced, chunk, joint.module, joint.inputs, joint.outputs)


def part(
    value: torch.Tensor, places: Sequence[Placement], divides: Sequence[Divide], at: Sequence[int]
) -> torch.Tensor:
    for place, divide, coordinate in zip(places, divides, at, strict=True):
        if isinstance(place, Shard):
            value = value.chunk(divide.size, place.dim)[coordinate]
        elif place == PARTIAL:
            value = value * (0.25 if coordinate == 0 else 0.75 / (divide.size - 1))
    return value.contiguous()


def whole(parts: Mapping[tuple[int, ...], torch.Tensor], places: Sequence[Placement]) -> torch.Tensor:
    """Put together what the devices have, the innermost axis first."""
    *outer, place = places
    together: dict[tuple[int, ...], torch.Tensor] = {}
    for prefix, group in itertools.groupby(sorted(parts), key=lambda at: at[:-1]):
        members = [parts[at] for at in group]
        if place == REPLICATE:
            assert all(torch.equal(member, members[0]) for member in members)
            together[prefix] = members[0]
        else:
            together[prefix] = (
                torch.cat(members, place.dim) if isinstance(place, Shard) else torch.stack(members).sum(0)
            )
    return whole(together, outer) if outer else together[()]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def agree(chunk: Given, *divides: Divide, arriving: Mapping[Slot, tuple[Placement, ...]] | None = None) -> Local:
    """The divided chunk gives what the undivided one does, on every device that there is."""
    local = chunk.local(*divides, arriving=arriving)
    compare(chunk, local, *divides)
    return local


def compare(chunk: Given, local: Local, *divides: Divide) -> None:
    values = chunk.values()
    expected = chunk.run(chunk.joint, values)
    found: dict[Slot, dict[tuple[int, ...], torch.Tensor]] = {slot: {} for slot in expected}
    for at in itertools.product(*(range(divide.size) for divide in divides)):
        own = {slot: part(value, local.placements[slot], divides, at) for slot, value in values.items()}
        own |= {slot: torch.cat([value, torch.tensor(at)]) for slot, value in own.items() if slot[0] == "rng"}
        check_values(local.joint, [own[slot] for slot in chunk.inputs])
        for slot, value in chunk.run(local.joint, own).items():
            found[slot][at] = value
    assert set(local.placements) == set(chunk.inputs) | set(expected)
    for slot, value in expected.items():
        assert relative(whole(found[slot], local.placements[slot]), value) < 1e-5, slot
        assert value.abs().max() > 1e-3, "nothing is compared"


def check_values(joint: fx.GraphModule, values: list[torch.Tensor]) -> None:
    """Every node's fake value has the shape that it has when it runs; `rng` alone grows with the axes."""

    class Checked(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            for real, fake in zip(
                *(
                    leaves if isinstance(leaves, tuple | list) else [leaves]
                    for leaves in (result, n.meta.get("val", result))
                ),
                strict=True,
            ):
                if isinstance(real, torch.Tensor) and not (n.op == "placeholder" and fake.shape == (2,)):
                    assert real.shape == fake.shape, n
            return result

    with torch.no_grad():
        Checked(joint).run(*values, enable_io_processing=False)


def over(size: int, style: str, axis: str = "tp") -> Divide:
    return Divide(axis, size, style)


# ---------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("samples", [3, 4])
def test_experts(size: int, samples: int) -> None:
    """With four samples the number of experts is that of the samples too, and only one of the two dimensions will
    do."""
    case = CASES["moe"]
    chunk = given(case.model, "expert", 0, case.batch(samples), case.loss)
    local = agree(chunk, over(size, "experts", "ep"))
    if size == 1:
        assert set(local.placements.values()) == {(REPLICATE,)}
        return
    assert local.placements["input", 0] == local.placements["output", 0] == (Shard(1),)
    assert local.placements["weight", 0] == local.placements["grad_weight", 0] == (Shard(0),)


# ---------------------------------------------------------------------------------------------------- columns and rows


class Pair(nn.Module):
    """What a transformer does between its attentions, the first part fed by another chunk."""

    def __init__(self, hidden: int = 4 * WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("part", "first"):
            x = self.first(x)
        with annotate("part", "up"):
            x = self.dropout(f.gelu(self.up(x)))
        with annotate("part", "down"):
            return self.down(x)


def test_columns_then_rows() -> None:
    columns = agree(given(Pair, value="up"), over(2, "columns")).placements
    assert columns["weight", 0] == columns["weight", 1] == (Shard(0),)
    assert columns["input", 0] == (REPLICATE,)
    assert columns["grad_input", 0] == (PARTIAL,)
    assert columns["output", 0] == columns["grad_output", 0] == (Shard(2),)
    rows = agree(given(Pair, value="down"), over(2, "rows"), arriving={("input", 0): columns["output", 0]}).placements
    assert rows["weight", 0] == (Shard(1),)
    assert rows["weight", 1] == rows["grad_weight", 1] == (REPLICATE,)
    assert rows["input", 0] == rows["grad_input", 0] == (Shard(2),)
    assert rows["output", 0] == (PARTIAL,)
    assert rows["grad_output", 0] == (REPLICATE,)


def test_rows_take_their_part_even_of_what_arrives_whole() -> None:
    places = agree(given(Pair, value="down"), over(2, "rows"), arriving={("input", 0): (REPLICATE,)}).placements
    assert places["input", 0] == (Shard(2),)


def test_what_is_linear_takes_sums_as_they_arrive() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "first"):
                x = self.first(x)
            with annotate("part", "twice"):
                return (x + x).transpose(0, 1).contiguous().transpose(0, 1)

    places = agree(given(Twice, value="twice"), over(2, "rows"), arriving={("input", 0): (PARTIAL,)}).placements
    assert places["input", 0] == places["output", 0] == (PARTIAL,)
    assert places["grad_input", 0] == (REPLICATE,)


# --------------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Separate projections, so that columns are heads; a mask of the whole sequence, or one for each head."""

    def __init__(self, heads: int = 4, masked: str = "no") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # A bias of k has no effect on attention, so its gradient would be noise.
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(4))
        self.heads, self.masked = heads, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("part", "norm"):
            y = self.norm(x)
        with annotate("part", "mask"):
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril().triu(-4)
            if self.masked == "heads":
                mask = mask.expand(x.shape[0], self.heads, LENGTH, LENGTH).clone()
        with annotate("part", "attention"):
            q, k, v = (
                layer(y).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            options = {"is_causal": True} if self.masked == "no" else {"attn_mask": mask}
            z = f.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(x.shape)
        with annotate("part", "out"):
            return self.out(z)


@pytest.mark.parametrize(("size", "masked"), [(2, "no"), (4, "no"), (2, "whole")])
def test_attention_by_heads(size: int, masked: str) -> None:
    chunk = given(lambda: Attention(masked=masked), value="attention")
    places = agree(
        chunk, over(size, "columns"), arriving={("input", i): (REPLICATE,) for i in range(len(chunk.chunk.inputs))}
    ).placements
    assert places["output", 0] == places["grad_output", 0] == (Shard(2),)
    assert places["grad_input", 0] == (PARTIAL,)
    rows = agree(
        given(Attention, value="out"), over(size, "rows"), arriving={("input", 0): places["output", 0]}
    ).placements
    assert rows["output", 0] == (PARTIAL,)


def test_a_mask_for_each_head_has_to_arrive_divided() -> None:
    chunk = given(lambda: Attention(masked="heads"), value="attention")
    (mask,) = (("input", i) for i, value in enumerate(chunk.chunk.inputs) if not value.fake.is_floating_point())
    assert agree(chunk, over(2, "columns"), arriving={mask: (Shard(1),)}).placements["output", 0] == (Shard(2),)
    assert "attention" in refused(chunk, over(2, "columns"), arriving={mask: (REPLICATE,)}).notes[0]


def test_heads_are_not_divided() -> None:
    diagnostic = refused(given(lambda: Attention(heads=2), value="attention"), over(4, "columns"))
    assert "(the model itself)" in diagnostic.notes[-1]


# ---------------------------------------------------------------------------------------------------------- sequence


class Normed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("part", "first"):
            x = self.first(x)
        with annotate("part", "norm"):
            x = self.dropout(f.gelu(self.norm(x)))
        with annotate("part", "last"):
            return self.last(x)


@pytest.mark.parametrize("size", [2, 3])
def test_sequence(size: int) -> None:
    places = agree(given(Normed, value="norm"), over(size, "sequence", "sp")).placements
    assert places["input", 0] == places["output", 0] == places["grad_input", 0] == (Shard(1),)
    assert places["weight", 0] == (REPLICATE,)
    assert places["grad_weight", 0] == (PARTIAL,)


def test_two_axes() -> None:
    places = agree(given(Normed, value="norm"), over(2, "columns"), over(3, "sequence", "sp")).placements
    assert places["output", 0] == (REPLICATE, Shard(1))
    assert places["grad_weight", 0] == (REPLICATE, PARTIAL)
    twice = agree(given(Pair, value="up"), over(2, "columns", "a"), over(4, "columns", "b")).placements
    assert twice["weight", 0] == (Shard(0), Shard(0))
    assert twice["output", 0] == (Shard(2), Shard(2))
    assert twice["grad_input", 0] == (PARTIAL, PARTIAL)


# ----------------------------------------------------------------------------------------------------------- dropout


def test_masks_of_undivided_tensors_are_what_they_were() -> None:
    like, rng = torch.empty(6, 5, 4), torch.tensor([mix(1, 2), 7])
    at = torch.arange(like.numel()) + 7 * 20
    x = at * -7046029254386353131 + (rng[0] + signed(9 * 6364136223846793005))
    for multiplier in (-4658895280553007687, -7723592293110705685, 2862933555777941757):
        x = (x ^ (x >> 31)) * multiplier
    expected = (((x >> 40) & (2**24 - 1)).float() * 2.0**-24).view(like.shape)
    assert torch.equal(uniform(rng, 9, like.shape, 6), expected)
    assert torch.equal(keep(like, rng, 9, 0.25, 6), expected >= 0.25)


@pytest.mark.parametrize(
    "divided", [[2, 2, 2], [0, 2, 2], [1, 2, 3], [2, 2, 2, 1, 3, 3], [2, 2, 2, 2, 3, 2], [0, 3, 2, 2, 2, 4, 0, 4, 3]]
)
def test_masks_do_not_depend_on_the_division(divided: list[int]) -> None:
    rng = torch.tensor([mix(1, 2), 7])
    expected = keep(torch.empty(6, 3, 8), rng, 9, 0.5, 6)
    triples = list(zip(divided[::3], divided[1::3], divided[2::3], strict=True))
    divides = [over(size, "") for _, _, size in triples]
    for at in itertools.product(*(range(divide.size) for divide in divides)):
        coordinates = [0, 0, 0]
        for (_, index, _), coordinate in zip(triples, at, strict=True):
            coordinates[index - 2] = coordinate
        own = part(expected, [Shard(dim) for dim, _, _ in triples], divides, at)
        assert torch.equal(
            keep(torch.empty(own.shape), torch.cat([rng, torch.tensor(coordinates)]), 9, 0.5, 6, divided), own
        )


@pytest.mark.parametrize(
    ("model", "value", "divides", "dims"),
    [
        (Pair, "up", [over(2, "columns")], [2]),
        (Pair, "up", [over(4, "columns", "a"), over(2, "columns", "b")], [2, 2]),
        (Normed, "norm", [over(3, "sequence")], [1]),
    ],
)
def test_dropout_in_a_divided_chunk(
    model: Callable[..., nn.Module], value: str, divides: list[Divide], dims: list[int]
) -> None:
    chunk = given(lambda: model(dropout=0.5), value=value)
    local = agree(chunk, *divides)
    (node,) = (node for node in local.joint.graph.nodes if node.target is torch.ops.piper.keep.default)
    assert list(node.args[5]) == [
        number
        for i, (dim, divide) in enumerate(zip(dims, divides, strict=True))
        for number in (dim, 2 + i, divide.size)
    ]
    # And it could have failed: masks that forget where they are differ.
    node.update_arg(5, [])
    local.joint.recompile()
    with pytest.raises(AssertionError):
        compare(chunk, local, *divides)


# ------------------------------------------------------------------------------------------------------------- means


@pytest.mark.parametrize(
    "function",
    [f.mse_loss, f.smooth_l1_loss, f.huber_loss, lambda x, y: 100 * f.binary_cross_entropy(x.sigmoid(), y.sigmoid())],
    ids=["mse", "smooth_l1", "huber", "bce"],
)
def test_a_mean_is_over_all_parts(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Kernels of losses divide by the size that they see, forward and backward."""

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "first"):
                x = self.first(x)
            with annotate("part", "mean"):
                mean = function(x, x.detach().cos())
            with annotate("part", "last"):
                return self.last(x) * mean

    places = agree(given(Auxiliary, value="mean"), over(2, "sequence", "sp")).placements
    assert places["input", 0] == (Shard(1),)
    assert (PARTIAL,) in [place for (kind, _), place in places.items() if kind == "output"]


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(chunk: Given, *divides: Divide, arriving: Mapping[Slot, tuple[Placement, ...]] | None = None) -> Diagnostic:
    with pytest.raises(PiperError) as found:
        chunk.local(*divides, arriving=arriving)
    assert not torch.distributed.is_initialized()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0411"
    assert diagnostic.helps
    for divide in divides:
        assert f"over {divide.axis} with style={divide.style}" in diagnostic.message
    return diagnostic


def test_a_norm_over_divided_features_is_refused() -> None:
    class Late(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "up"):
                x = self.norm(self.up(x))
            with annotate("part", "down"):
                return self.down(x)

    diagnostic = refused(given(Late, value="up"), over(2, "columns"))
    assert "layer_norm" in diagnostic.notes[0]
    assert diagnostic.notes[1] == "in module norm"


def test_experts_that_do_not_divide_are_refused() -> None:
    case = CASES["moe"]
    chunk = given(case.model, "expert", 0, case.batch(4), case.loss)
    diagnostic = refused(chunk, over(3, "experts", "ep"))
    assert diagnostic.notes[0] == "dimension 0 of a weight of shape [4, 16, 32] is not divisible by 3"
    assert "in module" in diagnostic.notes[1]


def test_a_chunk_without_experts_is_refused() -> None:
    diagnostic = refused(given(Pair, value="up"), over(2, "experts", "ep"))
    assert "no weight" in diagnostic.notes[0]
    assert diagnostic.notes[1] == "in module up"


def test_a_residual_around_columns_is_refused() -> None:
    """Each device would cut its part out of what all have: another part on each, which one graph cannot say. Twice,
    because DTensor remembers."""

    class Residual(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "first"):
                x = self.first(x)
            with annotate("part", "norm"):
                return x + self.last(x)

    for _ in range(2):
        diagnostic = refused(given(Residual, value="norm"), over(2, "columns"))
        assert diagnostic.notes == (
            "add needs a slice of a value that is replicated on every device",
            "in module (the model itself)",
        )


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    assert (
        refused(given(Normed, value="norm"), over(4, "sequence", "sp")).notes[0]
        == "no input of the chunk has a second dimension that is divisible by 4"
    )
    refused(given(Attention, value="attention"), over(2, "sequence", "sp"))


def test_two_axes_of_which_one_does_not_fit_are_refused() -> None:
    assert (
        "is not divisible by 8"
        in refused(given(lambda: Pair(4), value="up"), over(2, "columns", "a"), over(4, "columns", "b")).notes[0]
    )
    refused(given(Attention, value="attention"), over(2, "rows"), over(2, "sequence", "sp"))
    assert agree(given(Normed, value="norm"), over(2, "rows"), over(2, "sequence", "sp")).placements["output", 0] == (
        REPLICATE,
        Shard(1),
    )


def test_an_operator_without_a_rule_is_refused() -> None:
    class Distances(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "up"):
                x = self.up(x)
                x = x * torch.cdist(x, x).sum(-1, keepdim=True)
            with annotate("part", "down"):
                return self.down(x)

    assert (
        refused(given(Distances, value="up"), over(2, "columns"))
        .notes[0]
        .startswith("_cdist_forward cannot be sharded this way: ")
    )


def test_an_all_to_all_inside_a_chunk_prints_no_warning_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """DTensor warns, once per process, that it replaces an all-to-all by an all-gather on CPU; a traced graph is not
    run with DTensors."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(LENGTH, LENGTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("part", "up"):
                x = self.up(x)
                return x + x.transpose(1, 2)

    torch._logging._internal.warning_once.cache_clear()
    chunk = given(
        Transposed, value="up", batch=(torch.randn(SAMPLES, LENGTH, LENGTH), torch.randn(SAMPLES, LENGTH, LENGTH))
    )
    assert refused(chunk, over(2, "columns")).notes[0].startswith("add needs communication between the devices")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# ---------------------------------------------------------------------------------------------------------- features


def test_features_are_found_from_the_operators_that_read_a_weight() -> None:
    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.linear = nn.Embedding(5, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.plain, self.turned, self.added = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(3))
            self.bias, self.offset = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH))
            self.experts = nn.Parameter(torch.empty(3, WIDTH, WIDTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with annotate("part", 0):
                x = self.linear(self.norm(self.embed(ids)))
                x = x @ self.plain + self.offset
                x = x @ self.turned.transpose(0, 1).detach()
                x = torch.addmm(self.bias, x.flatten(0, 1), self.added).view(x.shape)
                return torch.einsum("sld,edh->slh", x, self.experts)

    chunk = given(
        Readers, value=0, batch=(torch.zeros(SAMPLES, LENGTH, dtype=torch.int64), torch.randn(SAMPLES, LENGTH, WIDTH))
    )
    names = [chunk.traced.weights[place].name for place in chunk.chunk.weights]
    found = {name: features_of(chunk.traced, chunk.chunk)["weight", i] for i, name in enumerate(names)}
    assert found == {
        "embed.weight": (1, None),
        "norm.weight": (None, None),
        "norm.bias": (None, None),
        "linear.weight": (0, 1),
        "linear.bias": (0, None),
        "plain": (1, 0),
        "offset": (0, None),
        "turned": (0, 1),
        "added": (1, 0),
        "bias": (0, None),
        "experts": (2, 1),
    }
