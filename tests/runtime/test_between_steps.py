"""Whole jobs beside plain training: what happens around a step (data, seeds, globals, the optimizer function) changes
nothing either, or is refused."""

from __future__ import annotations

import json
import random
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piperlang.capture.program import capture
from piperlang.capture.user.model_file import load_model
from piperlang.cli.main import main
from tests.support.jobs import Lent
from tests.support.often import one_in

BASE = """
import torch, piperlang
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = torch.tanh(self.a(x))
        with piperlang.annotate("stage", 1):
            return self.b(x)
def model(): return M()
def loss(o, t): return nn.functional.cross_entropy(o, t)
def data():
    g = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
def optimizer(p): return torch.optim.SGD(p, lr=0.1, momentum=0.9)
"""
PIPELINE = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nsplit batch into 2 as mb\n"
REPLICAS = "from std.data import ddp\nmesh gpu = dp: 2\nplace [stage=*] on gpu\nddp(gpu.dp)\n"
WHOLE = PIPELINE.replace("split batch into 2 as mb\n", "")

SAME = {
    "data from torch's generator": "def data():\n    while True: yield torch.randn(8, 4), torch.randint(3, (8,))\n",
    "data from a generator of the file": """
g = torch.Generator().manual_seed(5)
def data():
    while True: yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
""",
    "data that uses its memory again": """
def data():
    x, t, g = torch.empty(8, 4), torch.empty(8, dtype=torch.long), torch.Generator().manual_seed(5)
    while True:
        x.copy_(torch.randn(8, 4, generator=g)); t.copy_(torch.randint(3, (8,), generator=g))
        yield x, t
""",
    "a seed at the top of the file": "torch.manual_seed(123)\n",
    "a model that the file keeps": "torch.manual_seed(0)\nNET = M()\ndef model(): return NET\n",
    "data that on_step changes": """
size = [1.0]
def data():
    g = torch.Generator().manual_seed(5)
    while True:
        yield size[0] * torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
def on_step(row): size[0] *= 0.5
""",
    "a loss that is a method of an object that counts steps": """
class Job:
    def __init__(self): self.steps, self.factor = 0, torch.ones(())
    def loss(self, o, t): return nn.functional.cross_entropy(o * self.factor, t)
    def on_step(self, row): self.steps += 1
JOB = Job()
loss, on_step = JOB.loss, JOB.on_step
""",
    "an average of weights in a buffer, as a teacher": """
class A(M):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3, 8))
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = torch.tanh(self.a(x))
        with piperlang.annotate("stage", 1):
            self.average.lerp_(self.b.weight.detach(), 0.1)
            return self.b(x) - x @ self.average.t()
def model(): return A()
""",
    "tensors that nobody changes": """
import os
W, MASK = torch.full((3,), 0.5), torch.ones(8, 4)
MASK[0] = 0
def loss(o, t): return nn.functional.cross_entropy(o * W * float(os.environ.get("PIPER_TEST_GAMMA", "1")), t)
class My(torch.optim.SGD):
    per_parameter = True
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.shape == MASK.shape: p.grad.mul_(MASK)
        return super().step()
def optimizer(p): return My(p, lr=0.1)
def on_step(row): os.environ["PIPER_TEST_DELTA"] = "1"
""",
    "a shuffling loader that begins again": """
def data():
    torch.manual_seed(5)
    samples = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    return torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
""",
    "validation that draws from torch's generator": """
def data():
    while True: yield torch.randn(8, 4), torch.randint(3, (8,))
def validation(): yield torch.randn(8, 4), torch.randint(3, (8,))
""",
    "validation that draws from the iterator of data": """
def batches():
    g = torch.Generator().manual_seed(5)
    while True: yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
EVERY = batches()
def data(): yield from EVERY
def validation(): yield next(EVERY)
""",
    "validation that draws from a generator of the file": """
g = torch.Generator().manual_seed(5)
def data():
    while True: yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
def validation(): yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
""",
    "gradients that are only measured": "max_norm = float('inf')\n",
    "gradients that are only measured, by a number of NumPy": "import numpy as np\nmax_norm = np.float32(1e9)\n",
    "spectral norm": """
class S(M):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.utils.parametrizations.spectral_norm(self.a)
def model(): return S()
""",
}
NORMED = """
class N(M):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(8)
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = self.n(self.a(x))
        with piperlang.annotate("stage", 1):
            return self.b(x)
def model(): return N()
def validation():
    g = torch.Generator().manual_seed(6)
    yield torch.randn(8, 4, generator=g), torch.randint(3, (8,), generator=g)
"""
REFUSED = {
    "a global that data changes": (
        """
beta = 0.1
def loss(o, t): return (1 + beta) * o.square().mean()
def data():
    global beta
    for i in range(9):
        beta = 0.1 * (1 + i)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`beta`",
    ),
    "a global that the schedule changes": (
        """
cfg = {"alpha": 1.0}
def loss(o, t): return nn.functional.cross_entropy(o * cfg["alpha"], t)
def lr_schedule(o):
    def f(e):
        cfg["alpha"] = 1.0 + e
        return 1.0
    return torch.optim.lr_scheduler.LambdaLR(o, f)
""",
        "P0808",
        "`cfg`",
    ),
    "a global that does not exist yet": (
        """
def loss(o, t):
    found = nn.functional.cross_entropy(o, t)
    try: return found * ALPHA
    except NameError: return found
def on_step(row):
    global ALPHA
    ALPHA = 0.5
""",
        "P0808",
        "`ALPHA`",
    ),
    "a name that is looked up in globals": (
        """
def loss(o, t): return nn.functional.cross_entropy(o * (2.0 if "WARM" in globals() else 1.0), t)
def on_step(row): globals()["WARM"] = True
""",
        "P0808",
        "`WARM`",
    ),
    "a function of torch that is replaced": (
        """
def on_step(row):
    old = nn.functional.cross_entropy
    nn.functional.cross_entropy = lambda o, t: 2 * old(o, t)
UNDO = (nn.functional, "cross_entropy", nn.functional.cross_entropy)
""",
        "P0808",
        "`torch.nn.functional.cross_entropy`",
    ),
    "a function of torch that a module of torch calls": (
        """
def on_step(row):
    old = nn.functional.linear
    nn.functional.linear = lambda x, w, b: old(x, w / 2, b)
UNDO = (nn.functional, "linear", nn.functional.linear)
""",
        "P0808",
        "`torch.nn.functional.linear`",
    ),
    "a method of a module of torch": (
        """
def on_step(row): nn.Linear.forward = lambda self, x: nn.functional.linear(x, self.weight / 2, self.bias)
UNDO = (nn.Linear, "forward", nn.Linear.forward)
""",
        "P0808",
        "`Linear.forward`",
    ),
    "a function of torch that is builtin": (
        """
def on_step(row):
    old = torch.tanh
    torch.tanh = lambda x: old(x) / 2
UNDO = (torch, "tanh", torch.tanh)
""",
        "P0808",
        "`tanh` of module `torch`",
    ),
    "a setting of torch": (
        """
def loss(o, t):
    return nn.functional.cross_entropy(o * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0), t)
def on_step(row): torch.use_deterministic_algorithms(True)
""",
        "P0808",
        "`torch.use_deterministic_algorithms`",
    ),
    "data that uses the weights of the start": (
        """
made = []
def model(): made[:] = [M()]; return made[0]
def data():
    yield torch.randn(8, 4), torch.randint(3, (8,))
    while True:
        x = torch.randn(8, 4)
        yield x, made[0](x).argmax(1)
""",
        "P0808",
        "not being trained",
    ),
    "a rate that on_step changes": (
        """
made = []
def optimizer(p): made.append(torch.optim.SGD(p, lr=0.1)); return made[-1]
def on_step(row):
    for group in made[-1].param_groups: group["lr"] *= 0.5
""",
        "P0601",
        "has changed between steps",
    ),
    "a norm that on_step changes": (
        "max_norm = 1.0\ndef on_step(row):\n    global max_norm\n    max_norm = 0.1\n",
        "P0808",
        "`max_norm` has changed",
    ),
    "a class attribute that on_step changes": (
        "M.scale = 1.0\ndef loss(o, t): return (o * M.scale).square().mean()\ndef on_step(row): M.scale = 0.5\n",
        "P0808",
        "`M",
    ),
    "a schedule by a number that data counts": (
        """
seen = [0]
def data():
    while True:
        seen[0] += 1
        yield torch.randn(8, 4), torch.randint(3, (8,))
def lr_schedule(o): return torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + seen[0]))
""",
        "P0808",
        "`seen`",
    ),
    "layers unfrozen by the schedule": (
        """
made = []
def model():
    made.append(M()); made[-1].a.requires_grad_(False)
    return made[-1]
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
def lr_schedule(o):
    def f(e):
        for one in made: one.a.requires_grad_(e > 0)
        return 1.0
    return torch.optim.lr_scheduler.LambdaLR(o, f)
""",
        "P0808",
        "error[P0808]",
    ),
    "hooks registered by the optimizer function": (
        (
            "def optimizer(params):\n    params = list(params)\n    params[0].register_hook(lambda g: g / 2)\n   "
            " return torch.optim.SGD(params, lr=0.1)\n"
        ),
        "P0810",
        "a.weight",
    ),
    "a weight frozen by the optimizer function": (
        (
            "def optimizer(model):\n    model.a.weight.requires_grad_(False)\n    return"
            " torch.optim.SGD(model.parameters(), lr=0.1)\n"
        ),
        "P0801",
        "requires_grad",
    ),
    "a counter in a class": (
        (
            "class C: n = 0\ndef count():\n    C.n += 1\n    return C.n\nclass N(M):\n    def forward(self, x): return"
            " super().forward(x) * (1.0 if count() < 25 else 2.0)\ndef model(): return N()\n"
        ),
        "P0808",
        "`C`",
    ),
    "a counter in a closure": (
        """
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
count = counter()
class N(M):
    def forward(self, x): return super().forward(x) * (1.0 if count() < 25 else 2.0)
def model(): return N()
""",
        "P0808",
        "`count`",
    ),
    "a tensor that data changes": (
        """
W = torch.ones(())
def loss(o, t): return W * o.square().mean()
def data():
    for i in range(9):
        if i == 2: W.mul_(0.1)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`W` has changed",
    ),
    "a tensor that on_step changes": (
        "W = torch.ones(())\ndef loss(o, t): return W * o.square().mean()\ndef on_step(row): W.fill_(0.1)\n",
        "P0808",
        "`W` has changed",
    ),
    "a tensor that on_step changes, by another one": (
        (
            "W = torch.ones(())\ndef loss(o, t): return W * o.square().mean()\n"
            "def on_step(row):\n    global W\n    W = W * 0.1\n"
        ),
        "P0808",
        "`W` has changed",
    ),
    "a tensor in a dict that the schedule changes": (
        """
cfg = {"w": torch.ones(())}
def loss(o, t): return cfg["w"] * o.square().mean()
def lr_schedule(o):
    def f(e):
        if e > 0: cfg["w"].fill_(0.1)
        return 1.0
    return torch.optim.lr_scheduler.LambdaLR(o, f)
""",
        "P0808",
        "`cfg` changes when",
    ),
    "a tensor on a class that data changes": (
        """
class C: w = torch.ones(3)
class N(M):
    def forward(self, x): return super().forward(x) * C.w
def model(): return N()
def data():
    for i in range(9):
        C.w[:] = 1 / (1 + i)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`C` has changed",
    ),
    "an array whose memory a tensor has": (
        """
import numpy as np
A = np.ones(3, np.float32)
T = torch.from_numpy(A)
class N(M):
    def forward(self, x): return super().forward(x) * T
def model(): return N()
def data():
    for i in range(9):
        A[:] = 1 / (1 + i)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`T` has changed",
    ),
    "a tensor in a closure that on_step changes": (
        """
def made():
    w = torch.ones(())
    def loss(o, t): return w * o.square().mean()
    def on_step(row): w.fill_(0.1)
    return loss, on_step
loss, on_step = made()
""",
        "P0808",
        "closure of `loss` has changed",
    ),
    "a weight of a loss module that data changes": (
        """
BCE = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
def loss(o, t): return BCE(o, nn.functional.one_hot(t, 3).float())
def data():
    for i in range(9):
        BCE.pos_weight[0] = 1.0 + i
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`BCE` has changed",
    ),
    "an attribute that a method as loss reads": (
        """
class Job:
    def __init__(self): self.factor = torch.ones(())
    def loss(self, o, t): return (o * self.scale()).square().mean()
    def scale(self): return self.factor
    def on_step(self, row): self.factor.mul_(0.5)
JOB = Job()
loss, on_step = JOB.loss, JOB.on_step
""",
        "P0808",
        "attribute `factor` of `Job` has changed",
    ),
    "a weight of the loss itself that data changes": (
        """
loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))
def data():
    for i in range(9):
        loss.pos_weight[0] = 1.0 + i
        yield torch.randn(8, 4), torch.rand(8, 3)
""",
        "P0808",
        "has changed",
    ),
    "a method of a base class that reads what data changes": (
        """
factor = [1.0]
class B(M):
    def forward(self, x): return super().forward(x) * factor[0]
class N(B): pass
def model(): return N()
def on_step(row): factor[0] *= 0.5
""",
        "P0808",
        "`factor` has changed",
    ),
    "a buffer of a kept model that on_step changes": (
        """
made = []
class N(M):
    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))
    def forward(self, x): return super().forward(x) * self.temperature
def model(): made[:] = [N()]; return made[0]
def on_step(row): made[0].temperature.mul_(0.5)
""",
        "P0808",
        "temperature changes",
    ),
    "an attribute of a kept model that data changes": (
        """
made = []
class N(M):
    factor = 1.0
    def forward(self, x): return super().forward(x) * self.factor
def model(): made[:] = [N()]; made[0].factor = 1.0; return made[0]
def data():
    for i in range(9):
        if made: made[0].factor = 1.0 / (1 + i)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "`factor`",
    ),
    "an environment variable that data sets": (
        """
import os
def loss(o, t): return float(os.environ.get("PIPER_TEST_ALPHA", "1")) * o.square().mean()
def data():
    for i in range(9):
        os.environ["PIPER_TEST_ALPHA"] = str(1.0 if i < 2 else 0.1)
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "P0808",
        "environment variable `PIPER_TEST_ALPHA`",
    ),
    "an environment variable that on_step sets": (
        """
import os
KEY = "PIPER_TEST_" + "BETA"
class N(M):
    def forward(self, x): return super().forward(x) * float(os.getenv(KEY, "1"))
def model(): return N()
def on_step(row): os.environ[KEY] = "0.5"
""",
        "P0808",
        "environment variable `PIPER_TEST_BETA`",
    ),
    "an attribute of another module that on_step sets": (
        (
            "def loss(o, t): return getattr(torch, 'piper_test', 1.0) * o.square().mean()\n"
            "def on_step(row): torch.piper_test = 0.5\n"
        ),
        "P0808",
        "attribute `piper_test` of module `torch`",
    ),
    "calls counted in ctypes": (
        """
import ctypes
C = ctypes.c_int(0)
class N(M):
    def forward(self, x):
        C.value += 1
        return super().forward(x) * (1.0 if C.value < 30 else 0.5)
def model(): return N()
""",
        "P0808",
        "`C` changes",
    ),
    "calls counted in a file in memory": (
        """
import io
S = io.BytesIO()
class N(M):
    def forward(self, x):
        S.write(b"x")
        return super().forward(x) * (1.0 if S.tell() < 30 else 0.5)
def model(): return N()
""",
        "P0808",
        "`S` changes",
    ),
    "calls counted on another module": (
        """
class N(M):
    def forward(self, x):
        torch.piper_calls = getattr(torch, "piper_calls", 0) + 1
        return super().forward(x) * (1.0 if torch.piper_calls < 30 else 0.5)
def model(): return N()
""",
        "P0808",
        "attribute `piper_calls` of module `torch`",
    ),
    "calls counted in the environment": (
        """
import os
class N(M):
    def forward(self, x):
        n = int(os.environ.get("PIPER_TEST_CALLS", "0")) + 1
        os.environ["PIPER_TEST_CALLS"] = str(n)
        return super().forward(x) * (1.0 if n < 30 else 0.5)
def model(): return N()
""",
        "P0808",
        "environment variable `PIPER_TEST_CALLS`",
    ),
    "an attribute of a class of torch": (
        """
nn.Module.piper_factor = 1.0
class N(M):
    def forward(self, x): return super().forward(x) * self.piper_factor
def model(): return N()
def on_step(row): setattr(nn.Module, "piper_factor", 2.0)
UNDO = (nn.Module, "piper_factor", 1.0)
""",
        "P0808",
        "`Module.piper_factor`",
    ),
    "an attribute of builtins": (
        """
import builtins
builtins.PIPER_FACTOR = 1.0
class N(M):
    def forward(self, x): return super().forward(x) * PIPER_FACTOR
def model(): return N()
def on_step(row): setattr(builtins, "PIPER_FACTOR", 2.0)
""",
        "P0808",
        "`PIPER_FACTOR`",
    ),
    "an attribute of a metaclass": (
        """
class Kind(type): factor = 1.0
class K(metaclass=Kind): pass
class N(M):
    def forward(self, x): return super().forward(x) * K.factor
def model(): return N()
def on_step(row): setattr(Kind, "factor", 2.0)
""",
        "P0808",
        "`K`",
    ),
    "an attribute of a base class": (
        """
class One: factor = 1.0
class K(One): pass
class N(M):
    def forward(self, x): return super().forward(x) * K.factor
def model(): return N()
def on_step(row): setattr(One, "factor", 2.0)
""",
        "P0808",
        "`K`",
    ),
    "other base classes": (
        """
class One: factor = 1.0
class Two: factor = 2.0
class K(One): pass
class N(M):
    def forward(self, x): return super().forward(x) * K.factor
def model(): return N()
def on_step(row): setattr(K, "__bases__", (Two,))
""",
        "P0808",
        "`K`",
    ),
    "what a weak reference refers to": (
        """
import weakref
class K: factor = 1.0
k = K()
REF = weakref.ref(k)
class N(M):
    def forward(self, x): return super().forward(x) * REF().factor
def model(): return N()
def on_step(row): setattr(k, "factor", 2.0)
""",
        "P0808",
        "`REF`",
    ),
    "mapped memory": (
        """
import mmap
MAP = mmap.mmap(-1, 16)
MAP[0] = 1
class N(M):
    def forward(self, x): return super().forward(x) * MAP[0]
def model(): return N()
def on_step(row): MAP.__setitem__(0, 2)
""",
        "P0808",
        "`MAP`",
    ),
    "the environment as bytes": (
        """
import os
os.environ["PIPER_TEST_BYTES"] = "1"
class N(M):
    def forward(self, x): return super().forward(x) * float(os.environb[b"PIPER_TEST_BYTES"])
def model(): return N()
def on_step(row): os.environ.__setitem__("PIPER_TEST_BYTES", "2")
""",
        "P0808",
        "environment variable `PIPER_TEST_BYTES`",
    ),
    "a global that the backward of an operator reads": (
        """
FACTOR = [1.0]
@torch.library.custom_op("piper_test::backward_reads", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor: return x * 1.0
@op.register_fake
def _(x): return torch.empty_like(x)
op.register_autograd(lambda ctx, g: FACTOR[0] * g, setup_context=lambda ctx, inputs, output: None)
class N(M):
    def forward(self, x): return torch.ops.piper_test.backward_reads(super().forward(x))
def model(): return N()
def on_step(row): FACTOR[0] *= 0.5
""",
        "P0808",
        "`FACTOR`",
    ),
    "a global that an operator reads": (
        """
FACTOR = [1.0]
@torch.library.custom_op("piper_test::forward_reads", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor: return x * FACTOR[0]
@op.register_fake
def _(x): return torch.empty_like(x)
op.register_autograd(lambda ctx, g: g * 1.0, setup_context=lambda ctx, inputs, output: None)
class N(M):
    def forward(self, x): return op(super().forward(x))
def model(): return N()
def on_step(row): FACTOR[0] *= 0.5
""",
        "P0808",
        "`FACTOR`",
    ),
    "a buffer that changes in evaluation mode": (
        """
class N(M):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            self.calls += 1
            x = torch.tanh(self.a(x)) * (1 + self.calls)
        with piperlang.annotate("stage", 1):
            return self.b(x)
def model(): return N()
def validation():
    for _ in range(2): yield torch.ones(8, 4), torch.ones(8, dtype=torch.long)
""",
        "P0606",
        "buffer calls changes in evaluation mode",
    ),
    "a loss that is not finite": (
        "def loss(o, t): return o.square().mean() * float('nan')\n",
        "P0608",
        "on the first batch the loss is not finite",
    ),
    "a gradient that is not finite": (
        "def loss(o, t): return (o - o.detach()).square().sum(1).sqrt().mean()\n",
        "P0608",
        "is not finite, so the captured program cannot be compared",
    ),
    "a tensor without elements between stages": (
        """
class N(M):
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = torch.tanh(self.a(x)); e = x.new_zeros(x.shape[0], 0)
        with piperlang.annotate("stage", 1):
            return self.b(torch.cat([x, e], 1))
def model(): return N()
""",
        "P0802",
        "an empty tensor is passed",
    ),
}


TEACHER = """
class N(M):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)
        self.register_buffer("temperature", torch.ones(()))
        self.factor = 1.0
    def forward(self, x):
        with piperlang.annotate("stage", 0):
            x = torch.tanh(self.a(x))
        with piperlang.annotate("stage", 1):
            return (self.b(x) - self.teacher(x)) * self.temperature * self.factor
def model(): return N()
class My(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.after()
def optimizer(model):
    made = My([p for p in model.parameters() if p.requires_grad], lr=0.1)
    made.net = model
    return made
"""
OPTIMIZERS = {
    "a frozen teacher that follows the weights": (
        TEACHER + "def after(self): self.net.teacher.weight.lerp_(self.net.b.weight, 0.5)\nMy.after = after\n",
        "parameter teacher.weight changes",
    ),
    "a buffer of the model": (
        TEACHER + "def after(self): self.net.temperature.mul_(0.5)\nMy.after = after\n",
        "buffer temperature changes",
    ),
    "an attribute of the model": (
        TEACHER + "def after(self): self.net.factor *= 0.5\nMy.after = after\n",
        "attribute `factor` of the model changes",
    ),
    "a buffer, by a step hook": (
        TEACHER
        + """
def optimizer(model):
    made = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    made.register_step_post_hook(lambda *_: model.temperature.mul_(0.5))
    return made
""",
        "buffer temperature changes",
    ),
    "a tensor that the loss reads": (
        """
T = torch.ones(())
class My(torch.optim.SGD):
    def step(self, closure=None):
        super().step(); T.mul_(0.5)
def optimizer(p): return My(p, lr=0.1)
def loss(o, t): return T * o.square().mean()
""",
        "global `T`",
    ),
    "a tensor that the loss reads, by a step hook": (
        """
T = torch.ones(())
def optimizer(p):
    made = torch.optim.SGD(p, lr=0.1)
    made.register_step_post_hook(lambda *_: T.mul_(0.5))
    return made
def loss(o, t): return T * o.square().mean()
""",
        "global `T`",
    ),
    "a mask that data changes": (
        """
MASK = torch.ones(8, 4)
class My(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.shape == MASK.shape: p.data.sub_(p.grad * MASK * group["lr"])
def optimizer(p): return My(p, lr=0.1)
def data():
    for i in range(9):
        if i == 2: MASK[:, 2:] = 0
        yield torch.randn(8, 4), torch.randint(3, (8,))
""",
        "global `MASK` has changed",
    ),
    "a mask that the optimizer holds and on_step changes": (
        """
MASK = torch.ones(8, 4)
class My(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.shape == self.mask.shape: p.data.sub_(p.grad * self.mask * group["lr"])
def optimizer(p):
    made = My(p, lr=0.1)
    made.mask = MASK
    return made
def on_step(row): MASK[:, 2:] = 0
""",
        "global `MASK` has changed",
    ),
}
SCALED = """
class My(torch.optim.SGD):
    elementwise = True
    scale = {scale}
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]: p.data.sub_(p.grad * My.scale * group["lr"])
class S:
    def __init__(self, optimizer): pass
    def step(self): My.scale *= 0.5
def optimizer(p): return My(p, lr=0.1)
def lr_schedule(optimizer): return S(optimizer)
"""


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def plain(path: Path, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Anyone's training loop; the file is run before the seed is set."""
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    seed(0)
    model = scope["model"]()
    optimizer = scope["optimizer"]([p for p in model.parameters() if p.requires_grad])
    seed(0)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, target in scope["data"]():
            if len(losses) < steps:
                optimizer.zero_grad()
                loss = scope["loss"](model(inputs), target)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                scope.get("on_step", len)({})
            else:
                break
    return losses, model.state_dict()


def job(folder: Path, text: str, script: str, *options: str) -> tuple[int, list[float], dict[str, Any]]:
    (folder / "model.py").write_text(BASE + text)
    (folder / "s.piper").write_text(script)
    code = main(
        [str(folder / "model.py"), str(folder / "s.piper"), "--steps", "3", "--out", str(folder / "run"), *options]
    )
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines() if code == 0 else []
    return (
        code,
        [json.loads(row)["loss"] for row in rows],
        torch.load(folder / "run" / "weights.pt") if code == 0 else {},
    )


def assert_plain(folder: Path, losses: list[float], weights: dict[str, Any]) -> None:
    expected, state = plain(folder / "model.py", 3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert weights.keys() == state.keys()
    for name, value in state.items():
        assert torch.allclose(weights[name].double(), value.double(), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("name", one_in(4, SAME))
def test_same_as_plain(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, SAME[name], PIPELINE, "--executor", "inline")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


def test_statistics_with_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, NORMED, WHOLE, "--executor", "inline")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


NEIGHBOUR = """
from neighbour_of_model import factor
FACTOR = 1.0
class N(M):
    def forward(self, x): return super().forward(x) * FACTOR * factor()
def model(): return N()
def on_step(row):
    import neighbour_of_model
    neighbour_of_model.FACTOR = 2.0
"""


def test_two_globals_of_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_model.py").write_text("FACTOR = 1.0\ndef factor(): return FACTOR\n")
    code, _, _ = job(tmp_path, NEIGHBOUR, PIPELINE, "--executor", "inline")
    assert (code, sys.modules.pop("neighbour_of_model").FACTOR) == (1, 2.0)
    assert "error[P0808]: global `FACTOR` of module `neighbour_of_model`" in capsys.readouterr().err


CURSORS = {
    "a list": "at = [0]\ndef draw():\n    at[0] += 1\n    return at[0]\n",
    "a number": "at = 0\ndef draw():\n    global at\n    at += 1\n    return at\n",
}


@pytest.mark.parametrize("watched", ["", "def on_step(row): pass\n"], ids=["ahead", "with on_step"])
@pytest.mark.parametrize("name", CURSORS)
def test_validation_that_moves_the_data(
    name: str, watched: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches are drawn in the order in which a plain loop draws them."""
    text = (
        CURSORS[name]
        + watched
        + """
def numbered():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(draw()))
    return x, x.argmax(1) % 3
def data():
    while True: yield numbered()
def validation():
    for _ in range(2): yield numbered()
"""
    )
    code, losses, _ = job(tmp_path, text, PIPELINE, "--executor", "inline", "--validate-every", "1")
    assert code == 0, capsys.readouterr().err
    scope: dict[str, Any] = {}
    exec(BASE + text, scope)
    seed(0)
    model = scope["model"]()
    optimizer = scope["optimizer"](model.parameters())
    batches, expected = scope["data"](), []
    for _ in range(3):
        inputs, target = next(batches)
        optimizer.zero_grad()
        loss = scope["loss"](model(inputs), target)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
        list(scope["validation"]())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", one_in(4, REFUSED))
def test_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, code, words = REFUSED[name]
    scope: dict[str, Any] = {}
    exec(BASE + text, scope)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        exit_code, _, _ = job(tmp_path, text, PIPELINE, "--executor", "inline")
    finally:
        torch.use_deterministic_algorithms(deterministic)
        if "UNDO" in scope:
            setattr(*scope["UNDO"])
    err = capsys.readouterr().err
    assert exit_code == 1
    assert f"error[{code}]" in err
    assert words in err
    assert "model.py:" in err


@pytest.mark.parametrize("options", [(), ("--no-verify",)], ids=["verified", "not verified"])
@pytest.mark.parametrize("name", one_in(4, OPTIMIZERS))
def test_optimizers_that_change_what_others_read(
    name: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the comparison before the first step, too."""
    text, words = OPTIMIZERS[name]
    exit_code, _, _ = job(tmp_path, text, REPLICAS, "--executor", "inline", *options)
    err = capsys.readouterr().err
    assert exit_code == 1
    assert "error[P0808]" in err or ("error[P0601]" in err and "changes in every step" in err)
    assert words in err
    assert "model.py:" in err


@pytest.mark.parametrize("scale", ["1.0", "torch.ones(())"])
@pytest.mark.parametrize("script", ["", REPLICAS.replace("ddp", "zero1")], ids=["one device", "zero1"])
def test_a_class_attribute_of_the_optimizer_that_the_schedule_changes(
    scale: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, _, _ = job(tmp_path, SCALED.format(scale=scale), script, "--executor", "inline")
    err = capsys.readouterr().err
    assert exit_code == 1
    assert "error[P0808]: class attribute `My.scale`" in err or "error[P0601]: class `My`" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        OPTIMIZERS["a tensor that the loss reads"],
        OPTIMIZERS["a mask that data changes"],
        OPTIMIZERS["a buffer of the model"],
        (REFUSED["a tensor in a dict that the schedule changes"][0].replace("e > 0", "e > 1"), "`cfg` changes when"),
    ],
    ids=["a tensor", "a mask", "a buffer", "by the schedule, in the second step"],
)
def test_what_workers_change_without_a_comparison(
    text: str, words: str, lent_worker: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optimizer and schedule run on workers, data in the driver."""
    exit_code, _, _ = job(tmp_path, text, "", "--no-verify")
    err = capsys.readouterr().err
    assert lent_worker.jobs == 1
    assert exit_code == 1
    assert "error[P0808]" in err
    assert words in err
    assert "model.py:" in err


def test_the_check_before_a_step_is_quick(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        BASE + "W = torch.ones(8)\ndef loss(o, t): return W.mean() * o.square().mean()\n"
    )
    file = load_model(tmp_path / "model.py")
    frozen = capture(file.model, file.loss, next(file.data())).sizes.small.frozen
    frozen.check()
    # Of this process alone: other work on the machine does not count. On a quiet one it is 90 us.
    seconds = min(timeit.repeat(frozen.check, timer=time.process_time, number=20, repeat=20)) / 20
    assert seconds < 500e-6


def test_a_seed_at_the_top_of_the_file_on_workers(
    lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers run the model file, too, before they seed."""
    code, losses, weights = job(tmp_path, SAME["a seed at the top of the file"], PIPELINE)
    assert code == 0, capsys.readouterr().err
    assert lent.jobs == 1
    assert_plain(tmp_path, losses, weights)


def test_the_model_file_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BASE)
    assert load_model(tmp_path / "model.py") is load_model(tmp_path / "model.py")


FAILING = {
    "data that fails": (
        "def data():\n    for _ in range(3): yield torch.randn(8, 4), torch.randint(3, (8,))\n    raise OSError('no"
        " more')\n"
    ),
    "validation of another shape": (
        "def validation():\n    yield torch.randn(8, 4), torch.randint(3, (8,))\n    yield torch.randn(5, 4),"
        " torch.randint(3, (5,))\n"
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_between_steps_costs_no_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(BASE + FAILING[name])
    (tmp_path / "pp.piper").write_text(PIPELINE)
    words = [
        str(tmp_path / "model.py"),
        str(tmp_path / "pp.piper"),
        "--steps",
        "5",
        "--executor",
        "inline",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--validate-every", "3"] if "validation" in name else words) == 1
    err = capsys.readouterr().err
    assert "error[P0801]" in err
    kept = tmp_path / "run" / "weights-unfinished.pt"
    assert f"note: the weights after 3 steps are in {kept}\n" in err
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pt*")) == ["weights-unfinished.pt"]
    trained = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert trained == ([0, 1, 2] if "data" in name else [0, 1])
    made = load_model(tmp_path / "model.py").model()
    fresh = {key: value.clone() for key, value in made.state_dict().items()}
    made.load_state_dict(torch.load(kept))
    assert any(not torch.equal(value, fresh[key]) for key, value in made.state_dict().items())


def unwritable(
    folder: Path, more: str, capsys: pytest.CaptureFixture[str], out: Path | None = None
) -> tuple[str, list[str]]:
    """The error of a job whose run folder becomes unusable, and what is there after it."""
    out = out or folder / "run"
    (folder / "model.py").write_text(BASE + more)
    (folder / "pp.piper").write_text(PIPELINE)
    words = [str(folder / "model.py"), str(folder / "pp.piper"), "--steps", "4", "--executor", "inline"]
    assert main([*words, "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert "error[P0609]: cannot write" in err
    assert "Traceback" not in err
    return err, sorted(path.name for path in out.iterdir())


def test_a_run_folder_that_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = f"import shutil\ndef on_step(row):\n    if row['step'] == 1: shutil.rmtree({str(tmp_path / 'run')!r})\n"
    err, left = unwritable(tmp_path, more, capsys)
    assert f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}\n" in err
    assert "note: No such file or directory\n" in err
    assert "note: lost: the rows of metrics so far: the file was removed\n" in err
    assert f"note: the weights after 3 steps are in {tmp_path / 'run' / 'weights-unfinished.pt'}\n" in err
    assert left == ["weights-unfinished.pt"]


def test_a_disk_that_is_full_during_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    err, left = unwritable(tmp_path, "", capsys)
    assert f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}\n" in err
    assert "note: No space left on device\n" in err
    assert "note: lost: the rows of metrics from step 0 on\n" in err
    assert "weights-unfinished.pt" in left
    assert "weights.pt" not in left


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights.pt.part").symlink_to("/dev/full")
    err, left = unwritable(tmp_path, "", capsys)
    assert f"cannot write {tmp_path / 'run' / 'weights.pt'}\n" in err
    assert "note: No space left on device\n" in err
    assert "note: lost: the weights" in err
    assert not [name for name in left if name.startswith("weights")]


def test_weights_of_an_earlier_job_are_not_taken_for_this_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that ends with an error has no weights.pt; those of an earlier job in the same folder are kept."""
    code, _, _ = job(tmp_path, "", PIPELINE, "--executor", "inline")
    assert code == 0, capsys.readouterr().err
    code, _, _ = job(tmp_path, "def on_step(row): 1 / 0\n", PIPELINE, "--executor", "inline")
    assert code == 1
    left = sorted(path.name for path in (tmp_path / "run").glob("*.pt*"))
    assert left == ["weights-previous.pt", "weights-unfinished.pt"]
    first = (tmp_path / "run" / "weights-previous.pt").read_bytes()
    assert job(tmp_path, "", PIPELINE, "--executor", "inline")[0] == 0
    left = sorted(path.name for path in (tmp_path / "run").glob("*.pt*"))
    assert left == ["weights-previous-2.pt", "weights-previous.pt", "weights.pt"]
    assert (tmp_path / "run" / "weights-previous.pt").read_bytes() == first


def test_a_working_directory_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(BASE + "import os\ndef on_step(row): os.chdir('/')\n")
    (tmp_path / "pp.piper").write_text(PIPELINE)
    assert main(["model.py", "pp.piper", "--steps", "2", "--executor", "inline", "--out", "run"]) == 0
    assert (tmp_path / "run" / "weights.pt").exists()


def test_what_the_file_prints_stays_out_of_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(BASE + "def on_step(row): print('seen', row['step'])\n")
    (tmp_path / "pp.piper").write_text(PIPELINE)
    words = [
        str(tmp_path / "model.py"),
        str(tmp_path / "pp.piper"),
        "--steps",
        "2",
        "--executor",
        "inline",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    found = capsys.readouterr()
    assert [json.loads(line)["step"] for line in found.out.splitlines()] == [0, 1]
    assert "seen 0\nseen 1\n" in found.err
