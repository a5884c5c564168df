"""`piperc simulate`, `view`, `compare` and `profile`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from piperlang.cli.main import main
from piperlang.cli.profile import _slower
from piperlang.simulate.profile import load
from tests.support import ROOT
from tests.support.jobs import Lent
from tests.support.traced import traced_once

MODEL = str(ROOT / "examples" / "01_mlp" / "model.py")
ONE, OTHER = (str(ROOT / "examples" / "01_mlp" / name) for name in ("both.piper", "pipeline.piper"))


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    with traced_once():
        yield


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", MODEL, ONE, "--machine", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["devices"] == 4
    assert 0 < data["seconds"] < 1
    assert sum(part["seconds"] for part in data["critical_path"]) == pytest.approx(data["seconds"])
    assert any(part["line"] for part in data["critical_path"])
    assert main(["simulate", MODEL, ONE]) == 0
    assert "simulated, on NVIDIA H100" in capsys.readouterr().out


def test_simulate_draws_the_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As wide as the terminal, above the numbers."""
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["simulate", MODEL, OTHER, "--machine", "cpu"]) == 0
    drawn, _, numbers = capsys.readouterr().out.partition("\n\n")
    ruler, *lines, about = drawn.splitlines()
    assert ruler.endswith("| idle")
    assert "us" in ruler or "ms" in ruler
    assert all(len(line) <= 72 for line in (ruler, *lines))
    devices = [line for line in lines if "device " in line.split("|")[0]]
    assert [line.split("|")[0].strip() for line in devices] == ["device 0", "device 1"]
    assert all(re.search(r"F.*B", line.split("|")[1], re.IGNORECASE) for line in devices)
    assert sum(line.startswith("    comm |") for line in lines) == 2
    assert about.startswith("a column is ")
    assert numbers.startswith("step ")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["simulate", MODEL, OTHER, "--machine", "cpu"]) == 0
    colored = capsys.readouterr().out
    assert "\x1b[" in colored
    assert "\x1b[" not in drawn


@pytest.mark.parametrize("kind", ["html", "svg", "json"])
def test_view(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"step.{kind}"
    assert main(["view", MODEL, ONE, "-o", str(path)]) == 0
    assert "stage=0" in path.read_text()


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "both.html"
    assert main(["compare", ONE, OTHER, "--model", MODEL, "--machine", "cpu", "-o", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["schedule", ONE, OTHER]
    assert lines[3] == "simulated on CPU workers of one machine"
    assert path.read_text().count("both.piper") >= 1
    assert lines[3] in path.read_text()
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["compare", ONE, OTHER, "--model", MODEL, "--machine", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 90 for line in lines)
    assert [line.split()[0][-10:] for line in lines[1:3]] == [ONE[-10:], OTHER[-10:]]
    assert lines[1].startswith("…")


def test_a_machine_is_no_control_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    described = "".join(f"{key} = {text}\n" for key, text in GOOD.items())
    for name, shown in (('name = "\\u001b[31mred\\u0007"\n', "\\x1b[31mred\\x07"), ("", "mine.toml")):
        path.write_text(name + described)
        assert main(["simulate", MODEL, ONE, "--machine", str(path)]) == 0
        assert f"simulated, on {shown}\n" in capsys.readouterr().out
        assert main(["view", MODEL, ONE, "--machine", str(path), "-o", str(tmp_path / "step.svg")]) == 0
        assert f"simulated on {shown}<" in (tmp_path / "step.svg").read_text()


def test_a_parameter_goes_to_the_scripts_that_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(OTHER).read_text()
    other = tmp_path / "other.piper"
    other.write_text(f"{text}param unused = 1\n")
    words = ["compare", OTHER, str(other), "--model", MODEL, "--machine", "cpu", "--json"]
    assert main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main([*words, "-p", "unused=2"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main([*words, "-p", "unused=many"]) == 2
    assert "other.piper" in capsys.readouterr().err
    assert main([*words, "-p", "unusedd=2"]) == 2
    said = capsys.readouterr().err
    assert "error[P0903]: no script has a parameter `unusedd`" in said
    assert f"{other} has" in said


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(1.207, "recording made it 20.7% longer"), (0.793, "what recording adds is less than the noise")],
)
def test_what_recording_adds(ratio: float, said: str) -> None:
    assert _slower(ratio) == said


def test_compare_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Exposed is of one device, over its streams: no more than the time in which it does not compute."""
    assert main(["compare", ONE, OTHER, "--model", MODEL, "--machine", "cpu", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert main(["simulate", MODEL, row["script"], "--machine", "cpu", "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert 0 < max(alone["exposed"].values()) <= row["exposed"] <= alone["idle"]["max"] * alone["seconds"]
        assert type(row["bytes"]) is int


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate", MODEL, ONE, "--machine", "h1000"], "there is no machine `h1000`"),
        (["simulate", MODEL, ONE, "--profile", "none.json"], "none.json"),
        (["view", MODEL, ONE, "-o", "step.png"], "unknown kind of file"),
        (["view", MODEL, ONE, OTHER, "-o", "step.svg"], "shows one schedule"),
        (["compare", ONE, "--model", MODEL], "one schedule cannot be compared"),
        (["profile", MODEL, ONE, "--backend", "threads"], "`threads` is not one of gloo, nccl"),
        (["orders", OTHER, "--cost", "F=2", "--json"], "`--cost` and `--json` cannot be combined"),
        (["orders", OTHER, "--cost", "F=2", "--csv"], "`--cost` and `--csv` cannot be combined"),
        (["orders", OTHER, "--cost", "F=2,F=3"], "the cost of F is given twice"),
        (["compare", ONE, OTHER, "--model", MODEL, "-p", "nothing=4"], "no script has a parameter `nothing`"),
        (["view", MODEL, ONE, OTHER, "-p", "nothing=4"], "no script has a parameter `nothing`"),
        (["orders", ONE, "--svg", "/nowhere/o.svg"], "cannot be written"),
        (["orders", OTHER, "--svg", "o.html"], "unknown kind of file"),
        (["orders", OTHER, "--cost", "stage9=2"], "no pass in an order has stage=9"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in (1, 2)
    assert said in capsys.readouterr().err


GOOD = {
    "flops": "{ float32 = 1e12 }",
    "memory_bandwidth": "1e12",
    "memory": "1e12",
    "node": "{ bandwidth = 1e12, latency = 0 }",
    "network": "{ bandwidth = 1e12, latency = 0 }",
}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("flops", "{ bfloat16 = 1e15 }", "the model computes in float32, and mine.toml has no rate for it"),
        ("flops", "{ float33 = 1e12 }", "`flops` has `float33`"),
        ("flops", "{ float32 = 1e-300 }", "`flops.float32` is 1e-300, and must be between"),
        ("host", "1e308", "`host` is 1e+308, and must be between"),
        ("node", "3", "`node` must be a table"),
        ("node", "{ bandwidth = 1e12, latency = 0, foo = 1 }", "`node` must be a table"),
        ("rendezvous", "1", "`rendezvous` must be true or false"),
    ],
)
def test_a_machine_that_cannot_be(
    field: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{key} = {text}\n" for key, text in {**GOOD, field: value}.items()))
    assert main(["simulate", MODEL, ONE, "--machine", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "known", "needed"),
    [
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16-true", "float32", "bfloat16"),
        ("bf16-mixed", "float16", None),  # at the same rate
        ("bf16-mixed", "bfloat16", None),  # weights are in float32, and no product is
    ],
)
def test_the_rate_of_what_a_precision_computes_in(
    precision: str, known: str, needed: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{key} = {text}\n" for key, text in {**GOOD, "flops": f"{{ {known} = 1e12 }}"}.items()))
    words = ["simulate", MODEL, ONE, "--machine", str(path), "--precision", precision]
    assert main(words) == (2 if needed else 0)
    assert not needed or f"the model computes in {needed}, and" in capsys.readouterr().err


def test_steps_of_a_run_are_recorded(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main([MODEL, OTHER, "--steps", "6", "--trace", "2", "--out", str(run), "--no-verify"]) == 0
    said = capsys.readouterr()
    assert "recorded 2 steps, beside an estimate for CPU workers" in said.out + said.err
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', (run / "trace.html").read_text(), re.S)
    assert data is not None
    drawn = json.loads(data[1])
    measured, estimated = drawn["timelines"][0], drawn["estimated"]
    assert sorted(measured["what"]) == sorted(estimated["what"])
    assert 0 < measured["length"] < 60
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
    assert main([MODEL, OTHER, "--trace", "2", "--executor", "inline"]) == 2
    assert "`--trace` records workers" in capsys.readouterr().err


def test_a_profile_predicts_another_schedule(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    assert main(["profile", MODEL, OTHER, "--steps", "3", "-o", str(path)]) == 0
    assert "measured" in capsys.readouterr().out
    found = load(path)
    assert found.passes
    assert found.steps == 1  # the shorter half of three
    assert all(seconds > 0 for seconds in found.means().values())
    assert found.transfers["message"]
    # With times that are known: passes of another number of samples are taken from them, not from nowhere.
    known = json.loads(path.read_text())
    known["passes"] = {key: [[1.0] * len(step) for step in steps] for key, steps in known["passes"].items()}
    path.write_text(json.dumps(known))
    for script, at_least in ((OTHER, 4.0), (ONE, 4.0)):
        assert main(["simulate", MODEL, script, "--profile", str(path), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert at_least < data["seconds"] < 40
        assert data["idle"]["mean"] < 0.9
    # Each recorded step counts: a device waits for the slower one of two, so that a step is longer than one of means.
    slow, fast = ([3.0], [1.0])
    some = {key: [slow, fast] if "of stage=0" in key else [fast, slow] for key in known["passes"]}
    (tmp_path / "two.json").write_text(json.dumps({**known, "passes": some}))
    assert main(["simulate", MODEL, OTHER, "--profile", str(tmp_path / "two.json"), "--json"]) == 0
    two = json.loads(capsys.readouterr().out)
    means = {**known, "passes": {key: [[2.0]] for key in some}}
    (tmp_path / "means.json").write_text(json.dumps(means))
    assert main(["simulate", MODEL, OTHER, "--profile", str(tmp_path / "means.json"), "--json"]) == 0
    mean = json.loads(capsys.readouterr().out)
    assert two["range"][0] <= two["seconds"] <= two["range"][1]
    assert two["seconds"] == pytest.approx(sum(two["range"]) / 2)
    assert mean["range"] == [mean["seconds"]] * 2
    assert two["seconds"] > 1.05 * mean["seconds"]
    assert main(["simulate", MODEL, OTHER, "--profile", str(tmp_path / "two.json")]) == 0
    assert re.search(r"step +[\d.]+ s simulated \([\d.]+ s to [\d.]+ s in 2 steps\), on", capsys.readouterr().out)
    # A pass that computes more than the one that was measured is another one, whatever else is the same.
    more = json.loads(path.read_text())
    first = next(key for key in more["passes"] if key.startswith("F of stage=0"))
    for key in [key for key in more["passes"] if "of stage=0" in key]:
        more["passes"][re.sub(r"[\d.e+]+ FLOPs", "1 FLOPs", key)] = more["passes"].pop(key)
    (tmp_path / "more.json").write_text(json.dumps(more))
    assert main(["simulate", MODEL, OTHER, "--profile", str(tmp_path / "more.json")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"not measured, and estimated from what was: B of {first[5:]}" in said
    assert main(["simulate", MODEL, OTHER, "--profile", str(tmp_path / "more.json"), "--json"]) == 0
    assert f"B of {first[5:]}" in json.loads(capsys.readouterr().out)["estimated"]
    # Nor is one of other operators, or in another precision.
    edited = path.read_text().replace("program ", "program of yesterday ")
    (tmp_path / "edited.json").write_text(edited)
    for options in (
        ["--profile", str(tmp_path / "edited.json")],
        ["--profile", str(path), "--precision", "bf16-mixed"],
    ):
        assert main(["simulate", MODEL, OTHER, *options]) == 2
        assert "the profile has no pass of this model" in capsys.readouterr().err
    good = json.loads(path.read_text())
    for key, value, why in (
        ("passes", {}, "`passes` is empty"),
        ("passes", {"F": [[-1.0]]}, "a time"),
        ("passes", {"F": [[1e308]]}, "a time"),
        ("passes", {"F": [[1.0], []]}, "`F` has no times of some of the 2 recorded steps"),
        ("passes", {"F": [[1.0]], "B": [[1.0], [1.0]]}, "`B` has no times of some of the 1 recorded steps"),
        ("passes", [], "passes"),
        ("before", float("nan"), "a time"),
        ("side_by_side", 0, "`side_by_side` is 0, and must be at least 1"),
        ("shared_devices", -1, "`shared_devices` is -1, and must be at least 0"),
        ("transfers", {"message": []}, "`transfers` has no times of `message`"),
        ("transfers", {"message": [[-5.0, 1.0]]}, "a number of bytes is negative"),
        ("version", 99, "version 99"),
    ):
        path.write_text(json.dumps({**good, key: value}))
        assert main(["simulate", MODEL, OTHER, "--profile", str(path)]) == 1, key
        said = capsys.readouterr().err
        assert "error[P0505]" in said
        assert why in said
    path.write_text(json.dumps({**good, "about": {**good["about"], "device": "\x1b[31mred"}}))
    assert main(["simulate", MODEL, OTHER, "--profile", str(path)]) == 0
    assert f"simulated, on \\x1b[31mred, as measured under {OTHER} (times.json)" in capsys.readouterr().out
    path.write_text("[" * 100_000)
    assert main(["simulate", MODEL, OTHER, "--profile", str(path)]) == 1
    path.write_text(
        json.dumps({**good, "passes": {"F of stage=0 #0, 3 weights, 2 outputs of a sample, samples: 4": [[0.1]]}})
    )
    capsys.readouterr()
    assert main(["simulate", MODEL, OTHER, "--profile", str(path)]) == 2
    assert "the profile has no pass of this model" in capsys.readouterr().err
