"""The graph as commands show it, and what selectors mean against a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import capture
from piperlang.cli.main import main
from piperlang.diagnostics import PiperError
from piperlang.ir.text import brief, text
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.equivalence import SAMPLES, assert_same, compiled, optimizer, program
from tests.support.models import CASES, WIDTH, Case, Gpt, tokens, vectors

MODEL = """
import torch
from torch import nn
from piperlang import annotate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        return x


def model():
    return Net()


def loss(output, target):
    return nn.functional.mse_loss(output, target)


def data():
    while True:
        yield torch.randn(8, 8), torch.randn(8, 8)


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)
"""
SCRIPT = """mesh gpu = pp: 2, dp: 2
place [stage=0] on gpu[pp=0]
place [stage=1] on gpu[pp=1]
split batch into 2 as mb
replicate [pass=*] over gpu.dp with grads=sharded
stream [comm=p2p] on "pp"
order on gpu[pp=0]:
    [stage=0, pass=F, mb=next], [stage=0, pass=F, mb=next], [stage=0, pass=B, mb=next], [stage=0, pass=B, mb=next]
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "s.piper").write_text(SCRIPT)
    return str(tmp_path / "model.py"), str(tmp_path / "s.piper")


def graph_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["graph", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def graph_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["graph", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_text_has_one_node_a_line_and_is_stable(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = graph_text(capsys, *files, "-v")
    assert lines == graph_text(capsys, *files, "--verbose")
    assert len(lines) == len(graph_json(capsys, *files)["nodes"]) == 22
    assert (
        "F[stage=0, mb=0] on gpu[pp=0] stream compute: w:layers.0.weight@0, w:layers.0.bias@0, batch:flat_0@0#0 ->"
        " tanh#0: float32[4, 8]{dp: batch}, saved:0#0" in lines
    )
    assert "send.F[stage=0, mb=1] on gpu[pp=0] stream pp: tanh#1 -> tanh#1@0!sent: float32[4, 8]{dp: batch}" in lines
    assert sum(line.startswith("reduce_scatter[stage=1] on gpu[pp=1] over dp") for line in lines) == 1


def test_short_text_has_the_same_nodes_in_a_few_words(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = graph_text(capsys, *files)
    for short, long in zip(lines, graph_text(capsys, *files, "-v"), strict=True):
        name, where, *_ = short.split("  ")
        assert long.startswith(f"{name} on {where}")
    assert max(map(len, lines)) < 80
    for line in (
        "F[stage=0, mb=0]  gpu[pp=0]  2 weights -> [4, 8]",
        "send.F[stage=0, mb=1]  gpu[pp=0]  [4, 8]  stream pp",
        "B[stage=1, mb=0]  gpu[pp=1]  1 weight -> [4, 8], 2 gradients",
        "B[stage=0, mb=0]  gpu[pp=0]  -> 2 gradients",
        "reduce_scatter[stage=1]  gpu[pp=1] over dp  2 gradients",
        "update[stage=0]  gpu[pp=0]  2 weights",
    ):
        assert line in lines


def test_short_text_of_activations_and_of_values_kept_elsewhere() -> None:
    graph, _ = compiled(
        program("mlp"),
        "mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nrecompute [stage=1]\noffload"
        " [stage=0]\n",
    )
    lines = brief(graph).splitlines()
    assert len(lines) == len(graph.nodes)
    assert "R[stage=1]  gpu[pp=0]  2 weights -> activations" in lines
    assert "offload[stage=0]  gpu[pp=0]  activations  stream host" in lines


def test_json_holds_together(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = graph_json(capsys, *files)
    done: set[int] = set()
    made: set[str] = set()
    for node in found["nodes"]:  # in an order in which it can run
        assert set(node["after"]) <= done
        for key in (key for keys in node["reads"] for key in keys):
            assert key in made or key.startswith(("w:", "batch:flat_", "given:seed"))
        done.add(node["id"])
        made |= set(node["writes"])
    assert {tuple(node["devices"]) for node in found["nodes"] if node["op"] == "F"} == {(0, 1), (2, 3)}
    assert found["values"]["tanh#1"] == {
        "dtype": "float32",
        "shape": [4, 8],
        "on": "gpu[pp=0]",
        "lies": {"dp": "batch"},
        "first": 4,
        "samples": 4,
    }
    assert [len(step) for order in found["orders"] for step in order["steps"]] == [1, 1, 1, 1]


def test_after_each_directive(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for after in range(9):
        nodes = graph_json(capsys, *files, "--after", str(after))["nodes"]
        counts.append(
            (
                len(nodes),
                sum(node["op"] == "send" for node in nodes),
                sum(node["op"] == "reduce_scatter" for node in nodes),
            )
        )
    # one update for both stages; a mesh changes nothing; one stage placed, both placed; two microbatches; replicated; a
    # stream and an order add no nodes
    assert counts == [
        (5, 0, 0),
        (5, 0, 0),
        (10, 2, 0),
        (10, 2, 0),
        (18, 4, 0),
        (22, 4, 2),
        (22, 4, 2),
        (22, 4, 2),
        (22, 4, 2),
    ]


def test_a_drawing_names_every_node(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", *files, "--svg", str(tmp_path / "g.svg")]) == 0
    root = ElementTree.parse(tmp_path / "g.svg").getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 22
    assert "F[stage=0, mb=0] on gpu[pp=0]" in titles
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 8


def test_numerics(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *files, "--numerics", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["loss"] == pytest.approx(found["loss_reference"], rel=1e-9)
    assert 0 < found["max_grad_rel_err"] < 1e-9  # summed in another order, so not to the last bit
    assert found["max_weight_rel_err"] < 1e-9
    assert main(["check", *files]) == 0
    assert "ok with" in capsys.readouterr().out


def test_numerics_can_fail(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that lost a gradient would be told apart."""
    from piperlang.runtime.reference.shards import ShardedWeights

    monkeypatch.setattr(ShardedWeights, "_summed", lambda self, held, parts, axes: list(parts))
    assert main(["check", *files, "--numerics", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["max_grad_rel_err"] > 1e-2


# ------------------------------------------------------------------------------------------------------ selectors


def test_count_and_tags_look_at_the_graph() -> None:
    compiled(
        program("mlp"),
        """require tags("stage") == [0, 1, 2, 3], "stages"
require count([pass=F]) == 4 and count([comm=*]) == 0, "one device"
mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
require count([comm=p2p]) == 4 and count([comm=send]) == 2, "there and back"
split batch into 4 as mb
require count([pass=F]) == 16 and count([pass=F, mb=0:2]) == 8 and count([pass=F, stage=1, mb=3]) == 1, "microbatches"
require count([comm=send, pass=F, stage=1]) == 4, "sends"
require count([update]) == 2 and count([update, stage=2]) == 1, "one update for both stages of a device"
require count([pass=B]) == 16 and count([pass=W]) == 0, "whole"
stream [stage=2, pass=W] on "w"
require count([pass=B]) == 12 and count([pass=W]) == 4 and count([pass=I]) == 4, "halves where they are named"
""",
    )


def test_orders_may_name_communication() -> None:
    graph, _ = compiled(
        program("mlp"),
        """mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 2 as mb
order on gpu[pp=0]:
    [stage=1, pass=F, mb=0], [comm=send, stage=1, pass=F, mb=next], [stage=0, pass=F, mb=1]
order [comm=recv, stage=2, mb=1] -> [stage=2, pass=F, mb=0]
""",
    )
    lines = text(graph).splitlines()
    at = {line.split(" stream")[0]: i for i, line in enumerate(lines)}
    assert (
        at["F[stage=1, mb=0] on gpu[pp=0]"]
        < at["send.F[stage=1, mb=0] on gpu[pp=0]"]
        < at["F[stage=0, mb=1] on gpu[pp=0]"]
    )
    assert at["recv.F[stage=2, mb=1] on gpu[pp=1]"] < at["F[stage=2, mb=0] on gpu[pp=1]"]


def test_the_last_stream_holds() -> None:
    graph, _ = compiled(
        program("mlp"), 'split batch into 2 as mb\nstream [pass=F] on "a"\nstream [pass=F, mb=1, stage=2:4] on "b"\n'
    )
    streams = {str(node): node.stream for node in graph.nodes}
    assert streams["F[stage=2, mb=0] on device"] == "a"
    assert streams["F[stage=2, mb=1] on device"] == "b"
    assert streams["B[stage=2, mb=1] on device"] == "compute"


def test_recompute_serves_both_halves_once() -> None:
    graph, _ = compiled(
        program("mlp"), 'split batch into 2 as mb\nrecompute [stage=1]\nstream [stage=1, pass=W] on "w"\n'
    )
    assert sum(node.op == "R" for node in graph.nodes) == 2
    saved = {key for node in graph.nodes if node.op == "R" for key in node.writes}
    assert not any(key in saved for node in graph.nodes if node.op == "F" for key in node.writes)


@pytest.mark.parametrize("directive", ["recompute", "offload"])
@pytest.mark.parametrize("selector", ["stage=1, mb=0", "stage=1, mb=next", "comm=p2p", "update", "stage=1, mb=1:"])
def test_what_applies_to_whole_chunks_refuses_parts_of_them(directive: str, selector: str) -> None:
    """They would mean all of the chunk, in silence."""
    with pytest.raises(PiperError) as problem:
        compiled(program("mlp"), f"split batch into 2 as mb\n{directive} [{selector}]\n")
    (found,) = problem.value.diagnostics
    assert found.code in ("P0302", "P0304")
    assert found.span is not None
    assert found.helps


@pytest.mark.parametrize("directive", ["recompute", "offload"])
@pytest.mark.parametrize("selector", ["stage=1", "stage=1, mb=*", "stage=1, mb=0:2", "stage=1, pass=*"])
def test_all_parts_are_the_whole_chunk(directive: str, selector: str) -> None:
    graph, _ = compiled(program("mlp"), f"split batch into 2 as mb\n{directive} [{selector}]\n")
    op = {"recompute": "R", "offload": "offload"}[directive]
    assert sum(node.op == op for node in graph.nodes) == 2


# --------------------------------------------------------------------------------------------------------- losses


def masked(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first samples have fewer targets than the others."""
    ids, target = tokens(samples)
    target[: samples // 2, 2:] = -100
    return ids, target


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


DIVIDED = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\nsplit batch into 2 as mb\n"


def test_parts_with_fewer_targets_weigh_less() -> None:
    case = Case("masked", Gpt, mean, masked, 4)
    assert_same(case, capture(case.model, case.loss, case.batch(SAMPLES)), DIVIDED)


@pytest.mark.slow
def test_a_loss_may_be_a_sum_and_a_count() -> None:
    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        valid = target != -100
        return f.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), valid.sum()

    traced = capture(Gpt, pair, masked(SAMPLES))
    assert traced.cut().model.combine == "sum"
    assert_same(Case("pair", Gpt, mean, masked, 4), traced, DIVIDED)


def test_a_sum_over_the_batch_stays_a_sum() -> None:
    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return f.mse_loss(output, target, reduction="sum")

    case = Case("sum", CASES["mlp"].model, total, vectors, 4)
    assert_same(case, capture(case.model, case.loss, case.batch(SAMPLES)), DIVIDED)


class Turned(nn.Module):
    """Sequence first: what crosses has the samples inside its first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            y = self.first(x.transpose(0, 1).flatten(0, 1))
        with annotate("stage", 1):
            return self.second(y).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def sequences(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 6, WIDTH), torch.randn(samples, 6, WIDTH)


def test_samples_inside_a_dimension_move_but_are_not_divided_anew() -> None:
    case = Case("turned", Turned, CASES["mlp"].loss, sequences, 2)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    same = (
        "mesh gpu = pp: 2, dp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nreplicate [pass=*] over"
        " gpu.dp\nsplit batch into 2 as mb\n"
    )
    assert_same(case, traced, same)
    with pytest.raises(PiperError, match="cannot be redistributed") as refused:
        compiled(traced, same.replace("gpu[pp=1]", "gpu[pp=1, dp=0]"))
    assert refused.value.diagnostics[0].span is not None


@pytest.mark.parametrize(
    "splits",
    [
        "split [stage=0] into 4 as mb\n",
        "split [stage=1] into 4 as mb\n",
        "split [stage=0] into 2 as a\nsplit [stage=1] into 2 as b\n",
        "split batch into 2 as mb\nsplit [stage=1] into 2 as part\n",
    ],
)
def test_samples_inside_a_dimension_are_not_split_apart(splits: str) -> None:
    case = Case("turned", Turned, CASES["mlp"].loss, sequences, 2)
    traced = capture(case.model, case.loss, case.batch(SAMPLES))
    places = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\n"
    with pytest.raises(PiperError, match="cannot be redistributed") as refused:
        compiled(traced, places + splits)
    span = refused.value.diagnostics[0].span
    assert span is not None
    assert span.text.startswith("split [")
    assert_same(case, traced, places + "split [stage=*] into 2 as mb\n")


def test_an_axis_of_one_device_is_no_mistake() -> None:
    """Scripts have parameters, and one of them may be 1."""
    graph, _ = compiled(
        program("mlp"),
        "param width = 1\nmesh gpu = dp: width\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with"
        " params=sharded\n",
    )
    assert not any(node.template.communicates for node in graph.nodes)


def test_a_batch_of_one_sample() -> None:
    case = CASES["mlp"]
    traced = capture(case.model, case.loss, case.batch(1))
    graph, captured = compiled(traced, "recompute [stage=1]\n")
    assert graph.model.samples == 1
    torch.manual_seed(0)
    model, batch = case.model(), case.batch(1)
    assert GraphInterpreter(graph, captured, model, optimizer).step(batch).loss == pytest.approx(
        case.loss(model(batch[0]), batch[1]).item(), rel=1e-6
    )


@pytest.mark.parametrize("samples", [4, 16])
def test_a_batch_of_another_size_is_refused(samples: int) -> None:
    """More samples than were planned for would be left out in silence."""
    graph, captured = compiled(program("mlp"), "split batch into 2 as mb\n")
    with pytest.raises(PiperError, match="but the model was traced with"):
        GraphInterpreter(graph, captured, CASES["mlp"].model(), optimizer).step(CASES["mlp"].batch(samples))


class Shifted(nn.Module):
    """Both halves of the backward read the output's gradient itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            y = self.layer(x)
        with annotate("stage", 1):
            z = y + self.shift
        with annotate("stage", 2):
            return torch.tanh(z)


def test_two_halves_may_read_one_gradient() -> None:
    case = Case("shifted", Shifted, CASES["mlp"].loss, vectors, 3)
    assert_same(
        case,
        capture(case.model, case.loss, case.batch(SAMPLES)),
        'split batch into 2 as mb\nstream [stage=1, pass=W] on "weights"\n',
    )


def test_devices_that_would_have_parts_of_the_loss_are_refused() -> None:
    """One device of those with the same samples tells the loss."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with annotate("stage", 0):
                x = self.first(x).tanh()
            with annotate("stage", 1):
                return self.last(x)

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, 6, WIDTH), torch.randn(samples, 6, WIDTH)

    def apart(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 2):
            return f.mse_loss(output, target)

    script = "mesh gpu = tp: 2\nplace [stage=*] on gpu\nreplicate [stage={0, 2}] over gpu.tp\n"
    divided = script + "shard [stage=1] over gpu.tp with style=sequence\n"
    with pytest.raises(PiperError, match="each device along tp would have a part of the loss") as found:
        compiled(capture(Positions, f.mse_loss, batch(SAMPLES)), divided.replace("{0, 2}", "0"))
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0411"
    assert diagnostic.span is not None
    assert diagnostic.span.text.startswith("shard [stage=1]")
    assert_same(Case("positions", Positions, apart, batch, 3), capture(Positions, apart, batch(SAMPLES)), divided)
