"""Plans: the compiler's are right, files come back as they were, mistakes are refused before anything runs, and what a
plan will cost is foreseen.

`pytest tests/plan/test_plan.py -m slow` runs a thousand mistakes and the plan of 1,024 devices.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import capture
from piperlang.core.value_id import Kind, ValueId
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.fuzz.write import write
from piperlang.plan import files
from piperlang.plan.estimate.machine import Interconnect, Machine
from piperlang.plan.estimate.memory import peak, peaks
from piperlang.plan.estimate.summary import as_json, bytes_text, summary
from piperlang.plan.instructions import (
    Backward,
    Copy,
    Fetch,
    Forward,
    LocalCopy,
    Message,
    Receive,
    Recompute,
    ScatterGradients,
    Send,
)
from piperlang.plan.lower import lower
from piperlang.plan.plan import VERSION, Plan, PlanNode
from piperlang.plan.verify import check, measured
from tests.support.directive_scripts import script
from tests.support.equivalence import LIMIT, SAMPLES, compiled, relative
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.models import CASES, WIDTH, Case, square, vectors
from tests.support.often import one_in
from tests.support.plan_mutants import mutate
from tests.support.plan_runs import CROSSED, SUBJECTS, expected, planned, right_plan, trained
from tests.support.plans import pipeline
from tests.support.random_models import case_and_traits


def complaints(plan: Plan, **how: bool) -> tuple[Diagnostic, ...]:
    with pytest.raises(PiperError) as refused:
        check(plan, **how)
    return refused.value.diagnostics


# --------------------------------------------------------------------------------------------------- running plans


def assert_trains_alike(model: str, text: str, plan: Plan) -> None:
    graph, captured, _ = planned(model, text)
    losses, *tensors = trained(CASES[model], captured, plan, graph.model.tensors[graph.model.loss].dtype)
    wanted, *others = expected(model, text)
    assert losses == pytest.approx(wanted, rel=LIMIT)
    for mine, theirs in zip(tensors, others, strict=True):
        for have, want in zip(mine, theirs, strict=True):
            assert have.keys() == want.keys()
            for key, value in want.items():
                assert have[key].shape == value.shape
                assert not value.numel() or relative(have[key], value) <= LIMIT, key


# ------------------------------------------------------------------------------------------------ plans are right


@pytest.mark.parametrize("name", [*CROSSED, *JOB_SCHEDULES])
def test_plans_of_pipelines(name: str) -> None:
    plan = planned(*(CROSSED | JOB_SCHEDULES)[name])[2]
    check(plan)
    check(plan, buffered=False)


@pytest.mark.parametrize("seed", [30, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (25, 35, 40, 45))])
def test_plans_of_random_schedules(seed: int) -> None:
    """The plans of earlier seeds, and of all pairs of directives, are looked at where their graphs are run
    (tests/directives)."""
    _, traits = case_and_traits(seed // 5)
    for number in range(seed, seed + 5):
        graph, _ = compiled(traits.program, write(traits, number))
        plan = right_plan(graph)
        assert all(one.bytes == sum(one.by.values()) > 0 for one in peaks(plan, graph))


class Merged(nn.Module):
    """Two weights that are added up have the same gradient, in the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * (self.one + self.two))


def test_gradients_that_are_one_tensor_are_added_up_apart() -> None:
    case = Case("merged", Merged, square, vectors, 1)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    results = []
    for text in ("split batch into 4 as mb\n", "mesh gpu = dp: 1\nplace [pass=*] on gpu\n"):
        graph, captured = compiled(traced, text)
        results.append(trained(case, captured, lower(graph), "float32"))
    for have, want in zip(results[0][2][0].items(), results[1][2][0].items(), strict=True):
        assert have[0] == want[0]
        assert relative(have[1], want[1]) <= LIMIT


# ------------------------------------------------------------------------------------------------- many mistakes

COMMUNICATION = ("tag", "dtype", "reduction", "group")
"""Mistakes that two instructions have a part in, whichever of them was changed."""


def mistaken(seed: int) -> None:
    """One mistake: refused with its instructions named, or without consequence."""
    name = list(SUBJECTS)[seed % len(SUBJECTS)]
    model, text = SUBJECTS[name]
    right = planned(model, text)[2]
    plan, mutation = mutate(right, seed)
    try:
        check(plan)
    except PiperError as refused:
        _assert_told(plan, mutation, refused.diagnostics)
        return
    if plan != right:
        assert_trains_alike(model, text, plan)


def _assert_told(plan: Plan, mutation: str, diagnostics: tuple[Diagnostic, ...]) -> None:
    for found in diagnostics:
        assert found.code in ("P0501", "P0503", "P0504")
        assert found.helps
    named = [note for found in diagnostics for note in found.notes if "(device " in note]
    if mutation in COMMUNICATION and diagnostics[0].code == "P0503" and len(plan.devices) > 1:
        assert (
            len([note for note in diagnostics[0].notes if "(device " in note]) == 2
            or "of devices" in diagnostics[0].message
            or "and there are" in diagnostics[0].message
        )
    assert named or mutation in ("share", "feed", "kept")


@pytest.mark.parametrize("start", one_in(3, range(0, 80, 10)))
def test_a_mistake_is_refused_or_harmless(start: int) -> None:
    for seed in range(start, start + 10):
        mistaken(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 50))
def test_a_thousand_mistakes(start: int) -> None:
    for seed in range(start, start + 50):
        try:
            mistaken(seed)
        except BaseException:
            print(seed)
            raise


# ------------------------------------------------------------------------------------------------ single mistakes


def small() -> Plan:
    """Three stages on two replicas."""
    return pipeline(3, 2, 4)


def at(plan: Plan, device: int, do: str, number: int = 0) -> int:
    return [i for i, x in enumerate(plan.devices[device].instructions) if x.op == do][number]


def change(plan: Plan, device: int, i: int, **fields: Any) -> None:
    plan.devices[device].instructions[i] = replace(plan.devices[device].instructions[i], **fields)


def test_the_plans_made_here_are_right() -> None:
    check(small())
    check(small(), buffered=False)


def test_a_send_and_its_receive_are_both_named() -> None:
    plan = small()
    i = at(plan, 2, "recv")
    receive = plan.devices[2].instructions[i]
    assert isinstance(receive, Receive)
    change(plan, 2, i, messages=(receive.messages[0]._replace(shape=(1, 63)),), shape=(1, 63))
    (found,) = complaints(plan)
    assert found.code == "P0503"
    assert found.message == "from device 0 to device 2, float32[1, 64] is sent and float32[1, 63] received"
    assert [note.partition(" of ")[0] for note in found.notes] == ["send", "and recv"]
    assert all("large.piper:" in note for note in found.notes)


def test_members_of_a_group_that_do_something_else() -> None:
    plan = small()
    i = at(plan, 3, "reduce")
    change(plan, 3, i, dtype="float16")
    (found,) = complaints(plan)
    assert found.code == "P0503"
    assert "differ in dtypes" in found.message
    assert "(device 2," in found.notes[0]
    assert "(device 3," in found.notes[1]


def test_a_read_without_its_wait() -> None:
    plan = small()
    i = next(i for i, x in enumerate(plan.devices[2].instructions) if x.op == "F")
    change(plan, 2, i, waits=())
    (found,) = complaints(plan)
    assert found.code == "P0504"
    assert "before stream comm<0 has surely made it" in found.message
    assert len(found.notes) == 2


def test_a_wait_may_go_through_others() -> None:
    """compute -> comm -> side: the last one waits for the middle one only."""
    plan = small()
    device = plan.devices[0]
    update = next(i for i, x in enumerate(device.instructions) if x.op == "update")
    reduce = next(i for i, x in enumerate(device.instructions) if x.op == "reduce")
    assert device.instructions[update].waits == (reduce,)
    change(plan, 0, update, stream="side")  # whoever reads the weight has ended before the reduction begins
    change(plan, 1, update, stream="side")
    check(plan)
    change(plan, 0, reduce, waits=device.instructions[reduce].waits[:-1])
    assert any("surely" in found.message or "in place" in found.message for found in complaints(plan))


def test_an_update_in_place_waits_for_readers() -> None:
    plan = small()
    old = next(iter(plan.devices[0].weights))
    whole = ((0, 64), (0, 64))
    plan.nodes.append(PlanNode("copy", "large.piper:9", ()))
    copied = Copy(
        "side",
        len(plan.nodes) - 1,
        (),
        sources=(old,),
        target=old.redistributed(1),
        copies=(LocalCopy(old, whole, whole),),
        shape=(64, 64),
        dtype="float32",
    )
    plan.devices[0].instructions.append(copied)
    assert any(
        "changed in place on device 0 while it may still be read" in found.message and len(found.notes) == 2
        for found in complaints(plan)
    )


def test_a_circle_is_shown() -> None:
    """Rank 0 wants a gradient before it sends what the gradient is made from."""
    plan = small()
    device = plan.devices[0]
    late = at(plan, 0, "recv")
    change(plan, 0, late, stream="comm>")
    moved = device.instructions.pop(late)
    device.instructions.insert(0, moved)
    where = {old: new for new, old in enumerate([late, *(k for k in range(len(device.instructions)) if k != late)])}
    device.instructions[:] = [replace(x, waits=tuple(sorted(where[k] for k in x.waits))) for x in device.instructions]
    (found,) = complaints(plan)
    assert (found.code, found.message) == ("P0501", "devices 0, 2 wait for each other")
    assert all(" waits for " in note and "large.piper:" in note for note in found.notes)
    assert found.helps[0].startswith("look at the order that large.piper:")


def test_sends_that_block() -> None:
    """Both send first and receive then: fine with buffers, stuck without."""
    plan = small()
    for device, peer in ((0, 2), (2, 0)):
        here = plan.devices[device]
        node = here.instructions[0].node
        signal = (Message(peer, 99, None, (1,)),)
        for i, x in enumerate(
            (
                Send("order", node, (), value=None, messages=signal, dtype="uint8"),
                Receive(
                    "order",
                    node,
                    (),
                    target=ValueId(Kind.SIGNAL, "", (device, node)),
                    messages=signal,
                    local=(),
                    shape=(1,),
                    dtype="uint8",
                ),
            )
        ):
            here.instructions[:] = [replace(y, waits=tuple(k + (k >= i) for k in y.waits)) for y in here.instructions]
            here.instructions.insert(i, x)
    check(plan)
    (found,) = complaints(plan, buffered=False)
    assert (found.code, found.message) == ("P0501", "devices 0, 2 wait for each other")


def test_messages_in_another_order_than_sent() -> None:
    """What tags make right is wrong where there are none."""
    plan = small()
    device = plan.devices[2]
    first, second = at(plan, 2, "recv", 0), at(plan, 2, "recv", 1)
    assert device.instructions[first].stream == device.instructions[second].stream
    moved = device.instructions.pop(second)
    device.instructions.insert(first, moved)
    order = [*range(first), second, *(k for k in range(first, len(device.instructions)) if k != second)]
    where = {old: new for new, old in enumerate(order)}
    device.instructions[:] = [replace(x, waits=tuple(sorted(where[k] for k in x.waits))) for x in device.instructions]
    check(plan)
    (found,) = complaints(plan, buffered=False)
    assert (found.code, found.message) == ("P0503", "device 2 takes message 1 of device 0 where message 0 is sent")
    assert len(found.notes) == 2


# -------------------------------------------------------------------------------------------------------- large


def test_the_work_grows_with_the_plan() -> None:
    """Steps counted, not seconds: twice the devices, or twice the microbatches, are twice the work."""
    base = measured(pipeline(4, 8, 8))
    assert measured(pipeline(4, 16, 8)) < 2.2 * base
    assert measured(pipeline(8, 8, 8)) < 2.2 * base
    assert measured(pipeline(4, 8, 16)) < 2.2 * base


@pytest.mark.slow
def test_1024_devices_in_two_seconds() -> None:
    plan = pipeline(16, 64, 48)
    count = sum(len(device.instructions) for device in plan.devices)
    seconds = []
    for _ in range(3):
        started = time.process_time()  # what others do on this machine does not count
        check(plan)
        seconds.append(time.process_time() - started)
    print(f"{count:,} instructions on {len(plan.devices):,} devices in {min(seconds):.2f} s")
    assert count > 290_000
    assert min(seconds) < 2


# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["zbv x zero3", "ep", "columns and rows", "recompute and offload", "gpt+shard+zero3"])
def test_a_plan_from_a_file_trains_to_the_same_numbers(name: str) -> None:
    model, text = SUBJECTS[name]
    plan = planned(model, text)[2]
    again = files.load(files.dump(plan))
    assert again == plan
    assert repr(again) == repr(plan)  # tuples are tuples, and lists are lists
    assert files.digest(again) == files.digest(plan)
    check(again)
    assert_trains_alike(model, text, again)


def test_the_digest_is_of_what_a_plan_does() -> None:
    plan = small()
    before = files.digest(plan)
    plan.about = {"files": {"model.py": "0"}}
    assert files.digest(plan) == before
    change(plan, 0, 0, stream="other")
    assert files.digest(plan) != before


def test_broken_files_are_diagnostics() -> None:
    """Cut off, bytes changed, parts of the JSON replaced: read as another plan, or refused; never an exception."""
    text = files.dump(planned(*JOB_SCHEDULES["pp x ep"])[2])
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        codes = _codes(_broken(text, draw))
        assert codes == {"P0505"} or codes <= {"P0501", "P0503", "P0504"}
        refused += codes == {"P0505"}
    assert refused > 100


def _codes(text: str) -> set[str]:
    try:
        check(files.load(text))
    except PiperError as problem:
        return {found.code for found in problem.diagnostics}
    return set()


def _broken(text: str, draw: random.Random) -> str:
    if draw.random() < 0.2:
        return text[: draw.randrange(len(text))]
    if draw.random() < 0.3:
        at = draw.randrange(len(text))
        return text[:at] + draw.choice('0{["x,:}]-') + text[at + 1 :]
    data = json.loads(text)
    inside = [(data, key) for key in data]
    for _ in range(draw.randrange(9)):
        holder, key = draw.choice(inside)
        value = holder[key]
        deeper = (
            [(value, k) for k in (value if isinstance(value, dict) else range(len(value)))]
            if isinstance(value, dict | list)
            else []
        )
        inside = deeper or inside
    holder, key = draw.choice(inside)
    if draw.random() < 0.3:
        del holder[key]
    else:
        holder[key] = draw.choice([None, -1, 10**30, 0.5, "x", [], {}, [[]], True, ["x"], {"x": 1}])
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no JSON"),
        ("[]", "a plan says"),
        (
            '{"format": "piperlang plan", "version": 0}',
            f"it is of version 0, and this piperlang reads version {VERSION}",
        ),
        (f'{{"format": "piperlang plan", "version": {VERSION}}}', "it has no list of devices"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_foreign_files(text: str, why: str) -> None:
    with pytest.raises(PiperError) as refused:
        files.load(text, "x.plan")
    (found,) = refused.value.diagnostics
    assert found.message == "x.plan cannot be used"
    assert found.notes[0].startswith(why)


def test_what_a_plan_was_made_from(tmp_path: Path) -> None:
    model, script_path, common = tmp_path / "model.py", tmp_path / "s.piper", tmp_path / "common.piper"
    model.write_text("x = 1\n")
    common.write_text("from std.pipeline import loop\nlet ranks = 2\n")
    script_path.write_text('from "./common.piper" import ranks\nmesh gpu = pp: ranks\n')
    then = files.about(model, script_path, {"ranks": 2})
    assert {Path(name).name for name in then["files"]} == {"model.py", "s.piper", "common.piper", "pipeline.piper"}
    assert files.stale(files.about(model, script_path, {"ranks": "2"}), then) is None
    assert files.stale(json.loads(json.dumps(then)), then) is None
    common.write_text("let ranks = 3\n")
    now = files.about(model, script_path, {"ranks": 4})
    now["versions"]["torch"] = "9.9"
    found = files.stale(now, then)
    assert found is not None
    reasons = [found.message, *found.notes]
    assert found.code == "P0506"
    assert any("common.piper has changed since" in reason for reason in reasons)
    assert any("pipeline.piper is not read any more" in reason for reason in reasons)
    assert "parameter ranks was 2, and is 4 now" in reasons
    assert any(reason.startswith("torch was ") and reason.endswith("and is 9.9 now") for reason in reasons)


# -------------------------------------------------------------------------------------------------------- foreseen


def test_memory_is_made_of_what_the_device_keeps() -> None:
    """One device, SGD: weights, a gradient of each, and activations that grow with the microbatches in flight."""
    graph, _, plan = planned("mlp", script("mlp", "split"))
    found = peak(plan.devices[0], plan, graph, states=4)
    weights = sum(weight.bytes for weight in graph.model.weights.values())
    assert found.by["weights"] == weights
    assert found.by["optimizer states"] == weights
    assert 0 < found.by["gradients"] <= weights
    assert found.by["communication"] == 0
    assert found.bytes == sum(found.by.values())
    assert 0 <= found.at < len(plan.devices[0].instructions)


def test_schedules_that_save_memory_do() -> None:
    def worst(text: str) -> dict[str, int]:
        graph, _, plan = planned("gpt", text)
        return dict(max(peaks(plan, graph), key=lambda one: one.bytes).by)

    split, plain = (
        "split batch into 4 as mb\n",
        worst("split batch into 4 as mb\norder [stage=3, pass=F, mb=3] -> [stage=3, pass=B, mb=0]\n"),
    )
    assert (
        worst(f"{split}recompute [stage=*]\norder [stage=3, pass=F, mb=3] -> [stage=3, pass=B, mb=0]\n")["activations"]
        < plain["activations"]
    )
    data = "mesh gpu = dp: 4\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp"
    whole, parts = worst(data + "\n"), worst(data + " with states=sharded\n")
    assert parts["optimizer states"] <= whole["optimizer states"] / 3.9
    assert worst(data + " with params=sharded, prefetch=0\n")["weights"] < whole["weights"]


@pytest.mark.parametrize("directive", ["recompute", "offload"])
@pytest.mark.parametrize("ordered", ["order on gpu:\n{fs}{bs}", "{chain}"])
def test_activations_are_made_again_when_the_backward_may_begin(directive: str, ordered: str) -> None:
    """On the device with the loss, too, whose backward waits for no gradient: only for the order."""
    fs = "".join(f"    for s in range(4): [stage=s, pass=F, mb={m}]\n" for m in range(4))
    bs = "".join(f"    for s in reversed(range(4)): [stage=s, pass=B, mb={m}]\n" for m in range(4))
    chain = "order [pass=F] -> [pass=B]\n"
    script = (
        "mesh gpu = d: 1\nplace [pass=*] on gpu\nsplit batch into 4 as mb\n"
        f"{directive} [stage=3]\n{ordered.format(fs=fs, bs=bs, chain=chain)}"
    )
    _, _, plan = planned("gpt", script)
    (device,) = plan.devices
    again = [i for i, x in enumerate(device.instructions) if isinstance(x, Recompute | Fetch)]
    forwards = [i for i, x in enumerate(device.instructions) if isinstance(x, Forward)]
    assert len(again) == 4
    assert min(again) > max(forwards)


def test_summary_fits_a_screen_and_says_the_same_as_json() -> None:
    for model, text in SUBJECTS.values():
        graph, _, plan = planned(model, text)
        shown, found = summary(plan, graph), as_json(plan, graph)
        lines = shown.splitlines()
        assert len(lines) <= 30
        assert max(map(len, lines)) <= 140
        assert json.loads(json.dumps(found)) == found
        assert found["devices"]["count"] == len(plan.devices)
        assert sum(found["nodes"]["by_kind"].values()) == len(graph.nodes)
        assert 0 <= found["step"]["idle"]["min"] <= found["step"]["idle"]["max"] <= 1
        assert "on the target machine of the compiler, which is a large accelerator;" in shown
        assert found["memory"]["bytes"]["max"] == sum(found["memory"]["by"].values())


def test_halves_are_rounded_as_on_a_page() -> None:
    assert bytes_text(22.25 * 2**20) == "22.3 MiB"
    assert [bytes_text(size) for size in (0, 512, 1536, 100.5 * 2**10)] == ["0 B", "512 B", "1.5 KiB", "101 KiB"]


def test_summary_tells_what_each_line_added() -> None:
    graph, _, plan = planned(*JOB_SCHEDULES["ep"])
    added = {line["line"]: line["nodes"] for line in as_json(plan, graph)["added"]}
    assert added["s.piper:3"]["all_to_all"] == 8
    assert added["s.piper:4"] == {"all_reduce": 1}
    moved = as_json(plan, graph)["communication"]["comm"]
    assert moved["bytes"] == len(plan.devices) * moved["of_a_device"]["max"]


def test_gradients_do_not_wait_behind_gathers() -> None:
    """Where communication is the bottleneck, ZeRO-3 still reduces a gradient before many others are computed."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                with annotate("stage", i):
                    x = torch.tanh(layer(x))
            return x

    text = "from std.data import zero3\nmesh gpu = dp: 2\nplace [pass=*] on gpu\nzero3(gpu.dp)\n"
    graph, _ = compiled(capture(Layers, square, vectors(SAMPLES)), text)
    plan = lower(graph, Machine(network=Interconnect(1e6, 1e-5)))
    check(plan)
    waiting = most = 0
    for x in plan.devices[0].instructions:
        waiting += isinstance(x, Backward) - isinstance(x, ScatterGradients)
        most = max(most, waiting)
    assert most <= 3
