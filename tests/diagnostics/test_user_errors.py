"""User code that raises, or returns what cannot be used: always a diagnostic at the user's own line with a repair, and
exit code 1."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f

import piperlang
from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model, shipped
from piperlang.cli.main import main
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.plan.lower import lower
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.runtime.optimizer.optimize import default_optimizer
from tests.support.equivalence import compiled
from tests.support.jobs import Lent

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
HERE = "# here"
"""Marks the line that the diagnostic must point at."""
ON_WORKERS = "'default_worker' in __import__('sys').argv[0]"
"""True in processes that Ray starts."""

# ------------------------------------------------------------------------------------------------------ model files

HEAD = (
    "import sys\n\nimport numpy as np\nimport torch\nfrom torch import nn\n"
    "from torch.nn import functional as f\n"
    "from torch.utils.data import DataLoader, Dataset, TensorDataset\n"
)
MODEL = "def model():\n    return nn.Linear(4, 4)\n"
LOSS = "def loss(output, target):\n    return f.mse_loss(output, target)\n"
DATA = "def data():\n    while True:\n        yield torch.randn(8, 4), torch.randn(8, 4)\n"


def written(model: str = MODEL, loss: str = LOSS, data: str = DATA, more: str = "") -> str:
    return "\n\n".join(part for part in (HEAD, model, loss, data, more) if part)


def forward(*lines: str) -> str:
    """A model file whose module `blocks.1` runs these lines on x, with a layer of its own."""
    body = "".join(f"        {line}\n" for line in lines)
    return written(
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layer = nn.Linear(4, 4)\n\n    def forward(self, x):\n{body}\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList([nn.Linear(4, 4), Block()])\n\n"
        "    def forward(self, x):\n        for block in self.blocks:\n            x = block(x)\n"
        "        return x\n\n\ndef model():\n    return Net()\n"
    )


@dataclass(frozen=True)
class Mistake:
    name: str
    text: str
    code: str
    words: tuple[str, ...]
    """What message, label, notes and helps must say."""

    @property
    def line(self) -> int:
        (line,) = (number for number, text in enumerate(self.text.splitlines(), 1) if text.endswith(HERE))
        return line


def every(mistakes: Iterable[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.name)


FILES = [
    Mistake(
        "import fails",
        written(more="import no_such_module  # here"),
        "P0801",
        ("cannot be imported", "No module named 'no_such_module'", "install `no_such_module`"),
    ),
    Mistake(
        "top level raises", written(more="x = 1 / 0  # here"), "P0801", ("cannot be imported", "ZeroDivisionError")
    ),
    Mistake("top level exits", written(more="sys.exit('no GPU')  # here"), "P0801", ("SystemExit: no GPU",)),
    Mistake(
        "nothing there",
        "x = 1  # here",
        "P0801",
        (
            "no functions `model`, `loss` and `data`",
            "add `def loss(output, target): ",
            "add `def data(): yield input, target`",
        ),
    ),
    Mistake(
        "two missing",
        "from torch import nn  # here\n\n\nclass Net(nn.Module):\n    pass\n\n\ndef los(output, target):\n"
        "    return 1\n\n\ndef data():\n    yield 1\n",
        "P0801",
        (
            "no functions `model` and `loss`",
            "did you mean `los`? rename it to `loss`",
            "add `def model(): return Net()`",
        ),
    ),
    Mistake(
        "max_norm negative", written(more="max_norm = -1  # here"), "P0801", ("`max_norm` is -1", "`max_norm = 1.0`")
    ),
    Mistake(
        "max_norm a string", written(more="max_norm = '1'  # here"), "P0801", ("`max_norm` is '1'", "positive number")
    ),
    Mistake("max_norm not a number", written(more="max_norm = float('nan')  # here"), "P0801", ("`max_norm` is nan",)),
]

MODELS = [
    Mistake(
        "model forgets return",
        written("def model():  # here\n    nn.Linear(4, 4)\n"),
        "P0801",
        ("`model` returned None", "`return` is missing"),
    ),
    Mistake(
        "model returns a class",
        written("def model():  # here\n    return nn.Linear\n"),
        "P0801",
        ("the class Linear, not an instance", "`return Linear()`"),
    ),
    Mistake(
        "model returns a tuple",
        written("def model():  # here\n    return nn.Linear(4, 4), 1\n"),
        "P0801",
        ("`model` returned a tuple of 2", "one torch.nn.Module"),
    ),
    Mistake(
        "model is a module",
        written("model = nn.Linear(4, 4)  # here\n"),
        "P0801",
        ("not a function", "`def model(): return Linear(...)`"),
    ),
    Mistake(
        "model takes an argument",
        written("def model(width):  # here\n    return nn.Linear(4, width)\n"),
        "P0801",
        ("cannot be called as `model()`", "'width'"),
    ),
    Mistake(
        "model raises",
        written("def model():\n    raise ValueError('no such size')  # here\n"),
        "P0801",
        ("`model` raised ValueError: no such size",),
    ),
    Mistake(
        "constructor raises",
        written(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layer = nn.Linear(4)  # here\n\n\ndef model():\n    return Net()\n"
        ),
        "P0801",
        ("`model` raised TypeError", "out_features"),
    ),
    Mistake(
        "constructor wants a GPU",
        written("def model():\n    return nn.Linear(4, 4).to('cuda')  # here\n"),
        "P0801",
        ("do not choose devices: piperc",),
    ),
    Mistake(
        "lazy modules",
        written("def model():  # here\n    return nn.LazyLinear(4)\n"),
        "P0801",
        ("lazy modules", "nn.Linear"),
    ),
    Mistake(
        "TorchScript",
        written("def model():  # here\n    return torch.jit.script(nn.Linear(4, 4))\n"),
        "P0801",
        ("TorchScript", "without torch.jit.script"),
    ),
    Mistake(
        "exception without a message",
        written(
            "class E(Exception):\n    def __str__(self):\n        raise KeyError\n\n\ndef model():\n    raise E()  #"
            " here\n"
        ),
        "P0801",
        ("`model` raised E",),
    ),
]
if torch.version.cuda is not None:  # such a build makes fake tensors on GPUs that are not there
    MODELS = [mistake for mistake in MODELS if mistake.name != "constructor wants a GPU"]

FORWARDS = [
    Mistake(
        "forward raises",
        forward("raise ValueError('no such thing')  # here"),
        "P0802",
        ("model.forward raised ValueError: no such thing", "in module blocks.1"),
    ),
    Mistake(
        "the size of the batch as a number",
        forward("return self.layer(x.view(8, 4))  # here"),
        "P0802",
        ("raised RuntimeError: shape '[8, 4]' is invalid", "this happens with 16 samples", "use `x.shape[0]`"),
    ),
    Mistake(
        "forward has no such attribute",
        forward("return self.lyer(x)  # here"),
        "P0802",
        ("model.forward raised AttributeError: 'Block' object has no attribute 'lyer'", "in module blocks.1"),
    ),
    Mistake(
        "forward has no such key",
        forward("return {'a': x}['b']  # here"),
        "P0802",
        ("model.forward raised KeyError: 'b'",),
    ),
    Mistake(
        "forward raises many lines",
        forward("raise RuntimeError('one\\ntwo\\nthree')  # here"),
        "P0802",
        ("RuntimeError: one two three",),
    ),
    Mistake("forward exits", forward("sys.exit(3)  # here"), "P0802", ("model.forward raised SystemExit: 3",)),
    Mistake(
        "shapes of a product",
        forward("return nn.functional.linear(x, torch.zeros(4, 5))  # here"),
        "P0802",
        ("model.forward raised RuntimeError", "[8, 4]", "[5, 4]", "in module blocks.1"),
    ),
    Mistake(
        "shapes of a sum",
        forward("return x + torch.zeros(3)  # here"),
        "P0802",
        ("model.forward raised RuntimeError", "[8, 4]"),
    ),
    Mistake("shapes of a view", forward("return x.view(3, -1)  # here"), "P0802", ("shape '[3, -1]' is invalid",)),
    Mistake(
        "shapes without code of the user's",
        written("def model():  # here\n    return nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4))\n"),
        "P0802",
        ("model.forward raised RuntimeError", "in module 1"),
    ),
    Mistake(
        "forward takes another argument",
        written(
            "class Net(nn.Module):\n    def forward(self, x, mask):  # here\n        return x\n\n\ndef model():\n   "
            " return Net()\n"
        ),
        "P0802",
        ("TypeError", "'mask'", "a dict as keyword arguments"),
    ),
    Mistake(
        "branch on item()",
        forward("if self.layer(x).sum().item() > 0:  # here", "    return x", "return self.layer(x)"),
        "P0802",
        ("data-dependent control flow", "torch.where", "in module blocks.1"),
    ),
    Mistake(
        "branch on a sum",
        forward("return self.layer(x) if x.sum() > 0 else x  # here"),
        "P0802",
        ("data-dependent control flow", "torch.where", "in module blocks.1"),
    ),
    Mistake(
        "assertion on values",
        forward("assert x.mean() < 100  # here", "return self.layer(x)"),
        "P0802",
        ("data-dependent control flow",),
    ),
    Mistake(
        "loop over a value",
        forward("for _ in range(int(x.sum())):  # here", "    x = self.layer(x)", "return x"),
        "P0802",
        ("data-dependent control flow",),
    ),
    Mistake(
        "boolean index",
        forward("return self.layer(x) + x[x > 0].sum()  # here"),
        "P0802",
        ("data-dependent shape", "mask", "in module blocks.1"),
    ),
    Mistake(
        "unique",
        forward("return self.layer(x) + torch.unique(x).sum()  # here"),
        "P0802",
        ("data-dependent shape", "in module blocks.1"),
    ),
    Mistake(
        "numpy",
        forward("return self.layer(torch.from_numpy(np.tanh(x)))  # here"),
        "P0802",
        ("NumPy", "torch.tanh", "in module blocks.1"),
    ),
    Mistake(
        "numpy of a detached tensor",
        forward("return self.layer(torch.tensor(x.detach().numpy()))  # here"),
        "P0802",
        ("NumPy", "in module blocks.1"),
    ),
    Mistake(
        "a formatted value",
        forward("print(f'{x.sum():.3f}')  # here", "return self.layer(x)"),
        "P0802",
        ("values of a tensor", "in module blocks.1"),
    ),
    Mistake(
        "an address",
        forward("return self.layer(x) * x.data_ptr()  # here"),
        "P0802",
        ("memory of a tensor", "custom_op"),
    ),
    Mistake(
        "an operator without a fake implementation",
        written(
            "@torch.library.custom_op('user_errors::real_only', mutates_args=())\n"
            "def real_only(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n\n\n"
            "class Net(nn.Linear):\n    def forward(self, x):\n"
            "        return super().forward(real_only(x))  # here\n\n\ndef model():\n    return Net(4, 4)\n"
        ),
        "P0802",
        ("real_only", "register_fake"),
    ),
]

FUNCTION = """\
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        {}


class Net(nn.Linear):
    def forward(self, x):
        return Function.apply(super().forward(x)){}


def model():
    return Net(4, 4)
"""
OPERATOR = """\
@torch.library.custom_op('user_errors::{}', mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@operator.register_fake
def _(x):
    return torch.empty_like(x)

{}
class Net(nn.Linear):
    def forward(self, x):
        return operator(super().forward(x)){}


def model():
    return Net(4, 4)
"""
BACKWARDS = [
    Mistake(
        "backward raises",
        written(FUNCTION.format("raise ValueError('no gradient')  # here", "")),
        "P0802",
        ("the backward of the model raised ValueError: no gradient",),
    ),
    Mistake(
        "backward branches on values",
        written(FUNCTION.format("return gradient if gradient.sum() > 0 else -gradient  # here", "")),
        "P0802",
        ("data-dependent control flow", "torch.where"),
    ),
    Mistake(
        "backward gives another shape",
        written(FUNCTION.format("return gradient[:3]", "  # here")),
        "P0802",
        ("invalid gradient", "`backward`"),
    ),
    Mistake(
        "operator without a backward",
        written(OPERATOR.format("no_backward", "", "  # here")),
        "P0802",
        ("no autograd formula", "register_autograd"),
    ),
    Mistake(
        "backward of an operator raises",
        written(
            OPERATOR.format(
                "raises",
                "\ndef backward(ctx, gradient):\n    raise ValueError('no gradient')  #"
                " here\n\n\noperator.register_autograd(backward)\n\n",
                "",
            )
        ),
        "P0802",
        ("the backward of the model raised ValueError: no gradient",),
    ),
    Mistake(
        "sparse gradients",
        written(
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.table ="
            " nn.Embedding(4, 4, sparse=True)\n\n    def forward(self, x):\n        return self.table((x >"
            " 0).long()).sum(1)  # here\n\n\ndef model():\n    return Net()\n"
        ),
        "P0802",
        ("sparse gradients", "`sparse=True`"),
    ),
]

LOSSES = [
    Mistake(
        "loss raises",
        written(loss="def loss(output, target):\n    return f.mse_los(output, target)  # here\n"),
        "P0802",
        ("loss raised AttributeError", "mse_los", "`output` is a tensor of shape [8, 4]"),
    ),
    Mistake(
        "loss gets a dict",
        forward("return {'y': self.layer(x)}").replace("mse_loss(output, target)", "mse_loss(output, target)  # here"),
        "P0802",
        ("loss raised", "`output` is a dict of 1"),
    ),
    Mistake(
        "loss gets an object",
        forward("return slice(self.layer(x))").replace("mse_loss(output, target)", "mse_loss(output, target)  # here"),
        "P0802",
        ("loss raised", "`output` is a value of type slice"),
    ),
    Mistake(
        "loss gets None",
        forward("self.layer(x)").replace("mse_loss(output, target)", "mse_loss(output, target)  # here"),
        "P0802",
        ("loss raised", "`output` is None"),
    ),
    Mistake(
        "loss forgets return",
        written(loss="def loss(output, target):  # here\n    f.mse_loss(output, target)\n"),
        "P0807",
        ("`loss` returned None", "`return` is missing"),
    ),
    Mistake(
        "loss returns a float",
        written(loss="def loss(output, target):  # here\n    return 1.0\n"),
        "P0807",
        ("Python number", "no gradient"),
    ),
    Mistake(
        "loss returns an item",
        written(loss="def loss(output, target):  # here\n    return f.mse_loss(output, target).item()\n"),
        "P0807",
        ("Python number", "without `.item()`"),
    ),
    Mistake(
        "loss is detached",
        written(loss="def loss(output, target):  # here\n    return f.mse_loss(output, target).detach()\n"),
        "P0807",
        ("does not depend on any weight", "`detach`"),
    ),
    Mistake(
        "loss is an index",
        written(loss="def loss(output, target):  # here\n    return output.argmax()\n"),
        "P0807",
        ("does not depend on any weight", "`argmax`"),
    ),
    Mistake(
        "all weights frozen",
        written(
            "def model():\n    return nn.Linear(4, 4).requires_grad_(False)\n", LOSS.replace("):", "):  # here", 1)
        ),
        "P0807",
        ("does not depend on any weight", "requires_grad_(False)"),
    ),
    Mistake(
        "loss is a dict",
        written(
            loss="def loss(output, target):  # here\n    a = output.square().mean()\n    return {'loss': a, 'b': a}\n"
        ),
        "P0807",
        ("`loss` returned a dict that has `loss` and other entries", "a dict of terms"),
    ),
    Mistake(
        "loss is a string",
        written(loss="def loss(output, target):  # here\n    return 'mse'\n"),
        "P0807",
        ("`loss` returned a value of type str",),
    ),
    Mistake(
        "loss is a vector",
        written(loss="def loss(output, target):  # here\n    return (output - target).square()\n"),
        "P0807",
        ("instead of being a scalar", "[8, 4]"),
    ),
    Mistake(
        "count is an int",
        written(
            loss="def loss(output, target):  # here\n    return (output - target).square().sum(), target.numel()\n"
        ),
        "P0807",
        ("the count that `loss` returned", "int"),
    ),
    Mistake(
        "count is 0",
        written(
            loss="def loss(output, target):  # here\n    return (output - target).square().sum(), (target > 9).sum()\n",
            data=DATA.replace("randn(8, 4)\n", "full((8, 4), 10.0)\n", 1)
            + "        yield torch.randn(8, 4), torch.zeros(8, 4)\n",
        ),
        "P0807",
        ("the count of the loss is 0", "masked"),
    ),
    Mistake(
        "loss takes one argument",
        written(loss="def loss(output):  # here\n    return output.mean()\n"),
        "P0801",
        ("cannot be called as `loss(output, target)`", "too many"),
    ),
    Mistake(
        "loss takes three arguments",
        written(loss="def loss(output, target, weight):  # here\n    return output.mean()\n"),
        "P0801",
        ("cannot be called as `loss(output, target)`", "'weight'"),
    ),
]

ONE, OTHER, WIDE = "torch.randn(8, 4)", "torch.randn(7, 4)", "torch.randn(8, 5)"
BATCHES = [
    Mistake(
        "data raises",
        written(data='def data():\n    return open("nothing.txt")  # here\n'),
        "P0801",
        ("`data` raised FileNotFoundError", "nothing.txt"),
    ),
    Mistake(
        "data raises at the first batch",
        written(data="def data():\n    yield torch.randn(8, 4), {}['y']  # here\n"),
        "P0801",
        ("`data` raised KeyError: 'y'",),
    ),
    Mistake(
        "data raises at a later batch",
        written(data=f"def data():\n    yield {ONE}, {ONE}\n    raise OSError('shard 2')  # here\n"),
        "P0801",
        ("`data` raised OSError: shard 2",),
    ),
    Mistake(
        "data exits", written(data="def data():\n    sys.exit(1)  # here\n"), "P0801", ("`data` raised SystemExit: 1",)
    ),
    Mistake(
        "a process that loads data raises",
        written(
            data=(
                "class Broken(Dataset):\n    def __len__(self):\n        return 16\n\n    def __getitem__(self, i):\n"
                "        raise ValueError('no sample')  # here\n\n\n"
                "def data():\n    return DataLoader(Broken(), 8, num_workers=1)\n"
            )
        ),
        "P0801",
        ("`data` raised ValueError: no sample",),
    ),
    Mistake(
        "data is a list",
        written(data=f"data = [({ONE}, {ONE})]  # here\n"),
        "P0801",
        ("`data` is a list of 1, not a function", "`def data(): return ...`"),
    ),
    Mistake(
        "data is a loader",
        written(data=f"data = DataLoader(TensorDataset({ONE}, {ONE}), 8)  # here\n"),
        "P0801",
        ("`data` is a value of type DataLoader, not a function",),
    ),
    Mistake(
        "data returns None",
        written(data="def data():  # here\n    pass\n"),
        "P0801",
        ("`data` returned None", "yield (input, target) pairs"),
    ),
    Mistake(
        "data returns an int",
        written(data="def data():  # here\n    return 3\n"),
        "P0801",
        ("`data` returned a value of type int", "DataLoader"),
    ),
    Mistake(
        "data returns one batch",
        written(data=f"def data():  # here\n    return {ONE}, {ONE}\n"),
        "P0801",
        ("one batch instead of an iterator", "yield"),
    ),
    Mistake(
        "data gives no batch",
        written(data="def data():  # here\n    yield from ()\n"),
        "P0801",
        ("`data` yields no batches",),
    ),
    Mistake(
        "data gives tensors",
        written(data=f"def data():  # here\n    yield {ONE}\n"),
        "P0801",
        ("a tensor of shape [8, 4], not an (input, target) pair",),
    ),
    Mistake(
        "data gives one-tuples",
        written(data="def data():  # here\n    return DataLoader(TensorDataset(torch.randn(16, 4)), 8)\n"),
        "P0801",
        ("a list of 1", "`TensorDataset(inputs, targets)`"),
    ),
    Mistake(
        "data gives triples",
        written(data=f"def data():  # here\n    yield {ONE}, {ONE}, {ONE}\n"),
        "P0801",
        ("a tuple of 3", "`(a, b), target`"),
    ),
    Mistake(
        "data gives a dict",
        written(data="def data():  # here\n    yield {'x': [1.0, 2.0]}\n"),
        "P0801",
        ("contains a value of type float",),
    ),
    Mistake(
        "data gives arrays",
        written(data="def data():  # here\n    yield np.zeros((8, 4)), np.zeros((8, 4))\n"),
        "P0801",
        ("a value of type ndarray", "torch.as_tensor"),
    ),
    Mistake(
        "data gives no target",
        written(data=f"def data():  # here\n    yield {ONE}, None\n"),
        "P0801",
        ("contains None",),
    ),
    Mistake(
        "data gives no samples",
        written(data="def data():  # here\n    yield torch.randn(0, 4), torch.randn(0, 4)\n"),
        "P0801",
        ("no samples", "[0, 4]"),
    ),
    Mistake(
        "numbers of samples differ",
        written(data=f"def data():  # here\n    yield {ONE}, {OTHER}\n"),
        "P0801",
        ("different numbers of samples", "[8, 4] and [7, 4]"),
    ),
    Mistake(
        "features change",
        written(
            "def model():  # here\n    return nn.Linear(4, 4)\n",
            data=f"def data():\n    yield {ONE}, {ONE}\n    yield {WIDE}, {WIDE}\n",
        ),
        "P0802",
        ("[8, 5]", "the first one has shape [8, 4], [8, 4]"),
    ),
    Mistake(
        "types change",
        written(data=f"def data():  # here\n    yield {ONE}, {ONE}\n    yield {ONE}.double(), {ONE}\n"),
        "P0801",
        ("batch 2 of `data`", "torch.float64"),
    ),
    Mistake(
        "parts change",
        written(data=f"def data():  # here\n    yield {ONE}, {ONE}\n    yield ({ONE},), {ONE}\n"),
        "P0801",
        ("batch 2 of `data`", "a different structure"),
    ),
    Mistake(
        "data takes an argument",
        written(data="def data(size):  # here\n    yield 1\n"),
        "P0801",
        ("cannot be called as `data()`", "'size'"),
    ),
    Mistake(
        "validation returns None",
        written(more="def validation():  # here\n    pass\n"),
        "P0801",
        ("`validation` returned None",),
    ),
    Mistake(
        "validation raises",
        written(more="def validation():\n    raise OSError('no disk')  # here\n"),
        "P0801",
        ("`validation` raised OSError: no disk",),
    ),
    Mistake(
        "validation has other features",
        written(
            "def model():  # here\n    return nn.Linear(4, 4)\n", more=f"def validation():\n    yield {WIDE}, {WIDE}\n"
        ),
        "P0802",
        ("[8, 5]",),
    ),
    Mistake(
        "validation is a list",
        written(more="validation = []  # here\n"),
        "P0801",
        ("`validation` is a list of 0, not a function",),
    ),
]

SGD = (
    "class Own(torch.optim.SGD):\n    def step(self, closure=None):\n        {}  # here\n"
    "        return super().step(closure)\n\n\ndef optimizer(params):\n    return Own(params, lr=0.1)\n"
)
SCHEDULE = (
    "class Own(torch.optim.lr_scheduler.LambdaLR):\n    def step(self, epoch=None):\n        {}  # here\n"
    "        super().step()\n\n\ndef lr_schedule(optimizer):\n"
    "    return Own(optimizer, lambda step: 1.0)\n"
)
OPTIMIZERS = [
    Mistake(
        "optimizer raises",
        written(more="def optimizer(params):\n    return torch.optim.Adamm(params)  # here\n"),
        "P0801",
        ("`optimizer` raised AttributeError", "'Adamm'"),
    ),
    Mistake(
        "optimizer forgets return",
        written(more="def optimizer(params):  # here\n    torch.optim.SGD(params, 0.1)\n"),
        "P0801",
        ("`optimizer` returned None", "`return torch.optim.AdamW(params, lr=1e-3)`"),
    ),
    Mistake(
        "optimizer returns a class",
        written(more="def optimizer(params):  # here\n    return torch.optim.SGD\n"),
        "P0801",
        ("the class SGD, not an instance", "`return SGD(params)`"),
    ),
    Mistake(
        "optimizer returns an int",
        written(more="def optimizer(params):  # here\n    return 3\n"),
        "P0801",
        ("a value of type int, which has no `param_groups`",),
    ),
    Mistake(
        "optimizer is one",
        written(more="optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # here\n"),
        "P0801",
        ("`optimizer` is a value of type SGD, not a function",),
    ),
    Mistake(
        "optimizer takes nothing",
        written(more="def optimizer():  # here\n    return 1\n"),
        "P0801",
        ("cannot be called as `optimizer(params)`", "too many"),
    ),
    Mistake(
        "optimizer takes two arguments",
        written(more="def optimizer(params, lr):  # here\n    return 1\n"),
        "P0801",
        ("cannot be called as `optimizer(params)`", "'lr'"),
    ),
    Mistake(
        "optimizer.step raises",
        written(more=SGD.format("raise ValueError('in step')")),
        "P0801",
        ("a step of the optimizer raised ValueError: in step",),
    ),
    Mistake(
        "lr_schedule raises",
        written(more="def lr_schedule(optimizer):\n    raise ValueError('no schedule')  # here\n"),
        "P0801",
        ("`lr_schedule` raised ValueError: no schedule",),
    ),
    Mistake(
        "lr_schedule forgets return",
        written(more="def lr_schedule(optimizer):  # here\n    pass\n"),
        "P0801",
        ("`lr_schedule` returned None", "CosineAnnealingLR"),
    ),
    Mistake(
        "lr_schedule returns a class",
        written(more="def lr_schedule(optimizer):  # here\n    return torch.optim.lr_scheduler.LambdaLR\n"),
        "P0801",
        ("the class LambdaLR, not an instance",),
    ),
    Mistake(
        "lr_schedule returns a function",
        written(more="def lr_schedule(optimizer):  # here\n    return lambda step: 0.1\n"),
        "P0801",
        ("no method `step`", "LambdaLR(optimizer, f)"),
    ),
    Mistake(
        "lr_schedule wants the loss",
        written(
            more=(
                "def lr_schedule(optimizer):  # here\n    return"
                " torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
            )
        ),
        "P0801",
        ("ReduceLROnPlateau", "needs `metrics`", "without arguments"),
    ),
    Mistake(
        "lr_schedule takes nothing",
        written(more="def lr_schedule():  # here\n    return 1\n"),
        "P0801",
        ("cannot be called as `lr_schedule(optimizer)`",),
    ),
]

LATE = written(  # fails with the values of the second batch, so that the check before the first step finds nothing
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.table = nn.Embedding(4, 4)\n\n    def forward(self, x):\n"
    "        return self.table(x).sum(1)  # here\n\n\ndef model():\n    return Net()\n",
    data=(
        "def data():\n    yield torch.zeros(8, 3, dtype=torch.int64), torch.randn(8, 4)\n"
        "    yield torch.full((8, 3), 9), torch.randn(8, 4)\n"
    ),
)
SINGULAR = written(  # the second batch makes matrices that cannot be inverted: eager PyTorch raises, too
    "class Net(nn.Linear):\n    def forward(self, x):\n        matrices = torch.diag_embed((x != 0).float())\n       "
    " return super().forward((torch.linalg.inv(matrices) @ x[..., None])[..., 0])  # here\n\n\ndef model():\n    return"
    " Net(4, 4)\n",
    data="def data():\n    yield torch.ones(8, 4), torch.randn(8, 4)\n    yield torch.zeros(8, 4), torch.randn(8, 4)\n",
)
EAGER = LATE.replace("torch.zeros(8, 3, dtype=torch.int64)", "torch.full((8, 3), 9)", 1)
KERNEL = written(
    "@torch.library.custom_op('user_errors::kernel{}', mutates_args=())\n"
    "def kernel(x: torch.Tensor) -> torch.Tensor:\n    if x[0, 0] > 9:\n"
    "        raise ValueError('in the kernel')  # here\n    return x.clone()\n\n\n"
    "@kernel.register_fake\ndef _(x):\n    return torch.empty_like(x)\n\n\nclass Net(nn.Linear):\n"
    "    def forward(self, x):\n        return super().forward(kernel(x))\n\n\ndef model():\n"
    "    return Net(4, 4)\n",
    data=(
        "def data():\n    yield torch.zeros(8, 4), torch.randn(8, 4)\n    yield torch.full((8, 4), 10.0),"
        " torch.randn(8, 4)\n"
    ),
)
STEPS = [
    Mistake(
        "operator raises",
        LATE,
        "P0604",
        ("device 0 failed", "IndexError: index out of range in self", "in module table", "it was running F of"),
    ),
    Mistake(
        "a matrix that cannot be inverted",
        SINGULAR,
        "P0604",
        ("device 0 failed", "input matrix is singular", "it was running F of"),
    ),
    Mistake("kernel raises", KERNEL.format(1), "P0604", ("device 0 failed", "ValueError: in the kernel")),
    Mistake(
        "optimizer.step raises later",
        written(more=SGD.format("self.count = getattr(self, 'count', 0) + 1; assert self.count < 4, 'fourth step'")),
        "P0604",
        ("AssertionError: fourth step", "it was running update of"),
    ),
    Mistake(
        "lr_schedule.step raises later",
        written(
            more=SCHEDULE.format("self.count = getattr(self, 'count', 0) + 1; assert self.count < 6, 'fifth step'")
        ),
        "P0801",
        ("AssertionError: fifth step",),
    ),
    Mistake(
        "plain model raises",
        EAGER,
        "P0801",
        ("the model raised IndexError: index out of range in self", "in module table", "without a schedule"),
    ),
]

MISTAKES = [*FILES, *MODELS, *FORWARDS, *BACKWARDS, *LOSSES, *BATCHES, *OPTIMIZERS, *STEPS]
SOME = [
    next(mistake for mistake in MISTAKES if mistake.name == name)
    for name in (
        "top level raises",
        "nothing there",
        "constructor raises",
        "branch on a sum",
        "shapes of a product",
        "loss forgets return",
        "data raises at a later batch",
        "types change",
        "optimizer raises",
        "optimizer.step raises",
        "lr_schedule wants the loss",
        "plain model raises",
    )
]
"""For the commands that run two steps."""
TRACED = [mistake for mistake in [*FILES, *MODELS, *FORWARDS[:3], *LOSSES[:3]] if "loss is" not in mistake.name]
"""What shows without a step."""

# ------------------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str

    def diagnostics(self) -> list[dict[str, Any]]:
        text = self.err if self.err.startswith("{") else self.out
        found: list[dict[str, Any]] = json.loads(text)["diagnostics"]
        return found


@cache
def answer(text: str, *arguments: str) -> Answer:
    """What piperc says of a model file, in a folder that holds nothing but that and an empty script."""
    out, err = io.StringIO(), io.StringIO()
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(out), redirect_stderr(err):
        Path("model.py").write_text(text)
        Path("schedule.piper").write_text("")
        status = main(list(arguments))
    return Answer(status, out.getvalue(), PROGRESS.sub("", err.getvalue()))


PROGRESS = re.compile(r"^(\w.* \.\.\. \d+ s|[a-z]+ (.* )?\d+(\.\d+)? s( \(.*\))?)\n", re.MULTILINE)
"""What a busy machine takes long for is shown, too."""


TRAIN = ("model.py", "schedule.piper", "--executor", "inline", "--steps", "6", "--out", "run", "--format", "json")


def assert_told(mistake: Mistake, found: Answer) -> None:
    assert found.status == 1, found.err
    (diagnostic,) = found.diagnostics()
    assert diagnostic["code"] == mistake.code
    assert diagnostic["helps"]
    text = "\n".join([diagnostic["message"], diagnostic["label"], *diagnostic["notes"], *diagnostic["helps"]])
    assert [word for word in mistake.words if word not in text] == [], text
    assert (Path(diagnostic["file"]).name, diagnostic["line"]) == ("model.py", mistake.line)


@every(MISTAKES)
def test_training_ends_with_a_diagnostic(mistake: Mistake) -> None:
    """JSON and nothing else on standard error: no trace, no log, no warning of torch's."""
    assert_told(mistake, answer(mistake.text, *TRAIN))


@every(SOME)
def test_numerics(mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, "check", "model.py", "schedule.piper", "--numerics", "--format", "json"))


@every(SOME)
def test_fuzz(mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, "fuzz", "model.py", "--count", "1", "--devices", "2", "--format", "json"))


@every(TRACED)
@pytest.mark.parametrize("command", ["check", "plan", "graph"])
def test_commands_that_only_trace(command: str, mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, command, "model.py", "schedule.piper", "--format", "json"))


OWN = "class Stop(BaseException):\n    pass\n\n\n"
"""An exception that is no Exception, as those of some frameworks are."""
BASE_EXCEPTIONS = [
    Mistake("at the top", written(more=OWN + "raise Stop('now')  # here\n"), "P0801", ("Stop: now",)),
    Mistake(
        "model",
        written(model=OWN + "def model():\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`model` raised Stop: now",),
    ),
    Mistake(
        "loss",
        written(loss=OWN + "def loss(output, target):\n    raise Stop('now')  # here\n"),
        "P0802",
        ("loss raised Stop: now",),
    ),
    Mistake(
        "data",
        written(data=OWN + "def data():\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`data` raised Stop: now",),
    ),
    Mistake(
        "data at a later batch",
        written(data=OWN + f"def data():\n    yield {ONE}, {ONE}\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`data` raised Stop: now",),
    ),
    Mistake(
        "optimizer",
        written(more=OWN + "def optimizer(params):\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`optimizer` raised Stop: now",),
    ),
    Mistake(
        "lr_schedule",
        written(more=OWN + "def lr_schedule(optimizer):\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`lr_schedule` raised Stop: now",),
    ),
    Mistake(
        "on_step",
        written(more=OWN + "def on_step(row):\n    raise Stop('now')  # here\n"),
        "P0801",
        ("`on_step` raised Stop: now",),
    ),
]


BASE_EXCEPTIONS += [
    replace(mistake, name=f"{mistake.name}, as a generator ends", text=text, words=words)
    for mistake in BASE_EXCEPTIONS
    if "Stop('now')" in mistake.text
    for text in [mistake.text.replace("raise Stop('now')", "raise GeneratorExit")]
    for words in [tuple(word.replace("Stop: now", "GeneratorExit") for word in mistake.words)]
]


@every(BASE_EXCEPTIONS)
def test_exceptions_that_are_no_exception(mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, *TRAIN))


SILENT = """
class Silent(Exception):
    def __str__(self): raise SystemExit(0)
class Failing(torch.optim.SGD):
    steps = 0
    def step(self, closure=None):
        Failing.steps += 1
        if Failing.steps > 9: raise Silent  # here
        return super().step()
def optimizer(params): return Failing(params, lr=0.1)
"""


def test_an_exception_that_cannot_be_printed() -> None:
    mistake = Mistake("silent", written(more=SILENT), "P0604", ("Silent",))
    assert_told(mistake, answer(mistake.text, *TRAIN, "--steps", "20", "--no-verify"))


def batch(text: str) -> str:
    return f"def data():  # here\n    while True:\n        yield {text}, torch.zeros(8, 4)\n"


UNUSUAL = [
    Mistake("sparse", written(data=batch("torch.eye(8)[:, :4].to_sparse()")), "P0801", ("sparse_coo", "to_dense()")),
    Mistake(
        "nested",
        written(data=batch("torch.nested.nested_tensor([torch.zeros(4)] * 8)")),
        "P0801",
        ("a nested tensor", "to_padded_tensor"),
    ),
    Mistake(
        "subclass",
        written(data="class Mine(torch.Tensor): pass\n" + batch("torch.zeros(8, 4).as_subclass(Mine)")),
        "P0801",
        ("contains a Mine, a subclass of torch.Tensor", "as_subclass(torch.Tensor)"),
    ),
    Mistake("meta", written(data=batch("torch.zeros(8, 4, device='meta')")), "P0801", ("which has no values",)),
]


@every(UNUSUAL)
def test_batches_that_cannot_be_sent(mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, *TRAIN))


def test_batches_that_are_conjugated_lazily() -> None:
    text = "torch.randn(8, 4, dtype=torch.complex64).conj()"
    real = (
        "class Real(nn.Module):\n    def forward(self, x): return x.real + x.imag\n"
        "def model(): return nn.Sequential(Real(), nn.Linear(4, 4))\n"
    )
    found = answer(written(real, data=batch(text)), *TRAIN)
    assert found.status == 0, found.err


def test_batches_that_come_with_a_graph() -> None:
    """Plain PyTorch trains on them; the gradient of a batch is nobody's. Before, the comparison with eager PyTorch went
    through their graph twice."""
    text = "def data():\n    torch.manual_seed(1)\n    while True:\n        yield {0}, torch.randn(8, 4)\n"
    losses = []
    for how in (".requires_grad_() * 1", ".requires_grad_()", ""):
        words = ("model.py", "schedule.piper", "--executor", "inline", "--steps", "3", "--out", "run", "--json")
        found = answer(written(data=text.format(f"torch.randn(8, 4){how}")), *words)
        assert found.status == 0, found.err
        losses.append([json.loads(line)["loss"] for line in found.out.splitlines()])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1] == losses[2]


def test_a_schedule_that_changes_the_optimizer_itself() -> None:
    own = (
        "class Scaled(torch.optim.SGD):\n    elementwise = True\n    scale = 1.0\n\n    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n            for p in group['params']:\n"
        "                p.data.add_(p.grad, alpha=-group['lr'] * self.scale)\n\n\n"
        "class Halving:\n    def __init__(self, optimizer):\n        self.optimizer = optimizer\n\n"
        "    def step(self):\n        self.optimizer.scale *= 0.5\n\n\n"
        "def optimizer(params):\n    return Scaled(params, lr=0.1)\n\n\n"
        "def lr_schedule(optimizer):  # here\n    return Halving(optimizer)\n"
    )
    words = ("the schedule changes the attribute `scale` of Scaled", 'as `group["scale"]`')
    assert_told(Mistake("private option", written(more=own), "P0601", words), answer(written(more=own), *TRAIN))


def test_what_raises_in_this_process_is_not_told_to_run_in_this_process() -> None:
    text = written(
        data=f"def data():\n    yield torch.zeros(8, dtype=torch.int64), {ONE}\n    yield torch.full((8,), 9), {ONE}\n",
        model="def model():\n    return nn.Embedding(4, 4)  # here\n",
    )
    found = answer(text, *TRAIN)
    (diagnostic,) = found.diagnostics()
    assert (found.status, diagnostic["code"]) == (1, "P0604")
    assert "--executor inline" not in found.err
    assert "debugger" in diagnostic["helps"][0]


def test_several_mistakes_at_once() -> None:
    text = written(
        "def model(width):\n    return nn.Linear(4, width)\n",
        "def los(output, target):\n    return 1\n",
        more="max_norm = 0\noptimizer = 3\n",
    )
    found = answer(text, *TRAIN).diagnostics()
    assert [d["message"] for d in found] == [
        "model.py has no function `loss`",
        "`model` cannot be called as `model()`",
        "`optimizer` is a value of type int, not a function",
        "`max_norm` is 0, not a positive number",
    ]


def test_a_neighbour_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(written(more="import user_errors_neighbour\n"))
    Path("user_errors_neighbour.py").write_text("x = 1\ny = x + 'a'\n")
    Path("schedule.piper").write_text("")
    assert main(["check", "model.py", "schedule.piper", "--format", "concise"]) == 1
    assert "user_errors_neighbour.py:2:1: P0801 model.py cannot be imported (TypeError" in capsys.readouterr().err


def test_what_nobody_reads_may_be_taken_out_of_a_tensor() -> None:
    """Values are unknown while a model is traced, so that printing them shows their symbols."""
    found = answer(forward("print(x.tolist())", "return self.layer(x)"), "check", "model.py", "schedule.piper")
    assert (found.status, found.err) == (0, "")


def test_callables_of_every_kind() -> None:
    text = written(
        "model = partial(nn.Linear, 4, 4)\n",
        "loss = nn.MSELoss()\n",
        more=(
            "optimizer = torch.optim.AdamW\nlr_schedule = partial(torch.optim.lr_scheduler.StepLR,"
            " step_size=2)\nmax_norm = 1\n"
        ),
    )
    found = answer(f"from functools import partial\n{text}", *TRAIN)
    assert (found.status, found.err) == (0, "")


@every(
    [
        Mistake(
            "loss is a module",
            written("def model():\n    return nn.Linear(4, 5)\n", "loss = nn.MSELoss()  # here\n"),
            "P0802",
            ("loss raised RuntimeError", "[8, 5]"),
        ),
        Mistake(
            "model is a class",
            written("class Net(nn.Linear):\n    def __init__(self, width):\n        pass\n\n\nmodel = Net  # here\n"),
            "P0801",
            ("cannot be called as `model()`", "'width'"),
        ),
        Mistake(
            "optimizer is a class",
            written(more="optimizer = torch.optim.LBFGS  # here\n"),
            "P0601",
            ("LBFGS.step needs a closure",),
        ),
    ]
)
def test_what_has_no_code_of_its_own_is_shown_where_it_is_bound(mistake: Mistake) -> None:
    assert_told(mistake, answer(mistake.text, *TRAIN))


def test_torch_writes_nothing_to_standard_error(tmp_path: Path) -> None:
    """In a process of its own: loggers keep the standard error that they were made with."""
    mistakes = [mistake for mistake in FORWARDS if mistake.name in ("shapes of a product", "branch on a sum")]
    for i, mistake in enumerate(mistakes):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "model.py").write_text(mistake.text)
        (tmp_path / str(i) / "schedule.piper").write_text("")
    code = (
        "import os\nfrom piperlang.cli.main import main\n"
        f"for i in range({len(mistakes)}):\n    os.chdir({str(tmp_path)!r} + f'/{{i}}')\n"
        "    print('\\0', main(['check', 'model.py', 'schedule.piper', '--format', 'json']), end='\\0')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *told, rest = done.stdout.split("\0")
    assert (len(mistakes), rest) == (2, "")
    for mistake, out, status in zip(mistakes, told[::2], told[1::2], strict=True):
        assert_told(mistake, Answer(int(status), out, ""))


def test_the_text_for_people() -> None:
    """All of it, once."""
    mistake = next(mistake for mistake in FORWARDS if mistake.name == "branch on a sum")
    assert (
        answer(mistake.text, "check", "model.py", "schedule.piper").err
        == "error[P0802]: data-dependent control flow: a branch or a loop reads the value of a tensor\n"
        "  --> model.py:16:9\n"
        "   |\n"
        "16 |         return self.layer(x) if x.sum() > 0 else x  # here\n"
        "   |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "   = note: in module blocks.1\n"
        "   = help: compute both sides and choose with torch.where(condition, a, b); branches on shapes are fine\n"
        "\n"
        "1 error; for details, run `piperc explain P0802`\n"
    )


# ------------------------------------------------------------------------------------------------------- from Python


def model() -> nn.Module:
    return nn.Linear(4, 4)


def broken_model() -> nn.Module:
    raise ValueError("no such size")  # broken_model


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target)


def broken_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target[0, 0, 0])  # broken_loss


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def broken_optimizer(params: Any) -> torch.optim.Optimizer:
    raise ValueError("no such rate")  # broken_optimizer


def no_optimizer(params: Any) -> None:  # no_optimizer
    pass


EXAMPLE = (torch.zeros(8, 4), torch.zeros(8, 4))


def line_with(word: str) -> int:
    return next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {word}")
    )


def compiled_and_stepped(tmp_path: Path, **changes: Any) -> Diagnostic:
    """What compiling, or the first step, says."""
    script = tmp_path / "schedule.piper"
    script.write_text("")
    arguments: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "optimizer": optimizer,
        "example": EXAMPLE,
        "executor": "inline",
        **changes,
    }
    batch = arguments.pop("batch", EXAMPLE)
    with pytest.raises(PiperError) as found, piperlang.compile(script=script, **arguments) as trainer:  # compile
        trainer.step(batch)  # step
    (diagnostic,) = found.value.diagnostics
    return diagnostic


@pytest.mark.parametrize(
    ("changes", "says", "place"),
    [
        ({"model": broken_model}, "`model` raised ValueError: no such size", "broken_model"),
        ({"model": nn.Linear(4, 4)}, "`model` is a value of type Linear, not a function", "compile"),
        ({"model": lambda width: nn.Linear(4, width)}, "cannot be called as `model()`", ""),
        ({"loss": broken_loss}, "loss raised IndexError", "broken_loss"),
        ({"loss": None}, "`loss` is None, not a function", "compile"),
        ({"optimizer": broken_optimizer}, "`optimizer` raised ValueError: no such rate", "broken_optimizer"),
        ({"optimizer": no_optimizer}, "`optimizer` returned None", "no_optimizer"),
        ({"lr_schedule": broken_optimizer}, "`lr_schedule` raised ValueError: no such rate", "broken_optimizer"),
        ({"example": EXAMPLE[0]}, "`example` is a tensor of shape [8, 4], not an (input, target) pair", "compile"),
        ({"max_norm": -1.0}, "`max_norm` is -1.0", "compile"),
        ({"batch": (torch.zeros(8, 4).double(), torch.zeros(8, 4))}, "tensor 0 of a batch has dtype", "step"),
        ({"batch": torch.zeros(8, 4)}, "the batch is a tensor of shape [8, 4], not an (input, target) pair", "step"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_python_api(changes: dict[str, Any], says: str, place: str, tmp_path: Path) -> None:
    diagnostic = compiled_and_stepped(tmp_path, **changes)
    assert says in diagnostic.message
    assert diagnostic.helps
    assert diagnostic.span is not None
    assert diagnostic.span.source.name == __file__
    assert not place or diagnostic.span.first.line == line_with(place)


# -------------------------------------------------------------------------------------------------------- on workers


WORKERS = [
    Mistake(
        "constructor raises on a worker, and what cannot be unpickled",
        written(
            "class OnlyHere(Exception):\n    def __init__(self, a, b):\n"
            f"        super().__init__('no memory')\n\n\ndef model():\n    if {ON_WORKERS}:\n"
            "        raise OnlyHere(1, 2)  # here\n    return nn.Linear(4, 4)\n"
        ),
        "P0801",
        ("`model` raised OnlyHere: no memory",),
    ),
    Mistake(
        "optimizer exits on a worker",
        written(
            more=(
                f"def optimizer(params):\n    if {ON_WORKERS}:\n        sys.exit(5)  # here\n    return"
                " torch.optim.SGD(params, 0.1)\n"
            )
        ),
        "P0801",
        ("`optimizer` raised SystemExit: 5",),
    ),
    Mistake(
        "operator raises on a worker",
        SINGULAR,
        "P0604",
        ("device 0 failed", "input matrix is singular", "it was running F of"),
    ),
    Mistake(
        "optimizer.step raises on a worker",
        written(more=SGD.format(f"assert not {ON_WORKERS}, 'not here'")),
        "P0604",
        ("AssertionError: not here", "it was running update of"),
    ),
]


@every(WORKERS)
def test_on_workers(mistake: Mistake, worker: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(mistake.text)
    file = load_model(path)
    batches = file.data()
    first = next(batches)
    graph, captured = compiled(capture(file.model, file.loss, first), "")
    make: Callable[..., Any] | None = shipped(file, "model")
    assert make is not None
    training = Training(make, shipped(file, "optimizer") or default_optimizer)
    lent: Any = Lent(worker)
    with pytest.raises(PiperError) as found, Job(lower(graph), captured, training, timeout=30, cluster=lent) as job:
        list(map(job.step, (first, next(batches))))
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == mistake.code
    text = "\n".join([diagnostic.message, *diagnostic.notes])
    assert [word for word in mistake.words if word not in text] == [], text
    assert diagnostic.span is not None
    assert (diagnostic.span.source.name, diagnostic.span.first.line) == (str(path), mistake.line)
