"""Random legal schedules, and the command that tries them: what it draws, what it says of a fault, how it makes a
script smaller."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from piperlang.capture.program import capture
from piperlang.cli.main import main
from piperlang.fuzz.shrink import shrink
from piperlang.fuzz.traits import Traits
from piperlang.fuzz.write import Mesh, write
from piperlang.ir.layout import devices_of
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.matrix import program
from tests.support import ROOT
from tests.support.equivalence import compiled
from tests.support.models import WIDTH, square, vectors
from tests.support.often import one_in

MODEL = str(ROOT / "examples" / "01_mlp" / "model.py")


@cache
def traits(model: str) -> Traits:
    return Traits(program(model))


def test_a_seed_gives_one_script() -> None:
    assert write(traits("mlp-4"), 7) == write(Traits(program("mlp-4")), 7)
    assert len({write(traits("mlp-4"), seed) for seed in range(10)}) == 10


PP, TP = (("pp", 2),), (("pp", 1), ("tp", 2))
DRAWN = {
    ("mlp-4", None): (
        "style=columns",
        "interleaved",
        "zbv(",
        "params=sharded",
        "grads=sharded",
        "recompute",
        "policy=cheap",
        "offload",
        "split batch",
        "split [",
        "pass=W] on",
        "comm=",
        "ctas=",
        "mesh view",
        "] on view[a={",
        "mb=0:",
        "order on",
        "] & [",
        "dp=0:2",
        "=1]",
        ", dp: 2, tp: 2",
    ),
    ("mlp-4", PP): ("zbv(", "dualpipev("),
    ("mlp-2", PP): ("gpipe(", "one_f_one_b(", "zero_bubble(", "mirror("),
    ("moe-2", TP): ("style=experts",),
    ("gpt-2", TP): ("style=rows", "style=sequence"),
}


@pytest.mark.parametrize(("model", "mesh"), [pytest.param(*each, marks=pytest.mark.slow) for each in DRAWN])
def test_everything_is_drawn(model: str, mesh: Mesh | None) -> None:
    """Experts where there are experts, features and sequences elsewhere; the library's schedules; both directions; two
    steps at once."""
    left = set(DRAWN[model, mesh])
    for seed in range(200):
        script = write(traits(model), seed, mesh)
        left = {word for word in left if word not in script}
        if not left:
            return
    assert left == set()


@pytest.mark.parametrize("mesh", one_in(4, [(("pp", 2), ("dp", 2)), (("dp", 2), ("tp", 2)), (("pp", 4),)]))
def test_a_mesh_is_kept_to(mesh: Mesh) -> None:
    text = ", ".join(f"{axis}: {size}" for axis, size in mesh)
    for seed in range(12):
        script = write(traits("mlp-4"), seed, mesh)
        assert f"mesh gpu = {text}\n" in script
        compiled(program("mlp-4"), script)


def test_devices_are_a_limit() -> None:
    for seed in range(15):
        graph, _ = compiled(program("mlp-4"), write(traits("mlp-4"), seed, devices=4))
        assert max(device for template in graph.templates for device in devices_of(template.where)) < 4


def test_a_model_without_stages_is_cut_by_its_modules() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = (
                nn.Linear(WIDTH, WIDTH),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
            )

        def forward(self, x: object) -> object:
            return self.layers(self.first(x))

    found = Traits(capture(Plain, square, vectors(8)))
    assert found.tags == (
        'tag stage=0 at "first"',
        'tag stage=1 at "layers.0"',
        'tag stage=2 at "layers.1"',
        'tag stage=3 at "layers.2"',
    )
    assert found.stages == (0, 1, 2, 3)
    assert any("pp: 4" in write(found, seed) or "pp: 2" in write(found, seed) for seed in range(5))


@pytest.mark.slow
def test_stages_that_share_weights_are_known() -> None:
    assert traits("gpt-2").tied
    assert not traits("mlp-4").tied
    assert {part.style for part in traits("moe-2").parts} == {"experts", "columns", "rows", "sequence"}
    assert "experts" not in {part.style for part in traits("gpt-2").parts}


# ------------------------------------------------------------------------------------------------------------ smaller


def test_only_what_it_takes_to_fail_is_left() -> None:
    script = "a\nb\norder on gpu:\n    x\n    y\n    z\nc\norder on gpu:\n    x\nd\n"
    tried: list[str] = []

    def fails(text: str) -> bool:
        tried.append(text)
        return "    y\n" in text and "c\n" in text

    assert shrink(script, fails) == "order on gpu:\n    y\nc\n"
    assert all("order on gpu:\n" in text or "    " not in text for text in tried), "no step stands outside of an order"
    assert shrink(script, fails, limit=0) == script


# ------------------------------------------------------------------------------------------------------------ command


@pytest.mark.parametrize(("executor", "count"), [("graph", 3), ("inline", 2)])
def test_fine(executor: str, count: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(
            [
                "fuzz",
                MODEL,
                "--count",
                str(count),
                "--seed",
                "3",
                "--devices",
                "4",
                "--executor",
                executor,
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said[:-1]] == [
        f"seed {seed}: matches plain PyTorch" for seed in range(3, 3 + count)
    ]
    assert said[-1] == f"{count} schedules, 0 failed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_fine_on_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(
            [
                "fuzz",
                MODEL,
                "--count",
                "5",
                "--mesh",
                "pp=2,dp=2",
                "--executor",
                "ray",
                "--out",
                str(tmp_path),
                "--json",
            ]
        )
        == 0
    )
    assert [json.loads(line)["outcome"] for line in capsys.readouterr().out.splitlines()] == ["same"] * 5


def test_a_fault_is_found_and_made_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Losses of parts of the batch that count for too much: all it takes is to divide the batch."""
    monkeypatch.setattr(GraphInterpreter, "_share", lambda self, node: self.graph.model.samples / node.template.samples)
    arguments = ["fuzz", MODEL, "--count", "1", "--seed", "1", "--out", str(tmp_path / "new")]
    assert main([*arguments, "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["seed"], row["outcome"]) == (1, "different")
    small = Path(row["file"])
    assert small.read_text() == row["small"]
    assert (tmp_path / "new" / "fuzz-1.piper").read_text() == row["script"]
    assert len(row["small"].splitlines()) < len(row["script"].splitlines()) / 2
    assert main(["check", MODEL, str(small), "--numerics"]) == 1, "fails alone too"
    capsys.readouterr()
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert said.startswith("seed 1: DIFFERENT (")
    assert "".join(f"    {line}\n" for line in row["small"].splitlines()) in said
    monkeypatch.undo()
    assert main(["check", MODEL, str(small), "--numerics"]) == 0


def test_an_exception_of_the_compiler_is_a_fault_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("piperlang.fuzz.attempt.planned", broken)
    assert main(["fuzz", MODEL, "--count", "1", "--out", str(tmp_path), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["outcome"], row["what"]) == ("raised", "KeyError: 'lost'")
    assert row["small"] == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "pp"], "--mesh pp"),
        (["--mesh", "pp=2,pp=2"], "invalid mesh"),
        (["--mesh", "dp=0"], "invalid mesh"),
        (["--mesh", "dp=7"], "is not divisible by 7 devices"),
        (["--count", "0"], "--count must be at least 1, not 0"),
        (["--devices", "0"], "--devices must be at least 1, not 0"),
        (["--mesh", "pp=2", "--devices", "4"], "cannot be combined"),
        (["--counts=3"], "did you mean `--count`?"),
    ],
)
def test_what_is_not_understood(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", MODEL, *arguments]) == 2
    assert says in capsys.readouterr().err
