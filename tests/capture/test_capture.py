"""Capture: chunks form a true DAG, and their explicit backward equals eager autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.autodiff.cut import Subgraph, cut, matches
from piperlang.capture.autodiff.differentiate import differentiate
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.program import capture
from piperlang.capture.trace.names import ModuleName
from piperlang.capture.trace.random import mix
from piperlang.capture.trace.trace import Traced, trace
from piperlang.capture.user.model_file import load_model
from piperlang.diagnostics import PiperError
from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.explain import page
from piperlang.directives.tag import ModulePath
from piperlang.pipeline import schedule
from piperlang.source import Source
from tests.support.chunks import SPAN, run, tag
from tests.support.equivalence import relative
from tests.support.models import CASES, WIDTH, Case, Mlp, square, vectors
from tests.support.often import one_in

torch.set_num_threads(1)


@cache
def captured(case: Case, samples: int = 4) -> tuple[Traced, list[Subgraph], list[PassGraphs]]:
    traced = trace(case.model, case.loss, case.batch(samples))
    chunks = cut(traced)
    return traced, chunks, differentiate(traced, chunks)


def eager(case: Case, batch: Any, seed: int = 1) -> tuple[nn.Module, float]:
    torch.manual_seed(seed)
    model = case.model()
    loss = case.loss(model(batch[0]), batch[1])
    loss.backward()
    return model, loss.item()


@pytest.mark.parametrize("halves", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("name", one_in(2, [name for name in CASES if name != "dropout"]))
def test_equals_eager_autograd(name: str, halves: bool) -> None:
    case = CASES[name]
    traced, chunks, pieces = captured(case)
    torch.manual_seed(0)
    batch = case.batch(4)
    model, loss = eager(case, batch)
    got_loss, grads = run(traced, chunks, pieces, model, batch, halves=halves)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == set(trained)
    assert max(relative(grads[n], g) for n, g in trained.items()) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_a_true_dag(name: str) -> None:
    case = CASES[name]
    traced, chunks, _ = captured(case)
    made: set[str] = set()
    for chunk in chunks:
        assert {value.name for value in chunk.inputs} <= made
        made |= {value.name for value in chunk.outputs}
    assert {dict(chunk.tags)["stage"] for chunk in chunks} == set(range(case.stages))
    assert len(chunks[-1].outputs) == 1
    assert chunks[-1].outputs[0].fake.shape == ()
    assert sum(len(chunk.nodes) for chunk in chunks) == sum(
        node.op not in ("placeholder", "output") for node in traced.graph.nodes
    )


def test_skip_connections_have_edges_of_their_own() -> None:
    _, chunks, _ = captured(CASES["unet"])
    readers = [chunk.number for chunk in chunks if any(v.name == chunks[0].outputs[0].name for v in chunk.inputs)]
    assert readers == [1, 2, 3]
    assert len(chunks[3].inputs) == 3


def test_masks_and_integers_cross_forward_only() -> None:
    _, chunks, pieces = captured(CASES["gpt"])
    crossing = [v for chunk in chunks for v in chunk.inputs]
    masks = [v for v in crossing if not v.fake.is_floating_point()]
    assert masks
    assert not any(v.differentiable for v in masks)
    for chunk, piece in zip(chunks, pieces, strict=True):
        if piece.I is not None:
            wanted = {i for i, v in enumerate(chunk.inputs) if v.differentiable}
            assert {i for kind, i in piece.I.outputs if kind == "grad_input"} == wanted


def test_tied_weights_are_one_weight_with_two_users() -> None:
    traced, chunks, _ = captured(CASES["gpt"])
    tied = {place for place, weight in traced.weights.items() if weight.aliases}
    assert len(tied) == 2
    assert len({id(traced.weights[place]) for place in tied}) == 1
    assert sorted(chunk.number for chunk in chunks if tied & set(chunk.weights)) == [0, 3]


def test_frozen_weights_cost_no_gradient() -> None:
    traced, chunks, pieces = captured(CASES["unet"])
    frozen = {place for place, weight in traced.weights.items() if weight.name not in traced.trained}
    for chunk, piece in zip(chunks, pieces, strict=True):
        if piece.W is not None:
            assert not {chunk.weights[i] for kind, i in piece.W.outputs if kind == "grad_weight"} & frozen


def test_equal_layers_share_their_pieces() -> None:
    _, chunks, pieces = captured(CASES["gpt"])
    assert pieces[1] is pieces[2]
    assert pieces[0] is not pieces[1]
    assert len({id(p) for p in pieces}) == 3
    assert len(chunks) == 4


class Zeros(nn.Module):
    """What is made in the shape of something that learns, and crosses to another chunk, learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            y = self.first(x)
            total, sign = y.new_zeros(y.shape), torch.ones_like(y)
        with annotate("stage", 1):
            return self.second(y) * sign + total


def test_constants_in_the_shape_of_an_activation_learn_nothing() -> None:
    case = Case("zeros", Zeros, square, vectors, 2)
    _, chunks, _ = captured(case)
    assert [value.differentiable for value in chunks[0].outputs].count(True) == 1
    assert len(chunks[0].outputs) == 3
    torch.manual_seed(0)
    batch, model = case.batch(4), case.model()
    loss, gradients = run(*captured(case, 4), model, batch, halves=True)
    expected = case.loss(model(batch[0]), batch[1])
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()))
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad)


class LstmFirst(nn.Module):
    """The input of the LSTM requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH // 2, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.lstm(x.view(len(x), 2, WIDTH // 2))[0][:, -1]
        with annotate("stage", 1):
            return self.head(x)


def test_an_lstm_on_the_batch_itself() -> None:
    case = Case("lstm", LstmFirst, square, vectors, 2)
    torch.manual_seed(0)
    batch = case.batch(4)
    model, loss = eager(case, batch)
    got, gradients = run(*captured(case), model, batch, halves=True)
    assert got == pytest.approx(loss, rel=1e-6)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(gradients[name], weight.grad)


def test_halves_repeat_nothing() -> None:
    """Operators of I and W together are those of B, views of weights aside."""
    from piperlang.capture.autodiff.min_cut import VIEWS

    def work(piece: PassGraph) -> list[str]:
        return sorted(
            str(n.target) for n in piece.module.graph.nodes if n.op == "call_function" and n.target not in VIEWS
        )

    for name in ("mlp", "gpt", "unet", "moe"):
        for piece in captured(CASES[name])[2]:
            if piece.I is not None and piece.W is not None and piece.B is not None:
                assert sorted(work(piece.I) + work(piece.W)) == work(piece.B)


def test_saved_activations_are_counted_and_hold_no_weight() -> None:
    _, _, (piece, *_) = captured(CASES["mlp"])
    # tanh keeps its output, and the layer its input, which is the batch's: one activation of samples x width floats
    assert piece.saved_bytes == 4 * WIDTH * 4
    assert piece.F.cost.flops == {"float32": 2 * 4 * WIDTH * WIDTH}


def test_dropout_does_not_depend_on_how_the_batch_is_divided() -> None:
    case = CASES["dropout"]
    torch.manual_seed(0)
    batch = case.batch(8)
    torch.manual_seed(1)
    model = case.model()
    whole_loss, whole = run(*captured(case, 8), model, batch, halves=False)
    part = captured(case, 2)
    parts = [
        run(*part, model, (batch[0][i : i + 2], batch[1][i : i + 2]), halves=True, first=i) for i in range(0, 8, 2)
    ]
    assert sum(loss for loss, _ in parts) / 4 == pytest.approx(whole_loss, rel=1e-6)
    for name, grad in whole.items():
        assert relative(sum(grads[name] for _, grads in parts) / 4, grad) < 1e-5
    other, _ = run(*captured(case, 8), model, batch, halves=False, first=100)
    assert other != pytest.approx(whole_loss, rel=1e-3)


def test_dropout_keeps_the_right_share() -> None:
    from piperlang.capture.trace.random import counter_dropout

    x = torch.ones(1000, 100)
    kept = counter_dropout(x, torch.tensor([mix(1, 2), 0]), 3, 0.25, 1000)
    assert float((kept > 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    assert float((kept > 0).float().mean(0).std()) < 0.03


class Plain(nn.Module):
    """A model nobody may edit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_tags_by_module_path() -> None:
    traced = trace(Plain, square, vectors(4))
    chunks = cut(
        traced,
        [
            tag("stage", 0, ("embed",), ("layers", (0, 2))),
            tag("stage", 1, ("layers", (2, None)), ("head",)),
            tag("part", 7, ("layers", 3, 0)),
        ],
    )
    assert [dict(c.tags) for c in chunks] == [{"stage": 0}, {"stage": 1}, {"stage": 1, "part": 7}, {"stage": 1}]
    torch.manual_seed(0)
    batch = vectors(4)
    case = Case("plain", Plain, square, vectors, 2)
    model, loss = eager(case, batch)
    got, grads = run(traced, chunks, differentiate(traced, chunks), model, batch, halves=True)
    assert got == pytest.approx(loss, rel=1e-6)
    assert max(relative(grads[n], p.grad) for n, p in model.named_parameters() if p.grad is not None) < 1e-5


@pytest.mark.parametrize(
    ("path", "module", "length"),
    [
        (("layers",), "layers.3.attn", 1),
        (("layers", 3), "layers.3.attn", 2),
        (("layers", 2), "layers.3.attn", 0),
        (("layers", (0, 4), "attn"), "layers.3.attn", 3),
        (("layers", None), "layers.0", 2),
        (("layers", "0"), "layers.0", 2),
        (("head",), "layers.0", 0),
        (("layers", 0, "x"), "layers.0", 0),
    ],
)
def test_module_paths(path: tuple[Any, ...], module: str, length: int) -> None:
    assert matches(ModulePath(path, SPAN), ModuleName(tuple(module.split(".")))) == length


def refused(model: Callable[[], nn.Module]) -> str:
    with pytest.raises(PiperError) as found:
        trace(model, square, vectors(4))
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.helps
    return diagnostic.code


def test_models_that_cannot_be_captured_are_refused() -> None:
    class Branches(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.unsqueeze(-1).expand(-1, -1, 3))[..., 0]

    class Noise(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, torch.randperm(WIDTH)])

    assert refused(Branches) == "P0802"
    assert refused(Statistics) == "P0803"
    assert refused(Noise) == "P0804"


def test_annotations_are_checked() -> None:
    with pytest.raises(TypeError, match="identifier"), annotate("a b", 1):
        pass
    with pytest.raises(TypeError, match="integer or a string"), annotate("stage", 1.5):  # type: ignore[arg-type]
        pass


MODEL_CODES = [code for code in CODES if code.startswith("P08")]


def check_model(path: Path) -> list[str]:
    """What is wrong with a model.py: load it, trace it on its first batch, cut, differentiate and divide the batch."""
    try:
        found = load_model(path)
        program = capture(found.model, found.loss, next(iter(found.data())))
        problems = schedule(program, Source("schedule.piper", "split batch into 2 as mb\n")).problems
    except PiperError as problem:
        problems = problem.diagnostics
    return [d.code for d in problems]


@pytest.mark.parametrize("code", MODEL_CODES)
def test_pages_about_models_are_true(code: str, tmp_path: Path) -> None:
    found = page(code)
    assert found.title == f"{code}: {CODES[code]}"
    assert {role for role, _ in found.models()} == {"failing", "repaired"}
    for role, text in found.models():
        path = tmp_path / "model.py"
        path.write_text(text)
        assert check_model(path) == ([code] if role == "failing" else []), role


@pytest.mark.parametrize(
    ("text", "line", "label"),
    [
        ("import torch\n\nx = 1 +\n", 3, "SyntaxError"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("", 1, ""),
    ],
)
def test_a_broken_model_file_points_at_its_line(text: str, line: int, label: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(PiperError) as found:
        load_model(path)
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0801"
    assert diagnostic.span is not None
    assert diagnostic.span.first.line == line
    assert label in diagnostic.label


class Doubled(nn.Module):
    """Two weights whose gradients are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first + self.second)


def test_every_gradient_has_a_tensor_of_its_own() -> None:
    """Optimizers such as SGD with Nesterov momentum may change them in place."""
    traced = trace(Doubled, square, vectors(4))
    (chunk,) = cut(traced)
    (pieces,) = differentiate(traced, [chunk])
    assert pieces.B is not None
    values = {("weight", 0): torch.ones(WIDTH), ("weight", 1): torch.ones(WIDTH)} | {
        ("batch", i): t for i, t in enumerate(vectors(4))
    }
    with torch.no_grad():
        values |= pieces.F.run({slot: values[slot] for slot in pieces.F.inputs}) | {("grad_output", 0): torch.ones(())}
        gave = pieces.B.run({slot: values[slot] for slot in pieces.B.inputs})
    first, second = gave["grad_weight", 0], gave["grad_weight", 1]
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


class Copied(nn.Module):
    """Layers that are copies of one, as nn.TransformerEncoder makes them, with a buffer whose numbers are known, and
    converted after a weight was tied."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        layer.register_buffer("scale", torch.tensor([0.5]))
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.layers[0].double()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        for layer in self.layers:
            x = layer(x) * layer.scale
        return x


@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_copied_and_converted_modules_are_of_one_mode() -> None:
    """A copy of the mode would free the memory of its tensors twice."""
    given, target = vectors(4)
    traced = trace(Copied, square, (given, target.double()))
    assert {weight.fake.dtype for weight in traced.weights.values()} == {torch.float64}
    assert {id(weight.fake.fake_mode) for weight in traced.weights.values()} == {id(traced.mode)}
    assert {weight.aliases for weight in traced.weights.values()} == {(), ("layers.2.weight",)}
    assert torch.Tensor.__deepcopy__.__module__ == "torch._tensor"
