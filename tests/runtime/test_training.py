"""What training is besides forward, backward and update: clipping by global norm, and evaluation."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piperlang.capture.program import capture
from piperlang.cli.main import main
from piperlang.diagnostics import PiperError
from piperlang.plan import files as plan_files
from piperlang.plan.instructions import Compute, GradientNorm, Update
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.plan.rewrite.clip import with_norm
from piperlang.plan.rewrite.forward import forward
from piperlang.plan.verify import check
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training, piece_of
from piperlang.runtime.shapes import InEvaluationMode
from tests.support.between_steps import REPLICAS, assert_plain, job
from tests.support.equivalence import LIMIT, SAMPLES, compiled, optimizer, program, relative
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.models import CASES

MAX_NORM = 0.05
"""Small enough that gradients of all these models are clipped."""
NAMES = [
    "1f1b",
    "zbv x zero3",
    "dualpipe x zero2",
    "dp",
    "zero1",
    "zero3",
    "ep",
    "columns and rows",
    "ranks wait for each other",
    "uneven",
]


def plain(model: torch.nn.Module, name: str, steps: int = 2) -> list[float]:
    """Train the model as anyone would, with clipping, and give its losses."""
    case = CASES[name]
    eager = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        inputs, target = case.batch(SAMPLES)
        eager.zero_grad()
        loss = case.loss(model(inputs), target)
        loss.backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)) > 2 * MAX_NORM
        eager.step()
        losses.append(float(loss.detach()))
    return losses


def planned(name: str) -> tuple[str, Plan, object]:
    model, script = JOB_SCHEDULES[name]
    graph, captured = compiled(program(model), script)
    return model, lower(graph), captured


@pytest.mark.parametrize("name", NAMES)
def test_clipping_by_global_norm(name: str) -> None:
    case_name, plan, captured = planned(name)
    case = CASES[case_name]
    plan = with_norm(plan, MAX_NORM)
    check(plan)
    check(plan, buffered=False)
    assert plan_files.load(plan_files.dump(plan)) == plan
    torch.manual_seed(0)
    model = case.model()
    with ThreadJob(plan, captured, Training(case.model, optimizer)) as job:  # type: ignore[arg-type]
        losses = plain(model, case_name)
        for step, expected in enumerate(losses):
            torch.manual_seed(100 + step)
            assert job.step(case.batch(SAMPLES)).loss == pytest.approx(expected, rel=LIMIT)
        weights = job.weights()
    for key, parameter in model.named_parameters():
        assert relative(weights[key], parameter) <= LIMIT, key


def test_clipping_on_workers(cluster: Cluster) -> None:
    case_name, plan, captured = planned("zbv x zero3")
    case = CASES[case_name]
    torch.manual_seed(0)
    model = case.model()
    losses = plain(model, case_name)
    with Job(with_norm(plan, MAX_NORM), captured, Training(case.model, optimizer), timeout=30, cluster=cluster) as job:  # type: ignore[arg-type]
        for step, expected in enumerate(losses):
            torch.manual_seed(100 + step)
            assert job.step(case.batch(SAMPLES)).loss == pytest.approx(expected, rel=LIMIT)
        weights = job.weights()
    for key, parameter in model.named_parameters():
        assert relative(weights[key], parameter) <= LIMIT, key


def test_a_norm_that_counts_wrong_is_refused() -> None:
    """A part of a gradient that nobody counts, or two do; a gradient left out; an update that does not scale; members
    with different limits."""
    plan = with_norm(planned("dp")[1], MAX_NORM)
    norms = [next(i for i, x in enumerate(device.instructions) if x.op == "norm") for device in plan.devices]

    def norm_of(device: int) -> GradientNorm:
        x = plan.devices[device].instructions[norms[device]]
        assert isinstance(x, GradientNorm)
        return x

    def changed(device: int, **fields: Any) -> Plan:
        other = copy.deepcopy(plan)
        other.devices[device].instructions[norms[device]] = replace(norm_of(device), **fields)
        return other

    terms = norm_of(0).terms
    assert all(term.counts for term in terms)
    for mutant in (
        changed(0, terms=(terms[0]._replace(counts=False), *terms[1:])),
        changed(1, terms=(terms[0]._replace(counts=True), *norm_of(1).terms[1:])),
        changed(0, terms=terms[1:]),
        changed(1, limit=2 * MAX_NORM),
    ):
        with pytest.raises(PiperError):
            check(mutant)
    unscaled = copy.deepcopy(plan)
    update = next(i for i, x in enumerate(unscaled.devices[0].instructions) if x.op == "update")
    x = unscaled.devices[0].instructions[update]
    assert isinstance(x, Update)
    unscaled.devices[0].instructions[update] = replace(x, scale=None)
    with pytest.raises(PiperError):
        check(unscaled)


# -------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("name", NAMES)
def test_evaluation(name: str) -> None:
    """Before and after a step, by the forward of the same schedule; and the step is none the worse for it."""
    case_name, plan, captured = planned(name)
    case = CASES[case_name]
    torch.manual_seed(0)
    model = case.model()
    eager = optimizer([p for p in model.parameters() if p.requires_grad])
    only = forward(plan)
    check(only, forward=True)
    check(only, buffered=False, forward=True)
    assert {x.op for device in only.devices for x in device.instructions}.isdisjoint(
        {"B", "I", "W", "update", "scatter", "reduce"}
    )
    ran = {x.program for device in only.devices for x in device.instructions if isinstance(x, Compute)}
    for piece in (piece_of(captured, only.programs[i]) for i in ran):  # type: ignore[arg-type]
        assert {kind for kind, _ in piece.outputs} == {"output"}
        assert len(list(piece.module.graph.output_node().all_input_nodes)) <= len(piece.outputs)
    with ThreadJob(plan, captured, Training(case.model, optimizer)) as job:  # type: ignore[arg-type]
        job.shapes.add("evaluate", only, captured)  # type: ignore[arg-type]
        for _ in range(2):
            torch.manual_seed(7)
            inputs, target = batch = case.batch(SAMPLES)
            loss = case.loss(model(inputs), target)
            assert job.evaluate(batch) == pytest.approx(float(loss.detach()), rel=LIMIT)
            assert job.step(batch).loss == pytest.approx(float(loss.detach()), rel=LIMIT)
            eager.zero_grad()
            loss.backward()
            eager.step()


def test_evaluation_on_workers_without_dropout(cluster: Cluster) -> None:
    """In evaluation mode there are no masks: the loss is that of the plain model, to which training with masks cannot
    be compared."""
    case = CASES["dropout"]
    script = (
        "mesh gpu = pp: 2, dp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nreplicate [pass=*]"
        " over gpu.dp with params=sharded\nsplit batch into 2 as mb\n"
    )
    graph, captured = compiled(program("dropout"), script)
    other_graph, other = compiled(capture(InEvaluationMode(case.model), case.loss, case.batch(SAMPLES)), script)
    torch.manual_seed(0)
    model = case.model().eval()
    with Job(lower(graph), captured, Training(case.model, optimizer), timeout=30, cluster=cluster) as job:
        job.shapes.add("evaluate", forward(lower(other_graph)), other)
        inputs, target = batch = case.batch(SAMPLES)
        assert job.evaluate(batch) == pytest.approx(float(case.loss(model(inputs), target).detach()), rel=LIMIT)
        trained = job.step(batch).loss
        assert trained != pytest.approx(float(case.loss(model(inputs), target).detach()), rel=1e-3)
        model.load_state_dict(job.weights())
        assert job.evaluate(batch) == pytest.approx(float(case.loss(model(inputs), target).detach()), rel=LIMIT)


MODEL = """
import torch, torch.nn.functional as f
from torch import nn
from piperlang import annotate

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        with annotate("stage", 0):
            x = f.dropout(torch.tanh(self.a(x)), 0.5, self.training)
        with annotate("stage", 1):
            return self.b(x)

max_norm = 0.01

def model(): return Net()
def loss(output, target): return f.mse_loss(output, target)
def data():
    while True:
        x = torch.randn(8, 4)
        yield x, x[:, :2]
def validation():
    made = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn(8, 4, generator=made)
        yield x, x[:, :2]
def optimizer(params): return torch.optim.SGD(params, lr=0.1)
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "two.piper").write_text(
        "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nsplit batch into 2 as mb\n"
    )
    return str(tmp_path / "model.py"), str(tmp_path / "two.piper")


def test_a_model_file_with_both(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *files, "--numerics", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert (
        main(
            [
                *files,
                "--steps",
                "4",
                "--validate-every",
                "2",
                "--executor",
                "inline",
                "--json",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["validation_loss" in row for row in rows] == [False, True, False, True]
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    model = scope["model"]().eval()  # type: ignore[operator]
    model.load_state_dict(torch.load(tmp_path / "run" / "weights.pt"))
    losses = [float(scope["loss"](model(x), y).detach()) for x, y in scope["validation"]()]  # type: ignore[operator]
    assert rows[-1]["validation_loss"] == pytest.approx(sum(losses) / 3, rel=LIMIT)


@pytest.mark.parametrize(
    ("line", "said"), [("max_norm = 0", "`max_norm` is 0"), ("max_norm = 'much'", "`max_norm` is 'much'")]
)
def test_a_norm_that_is_none(files: tuple[str, str], line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(files[0]).write_text(MODEL.replace("max_norm = 0.01", line))
    assert main(["check", *files]) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert line in shown


def test_flags_that_cannot_be_followed(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--backend", "nccl"]) == (2 if not torch.cuda.is_available() else 0)
    assert "torch finds no GPU" in capsys.readouterr().err
    Path(files[0]).write_text(MODEL.replace("def validation", "def other"))
    assert main([*files, "--validate-every", "2"]) == 2
    assert "has no `validation`" in capsys.readouterr().err


class Spare(torch.nn.Module):
    """A weight and a buffer that the forward never reads, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(3.0))
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x)) * self.scale  # type: ignore[no-any-return]


def test_what_is_saved_can_be_loaded(cluster: Cluster) -> None:
    """Everything that the plain model would save, and nothing else."""
    batch = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 4)
    graph, captured = compiled(
        capture(Spare, torch.nn.functional.mse_loss, batch),
        "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n",
    )
    plan = lower(graph)
    torch.manual_seed(0)
    plain = Spare()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    with (
        Job(plan, captured, Training(Spare, optimizer), timeout=30, cluster=cluster) as job,
        ThreadJob(plan, captured, Training(Spare, optimizer)) as threads,
    ):
        for one in (job, threads):
            one.step(batch)
            plain.load_state_dict(one.weights())
            assert torch.equal(plain.spare.weight, before["spare.weight"])
            assert float(plain.count) == 3.0  # type: ignore[arg-type]
            assert not torch.equal(plain.used.weight, before["used.weight"])


EMPTY = """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.nothing = nn.Linear(4, 3), nn.Parameter(torch.zeros(0))
    def forward(self, x):
        with piperlang.annotate("stage", 0): x = self.first(x)
        with piperlang.annotate("stage", 1): return x + self.nothing.sum()
def model(): return N()
"""


@pytest.mark.parametrize("zero", ["ddp", pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_a_stage_whose_weights_have_no_elements(zero: str, tmp_path: Path) -> None:
    """Nothing is sent for them."""
    code, losses, weights = job(tmp_path, EMPTY, REPLICAS.replace("ddp", zero), "--executor", "inline", "--steps", "2")
    assert code == 0
    assert_plain(tmp_path, losses, weights)
