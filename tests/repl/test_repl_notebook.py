"""The session in a real notebook, with a real kernel: magics, HTML, a trainer, a refused cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from piperlang.repl.notebook import Magics, Refused
from tests.support import ROOT

CELLS = [
    "%load_ext piperlang",
    "%piper examples/02_gpt/model.py",
    """%%piper
mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 2 as mb
order on gpu[pp=0]:
    repeat 2: [stage=0, pass=F, mb=next]
    repeat 2: [stage=0, pass=B, mb=next]
""",
    "%piper :graph",
    "piper.graph",
    "%piper :run 3 inline",
    "trainer",
    "print(len(trainer.losses), sorted(trainer.state_dict())[0])",
]


def run(cells: list[str]) -> Any:
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def html(cell: Any) -> str:
    return "".join(output["data"].get("text/html", "") for output in cell.outputs if "data" in output)


def plain(cell: Any) -> str:
    """What a frontend without HTML shows."""
    return "\n".join(output["data"]["text/plain"] for output in cell.outputs if "data" in output)


def text(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_a_notebook_applies_statements_draws_graphs_and_trains() -> None:
    notebook = run(CELLS)
    nbformat.validate(notebook)
    opened, applied, drawn, graph, ran, trainer, printed = notebook.cells[1:]
    assert "traced examples/02_gpt/model.py" in text(opened)
    answer = html(applied)
    assert "<th>missing</th>" in answer
    assert "8 statements" not in answer
    assert "device 0 | F0 F1 B0--- B1---" in answer
    assert "prefers-color-scheme:dark" in answer
    assert "device 0 | F0 F1 B0--- B1---" in plain(applied)
    assert "Shown(" not in plain(applied)
    assert html(drawn).count("<svg") == 1
    assert plain(graph).startswith("31 nodes\nF[stage=0, mb=0]  gpu[pp=0]  14 weights")
    assert "http" not in html(drawn).replace("http://www.w3.org/2000/svg", "")  # self-contained
    assert "nodes</p>" in html(graph)
    assert "<svg" in html(graph)
    assert text(ran).count("loss") == 3
    assert "<polyline" in html(trainer)
    assert "3 steps on 2 devices" in html(trainer)
    assert text(printed).startswith("3 blocks.0.before_attention.bias")


def test_a_refused_cell_ends_with_its_diagnostic_and_no_traceback() -> None:
    with pytest.raises(CellExecutionError) as raised:
        run(["%load_ext piperlang", "%%piper\nmesh gpu = pp: 2\nplce [stage=0] on gpu\n"])
    said = str(raised.value)
    assert "did you mean `place`?" in said
    assert "Traceback" not in said
    assert "notebook.py" not in said


def test_a_session_without_a_model_keeps_what_was_accepted() -> None:
    notebook = run(["%load_ext piperlang", "%%piper\nlet x = 3\n", "%%piper\nx * 2\n", "piper.statements"])
    assert "6" in html(notebook.cells[2])
    assert notebook.cells[3].outputs[0]["data"]["text/plain"] == "('let x = 3',)"


class Shell:
    """As much of IPython's shell as the magics need."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}


def test_a_session_that_is_replaced_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    magics = Magics(shell)
    (tmp_path / "other.piper").write_text("let y = 1\n")
    magics.piper("", "let x = 3\n")
    assert repr(shell.user_ns["piper"]) == "<session: 1 statement, not saved>"
    magics.piper(str(tmp_path / "other.piper"))
    said = capsys.readouterr().out
    assert "the previous session has 1 unsaved statement: it is now `piper_before`" in said
    shell.user_ns["piper_before"].save(str(tmp_path / "kept.piper"))
    assert (tmp_path / "kept.piper").read_text() == "let x = 3\n"
    magics.piper("")  # what is open now is a file's
    assert "the previous session" not in capsys.readouterr().out
    with pytest.raises(Refused):
        magics.piper("nowhere.py")
    assert magics.session is shell.user_ns["piper"]
