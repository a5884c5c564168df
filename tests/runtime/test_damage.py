"""Checkpoints that were damaged, interrupted or forged: found, named, never used, and no code of them runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import optim

from piperlang.runtime.checkpoint import manifest as codec
from piperlang.runtime.checkpoint.files import verify
from piperlang.runtime.checkpoint.manifest import MANIFEST, Damaged
from piperlang.runtime.checkpoint.store import store_of
from tests.support.checkpoints import contents, job, save, save_in_parts, steps


def adam(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four files."""
    with job("pp zero3", adam) as running:
        steps(running, 0, 2)
        return save_in_parts(running, tmp_path_factory.mktemp("run"), 2)


# ---------------------------------------------------------------------------------------------------------- damaged


def flip(folder: Path, path: Path, draw: random.Random) -> Path:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return path


def truncate(folder: Path, path: Path, draw: random.Random) -> Path:
    os.truncate(path, draw.randrange(path.stat().st_size))
    return path


def lengthen(folder: Path, path: Path, draw: random.Random) -> Path:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 9)))
    return path


def swap(folder: Path, path: Path, draw: random.Random) -> Path:
    other = draw.choice([one for one in folder.iterdir() if one != path])
    here, there = path.read_bytes(), other.read_bytes()
    path.write_bytes(there)
    other.write_bytes(here)
    return path


def remove(folder: Path, path: Path, draw: random.Random) -> Path:
    path.unlink()
    return path


def add(folder: Path, path: Path, draw: random.Random) -> Path:
    more = folder / draw.choice(["part-00009.safetensors", "x.pt", f"{path.name}.part", ".hidden"])
    more.write_bytes(path.read_bytes())
    return more


def zero(folder: Path, path: Path, draw: random.Random) -> Path:
    """A block that never reached the disk."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    end = min(len(data), at + draw.randint(1, 4096))
    if not any(data[at:end]):
        return flip(folder, path, draw)
    data[at:end] = bytes(end - at)
    path.write_bytes(data)
    return path


DAMAGES: list[Callable[[Path, Path, random.Random], Path]] = [flip, truncate, lengthen, swap, remove, add, zero]


def test_damage_is_found_and_the_file_named(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(14)
    for number in range(1000):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        damage = draw.choice(DAMAGES)
        path = damage(folder, draw.choice(sorted(folder.iterdir())), draw)
        with pytest.raises(Damaged) as found:
            verify(folder)
        assert found.value.file == path.name or damage is swap, (damage.__name__, path.name, str(found.value))
        shutil.rmtree(folder)


def test_the_newest_whole_one_is_used(whole: Path, tmp_path: Path) -> None:
    store = store_of(tmp_path)
    for step in (2, 3, 4):
        shutil.copytree(whole, store.folder / f"step-{step:08}")
    os.truncate(store.folder / "step-00000004" / "part-00000.safetensors", 5)
    (store.folder / "step-00000003" / MANIFEST).unlink()
    found = [(folder.name, isinstance(manifest, Damaged)) for folder, manifest in store.all()]
    assert found == [("step-00000004", True), ("step-00000003", True), ("step-00000002", False)]


# ------------------------------------------------------------------------------------------------------------ killed


def test_a_driver_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """At 50 points: spread over all lines that run, and at the last ones, where the checkpoint gets its name and the
    old one is removed. The newest checkpoint is the old one or the new one, whole."""
    with job("pp zero3", adam) as running:
        steps(running, 0, 2)
        old = contents(save(running, tmp_path / "first", 2))
        shutil.copytree(tmp_path / "first", tmp_path / "run")
        steps(running, 2, 3)
        new = contents(save(running, tmp_path / "other", 3))
        lines = _lines(running, tmp_path / "counted")
        assert lines > 200
        seen = set()
        points = [1 + number * lines // 30 for number in range(30)] + [lines - 3 * number for number in range(20)]
        for point in points:
            run = tmp_path / f"run{point}"
            shutil.copytree(tmp_path / "run", run)
            assert _killed_at(running, run, point) or point > lines - 60
            newest = next(folder for folder, manifest in store_of(run).all() if not isinstance(manifest, Damaged))
            step = int(newest.name.removeprefix("step-"))
            seen.add(step)
            tensors, trees = contents(newest)
            expected, expected_trees = old if step == 2 else new
            assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
            assert (tensors.keys(), trees) == (expected.keys(), expected_trees)
            store_of(run).tidy()
            assert {path.name[:5] for path in store_of(run).folder.iterdir()} == {"step-"}
            shutil.rmtree(run)
        assert seen == {2, 3}


def _lines(running: Any, run: Path) -> int:
    """How many lines run while a checkpoint is saved."""
    read, write = os.pipe()
    if os.fork() == 0:
        count = [0]

        def seen() -> None:
            count[0] += 1

        _traced(seen)
        save(running, run, 3, keep=1)
        os.write(write, str(count[0]).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    return int(os.read(read, 100))


def _killed_at(running: Any, run: Path, line: int) -> bool:
    """Saves a checkpoint in another process, which is killed at a line."""
    child = os.fork()
    if child == 0:
        count = [0]

        def seen() -> None:
            count[0] += 1
            if count[0] == line:
                os.kill(os.getpid(), signal.SIGKILL)

        _traced(seen)
        save(running, run, 3, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _traced(seen: Callable[[], None]) -> None:
    """Calls a function for every line of the code that saves."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if "runtime/checkpoint/" not in name and "driver/checkpoints" not in name and "driver/saving" not in name:
            return None
        if event == "line":
            seen()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


# ------------------------------------------------------------------------------------------------------------ forged


def forged(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, and states its right SHA-256."""
    path = folder / MANIFEST
    body = json.loads(path.read_bytes())["checkpoint"]
    change(body)
    text = json.dumps(body, indent=1).encode().replace(b'"DEEP"', b'{"list": [' * DEEP + b"1" + b"]}" * DEEP)
    path.write_bytes(codec._HEAD + hashlib.sha256(text).hexdigest().encode() + codec._BODY + text + codec._END)


def _first(body: dict[str, Any]) -> Any:
    return next(one for one in body["tensors"] if one["name"] == "middle.weight")


def _rename_file(body: dict[str, Any], name: str) -> None:
    old = "part-00000.safetensors"
    body["files"][name] = body["files"].pop(old)
    for tensor in body["tensors"]:
        for piece in tensor["pieces"]:
            piece["file"] = name if piece["file"] == old else piece["file"]


DEEP = 100_000
FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a path out of the folder": lambda body: _rename_file(body, "../part-00000.safetensors"),
    "an absolute path": lambda body: _rename_file(body, "/etc/passwd"),
    "another kind of file": lambda body: _rename_file(body, "weights.pt"),
    "a huge shape": lambda body: _first(body).update(shape=[2**40, 2**40]),
    "a huge shape in one part": lambda body: _first(body).update(
        shape=[2**30, 2**30], pieces=[_first(body)["pieces"][0] | {"box": [[0, 2**30], [0, 2**30]], "interval": None}]
    ),
    "a negative size": lambda body: _first(body).update(shape=[-1, 6]),
    "overlapping ranges": lambda body: _first(body)["pieces"].append(_first(body)["pieces"][0]),
    "a missing range": lambda body: _first(body)["pieces"].pop(),
    "a range outside": lambda body: _first(body)["pieces"][0].update(box=[[0, 99], [0, 6]]),
    "an unknown type": lambda body: _first(body).update(dtype="object"),
    "another type": lambda body: _first(body).update(dtype="complex128"),
    "an unknown kind": lambda body: _first(body).update(kind="code"),
    "a tensor twice": lambda body: body["tensors"].append(_first(body)),
    "a file that is not there": lambda body: _first(body)["pieces"][0].update(file="part-00099.safetensors"),
    "a tensor that is not there": lambda body: _first(body)["pieces"][0].update(key="x"),
    "a list of a million dims": lambda body: _first(body).update(shape=[1] * 10**6),
    "a step of text": lambda body: body.update(step="2"),
    "a step below zero": lambda body: body.update(step=-1),
    "a later version": lambda body: body.update(version=2),
    "an object": lambda body: body["trees"].update({"state first.weight": {"pickle": "gASVKA"}}),
    "a deep list": lambda body: body["trees"].update({"state x": "DEEP"}),
    "state without its tensor": lambda body: body["trees"].update({"state x": {"tensor": {"like": ["y"]}}}),
    "a small tensor of few bytes": lambda body: body["trees"].update(
        {"state x": {"tensor": {"dtype": "int8", "shape": [2**50], "hex": "00", "host": False}}}
    ),
    "no tensors": lambda body: body.update(tensors=None),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests_are_refused(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    forged(folder, lambda body: None)
    verify(folder)
    forged(folder, FORGED[name])
    with pytest.raises(Damaged):
        verify(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/piper-bomb-of-a-test",)


@pytest.mark.parametrize("kind", ["pickle", "torch", "link", "other tensors"])
def test_forged_files_are_refused(kind: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    part = folder / "part-00000.safetensors"
    if kind == "pickle":
        part.write_bytes(pickle.dumps(Bomb()))
    elif kind == "torch":
        torch.save({"x": Bomb()}, part)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(part.read_bytes())
        part.unlink()
        part.symlink_to(tmp_path / "elsewhere")
    else:
        save_file({"x": torch.zeros(3)}, part)
    stored = {"bytes": part.stat().st_size, "sha256": hashlib.sha256(part.read_bytes()).hexdigest()}
    forged(folder, lambda body: body["files"].update({part.name: stored}))
    with pytest.raises(Damaged) as found:
        verify(folder)
    assert found.value.file == part.name
    assert not Path("/tmp/piper-bomb-of-a-test").exists()
