"""Rows go to the experts that they chose, however many choose the same one, and nothing is dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piperlang
from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.capture.trace.routed import routed_linear
from piperlang.core.placement import dispatched
from piperlang.core.value_id import ValueId, parse
from piperlang.diagnostics import PiperError
from piperlang.plan.files import dump, load
from piperlang.plan.instructions import INSTRUCTIONS, ROUTING
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.plan.verify import check
from piperlang.runtime.device.splits import leaving
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.equivalence import LIMIT, SAMPLES, assert_same, compiled, optimizer
from tests.support.jobs import Plain, assert_trains
from tests.support.models import WIDTH, Case, Dropless, balanced, square, tokens, vectors
from tests.support.often import one_in

torch.set_num_threads(1)
OWN = "mesh gpu = ep: {n}\nplace [pass=*] on gpu\nreplicate [!expert] over gpu.ep\nshard [expert=*] over gpu.ep\n"
CASE = Case("dropless", Dropless, balanced, tokens, 4)


@cache
def program() -> Program:
    return capture(CASE.model, CASE.loss, CASE.batch(SAMPLES))


# ------------------------------------------------------------------------------------------------------ the operator


def by_hand(rows: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.stack([row @ weight[expert] + bias[expert] for row, expert in zip(rows, chosen.tolist(), strict=True)])


@pytest.mark.parametrize(
    "chosen",
    [[0, 1, 2, 0, 1, 2], [2, 2, 2, 2, 2, 2], [1, 0, 1, 1, 0, 0]],
    ids=["even", "all the same", "one is not chosen"],
)
def test_every_row_meets_its_own_expert(chosen: list[int]) -> None:
    made = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=made, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 4), (3, 4, 5), (3, 5))
    ]
    rows, weight, bias = values
    choice = torch.tensor(chosen)
    done, expected = routed_linear(rows, choice, weight, bias), by_hand(rows, choice, weight, bias)
    torch.testing.assert_close(done, expected)
    grad = torch.randn(done.shape, generator=made, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(done, values, grad), torch.autograd.grad(expected, values, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_no_rows_at_all() -> None:
    weight = torch.randn(3, 4, 5, requires_grad=True)
    done = routed_linear(torch.randn(0, 4), torch.zeros(0, dtype=torch.int64), weight)
    assert done.shape == (0, 5)
    done.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_an_expert_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="expert index 5 is out of range: there are 4 experts"):
        routed_linear(torch.randn(2, 4), torch.tensor([0, 5]), torch.randn(4, 4, 5))
    with pytest.raises(ValueError, match="expert index 5 is out of range: there are 4 experts"):
        leaving(torch.tensor([0, 5]), 4, 2)


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"needs rows \[n, in\], choices \[n\] and weights"):
        piperlang.routed_linear(torch.randn(2, 3, 4), torch.zeros(2, dtype=torch.int64), torch.randn(3, 4, 5))


# --------------------------------------------------------------------------------------------------------- schedules

SCHEDULES = {
    "two devices": OWN.format(n=2),
    "an expert a device": OWN.format(n=4),
    "data and experts": (
        "mesh gpu = dp: 2, ep: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\nreplicate [!expert] over"
        " gpu.ep\nshard [expert=*] over gpu.ep\nsplit batch into 2 as mb\n"
    ),
    "experts over two axes": (
        "mesh gpu = a: 2, b: 2\nplace [pass=*] on gpu\nreplicate [!expert] over gpu.a\nreplicate [!expert] over"
        " gpu.b\nshard [expert=*] over gpu.a\nshard [expert=*] over gpu.b\n"
    ),
    "zero3 on the experts": (
        "mesh gpu = dp: 2, ep: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\nreplicate"
        " [!expert] over gpu.ep with grads=sharded\nshard [expert=*] over gpu.ep\n"
    ),
    "recompute and offload": (
        OWN.format(n=2) + "recompute [expert=*, stage=0]\noffload [expert=*, stage=1]\nsplit batch into 2 as mb\n"
    ),
    "halves": OWN.format(n=2) + 'stream [pass=W] on "weights"\n',
    "other axes for experts and data": (
        "mesh gpu = ep: 2, tp: 2\nplace [pass=*] on gpu\nreplicate [!expert] over gpu.ep\nreplicate [!expert] over"
        " gpu.tp\nshard [expert=*] over gpu.ep\nreplicate [expert=*] over gpu.tp\n"
    ),
    "experts elsewhere": (
        "mesh gpu = d: 6\nplace [!expert] on gpu[d=0:2]\nplace [expert=*] on gpu[d=2:6]\nreplicate [!expert] over"
        " gpu.d\nshard [expert=*] over gpu.d\nsplit batch into 2 as mb\n"
    ),
}


@pytest.mark.parametrize("name", one_in(10, SCHEDULES))
def test_equals_the_single_device(name: str) -> None:
    assert_same(CASE, program(), SCHEDULES[name])
    graph, _ = compiled(program(), SCHEDULES[name])
    plan = lower(graph)
    check(plan)
    check(plan, buffered=False)
    assert {x.op for device in plan.devices for x in device.instructions} >= set(ROUTING)


@pytest.mark.parametrize("name", one_in(3, ["an expert a device", "data and experts", "experts elsewhere"]))
def test_equals_the_single_device_on_workers(name: str, cluster: Cluster) -> None:
    assert_trains(cluster, CASE, program(), SCHEDULES[name])


class TwoParts(nn.Module):
    """Experts in two chunks that one choice leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4),
            nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stage", 0):
            best, chosen = torch.softmax(self.gate(x), -1).max(-1)
            rows = x * best.unsqueeze(-1)
        with annotate("expert", "up"):
            hidden = torch.relu(routed_linear(rows, chosen, self.up))
        with annotate("expert", "down"):
            done = routed_linear(hidden, chosen, self.down)
        with annotate("stage", 0):
            return torch.tanh(x + done * best.unsqueeze(-1))


TENSOR = """mesh gpu = ep: 2, tp: 2
place [pass=*] on gpu
replicate [!expert] over gpu.ep
replicate [!expert] over gpu.tp
shard [expert=*] over gpu.ep
shard [expert="up"] over gpu.tp with style=columns
shard [expert="down"] over gpu.tp with style=rows
"""


def test_what_goes_from_experts_to_experts_stays_there(cluster: Cluster) -> None:
    case = Case("two", TwoParts, square, vectors, 1)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    assert_same(case, traced, OWN.format(n=2))
    plan = lower(compiled(traced, OWN.format(n=2))[0])
    forward = [x.op for x in plan.devices[0].instructions if x.op in ROUTING or x.op == "F"]
    assert forward.count("choose") == 1
    assert forward.count("combine") == 2, "the result, and the gradient of what was given"
    assert_same(case, traced, TENSOR)
    assert_trains(cluster, case, traced, TENSOR)


class OneSided(Dropless):
    """All choose the first two experts."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.init.zeros_(layer.gate.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.slow
def test_a_device_that_nobody_chooses(cluster: Cluster) -> None:
    case = Case("one-sided", OneSided, balanced, tokens, 4)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    assert_same(case, traced, OWN.format(n=2))
    assert_trains(cluster, case, traced, OWN.format(n=2), steps=2)


def test_only_rows_that_are_chosen_travel() -> None:
    """Every row leaves its device once and comes back once; the parts are as large as the choices say, not as large as
    they could be."""
    graph, captured = compiled(program(), OWN.format(n=2))
    plan = lower(graph)
    torch.manual_seed(3)
    batch = CASE.batch(SAMPLES)
    with ThreadJob(plan, captured, Training(CASE.model, optimizer)) as job:
        sizes: list[tuple[int, list[int], list[int]]] = []
        for number, device in enumerate(job.training.devices):
            exchange = device.comm.exchange  # type: ignore[union-attr]

            def seen(
                group: int,
                give: Tensor,
                give_sizes: list[int],
                take: Tensor,
                take_sizes: list[int],
                number: int = number,
                exchange: Any = exchange,
            ) -> None:
                if give.is_floating_point():
                    sizes.append((number, give_sizes, take_sizes))
                exchange(group, give, give_sizes, take, take_sizes)

            device.comm.exchange = seen  # type: ignore[union-attr,method-assign]
        job.step(batch)
    rows = [[sum(side) // WIDTH for side in (give, take)] for _, give, take in sizes]
    local = SAMPLES // 2 * 6 * 2
    assert all(local in pair for pair in rows), "what a device has of its own samples is on one side of every exchange"
    assert any(pair[0] != pair[1] for pair in rows), "and choices are uneven"
    by = {
        number: sorted(tuple(pair) for n, pair in zip((n for n, *_ in sizes), rows, strict=True) if n == number)
        for number in (0, 1)
    }
    assert sum(take for _, take in by[0]) + sum(take for _, take in by[1]) == sum(give for give, _ in by[0]) + sum(
        give for give, _ in by[1]
    )


# -------------------------------------------------------------------------------------------------------- refusals


class Odd(nn.Module):
    """Experts with something among them that rows which have gone to them cannot do."""

    def __init__(
        self,
        inside: Callable[[Tensor], Tensor] | None = None,
        chooses_inside: bool = False,
        dropout: float = 0.0,
        reads_the_batch: bool = False,
    ) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.reads_the_batch = reads_the_batch
        self.inside, self.chooses_inside, self.dropout = inside, chooses_inside, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stage", 0):
            scores = self.gate(x)
            rows, chosen = x * scores.amax(-1, keepdim=True), scores.argmax(-1)
        with annotate("stage", 0), annotate("expert", 0):
            if self.chooses_inside:
                chosen = scores.argmax(-1)
            y = routed_linear(x if self.reads_the_batch else rows, chosen, self.weight)
            y = self.dropout(y if self.inside is None else self.inside(y))
        with annotate("stage", 0):
            return torch.tanh(y)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: Odd(chooses_inside=True), "only if one tensor of expert indices routes all of them"),
        (lambda: Odd(dropout=0.5), "dropout masks depend on the position in the batch"),
        (lambda: Odd(reads_the_batch=True), "it reads a tensor of the batch"),
        (
            lambda: Odd(lambda y: y.view(y.shape[0], 4, -1).flatten(1)),
            "depends on the number of routed tokens, which the data decides",
        ),
    ],
    ids=["chosen inside", "dropout", "the batch", "a number of rows"],
)
def test_what_rows_cannot_do_where_their_experts_are(made: Callable[[], nn.Module], reason: str) -> None:
    case = Case("odd", made, square, vectors, 1)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    with pytest.raises(PiperError) as problem:
        compiled(traced, OWN.format(n=2))
    (found,) = problem.value.diagnostics
    assert found.code == "P0411"
    assert found.message.startswith("expert=0, stage=0: ")
    assert any(reason in note for note in found.notes), found.notes
    assert found.span is not None
    assert "shard" in found.span.text
    # Undivided there is nothing to refuse.
    assert_same(case, traced, "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\n")


def test_rows_that_have_gone_are_not_split() -> None:
    with pytest.raises(PiperError) as problem:
        compiled(program(), OWN.format(n=2) + "split [expert=*] into 2 as half\n")
    assert problem.value.diagnostics[0].code == "P0411"
    assert "cannot be split" in problem.value.diagnostics[0].message


# ------------------------------------------------------------------------------------------------------------- plans


def planned() -> Plan:
    return lower(compiled(program(), OWN.format(n=2) + "split batch into 2 as mb\n")[0])


def test_a_plan_is_read_back() -> None:
    plan = planned()
    assert load(dump(plan)) == plan


def changed(plan: Plan, op: str, /, **fields: Any) -> Plan:
    """All devices' first instruction of the kind, changed alike: as a bug in the compiler would."""
    for device in plan.devices:
        i, x = next((i, x) for i, x in enumerate(device.instructions) if x.op == op)
        other = {name: make(x) for name, make in fields.items()}
        every = {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if field.init}
        make = INSTRUCTIONS[other.pop("op", op)]
        device.instructions[i] = make(**(every | other))
    return plan


def other_way(splits: ValueId) -> ValueId:
    """Those of the other microbatch."""
    text = str(splits)
    found = parse(text.replace("#0", "#1") if "#0" in text else text.replace("#1", "#0"))
    assert found is not None
    assert found is not splits
    return found


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        ("dispatch", {"splits": lambda x: other_way(x.splits)}, "does not belong to the choice"),
        ("combine", {"splits": lambda x: other_way(x.splits)}, "does not belong to the choice"),
        ("dispatch", {"experts": lambda x: 8}, "does not belong to the choice"),
        ("choose", {"experts": lambda x: 3}, "3 experts on 2 devices"),
        ("dispatch", {"op": lambda x: "combine"}, "comes back by another way|gone different ways|no rows have gone"),
    ],
)
def test_rows_that_would_go_astray_are_noticed(op: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PiperError, match=message):
        check(changed(planned(), op, **fields))


def test_layouts_say_who_chose() -> None:
    graph, _ = compiled(program(), OWN.format(n=2))
    places = {dispatched(value.layout.placements) for value in graph.values.values()} - {None}
    assert len(places) == 4
    assert {choice.experts for choice in places if choice} == {4}


def test_gradients_of_the_plan_equal_eager(cluster: Cluster) -> None:
    """Experts' gradients count every row once, whatever the degree of data and of experts."""
    batch = CASE.batch(SAMPLES)
    _, expected = Plain(CASE, program()).step(batch)
    for script in (OWN.format(n=2), SCHEDULES["data and experts"]):
        graph, captured = compiled(program(), script)
        plan = lower(graph)
        with ThreadJob(plan, captured, Training(CASE.model, optimizer)) as job:
            job.step(batch, gradients=True)
            for device, found in zip(plan.devices, job.gradients(), strict=True):
                for key, gradient in found.items():
                    held = device.weights[key]
                    want = expected[held.weight][tuple(slice(*interval) for interval in held.box)]
                    assert float((gradient - want).abs().max() / want.abs().max().clamp(min=1e-6)) < LIMIT, held.weight
