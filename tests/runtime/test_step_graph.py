"""What of a step can be a CUDA graph, and what the graph needs beside it. Graphs themselves need a GPU:
`python -m benchmarks.nccl` compares all schedules with and without them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.program import capture
from piperlang.plan.instructions import GatherParameters, Instruction, Update
from piperlang.plan.lower import lower
from piperlang.runtime.device import Device
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.hardware.borrowed import Borrowed, Owners
from piperlang.runtime.hardware.step_graph import NotCaptured, divided, move_back
from piperlang.runtime.optimizer.on_device import DeviceRates, counts_on_device
from tests.support.equivalence import compiled, program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.models import CASES


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def on_host(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@contextmanager
def devices(name: str, optimizer: Any) -> Iterator[Sequence[Device]]:
    model, script = JOB_SCHEDULES[name]
    graph, captured = compiled(program(model), script)
    with ThreadJob(lower(graph), captured, Training(CASES[model].model, optimizer)) as job:
        yield job.training.devices


CAPTURED = [name for name in JOB_SCHEDULES if name not in ("dropless", "recompute and offload")]


@pytest.mark.parametrize("name", CAPTURED)
def test_updates_that_count_on_the_device_are_part_of_the_graph(name: str) -> None:
    with devices(name, fused) as its:
        for device in its:
            chosen, late = divided(device)
            assert late == []
            assert chosen == list(range(len(device.plan.instructions)))


@pytest.mark.parametrize("name", CAPTURED)
def test_others_and_what_gathers_their_weights_are_issued_after_it(name: str) -> None:
    gathers: dict[int, set[bool]] = {}
    with devices(name, on_host) as its:
        for device in its:
            chosen, late = divided(device)
            instructions = device.plan.instructions
            assert sorted(chosen + late) == list(range(len(instructions)))
            assert {i for i, x in enumerate(instructions) if isinstance(x, Update)} <= set(late)
            assert all(isinstance(instructions[i], Update | GatherParameters) for i in late)
            made_late = {key for i in late for key in instructions[i].writes}
            assert all(made_late.isdisjoint(instructions[i].reads) for i in chosen)
            for i, x in enumerate(instructions):
                if isinstance(x, GatherParameters):
                    gathers.setdefault(x.node, set()).add(i in late)
    # One that waits in its graph for another, which takes part only after its own, would wait forever.
    assert all(len(found) == 1 for found in gathers.values())


@pytest.mark.parametrize(
    ("name", "why"), [("dropless", "how many tokens go to each expert"), ("recompute and offload", "host memory")]
)
def test_a_step_that_needs_the_host_is_no_graph(name: str, why: str) -> None:
    with devices(name, fused) as its, pytest.raises(NotCaptured, match=why):
        _divided(its)


def _divided(its: Sequence[Device]) -> None:
    for device in its:
        divided(device)


@torch.library.custom_op("piper_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(len(x))
    return x * len(CALLS)


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


counted.register_autograd(lambda _, grad: grad)
CALLS: list[int] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(self.layer(x))  # type: ignore[no-any-return]


def test_python_code_of_the_user_is_not_frozen_in_a_graph() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    batch = torch.randn(8, 8), torch.randn(8, 8)
    graph, captured = compiled(capture(Counting, loss, batch), "mesh gpu = d: 1\nplace [pass=*] on gpu\n")
    why = "`piper_tests::counted` is Python code"
    with ThreadJob(lower(graph), captured, Training(Counting, fused)) as job, pytest.raises(NotCaptured, match=why):
        divided(job.training.devices[0])


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("skip", "changes"), [(None, True), (0.0, True), (1.0, False)])
def test_what_moves_is_copied_back_unless_the_step_is_skipped(skip: float | None, changes: bool) -> None:
    """A graph reads a buffer where it was when it was captured."""
    with devices("1f1b", fused) as its:
        device = its[0]
        old, new = next(iter(device.plan.next.items()))
        kept = device.kept[old]
        before, now = kept.clone(), torch.full_like(kept, torch.nan)
        device.values = {**device.kept, new: now}
        device.skip = None if skip is None else torch.tensor(skip)
        move_back(device)
        assert device.values[new] is kept
        assert bool(kept.isnan().all()) is changes
        assert changes or torch.equal(kept, before)


@pytest.mark.parametrize("name", ["1f1b", "zbv x zero3", "dualpipe x zero2"])
def test_borrowed_tensors_are_kept_until_their_own_stream_has_waited(name: str) -> None:
    """What their own stream issues next may be given their memory: it must come after the reader, by the waits of the
    plan."""
    with devices(name, fused) as its:
        borrowed_at_all = 0
        for device in its:
            instructions = device.plan.instructions
            made = {key: x.stream for x in instructions for key in x.writes}
            before = _ends_before(instructions)
            borrowed = Borrowed(instructions)
            readers: dict[int, str] = {}
            """Of instructions that read tensors of another stream: which one."""
            for i, x in enumerate(instructions):
                owners = {made[key] for key in x.reads} if x.reads and all(key in made for key in x.reads) else set()
                owners -= {x.stream}
                if len(owners) == 1:
                    readers[i] = min(owners)
                borrowed.issue(i, [(readers[i], torch.zeros(1))] if i in readers else [])
                kept = {at for _, _, at, _ in borrowed.kept}
                for at, owner in readers.items():
                    if owner == x.stream and at != i:
                        assert (at in kept) == (at not in before[i]), (at, i)
                    borrowed_at_all += 1
        assert borrowed_at_all


def test_memory_belongs_to_the_stream_that_allocated_it_whoever_returns_a_view() -> None:
    """What a pass gives to others may be a view of what another stream has received: the statistics of a batch norm,
    the gradient of a sum."""

    class Doing:
        def __init__(self, stream: str, reads: Sequence[str], writes: Sequence[str]) -> None:
            self.stream, self.reads, self.writes = stream, reads, writes

    sums: Any = {"part 1": "total", "part 2": "total"}
    owners, values = Owners(sums), dict[Any, Any]({"weight": torch.ones(4)})

    def done(x: Any, made: Mapping[str, Any]) -> None:
        before = owners.before(x, values, x.reads)
        values.update(made)
        owners.made(x, values, before)

    def borrowed(stream: str, *keys: str) -> list[str]:
        x: Any = Doing(stream, keys, ())
        return sorted(owner for owner, _ in owners.borrowed(x, values, x.reads))

    received = torch.ones(3, 4)
    done(Doing("comm", (), ("received",)), {"received": received})
    its = {"saved": {0: received[0], 1: torch.ones(2)}, "out": (received.view(-1),)}
    done(Doing("compute", ("received", "weight"), ("saved", "out")), its)
    assert borrowed("compute", "saved", "out", "weight") == ["comm", "comm"]
    assert borrowed("comm", "saved", "out") == ["compute"]
    done(Doing("compute", (), ("part 1",)), {"total": torch.ones(2)})
    done(Doing("other", (), ("part 2",)), {"total": values["total"].add_(1)})
    assert borrowed("other", "total") == ["compute"]


def _ends_before(instructions: Sequence[Instruction]) -> list[set[int]]:
    """For each instruction, all that must have ended before it begins."""
    found: list[set[int]] = []
    last: dict[str, int] = {}
    for i, x in enumerate(instructions):
        direct = set(x.waits) | ({last[x.stream]} if x.stream in last else set())
        found.append(direct | {one for earlier in direct for one in found[earlier]})
        last[x.stream] = i
    return found


# ------------------------------------------------------------------------------------------------------- learning rate


def weights(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    found = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    for one in found:
        one.grad = torch.randn_like(one)
    return found


def test_rates_on_the_device_follow_those_of_the_groups() -> None:
    plain, ours = weights(), weights()
    reference, optimizer = fused(plain), fused(ours)
    group = optimizer.param_groups[0]
    rates = DeviceRates([group])
    for step in range(4):
        for one in (reference, optimizer):
            one.param_groups[0]["lr"] = 1e-2 / (1 + step)
        assert step == 0 or rates.refresh()
        with rates.used():
            assert group["lr"] is rates.rate
            group["capturable"] = False  # what it asks for there is on CUDA only
            if step == 0:
                rates.rate.fill_(1e-2)
            optimizer.step()
        reference.step()
        assert group["lr"] == 1e-2 / (1 + step)
        assert group["capturable"] is False
    for expected, got in zip(plain, ours, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_rate_that_changes_is_set_and_another_option_asks_for_a_new_graph() -> None:
    optimizer = fused(weights())
    group = optimizer.param_groups[0]
    rates = DeviceRates([group])
    with rates.used():
        pass
    assert rates.refresh()
    assert float(rates.rate) == pytest.approx(1e-3)
    group["lr"] = torch.tensor(0.5)
    assert rates.refresh()
    assert float(rates.rate) == 0.5
    group["weight_decay"] = random.Random(0).random()
    assert not rates.refresh()


def test_every_graph_has_rates_of_its_own() -> None:
    """One that is captured later, for batches of another shape, must not leave an earlier one with an old rate; nor
    with an option that has changed meanwhile."""
    with devices("dp", fused) as its:
        optimizers = its[0].optimizers
        first, second = optimizers.device_rates(), optimizers.device_rates()
        for rates in (first, second):
            for one in rates:
                with one.used():
                    pass
        groups = [group for one in first for group in one.groups]
        assert groups
        for group in groups:
            group["lr"] = 0.25
        for rates in (first, second):
            assert [one.refresh() for one in rates] == [True] * len(rates)
            assert {float(one.rate) for one in rates} == {0.25}
        for group in groups:
            group["betas"] = (0.5, 0.5)
        with second[0].used():
            pass
        assert not first[0].refresh()
        assert second[0].refresh()


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (fused, True),
        (on_host, False),
        (lambda params: torch.optim.SGD(params, lr=0.1), False),
        (lambda params: torch.optim.Adam(params, fused=True, amsgrad=True), True),
        (lambda params: type("Mine", (torch.optim.AdamW,), {})(params, fused=True), False),
    ],
)
def test_which_optimizers_count_on_the_device(make: Any, counts: bool) -> None:
    assert counts_on_device(make(weights())) is counts


def test_hooks_of_a_step_are_not_frozen_in_a_graph() -> None:
    optimizer = fused(weights())
    optimizer.register_step_post_hook(lambda *_: None)
    assert not counts_on_device(optimizer)
