"""Compiled stage programs on disk: loaded where everything is as it was, compiled again otherwise; and they free what
they are given."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from piperlang.runtime.device import artifacts, compiled
from piperlang.runtime.device.compiled import _Compiled, _look, _without_constants
from piperlang.runtime.device.program_key import key_of
from tests.support import ROOT


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix product, a view of an input, and an input as it is."""
    return torch.tanh(x @ w).sum(0) * 0.3, x.view(-1), w


def traced(function: Any = program, rows: int = 8) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    torch.manual_seed(0)
    given = [torch.randn(rows, 4), torch.randn(4, 4)]
    return make_fx(function)(*given), given


def key(function: Any = program, rows: int = 8) -> str | None:
    module, given = traced(function, rows)
    return key_of(module.graph, [_look(one) for one in given])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(artifacts.PLACE, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each time something is compiled."""
    found: list[int] = []
    packed = compiled._packed

    def counted(*given: Any) -> bytes | None:
        found.append(len(found))
        return packed(*given)

    monkeypatch.setattr(compiled, "_packed", counted)
    return found


def run(function: Any = program) -> None:
    """Compiles, or loads, and compares with the function itself."""
    module, given = traced(function)
    wanted = function(*given)
    results = _Compiled(module)(list(given))
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert results[1].data_ptr() == given[0].data_ptr()


def test_the_second_start_compiles_nothing(compilations: list[int], folder: Path) -> None:
    run()
    assert len(list(folder.iterdir())) == 1
    run()
    assert len(compilations) == 1


@pytest.mark.parametrize("content", [b"", b"nothing", None])
def test_a_file_that_is_damaged(content: bytes | None, compilations: list[int], folder: Path) -> None:
    run()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if content is None else content)
    run()
    assert len(compilations) == 2
    assert artifacts.read(path.name) is not None


def test_what_cannot_be_loaded(compilations: list[int], folder: Path) -> None:
    """Whole, but of another version of the pickled classes."""
    run()
    (path,) = folder.iterdir()
    artifacts.write(path.name, b"cbuiltins\nno_such_name\n.")
    run()
    assert len(compilations) == 2


def test_a_file_of_another_program(compilations: list[int], folder: Path) -> None:
    def other(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ w).sum(0) + 1, x.view(-1), w

    run()
    (path,) = folder.iterdir()
    found = key(other)
    assert found is not None
    path.rename(folder / found)
    run(other)
    assert len(compilations) == 2


def test_nothing_is_kept_without_a_folder(
    compilations: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then it is compiled for the process alone, as `packed` does not."""
    monkeypatch.delenv(artifacts.PLACE)
    monkeypatch.chdir(tmp_path)
    run()
    assert not compilations
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_may_write(compilations: list[int], folder: Path) -> None:
    run()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write"):
        run()
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(artifacts.PLACE, str(tmp_path / "file" / "programs"))
    run()


def test_the_folder_has_a_bound(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(artifacts, "MOST", 250)
    for i in range(3):
        artifacts.write(f"{i}", b"x" * 60)
        os.utime(folder / f"{i}", (i, i))
    artifacts.write("last", b"x" * 60)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "last"]


def test_what_a_key_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(x @ w).sum(0) * 0.30000000000000004, x.view(-1), w

    assert key() == key()
    different = [key(), key(other), key(rows=16)]
    torch.set_default_dtype(torch.float64)
    try:
        module, given = traced()
    finally:
        torch.set_default_dtype(torch.float32)
    different.append(key_of(module.graph, [_look(one) for one in given]))
    monkeypatch.setattr("torch._inductor.config.max_autotune", True)
    different.append(key())
    assert None not in different
    assert len(set(different)) == len(different)


def test_programs_without_a_key() -> None:
    """One that writes into its inputs, and one that calls an operator of the user."""

    def writes(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ops.aten.add_.Tensor(x, 1), w)

    @torch.library.custom_op("tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def calls(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return twice(x) @ w, x.view(-1), w

    assert key(writes) is None
    assert key(calls) is None
    run(calls)


def test_constants_are_inputs(compilations: list[int]) -> None:
    """The code of one program serves another one that has other constants."""
    results = []
    for value in (1.0, 2.0):
        graph = fx.Graph()
        x = graph.placeholder("x")
        constant = graph.get_attr("held")
        graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, constant)),))
        owner = torch.nn.Module()
        owner.held = torch.full((3,), value)
        module = fx.GraphModule(owner, graph)
        assert len(_without_constants(module)[1]) == 1
        (result,) = _Compiled(module)([torch.zeros(3)])
        results.append(result.tolist())
    assert results == [[1.0] * 3, [2.0] * 3]
    assert len(compilations) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_given_is_freed(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first input is freed while the program runs, after its last use, whether the program is loaded or not."""
    if not kept:
        monkeypatch.setattr(compiled, "_packed", lambda *_: None)
    freed: list[bool] = []
    watched: list[weakref.ref[torch.Tensor]] = []

    @torch.library.custom_op(f"tests::look_{kept}".lower(), mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        freed.append(all(one() is None for one in watched))
        return x.clone()

    look.register_fake(torch.empty_like)

    def chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (look(look(x) @ w),)

    module, given = traced(chain)
    call = _Compiled(module)
    call(given)
    assert given == []
    freed.clear()
    again = [torch.randn(8, 4), torch.randn(4, 4)]
    watched.append(weakref.ref(again[0]))
    call(again)
    assert freed == [False, True]


def test_processes_that_write_at_once(folder: Path) -> None:
    code = "from tests.runtime.test_compiled import run; run()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) for _ in range(2)]
    assert [one.wait(300) for one in started] == [0, 0]
    (path,) = folder.iterdir()
    assert artifacts.read(path.name) is not None


def test_a_number_of_attention_may_be_anywhere() -> None:
    """Its kernels leave the state of their random numbers on the GPU in a capture, and on the host otherwise."""
    x, state = torch.ones(2), torch.zeros((), dtype=torch.int64)
    piece = _Compiled(make_fx(lambda x, state: (x + 1,))(x, state))
    piece([x, state])
    assert torch.equal(piece([x, state.to("meta")])[0], x + 1)
    assert len(piece.known) == 1
