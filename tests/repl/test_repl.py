"""`piperc repl` without a terminal: answers, refusals, undo, orders, numerics, training, saving."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from piperlang.cli.main import main
from piperlang.cli.repl import _telling
from piperlang.diagnostics import PiperError
from piperlang.interrupts import uninterrupted
from piperlang.progress import phase
from piperlang.repl.commands import _changes
from piperlang.repl.model import open_model
from piperlang.repl.reading import inputs
from piperlang.repl.session import Screen, Session
from piperlang.runtime.driver.cluster import Cluster
from tests.support import ROOT
from tests.support.traced import traced_once

GPT = ROOT / "examples" / "02_gpt" / "model.py"
MLP = ROOT / "examples" / "01_mlp" / "model.py"

pytestmark = pytest.mark.xdist_group("repl")  # models are traced once, in one process


def repl(lines: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "piperlang", "repl", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    with traced_once():
        yield


def repl_here(
    lines: str, *arguments: str | Path, monkeypatch: pytest.MonkeyPatch, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in this process: where what is answered is looked at, and not how a process ends."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with redirect_stdout(out), redirect_stderr(err), chdir(cwd or Path.cwd()):
        code = main(["repl", *map(str, arguments)])
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def piperc(*arguments: str) -> str:
    """Another command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    assert code == 0, err.getvalue()
    return out.getvalue()


SCRIPTED = """\
mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=0]
:undo
place [stage=2:4] on gpu[pp=1]
split batch into 3 as mb
split batch into 4 as mb
order on gpu[pp=0]:
    for m in range(4):
        [stage=0, pass=F, mb=m], [stage=1, pass=F, mb=m]
    repeat 4: [stage=1, pass=B, mb=next], [stage=0, pass=B, mb=next]
order on gpu[pp=1]:
    repeat 4: [stage=2, pass=F, mb=next], [stage=3, pass=F, mb=next], [stage=3, pass=B, mb=next], [stage=2, pass=B,
    mb=next]
:numerics
:run 3
:graph {graph}
:save {script}
"""


@pytest.mark.slow
def test_scripted_session_on_the_gpt_example(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place, split, a mistake, undo, order, numerics, three steps on workers of its own, save; what is saved gives the
    same graph."""
    script, graph = tmp_path / "saved.piper", tmp_path / "graph.txt"
    started: list[Cluster] = []

    class Watched(Cluster):
        def __init__(self, *arguments: Any) -> None:
            started.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr("piperlang.repl.training.Cluster", Watched)
    done = repl_here(SCRIPTED.format(graph=graph, script=script), GPT, monkeypatch=monkeypatch)
    (workers,) = started
    assert not workers.folder.exists()  # they have ended with the session
    assert done.returncode == 1  # there was a mistake
    assert done.stderr.count("error[") == 1
    assert "error[P0412]: batch size 16 is not divisible by 3" in done.stderr
    assert "session:4:1" in done.stderr
    out = done.stdout
    assert "matched   4 nodes: 2 F, 2 B" in out
    assert "comm      + 2 send/recv, 128 KiB, stream comm" in out
    assert "missing   [stage=2], [stage=3] are not placed; estimates follow" in out
    assert "undone    place [stage=2:4] on gpu[pp=0]" in out
    assert re.search(r"memory    device 0: [\d.]+ MiB -> [\d.]+ MiB peak", out)
    assert re.search(r"step      \d+ us -> \d+ us estimated, idle \d+% -> \d+%", out)
    assert "open      16 of 32 passes are not ordered: the compiler schedules them" in out
    assert "device 1 | .    .    2F0* 3F0* 3B0*----- 2B0*----- 2F1*" in out
    assert "% idle (F=I=W=1, B=2, communication free, stages in a chain); * changed" in out
    assert "numerics  matches plain PyTorch" in out
    losses = [float(x) for x in re.findall(r"^step +\d+  loss ([\d.]+)", out, re.MULTILINE)]
    assert "verified against eager PyTorch" in out
    assert out.count("trained 3 steps on 2 devices") == 1
    # The saved script is canonical, compiles, gives the graph of the session and trains the same.
    assert piperc("fmt", "--check", str(script)) is not None
    assert piperc("graph", str(GPT), str(script), "-v") == graph.read_text()
    rows = [
        json.loads(line)
        for line in piperc(
            str(GPT), str(script), "--steps", "3", "--executor", "inline", "--json", "--out", str(tmp_path / "run")
        ).splitlines()
    ]
    assert [round(row["loss"], 4) for row in rows] == [round(loss, 4) for loss in losses]


def test_a_refused_statement_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    done = repl_here(
        "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=0] on gpu[pp=1]\n:list\n",
        GPT,
        monkeypatch=monkeypatch,
    )
    assert "error[P0401]: stage=0 is placed twice" in done.stderr
    assert done.stdout.endswith("   1  mesh gpu = pp: 2\n   2  place [stage=0] on gpu[pp=0]\n")


def test_a_circle_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "split batch into 2 as mb\norder [stage=1, pass=F, mb=0] -> [stage=0, pass=F, mb=0]\n:list\n"
    done = repl_here(text, GPT, monkeypatch=monkeypatch)
    assert "error[P0501]" in done.stderr
    assert done.stdout.endswith("   1  split batch into 2 as mb\n")


def test_training_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when something else has drawn random numbers between the runs; a changed script starts anew."""
    text = ":run 2 inline\n:numerics\n:run 2 inline\nsplit batch into 2 as mb\n:run 1 inline\n"
    done = repl_here(text, MLP, monkeypatch=monkeypatch)
    apart = re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)
    again = repl_here(":run 4 inline\n", MLP, monkeypatch=monkeypatch)
    whole = re.findall(r"step +(\d+)  loss ([\d.]+)", again.stdout)
    assert done.returncode == 0, done.stderr
    assert apart[:4] == whole
    assert "continuing after step 1" in done.stdout
    assert "the script has changed: training starts over" in done.stdout
    assert apart[4] == ("0", whole[0][1])


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_and_not_the_session(alone: None) -> None:
    said: list[str] = []
    session = Session(open_model(GPT), screen=Screen(say=said.append))
    try:
        for text in ("mesh gpu = pp: 2", "place [stage=0:2] on gpu[pp=0]", "place [stage=2:4] on gpu[pp=1]", ":run 2"):
            session.execute(text)
        assert session.workers is not None
        first, pids = session.workers, list(session.workers.pids)
        session.execute("split batch into 2 as mb")
        session.execute(":run 1")
        assert session.workers is first  # another script, the same workers
        os.kill(int(pids[1] or 0), signal.SIGKILL)
        with pytest.raises(PiperError) as raised:
            session.execute(":run 1")
        assert [x.code for x in raised.value.diagnostics] == ["P0602"]
        assert len(session.statements) == 4
        assert "trained 1 step on 2 devices" in session.execute(":run 1").text()
        assert session.workers is not first
    finally:
        session.close()
    losses = [line.split()[3] for line in said if line.startswith("step")]
    assert losses[0] == losses[2] == losses[-1]
    assert [line for line in said if line.startswith("starting")] == ["starting 2 workers"] * 2


def test_why_explains_the_path_with_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """\
mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 2 as mb
order on gpu[pp=0]: [stage=0, pass=F, mb=1], [stage=0, pass=F, mb=0]
:why [stage=0, pass=F, mb=1] before [stage=0, pass=F, mb=0]
:why [stage=0, pass=F, mb=0] before [stage=2, pass=F, mb=0]
:why [stage=2, pass=F, mb=0] before [stage=0, pass=F, mb=0]
:why [stage=2, pass=F, mb=0] before [stage=2, pass=F, mb=1]
:why [stage=2, pass=F, mb=0] before [stage=2, pass=F, mb=0]
:why [stage=2, pass=F] before [stage=2, pass=F]
"""
    done = repl_here(text, GPT, monkeypatch=monkeypatch)
    assert (done.returncode, done.stderr.count("error")) == (0, 0)
    assert "  -> F[stage=0, mb=0] on gpu[pp=0]  ordered by session:5" in done.stdout
    assert "  -> recv.F[stage=2, mb=0] on gpu[pp=1]  reads " in done.stdout
    assert (
        "no, the order is reversed: F[stage=2, mb=0] on gpu[pp=1] waits for F[stage=0, mb=0] on gpu[pp=0]"
        in done.stdout
    )
    assert "both are the same node: F[stage=2, mb=0] on gpu[pp=1]\nboth are the same 2 nodes;" in done.stdout
    assert "they are not ordered: F[stage=2, mb=0] on gpu[pp=1] and F[stage=2, mb=1] on gpu[pp=1]" in done.stdout


def test_looking_back_and_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """\
mesh gpu = pp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 4 as mb
:diff 0 3
:at 2
:at 3 :count [pass=F]
:count [pass=F]
:diff 3 4
:show [comm=p2p, mb=0]
:memory
:plan
:list
"""
    done = repl_here(text, GPT, monkeypatch=monkeypatch)
    assert (done.returncode, done.stderr.count("error")) == (0, 0)
    assert "nodes     17 added, 9 removed, 0 changed" in done.stdout  # a tied weight is updated apart from the others
    assert "missing   [stage=2], [stage=3] are not placed" in done.stdout
    assert "4 nodes: 4 F\n16 nodes: 16 F\n" in done.stdout
    assert "+ 6 send/recv (2 -> 8), 128 KiB, stream comm" in done.stdout
    assert "send.F[stage=1, mb=0] on gpu[pp=0]  stream comm  session:2" in done.stdout
    assert re.search(r"device +peak +weights +gradients +optimizer states", done.stdout)
    assert re.search(r"^devices  2, \d+ instructions each", done.stdout, re.MULTILINE)
    assert "   4  split batch into 4 as mb" in done.stdout


def test_nodes_with_the_same_name_are_all_compared() -> None:
    old, new = ["a on x: 1", "b on x: 1"], ["b on x: 2", "b on x: 3", "c on x: 1", "c on x: 2"]
    assert _changes(old, new) == ["- a on x", "~ b on x", "+ b on x", "+ c on x", "+ c on x"]


def test_tags_are_cut_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'tag part="up" at blocks[*].up\ntag part="down" at blocks[*].dwn\ntag part="down" at blocks[*].down\n:count'
        ' [part=*]\n:show [part="up", pass=F]\n'
    )
    done = repl_here(text, GPT, monkeypatch=monkeypatch)
    assert "did you mean `blocks.0.down`?" in done.stderr or "P0306" in done.stderr
    assert "the model is cut into chunks when a directive uses them" in done.stdout
    assert "16 nodes: 8 F, 8 B" in done.stdout
    assert done.stdout.count("F[part=up, stage=") == 4


ORDERS = """\
from std.pipeline import loop
mesh gpu = pp: 2
loop(gpu, 2)
split batch into 2 as mb
# forwards first
order on gpu[pp=0]: [stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]

order on gpu[pp=1]:
    repeat 2:
        [stage=1, pass=F, mb=next]
        [stage=1, pass=B, mb=next]
"""


def test_without_a_model_and_without_torch(tmp_path: Path) -> None:
    """Directives, grids, undo and files; what needs a model says so."""
    commands = (
        f":undo\n:redo\n:orders\ntags('stage')\nlen(gpu.pp) * 3\n:count [stage=0]\n:save {tmp_path / 's.piper'}\n:run"
        " 3\n:show [stage=0]\n"
    )
    code = f"""
import io, sys
sys.modules['torch'] = sys.modules['ray'] = None
sys.stdin = io.StringIO({(ORDERS + commands)!r})
from piperlang.cli.main import main
from piperlang.diagnostics import PiperError
from piperlang.repl.model import open_model
from piperlang.repl.reading import inputs
from piperlang.repl.session import Screen, Session
sys.exit(main(['repl']))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert re.findall(r"error\[.*", done.stderr) == [
        "error[P0902]: `:run` needs a model; this session has none",
        "error[P0902]: `:show` needs a model; this session has none",
    ]
    assert "`piperc repl MODEL.py`" in done.stderr
    assert "device 1 | .  F0 B0--- F1 B1---" in done.stdout
    assert "\n[0, 1]\n6\n4 passes that the script names\n" in done.stdout
    assert (tmp_path / "s.piper").read_text() == ORDERS


def test_a_model_without_torch_says_what_installs_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from piperlang.cli.main import main; sys.exit(main(['repl',"
        f" {str(GPT)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert "`torch` is not installed" in done.stderr
    assert "pip install 'piperlang[run]'" in done.stderr


@pytest.mark.parametrize(("strict", "lines"), [(False, "1\n3\n"), (True, "1\n")])
def test_strict_ends_at_the_first_error(strict: bool, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = repl_here("1\nlet x = y\n3\n", *(["--strict"] if strict else []), monkeypatch=monkeypatch)
    assert (done.returncode, done.stdout) == (1, lines)
    assert "error[P0201]" in done.stderr


def test_no_error_is_exit_code_zero() -> None:
    assert repl("let x = 2\nx * 3\n").stdout == "  name      x = 2\n6\n"
    assert repl("").returncode == 0


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (":lst\n", "did you mean `:list`?"),
        (":undo\n", "nothing to undo"),
        (":undo x\n", "`x` is not a number of statements"),
        (":redo\n", "nothing to redo"),
        (":at 3\n", "`3` is not one of 0 to 0"),
        (":at\n", "expected a number of statements"),
        (":orders foo\n", "`:orders` takes no argument"),
        (":quit foo\n", "`:quit` takes no argument"),
        ("undo\n", "commands start with a colon: `:undo`"),
        ("help place\n", "commands start with a colon: `:help place`"),
        ("quit\n", "commands start with a colon: `:quit`"),
        ("exit\n", "commands start with a colon: `:quit`"),
        ("let x = 1\n:undo 2\n", "only 1 statement can be undone"),
        ("mesh g = pp: 2\nplace [stage=0] on g[pp=0]\n:cost stage=99:2\n", "help: stage is one of 0\n"),
        (":at 0 :run 3\n", "`:run` cannot be used with `:at`"),
        (":diff 1\n", "expected two numbers"),
        (":why [stage=0]\n", "with `before` between them"),
        (":cost F=0\n", "`F=0` is not a cost; expected a whole number from 1 to 100"),
        (":cost Q=2\n", "`Q` is not a pass"),
        (":save\n", "expected a file"),
        (":save x.txt\n", "the name of a script must end in .piper"),
        (":load nowhere.piper\n", "cannot read nowhere.piper"),
        (":explain P9999\n", "unknown code `P9999`"),
        (":explain\n", "there was no diagnostic yet"),
        (":help nothing\n", "no help for `nothing`"),
        (":graph\n", "needs a model"),
        (":count\n", "`:count` needs a selector"),
        (":count [stage=\n", "error[P0105]"),
        (":count x\n", "error[P0201]"),
        (":count [mb=next]\n", "error[P0304]"),
        ("let x =\n", "expected an expression"),
        ("else:\n    print 1\n", "`else` follows an `if` block"),
        ("order on gpu:\n", "error["),
        ("\tprint 1\n", "tab in indentation"),
        ("let a = [1,\n\n", "`[` is never closed"),
        ("return 3\n", "error[P0111]"),
    ],
)
def test_every_mistake_is_a_diagnostic(
    lines: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, said = main(["repl"]), capsys.readouterr().err
    assert (code, says in said, "Traceback" in said) == (1, True, False), said


def test_usage_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, says in [
        (["s.piper", "m.py"], "the model must come first"),
        (["m.txt"], "neither a .py nor a .piper file"),
        (["a.py", "b.py"], "one model and one script"),
        (["nowhere.py"], "cannot read nowhere.py"),
        (["nowhere.piper"], "cannot read nowhere.piper"),
    ]:
        done = repl_here("", *arguments, monkeypatch=monkeypatch, cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), (arguments, done.stderr)


def test_loading_keeps_comments_and_may_import_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common.piper").write_text(
        "def both(gpu):\n    place [stage=0] on gpu[pp=0]\n    place [stage=1] on gpu[pp=1]\n"
    )
    script = (
        '"""What it is for."""\nfrom "./common.piper" import both\n\nparam ranks = 3\n\n# the devices\nmesh gpu = pp:'
        " ranks\nboth(gpu)  # all of them\n"
    )
    (tmp_path / "s.piper").write_text(script)
    done = repl_here(
        ":undo\n:redo\n:save copy.piper\nplace [stage=9] on gpu[pp=0]\n:load s.piper\n:save sub/copy.piper\n:save"
        " copy.piper\n:save! copy.piper\n",
        "s.piper",
        "-p",
        "ranks=2",
        monkeypatch=monkeypatch,
        cwd=tmp_path,
    )
    assert "saved copy.piper: 8 lines; it needs the options -p ranks=2" in done.stdout
    assert "saved copy.piper: 9 lines" in done.stdout
    # Loaded twice: every name is bound already. Saved elsewhere: its import would not be found there. Saved again:
    # the file exists.
    assert re.findall(r"error\[(.*)\]", done.stderr) == ["P0202", "P0202", "P0202", "P0209", "P0902"]
    assert "`:save! copy.piper` overwrites it" in done.stderr
    assert (tmp_path / "copy.piper").read_text() == script + "place [stage=9] on gpu[pp=0]\n"
    assert not (tmp_path / "sub").exists()


def test_costs_change_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    done = repl_here(ORDERS + ":cost F=1 I=1 W=1 stage=1:2\n:cost\n", monkeypatch=monkeypatch)
    assert "(F=I=W=1, B=2, stage=1 takes 2 times that, communication free, stages in a chain)" in done.stdout
    assert "device 1 | .  F0--- B0--------- F1--- B1---------" in done.stdout


def test_help_and_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ":help\n:help :run\n:help one_f_one_b\n:help place\nlet x = y\n:explain\n:explain P0302\n"
    done = repl_here(text, monkeypatch=monkeypatch)
    names = (
        ":undo",
        ":redo",
        ":list",
        ":at",
        ":diff",
        ":show",
        ":count",
        ":why",
        ":graph",
        ":orders",
        ":plan",
        ":memory",
        ":numerics",
        ":run",
        ":cost",
        ":load",
        ":save",
        ":explain",
        ":help",
        ":quit",
    )
    assert all(re.search(rf"^  {name}\b.*\S", done.stdout, re.MULTILINE) for name in names)
    assert max(map(len, done.stdout.partition("\n\n`:help")[0].splitlines())) <= 100
    assert "Ctrl-C stops after the current step" in done.stdout
    assert "from std.pipeline import one_f_one_b" in done.stdout
    assert "# P0201" in done.stdout
    assert "# P0302" in done.stdout


def test_printing_once_and_quitting() -> None:
    assert repl('print "hello"\nlet x = 1\n:quit\nlet y = 2\n').stdout == "  print     hello\n  name      x = 1\n"


def test_nothing_that_is_printed_steers_the_terminal() -> None:
    done = repl('print "a\x1b[31mb"\nlet x = "\x07"\nx\n:list\n')
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x07" not in done.stdout + done.stderr


def test_the_session_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newcomer pastes works: a model of `init`, the lines of README, the saved script trained."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert main(["init", str(tmp_path / "my_job")]) == 0
    text = lines.replace(":run 3", ":run 3 inline")
    done = repl_here(text, "--strict", "my_job/model.py", monkeypatch=monkeypatch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "matches plain PyTorch" in done.stdout
    found = piperc("check", str(tmp_path / "my_job" / "model.py"), str(tmp_path / "my_job" / "mine.piper"), "--json")
    assert json.loads(found)["ok"]


def test_ctrl_c_during_an_import_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted import would leave the module half initialised for the rest of the session."""
    (tmp_path / "slow_package.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        importlib.import_module("slow_package")
    assert sys.modules.pop("slow_package").whole
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("command", "name"), [(":run 1 inline", "trained"), (":numerics", "compared")])
def test_run_and_numerics_import_before_they_are_interrupted(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    called: list[str] = []

    def slowly(what: str) -> object:
        """An attribute that is interrupted while it is imported."""
        if what == name:
            signal.raise_signal(signal.SIGINT)
            imported.append(what)
            return lambda *arguments: called.append(what)
        raise AttributeError(what)

    training = ModuleType("piperlang.repl.training")
    training.__getattr__ = slowly  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "piperlang.repl.training", training)
    monkeypatch.setattr("piperlang.repl.commands._estimated", lambda session, name: None)
    session = Session()
    session.model = object()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        session.execute(command)
    assert (imported, called) == ([name], [])


@pytest.mark.parametrize(("closed", "code"), [("<&-", 0), (">&-", 1), ("<&- >&- 2>&-", 0)])
def test_closed_standard_streams(closed: str, code: int) -> None:
    """Closed input is empty input; answers to a closed output are lost, and refusals are not."""
    command = f"{shlex.quote(sys.executable)} -m piperlang repl {closed}"
    done = subprocess.run(
        ["sh", "-c", command], input="1\n:lst\n", capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert (done.returncode, "bug" in done.stderr) == (code, False), done.stderr


def test_every_axis_without_a_use_is_named() -> None:
    session = Session()
    assert "missing   axis a.pp is not used [P0404]" in str(session.execute("mesh a = pp: 2"))
    session.execute("mesh b = x: 2, y: 3")
    answer = str(session.execute("mesh c = q: 4, r: 2, s: 2, t: 2"))
    assert "missing   axes a.pp, b.x, b.y, c.q, c.r, c.s and 1 more are not used [P0404]" in answer


def test_axes_without_a_use_are_named_beside_those_that_chunks_lie_along(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "mesh gpu = pp: 2, dp: 2\nmesh other = x: 3\nplace [stage=*] on gpu[pp=0]\n"
    done = repl_here(text, GPT, monkeypatch=monkeypatch)
    assert (
        "  missing   axis other.x is not used [P0404]\n"
        "            stage=0; stage=1; stage=2; stage=3 do not use device axis `dp`"
    ) in done.stdout
    assert "gpu.dp is not used" not in done.stdout
    # Opening is told in the words of other commands.
    assert re.search(
        r"^loaded model\.py [\d.]+ s\n(.* \.\.\. \d+ s\n)*traced [\d.]+ s \(\d+ nodes\)$", done.stderr, re.MULTILINE
    )


def test_a_mistyped_executor_is_corrected() -> None:
    session = Session()
    session.model = object()  # type: ignore[assignment]
    with pytest.raises(PiperError) as raised:
        session.execute(":run 3 inlin")
    assert raised.value.diagnostics[0].helps == ("did you mean `inline`?",)


def test_a_grid_of_some_devices_has_no_idle_share() -> None:
    session = Session()
    for text in ("mesh gpu = pp: 2", "place [stage=0] on gpu[pp=0]", "place [stage=1] on gpu[pp=1]"):
        session.execute(text)
    session.execute("split batch into 2 as mb")
    answer = str(session.execute("order on gpu[pp=0]: [stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]"))
    assert "2 units, 1 of 2 devices has no order (F=I=W=1" in answer
    answer = str(session.execute("order on gpu[pp=1]: [stage=1, pass=F, mb=0], [stage=1, pass=F, mb=1]"))
    assert "3 units, 33% idle (F=I=W=1" in answer


def test_opening_a_model_gives_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piperlang.progress.plain.SILENCE", 0.1)
    with _telling("full"), phase("tracing model.py", "traced"):
        time.sleep(0.5)
    with _telling("json"), phase("tracing model.py", "traced"):
        time.sleep(0.2)
    said = capsys.readouterr()
    assert re.fullmatch(r"(tracing model\.py \.\.\. \d+ s\n)+traced \d+\.\d s\n", said.err)
    assert said.out == ""


def test_an_order_between_two_steps_is_answered_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nsplit batch into 2 as mb\n"
        "order [stage=0, pass=F, mb=1] -> [stage=0, pass=F, mb=0]\n:orders\n"
    )
    chain = "[stage=0, pass=F, mb=1] -> [stage=0, pass=F, mb=0]"
    assert repl_here(text, monkeypatch=monkeypatch).stdout.endswith(f"  applied   order {chain}\nalso: {chain}\n")


def test_statements_and_commands_pasted_together() -> None:
    assert inputs("let a = 1\nlet b = 2") == ["let a = 1\nlet b = 2"]
    pasted = "let a = 1\n:list\nfor i in range(2):\n    print i\n\n:quit"
    assert [one.strip() for one in inputs(pasted)] == ["let a = 1", ":list", "for i in range(2):\n    print i", ":quit"]
