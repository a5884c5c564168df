"""Model files that do something around a step, and their training beside anyone's training loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from piperlang.cli.main import main

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


class Plain(NamedTuple):
    losses: list[float]
    weights: dict[str, Any]
    validated: list[float]


def plain(path: Path, steps: int, validates: Container[int] = ()) -> Plain:
    """Anyone's training loop; the file is run before the seed is set. `validates`: steps after which the validation
    batches are evaluated."""
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    seed(0)
    model = scope["model"]()
    optimizer = scope["optimizer"]([p for p in model.parameters() if p.requires_grad])

    def loss_of(batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            return scope["loss"](model(**batch), batch)  # type: ignore[no-any-return]
        return scope["loss"](model(batch[0]), batch[1])  # type: ignore[no-any-return]

    seed(0)
    losses: list[float] = []
    validated: list[float] = []
    batches = endless(scope["data"])
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(next(batches))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        scope.get("on_step", len)({})
        if step in validates:
            model.eval()
            with torch.no_grad():
                found = [float(loss_of(batch)) for batch in scope["validation"]()]
            model.train()
            validated.append(sum(found) / len(found))
    return Plain(losses, model.state_dict(), validated)


def endless(data: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        yield from data()


def job(folder: Path, text: str, script: str, *options: str) -> tuple[int, list[float], dict[str, Any]]:
    (folder / "model.py").write_text(BASE + text)
    (folder / "s.piper").write_text(script)
    words = [str(folder / "model.py"), str(folder / "s.piper"), "--steps", "3", "--out", str(folder / "run")]
    code = main([*words, "--overwrite", *options])
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines() if code == 0 else []
    return (
        code,
        [json.loads(row)["loss"] for row in rows],
        torch.load(folder / "run" / "weights.pt") if code == 0 else {},
    )


def assert_plain(folder: Path, losses: list[float], weights: dict[str, Any]) -> None:
    expected, state, _ = plain(folder / "model.py", len(losses))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert weights.keys() == state.keys()
    for name, value in state.items():
        assert torch.allclose(weights[name].double(), value.double(), rtol=1e-4, atol=1e-6), name


def refused(folder: Path, text: str, script: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What a job that ends with a diagnostic has written. What its model file changes in torch is undone."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    scope: dict[str, Any] = {}
    exec(BASE + text, scope)
    try:
        exit_code, _, _ = job(folder, text, script, *options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        if "UNDO" in scope:
            setattr(*scope["UNDO"])
    err = capsys.readouterr().err
    assert exit_code == 1
    return err


CURSORS = {
    "a list": "at = [0]\ndef draw():\n    at[0] += 1\n    return at[0]\n",
    "a number": "at = 0\ndef draw():\n    global at\n    at += 1\n    return at\n",
}
