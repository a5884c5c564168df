"""Batches that workers load: the same as those of a plain loop, or the driver loads them, or the job is refused."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from piperlang.cli.main import main
from tests.support.between_steps import (
    CURSORS,
    OPTIMIZERS,
    PIPELINE,
    REFUSED,
    REPLICAS,
    SAME,
    assert_plain,
    job,
    plain,
    refused,
)
from tests.support.jobs import Lent
from tests.support.often import one_in


@pytest.mark.parametrize("name", one_in(13, SAME))
def test_same_as_plain(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, SAME[name], PIPELINE)
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)


@pytest.mark.parametrize("name", one_in(14, REFUSED))
def test_refused(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, code, words = REFUSED[name]
    err = refused(tmp_path, text, REPLICAS, capsys)
    assert f"error[{code}]" in err
    assert "model.py:" in err
    named = re.search("`.*?`", words)
    assert named is None or named[0] in err


@pytest.mark.parametrize("name", one_in(9, OPTIMIZERS))
def test_optimizers(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, _, _ = job(tmp_path, OPTIMIZERS[name][0], REPLICAS, "--no-verify")
    assert exit_code == 1
    assert "error[P0" in capsys.readouterr().err


IN_WORKERS = {
    "torch's generator": SAME["data from torch's generator"],
    "NumPy": """
import numpy as np
def data():
    while True: yield torch.from_numpy(np.random.randn(8, 4).astype("float32")), torch.randint(3, (8,))
""",
    "a shuffled DataLoader": """
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(5)
SET = TensorDataset(torch.randn(16, 4, generator=g), torch.randint(3, (16,), generator=g))
def data(): return DataLoader(SET, batch_size=8, shuffle=True)
""",
    "a DataLoader with processes": """
from torch.utils.data import DataLoader, TensorDataset
g = torch.Generator().manual_seed(5)
SET = TensorDataset(torch.randn(32, 4, generator=g), torch.randint(3, (32,), generator=g))
def data(): return DataLoader(SET, batch_size=8, shuffle=True, num_workers=2)
""",
    "a configuration that the model reads": """
class Config: samples, width = 8, 4
CONFIG = Config()
class N(M):
    def forward(self, x): return super().forward(x) / CONFIG.samples
def model(): return N()
def data():
    while True: yield torch.randn(CONFIG.samples, CONFIG.width), torch.randint(3, (CONFIG.samples,))
""",
    "printing": "def data():\n    for i in range(9):\n        print('batch', i)\n"
    "        yield torch.randn(8, 4), torch.randint(3, (8,))\n",
    "masked targets": """
def data():
    while True:
        target = torch.randint(3, (8,))
        target[torch.randperm(8)[:3]] = -100
        yield torch.randn(8, 4), target
""",
}


@pytest.mark.parametrize("case", one_in(2, [(name, script) for name in IN_WORKERS for script in (PIPELINE, REPLICAS)]))
def test_in_workers(case: tuple[str, str], lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, script = case
    code, losses, weights = job(tmp_path, IN_WORKERS[name], script, "--data", "workers")
    out, err = capsys.readouterr()
    assert code == 0, err
    if name == "printing":
        assert out.count("batch 1\n") == 1
    assert_plain(tmp_path, losses, weights)
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["waited_for_data"] >= 0 for row in rows[:-1])


SET = """
import os, random
PLACE = model.__code__.co_filename
from torch.utils.data import DataLoader, Dataset, TensorDataset
g = torch.Generator().manual_seed(5)
X, T = torch.randn(20, 4, generator=g), torch.randint(3, (20,), generator=g)
T[[1, 2, 6, 13]] = -100
class Told(Dataset):
    def __len__(self): return 20
    def __getitem__(self, i):
        with open(PLACE + ".reads", "a") as file: print(os.getpid(), file=file)
        return X[i], T[i]
"""
SLICED = {
    "a generator of its own": "def data(): return DataLoader(Told(), 8, shuffle=True, generator=g)",
    "shuffled, masked, a smaller last batch": "def data(): return DataLoader(TensorDataset(X, T), 8, shuffle=True)",
    "processes": "def data(): return DataLoader(Told(), 8, shuffle=True, num_workers=2)",
    "a validation": """
def data(): return DataLoader(Told(), 8, shuffle=True, drop_last=True)
def validation(): return DataLoader(TensorDataset(X, T), 12)
""",
    "a validation that mixes samples": """
class Centred(Told):
    def __getitems__(self, indices): return list(zip(X[indices] - X[indices].mean(0), T[indices]))
def data(): return DataLoader(Told(), 8, drop_last=True)
def validation(): return DataLoader(Centred(), 10)
""",
    "a validation that is loaded whole": """
def data(): return DataLoader(Told(), 8, drop_last=True)
def validation(): return [(X[:8], T[:8]), (X[8:14], T[8:14])]
""",
    "processes that stay": """
LOADER = DataLoader(torch.utils.data.Subset(Told(), range(8)), 4, True, num_workers=1, persistent_workers=True)
def data(): return LOADER
""",
    "a data set that opens a file when it is first read": """
class Lazy(Told):
    file = None
    def __getitem__(self, i):
        self.file = self.file or open(PLACE)
        return X[i], T[i]
EVEN = torch.utils.data.Subset(Lazy(), range(0, 20, 2))
def data(): return DataLoader(EVEN, batch_sampler=[[0, 1, 2, 3], [9, 8, 7, 6]])
""",
}


@pytest.mark.parametrize("case", one_in(4, [(name, script) for script in (REPLICAS, PIPELINE) for name in SLICED]))
def test_slices(case: tuple[str, str], lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, script = case
    code, losses, weights = job(tmp_path, SET + SLICED[name], script, "--data", "slices")
    assert code == 0, capsys.readouterr().err
    if script == REPLICAS and name == "a generator of its own":
        # Half of two batches, and one or two samples more; the third one has other shapes and is planned when it comes.
        reads = Counter((tmp_path / "model.py.reads").read_text().split())
        assert sorted(count for process, count in reads.items() if process != str(os.getpid())) == [14, 16]
    assert_plain(tmp_path, losses, weights)


NOT_SLICED = {
    "a generator": "def data():\n    yield from DataLoader(TensorDataset(X, T), 8)",
    "a collate function": "def stack(s): return [torch.stack(t) for t in zip(*s)]\n"
    "def data(): return DataLoader(Told(), 8, collate_fn=stack)",
    "a subclass": "class Own(DataLoader): pass\ndef data(): return Own(Told(), 8)",
    "random numbers": """
class Noisy(Told):
    def __getitem__(self, i): return X[i] + torch.randn(4), T[i]
def data(): return DataLoader(Noisy(), 8)
""",
    "random numbers in processes": """
class Noisy(Told):
    def __getitem__(self, i): return X[i] + random.random(), T[i]
def data(): return DataLoader(Noisy(), 8, num_workers=1)
""",
    "a generator in the data set": """
import numpy as np
class Noisy(Told):
    def __init__(self): self.rng = np.random.default_rng(0)
    def __getitem__(self, i): return X[i] + self.rng.normal(), T[i]
def data(): return DataLoader(Noisy(), 8)
""",
    "a count that changes samples later": """
class Late(Told):
    reads = 0
    def __getitem__(self, i):
        self.reads += 1
        return X[i] * (1 + (self.reads > 9)), T[i]
def data(): return DataLoader(Late(), 8)
""",
    "a generator of the class": """
class Rare(Told):
    rng = random.Random(2)
    def __getitem__(self, i): return X[i] * (1 + (self.rng.random() < 0.01)), T[i]
def data(): return DataLoader(Rare(), 8)
""",
    "a long list in front of a count": """
class Counted(Told):
    def __init__(self): self.names, self.reads = [f"{i}.jpg" for i in range(30_000)], [0]
    def __getitem__(self, i):
        self.reads[0] += 1
        return X[i] * (1 + (self.reads[0] > 9)), T[i]
def data(): return DataLoader(Counted(), 8)
""",
    "what cannot be seen": """
class Logged(Told):
    def __getitem__(self, i):
        os.environ["PIPER_TEST_READS"] = str(int(os.environ.get("PIPER_TEST_READS", 0)) + 1)
        return X[i] * (1 + (int(os.environ["PIPER_TEST_READS"]) % 100 > 8)), T[i]
def data(): return DataLoader(Logged(), 8)
""",
    "samples that are made from others of the batch": """
class Centred(Told):
    def __getitems__(self, indices): return list(zip(X[indices] - X[indices].mean(0), T[indices]))
def data(): return DataLoader(torch.utils.data.Subset(Centred(), range(16)), 8)
""",
    "a transform that counts": """
reads = [0]
def transform(x):
    reads[0] += 1
    return x * (1 + (reads[0] > 9))
class Transformed(Told):
    def __init__(self, *steps): self.steps = steps
    def __getitem__(self, i): return self.steps[0](X[i]), T[i]
def data(): return DataLoader(torch.utils.data.ConcatDataset([Transformed(transform)]), 8)
""",
}


@pytest.mark.parametrize("name", one_in(3, NOT_SLICED))
def test_what_cannot_be_sliced(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = job(tmp_path, SET + NOT_SLICED[name], REPLICAS, "--data", "slices")
    err = capsys.readouterr().err
    assert code in (1, 2), err
    assert "error[P0902]: cannot use `--data slices`" in err or "error[P0607]" in err
    assert "`--data workers`" in err
    assert "model.py:" in err


IN_DRIVER = {
    "what on_step changes": (SAME["data that on_step changes"], "`data` and `on_step` may share variables"),
    "what lr_schedule may change": (
        "CONFIG = {'rate': 0.5, 'samples': 8}\n"
        "def lr_schedule(o): return torch.optim.lr_scheduler.ExponentialLR(o, CONFIG['rate'])\n"
        "def data():\n    while True: yield torch.randn(CONFIG['samples'], 4), torch.randint(3, (8,))\n",
        "`data` and `lr_schedule` may share variables",
    ),
}


def test_on_step_is_called_in_the_driver(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may change what `data` reads in ways that nobody sees: here, a variable of the environment."""
    text = """
import os
def data():
    while True: yield torch.randn(8, 4) * float(os.environ.get("PIPER_TEST_FACTOR", "1")), torch.randint(3, (8,))
def on_step(row): os.environ["PIPER_TEST_FACTOR"] = str(2.0 + float(os.environ.get("PIPER_TEST_FACTOR", "1")))
"""
    try:
        code, losses, weights = job(tmp_path, text, REPLICAS)
        out, err = capsys.readouterr()
        assert code == 0, err
        assert "the driver loads the batches: `on_step` may change what `data` reads" in out
        os.environ.pop("PIPER_TEST_FACTOR")
        assert_plain(tmp_path, losses, weights)
    finally:
        os.environ.pop("PIPER_TEST_FACTOR", None)


@pytest.mark.parametrize("name", IN_DRIVER)
def test_in_the_driver(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, reason = IN_DRIVER[name]
    code, _, _ = job(tmp_path, text, REPLICAS)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert f"the driver loads the batches: {reason}" in out
    code, _, _ = job(tmp_path, text, REPLICAS, "--data", "workers", "--out", str(tmp_path / "other"))
    err = capsys.readouterr().err
    assert (code, "error[P0902]" in err, reason in err) == (2, True, True)


REJECTED = {
    "an unseeded generator": (
        "import numpy as np\ndef data():\n    g = np.random.default_rng()\n"
        '    while True: yield torch.from_numpy(g.standard_normal((8, 4)).astype("float32")), torch.randint(3, (8,))\n',
        "P0607]: `data` yields other batches in other processes",
    ),
    "a position on disk": (
        "import pathlib\nAT = pathlib.Path(__file__).parent / 'position'\ndef data():\n"
        "    every = torch.randn(9, 8, 4)\n    while True:\n"
        "        k = int(AT.read_text()) if AT.exists() else 0\n        AT.write_text(str(k + 1))\n"
        "        yield every[k], torch.zeros(8, dtype=torch.long)\n",
        "P0607]: `data` yields other batches in other processes",
    ),
    "a cache on disk": (
        "import pathlib\nAT = pathlib.Path(__file__).parent\ndef data():\n    for i in range(9):\n"
        "        file = AT / f'{i}.pt'\n"
        "        if not file.exists(): torch.save((torch.randn(8, 4), torch.randint(3, (8,))), file)\n"
        "        yield torch.load(file)\n",
        "P0607]: `data` yields other batches in other processes",
    ),
    "an exception in workers": (
        "import threading\ndef data():\n"
        "    if threading.current_thread().name.startswith('piperlang'): raise OSError('no file')\n"
        "    while True: yield torch.randn(8, 4), torch.randint(3, (8,))\n",
        "P0801]: `data` raised OSError: no file",
    ),
    "a global that model sets": (
        "SCALE = 1.0\ndef model():\n    global SCALE\n    SCALE = 2.0\n    return M()\n"
        "def data():\n    while True: yield torch.randn(8, 4) * SCALE, torch.randint(3, (8,))\n",
        "P0808]: global `SCALE` changes when `model` is called, and `data` reads it",
    ),
    "a list that lr_schedule changes": (
        "WARM = [0]\ndef lr_schedule(o):\n    def f(s):\n        WARM[0] = s\n        return 1.0 / (1 + s)\n"
        "    return torch.optim.lr_scheduler.LambdaLR(o, f)\n"
        "def data():\n    while True: yield torch.randn(8, 4) * (1 + WARM[0]), torch.randint(3, (8,))\n",
        "P0808]: global `WARM` changes when the optimizer or its schedule steps, and `data` reads it",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = REJECTED[name]
    code, _, _ = job(tmp_path, text, REPLICAS)
    err = capsys.readouterr().err
    assert code == 1
    assert words in err
    assert "model.py:" in err


DIFFERENT = {
    "batches differ later": (
        "import os\ndef data():\n    for i in range(9):\n        x = torch.randn(8, 4)\n"
        "        yield x + (os.getpid() if i == 2 else 0), torch.randint(3, (8,))\n",
        "error[P0607]: devices 0 and 1 have loaded different batches",
    ),
    "an exception": (
        "def data():\n    for i in range(9):\n        if i == 2: raise ValueError('no file')\n"
        "        yield torch.randn(8, 4), torch.randint(3, (8,))\n",
        "error[P0801]: `data` raised ValueError: no file",
    ),
    "another dtype": (
        "def data():\n    for i in range(9):\n        x = torch.randn(8, 4)\n"
        "        yield x.double() if i == 2 else x, torch.randint(3, (8,))\n",
        "error[P0801]: batch 3 of `data` has a tensor of dtype torch.float64",
    ),
    "random numbers in on_step": (
        "def on_step(row): torch.randn(1)\n",
        "error[P0801]: `on_step` uses the global generators",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_workers_cannot_load(name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = DIFFERENT[name]
    code, _, _ = job(tmp_path, text, REPLICAS, "--data", "workers")
    err = capsys.readouterr().err
    assert code == 1
    assert words in err
    assert "model.py:" in err
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == (1 if "on_step" in text else 2)
    if "error[P0801]" in words:
        assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("name", CURSORS)
def test_validation_that_moves_the_data(
    name: str, lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation batches are loaded in workers, too, and drawn in the order of a plain loop."""
    text = (
        CURSORS[name]
        + """
def numbered():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(draw())) + torch.randn(1)
    return x, x.argmax(1) % 3
def data():
    while True: yield numbered()
def validation():
    for _ in range(2): yield numbered()
"""
    )
    code, losses, _ = job(tmp_path, text, PIPELINE, "--validate-every", "2", "--data", "workers", "--steps", "5")
    assert code == 0, capsys.readouterr().err
    expected, _, validated = plain(tmp_path / "model.py", 5, validates=(1, 3, 4))
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [row["validation_loss"] for row in rows if "validation_loss" in row] == pytest.approx(validated, rel=1e-5)


def test_the_driver_is_told_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.py", "s.piper", "--data", "disk"]) == 2
    assert "workers" in capsys.readouterr().err


DICTS = """
class D(M):
    def forward(self, input, labels=None, mask=None):
        output = super().forward(input * mask)
        return {"logits": output, "loss": nn.functional.cross_entropy(output, labels)}
def model(): return D()
def loss(output, batch): return output["loss"] + 0.1 * (output["logits"].mean(-1) * batch["mask"][:, 0]).mean()
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        mask = (torch.rand(4, generator=g) > 0.2).float()
        return {"input": torch.randn(4, generator=g), "labels": i % 3, "mask": mask}
def data():
    for i, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True)):
        yield dict(reversed(batch.items())) if i % 2 else batch
"""


def test_batches_that_are_dicts(lent: Lent, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, losses, weights = job(tmp_path, DICTS, REPLICAS, "--data", "workers")
    assert code == 0, capsys.readouterr().err
    assert_plain(tmp_path, losses, weights)
