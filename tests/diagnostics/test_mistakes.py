"""Mistakes that only a model can show: each gives one diagnostic, at its line, with a help, and says which part of the
model is meant."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from piperlang.cli.main import main

torch.set_num_threads(1)
HERE = "# here"
"""Marks the line that a diagnostic must point at, in the script or in the model."""


@dataclass(frozen=True)
class Mistake:
    name: str
    code: str
    script: str
    words: tuple[str, ...]
    """What its message, label, notes and helps must say."""
    module: str = ""
    """The part of the model that its notes must name."""
    model: str = ""
    options: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        return {"model.py": self.model or CHAIN, "schedule.piper": self.script}

    @property
    def place(self) -> tuple[str, int]:
        """The file and the line that is marked."""
        found = [
            (name, number)
            for name, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if line.endswith(HERE)
        ]
        (place,) = found
        return place


# ------------------------------------------------------------------------------------------------------------ models

HEAD = (
    "from collections import OrderedDict\n\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as f\n"
)
LOSS = "def loss(output, target):\n    return f.mse_loss(output, target)\n"
DATA = "def data():\n    while True:\n        yield torch.randn(8, 4), torch.randn(8, 4)\n"
LAYERS = "nn.Sequential(OrderedDict(embed=nn.Linear(4, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 4)))"


def written(
    model: str = f"def model():\n    return {LAYERS}\n", loss: str = LOSS, data: str = DATA, more: str = ""
) -> str:
    """A model.py."""
    return "\n\n".join(part for part in (HEAD, model, loss, data, more) if part)


def forward(expression: str) -> str:
    """A model.py whose middle layer, `body`, computes the expression of x and of its own layer."""
    layer = (
        "class Layer(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer ="
        f" nn.Linear(4, 4)\n\n    def forward(self, x):\n        return {expression}\n"
    )
    return written(f"{layer}\n\ndef model():\n    return {LAYERS.replace('body=nn.Linear(4, 4)', 'body=Layer()')}\n")


CHAIN = written()
TIED = written(f"def model():\n    net = {LAYERS}\n    net.head.weight = net.embed.weight\n    return net\n")
NINE = CHAIN.replace("randn(8, 4)", "randn(9, 4)")
ADAFACTOR = written(more="def optimizer(params):\n    return torch.optim.Adafactor(params)\n")

# ----------------------------------------------------------------------------------------------------------- scripts

STAGES = "tag stage=0 at embed\ntag stage=1 at body\ntag stage=2 at head\n"
PIPELINE = f"mesh gpu = pp: 3\n{STAGES}for s in range(3):\n    place [stage=s] on gpu[pp=s]\n"
TOGETHER = f"mesh gpu = dp: 2\n{STAGES}place [stage=*] on gpu\n"
THREE = TOGETHER.replace("dp: 2", "dp: 3")
CIRCLE = """\
order on gpu[pp=0]:
    repeat 2: [stage=0, pass=F, mb=next], [stage=0, pass=B, mb=next]  # here
order on gpu[pp=1]:
    repeat 2: [stage=1, pass=F, mb=next]
    repeat 2: [stage=1, pass=B, mb=next]
"""
AROUND = (
    "F[stage=0, mb=1]",
    "send.F[stage=0, mb=1]",
    "recv.F[stage=1, mb=1]",
    "F[stage=1, mb=1]",
    "B[stage=1, mb=0]",
    "send.B[stage=1, mb=0]",
    "recv.B[stage=0, mb=0]",
    "B[stage=0, mb=0]",
)
OTHER_MESH = TOGETHER.replace("\n", "\nmesh other = dp: 2\n", 1)
OTHER_PART = f"mesh gpu = pp: 2, dp: 2\n{STAGES}place [stage=*] on gpu[pp=0]\nreplicate [stage=*] over gpu.dp\n"

PLACES = [
    Mistake(
        "chunk without a place",
        "P0402",
        f"mesh gpu = pp: 2  # here\n{STAGES}place [stage=0:2] on gpu[pp=0]\n",
        ("stage=2 is not placed", "`place [stage=2] on ...`"),
        "head",
    ),
    Mistake(
        "axis without a use for one chunk",
        "P0404",
        TOGETHER.replace("on gpu\n", "on gpu  # here\n") + "replicate [stage=0:2] over gpu.dp\n",
        ("stage=2 does not use device axis `dp`", "gpu[dp=0]"),
        "head",
    ),
    Mistake(
        "axis without a use for any chunk",
        "P0404",
        TOGETHER.replace("on gpu\n", "on gpu  # here\n"),
        ("stage=0; stage=1; stage=2 do not use device axis `dp`", "gpu.dp"),
        "body",
    ),
    Mistake(
        "axis used twice for one chunk",
        "P0409",
        f"{TOGETHER}replicate [stage=*] over gpu.dp\nshard [stage=1] over gpu.dp with style=columns  # here\n",
        ("stage=1", "used twice"),
        "body",
    ),
    Mistake(
        "axis used twice at once",
        "P0409",
        f"{TOGETHER}replicate [stage=*] over gpu.dp, gpu.dp  # here\n",
        ("gpu.dp", "twice"),
    ),
    Mistake(
        "axis of another mesh",
        "P0404",
        f"{OTHER_MESH}replicate [stage=*] over other.dp  # here\n",
        ("other.dp", "gpu.dp"),
        "embed",
    ),
    Mistake(
        "axis along which the chunk does not lie",
        "P0404",
        f"{OTHER_PART}replicate [stage=0] over gpu.pp  # here\n",
        ("gpu.pp", "gpu[pp=0]"),
        "embed",
    ),
    Mistake(
        "ordered where it is not placed",
        "P0403",
        f"{PIPELINE}order on gpu[pp=0]:\n    [stage=1, pass=F]  # here\n",
        ("stage=1 does not run on gpu[pp=0]", "gpu[pp=1]"),
        "body",
    ),
]
BATCHES = [
    Mistake(
        "batch not divisible by a split",
        "P0412",
        "split batch into 3 as mb  # here\n",
        ("batch size 8 is not divisible by 3", "split into 2"),
    ),
    Mistake(
        "batch not divisible by two splits",
        "P0412",
        "split batch into 4 as mb\nsplit batch into 4 as part  # here\n",
        ("batch size 8 is not divisible by 4 * 4", "already split into 4", "split into 2"),
    ),
    Mistake(
        "batch not divisible by an axis",
        "P0412",
        f"{THREE}replicate [stage=*] over gpu.dp  # here\n",
        ("batch size 8 is not divisible by 3", "1 microbatch,", "3 devices", "stage=0"),
        "embed",
    ),
    Mistake(
        "batch not divisible by split and axis",
        "P0412",
        TOGETHER.replace("dp: 2", "dp: 4") + "split batch into 4 as mb\nreplicate [stage=*] over gpu.dp  # here\n",
        ("batch size 8 is not divisible by 16", "4 microbatches", "4 devices", "stage=0"),
        "embed",
    ),
    Mistake(
        "uneven split, and orders that name its pieces",
        "P0412",
        f"{PIPELINE}split batch into 3 as mb  # here\norder on gpu[pp=0]:\n    repeat 3: [stage=0, pass=F, mb=next]\n",
        ("batch size 8 is not divisible by 3", "split into 2"),
    ),
    Mistake(
        "model that mixes samples, split",
        "P0805",
        "split batch into 2 as mb  # here\n",
        ("cannot be divided", "mean over the samples"),
        "body",
        forward("self.layer(x - x.mean(0))"),
    ),
    Mistake(
        "model that mixes samples, replicated",
        "P0805",
        f"{TOGETHER}replicate [stage=*] over gpu.dp  # here\n",
        ("cannot be divided", "along the batch dimension"),
        "body",
        forward("self.layer(x).softmax(0)"),
    ),
]
SHARDS = [
    Mistake(
        "shard of a dimension that does not divide",
        "P0411",
        f"{THREE}shard [stage=1] over gpu.dp with style=columns  # here\nreplicate [stage!=1] over gpu.dp\n",
        ("style=columns", "dimension 0", "[4, 4]", "not divisible by 3", "a number of devices that divides 4"),
        "body",
        NINE,
    ),
    Mistake(
        "shard that would communicate inside",
        "P0411",
        "mesh gpu = tp: 2\ntag part=0 at embed, body\ntag part=1 at head\nplace [part=*] on gpu\n"
        "shard [part=0] over gpu.tp with style=columns  # here\nreplicate [part=1] over gpu.tp\n",
        ("needs communication between the devices", "tag this part separately"),
        "body",
    ),
    Mistake(
        "shard by experts of a chunk without experts",
        "P0411",
        f"{TOGETHER}shard [stage=1] over gpu.dp  # here\nreplicate [stage!=1] over gpu.dp\n",
        ("three or more dimensions", "style=columns"),
        "body",
    ),
    Mistake(
        "tied weight divided in two ways",
        "P0414",
        f"{TOGETHER}shard [stage=0] over gpu.dp with style=columns\nreplicate [stage!=0] over gpu.dp  # here\n",
        ("embed.weight", "stage=0", "stage=2", "two ways"),
        "head",
        TIED,
    ),
    Mistake(
        "optimizer that needs whole weights",
        "P0601",
        f"{TOGETHER}replicate [stage=*] over gpu.dp with states=sharded  # here\n",
        ("Adafactor", "AdamW", "partition=weights"),
        "",
        ADAFACTOR,
        ("--numerics",),
    ),
]
ORDERS = [
    Mistake(
        "orders of two devices that wait for each other",
        "P0501",
        f"{PIPELINE}split batch into 2 as mb\n{CIRCLE}",
        AROUND,
    ),
    Mistake(
        "chain against the data flow",
        "P0501",
        f"{PIPELINE}order [stage=1, pass=F] -> [stage=0, pass=F]  # here\n",
        ("F[stage=1]", "F[stage=0]", "send.F[stage=0]", "recv.F[stage=1]"),
    ),
    Mistake(
        "chain against an order of the library",
        "P0501",
        f"from std.pipeline import gpipe\n{PIPELINE}split batch into 2 as mb\ngpipe(gpu, 3, 2)\n"
        "order [stage=0, pass=B, mb=0] -> [stage=0, pass=F, mb=1]  # here\n",
        ("F[stage=0, mb=1]", "B[stage=0, mb=0]"),
    ),
    Mistake(
        "chain that comes back to itself",
        "P0501",
        f"{PIPELINE}order [stage=1, pass=F] -> [stage=1]  # here\n",
        ("F[stage=1]", "before itself"),
    ),
]
SELECTORS = [
    Mistake(
        "stage that the model does not have",
        "P0302",
        f"{PIPELINE}recompute [stage=3]  # here\n",
        ("the model has stage=0 to stage=2", "did you mean `stage=2`?"),
    ),
    Mistake(
        "stage that the script computes",
        "P0302",
        f"{PIPELINE}let last = 2\nrecompute [stage=last + 1]  # here\n",
        ("stage is 3 here, and the model has stage=0 to stage=2",),
    ),
    Mistake(
        "tag that the model does not have",
        "P0302",
        f"{PIPELINE}recompute [stag=1]  # here\n",
        ("no", "`stag`", "did you mean `stage`?"),
    ),
    Mistake(
        "communication that there is none of",
        "P0302",
        f'{PIPELINE}stream [comm=all_to_all] on "x"  # here\n',
        ("the communication so far is recv, send",),
    ),
    Mistake(
        "communication that has other tags",
        "P0302",
        f'{PIPELINE}stream [comm=send, stage=2, pass=F] on "x"  # here\n',
        ("not with these tags",),
    ),
    Mistake("path of no module", "P0306", "tag stage=0 at embd  # here\n", ("`embd`", "did you mean `embed`?")),
    Mistake(
        "path of no module, far from any",
        "P0306",
        "tag stage=0 at layers[0:2]  # here\n",
        ("`layers[0:2]`", "body, embed, head"),
    ),
    Mistake(
        "path of no module, and a place for its tag",
        "P0306",
        f"{PIPELINE}place [stage=0] on gpu[pp=0]\n".replace("embed", "embd  # here"),
        ("did you mean `embed`?",),
    ),
    Mistake(
        "tag after place",
        "P0413",
        "mesh gpu = pp: 1\ntag stage=0 at embed\nplace [pass=*] on gpu\ntag stage=1 at body  # here\n",
        ("`tag` after a directive that uses chunks", "move the tag before this directive"),
    ),
    Mistake(
        "tag after place, and a place for it",
        "P0413",
        "mesh gpu = pp: 2\ntag stage=0 at embed\nplace [stage=0] on gpu[pp=0]\ntag stage=1 at body  # here\nplace"
        " [stage=1] on gpu[pp=1]\n",
        ("`tag` after a directive that uses chunks", "move the tag before this directive"),
    ),
]
MODELS = [
    Mistake("syntax", "P0801", "", ("SyntaxError",), model=f"{CHAIN}\nx = = 1  # here\n"),
    Mistake(
        "no loss",
        "P0801",
        "",
        ("no function `loss`", "did you mean `los`?"),
        model=CHAIN.replace("def loss", "def los").replace("OrderedDict\n", "OrderedDict  # here\n", 1),
    ),
    Mistake(
        "model fails",
        "P0801",
        "",
        ("ValueError: no such size",),
        model=written('def model():\n    raise ValueError("no such size")  # here\n'),
    ),
    Mistake(
        "loss fails",
        "P0802",
        "",
        ("no attribute 'mse_los'",),
        model=CHAIN.replace("mse_loss(output, target)", "mse_los(output, target)  # here"),
    ),
    Mistake(
        "loss is a vector",
        "P0807",
        "",
        ("instead of being a scalar",),
        model=CHAIN.replace(
            "target):\n    return f.mse_loss(output, target)", "target):  # here\n    return (output - target).square()"
        ),
    ),
    Mistake(
        "data fails",
        "P0801",
        "",
        ("FileNotFoundError", "nothing.txt"),
        model=written(data='def data():\n    return open("nothing.txt")  # here\n'),
    ),
    Mistake(
        "data fails, numerically",
        "P0801",
        "",
        ("FileNotFoundError", "nothing.txt"),
        model=written(data='def data():\n    return open("nothing.txt")  # here\n'),
        options=("--numerics",),
    ),
    Mistake(
        "data gives nothing",
        "P0801",
        "",
        ("yields no batches", "(input, target)"),
        model=written(data="def data():  # here\n    yield from ()\n"),
    ),
    Mistake(
        "data gives nothing, numerically",
        "P0801",
        "",
        ("yields no batches", "(input, target)"),
        model=written(data="def data():  # here\n    yield from ()\n"),
        options=("--numerics",),
    ),
    Mistake(
        "data gives no pairs",
        "P0801",
        "",
        ("(input, target)",),
        model=written(data="def data():  # here\n    yield torch.randn(8, 4)\n"),
    ),
    Mistake(
        "data gives no tensors",
        "P0801",
        "",
        ("tensor",),
        model=written(data="def data():  # here\n    yield [1.0], [2.0]\n"),
    ),
    Mistake(
        "optimizer fails",
        "P0801",
        "",
        ("no attribute 'Adamm'",),
        model=written(more="def optimizer(params):\n    return torch.optim.Adamm(params)  # here\n"),
        options=("--numerics",),
    ),
    Mistake(
        "model that cannot be exported",
        "P0802",
        "",
        ("torch.export", "NumPy"),
        "",
        forward("self.layer(torch.tensor(x.numpy()))  # here"),
    ),
    Mistake(
        "branch on values",
        "P0802",
        "",
        ("data-dependent", "torch.where"),
        "",
        forward("self.layer(x) if x.sum() > 0 else x  # here"),
    ),
    Mistake(
        "number taken out of a tensor", "P0802", "", ("item",), "", forward("self.layer(x) * x.sum().item()  # here")
    ),
    Mistake(
        "branch on the size of the batch",
        "P0806",
        "",
        ("batch size",),
        "body",
        forward("self.layer(x) if x.shape[0] < 10 else self.layer(x).tanh()  # here"),
    ),
]
MISTAKES = [*PLACES, *BATCHES, *SHARDS, *ORDERS, *SELECTORS, *MODELS]

# ------------------------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Answer:
    status: int
    diagnostics: list[dict[str, Any]]
    said: str
    """On standard error."""

    def only(self) -> dict[str, Any]:
        (diagnostic,) = self.diagnostics
        return diagnostic


@cache
def answer(mistake: Mistake) -> Answer:
    """What `piperc check` says, in a folder that holds nothing but the two files."""
    out, err = io.StringIO(), io.StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(out), redirect_stderr(err):
        for name, text in mistake.files.items():
            Path(name).write_text(text)
        status = main(["check", *mistake.files, *mistake.options, "--format", "json"])
    return Answer(status, json.loads(out.getvalue())["diagnostics"], err.getvalue())


def every(mistakes: Iterable[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.name)


@every(MISTAKES)
def test_one_diagnostic_that_says_what_and_how_to_repair_it(mistake: Mistake) -> None:
    found = answer(mistake)
    assert found.status == 1
    diagnostic = found.only()
    assert diagnostic["code"] == mistake.code
    assert diagnostic["helps"]
    text = "\n".join(
        [
            diagnostic["message"],
            diagnostic["label"],
            *diagnostic["notes"],
            *diagnostic["helps"],
            *(label["label"] for label in diagnostic["also"]),
        ]
    )
    assert [word for word in mistake.words if word not in text] == []
    assert (diagnostic["file"], diagnostic.get("line")) == mistake.place
    if mistake.module:
        notes = diagnostic["notes"]
        assert any(mistake.module in note.replace(",", " ").replace(".", " ").split() for note in notes), notes


def test_the_text_for_people() -> None:
    """All of it, once."""
    mistake = next(mistake for mistake in MISTAKES if mistake.name == "axis without a use for one chunk")
    err = io.StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stderr(err):
        for name, text in mistake.files.items():
            Path(name).write_text(text)
        assert main(["check", *mistake.files]) == 1
    assert (
        err.getvalue() == "error[P0404]: stage=2 does not use device axis `dp`\n"
        " --> schedule.piper:5:1\n"
        "  |\n"
        "5 | place [stage=*] on gpu  # here\n"
        "  | ^^^^^^^^^^^^^^^^^^^^^^ 2 devices along it would compute the same\n"
        "  = note: in the model: head\n"
        "  = help: `replicate` or `shard` it over gpu.dp, or place it on one of them: gpu[dp=0]\n"
        "\n"
        "1 error; for details, run `piperc explain P0404`\n"
    )


def test_a_circle_is_named_node_by_node() -> None:
    """Each node waits for the next, and the last for the first."""
    mistake = next(mistake for mistake in MISTAKES if mistake.words is AROUND)
    steps = [note.split(" before ") for note in answer(mistake).only()["notes"]]
    assert [later for _, later in steps] == [earlier for earlier, _ in steps[1:] + steps[:1]]
    assert {name.partition(" on ")[0] for name, _ in steps} == set(AROUND)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "model.py"], "SCHEDULE.piper is missing"),
        (["check", "model.py", "schedule.piper", "schedule.piper"], "expected one script with a model, not 2"),
        (["check", "schedule.piper", "--numerics"], "needs a model"),
        (["check", "schedule.piper", "model.py"], "the model must come before the schedule"),
        (["check", "model.py", "nothing.piper"], "nothing.piper"),
        (["check", "nothing.py", "schedule.piper"], "nothing.py"),
        (["check", "model.py", "schedule.piper", "-p", "ranks=2"], "`ranks`"),
        (["graph", "model.py", "schedule.piper", "-p", "ranks=2"], "`ranks`"),
        (["graph", "model.py", "schedule.piper", "--after", "-1"], "--after must be at least 0, not -1"),
        (["graph", "model.py", "schedule.piper", "--svg", "nowhere/graph.svg"], "nowhere/graph.svg"),
        (["graph", "schedule.piper", "model.py"], "the model must come before the schedule"),
        (["graph", "schedule.piper", "schedule.piper"], "is not a Python file"),
    ],
    ids=" ".join,
)
def test_mistakes_on_the_command_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(CHAIN)
    Path("schedule.piper").write_text(PIPELINE)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "error[P09" in said
    assert says in said


def test_a_refused_optimizer_is_not_ok() -> None:
    """What fails only when it runs fails the check too."""
    mistake = next(mistake for mistake in MISTAKES if mistake.code == "P0601")
    out = io.StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(out):
        for name, text in mistake.files.items():
            Path(name).write_text(text)
        assert main(["check", *mistake.files, "--numerics", "--json"]) == 1
    assert json.loads(out.getvalue())["ok"] is False
