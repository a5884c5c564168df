"""Ctrl-C, SIGTERM and SIGHUP at any time of a job in one process: soon its end, one line that says how far it came,
exit code 128 and the signal, a checkpoint if it trained, no traceback, nothing left behind.
tests/runtime/test_cluster.py has jobs on workers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from piperlang.cli.run_folder import removed_if_interrupted
from tests.support import ROOT

MODEL = ROOT / "examples" / "01_mlp" / "model.py"
SCRIPT = "split batch into 4 as mb\n"
LINE = re.compile(r"(SIGINT: [^\n]+\n)?interrupted (while [^\n]+|after [\d,]+ steps?; run)\n")
ENTRY = "import sys\nfrom piperlang.__main__ import main\nprint('up', flush=True)\nsys.exit(main())"
"""`python -m piperlang`, which says when it is there: before that, Ctrl-C is Python's."""
OFTEN = [0.02, 0.7, 3.0]
BY_HAND = [0.1, 0.2, 0.4, 1.0, 1.5, 2.0, 4.5, 6.0, 10.0]
"""Seconds: while our own modules are imported, those of torch, while it traces; the
tests below have the rest."""


def piperc(folder: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def words(steps: int, out: str, model: Path = MODEL) -> list[str]:
    return [str(model), "s.piper", "--executor", "inline", "--steps", str(steps), "--log-every", "1", "--out", out]


def job(folder: Path, model: Path = MODEL) -> subprocess.Popen[str]:
    (folder / "s.piper").write_text(SCRIPT)
    return piperc(folder, ENTRY, *words(1_000_000, "run", model))


def ended(process: subprocess.Popen[str], folder: Path, code: int = 130) -> str:
    """What an interrupted process said on standard error."""
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    with pytest.raises(ProcessLookupError):  # no process of its session is left
        os.killpg(process.pid, 0)
    assert list((folder / "tmp").iterdir()) == []
    return err


def interrupted(folder: Path, delay: float) -> str:
    process = job(folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    err = ended(process, folder)
    assert LINE.fullmatch(err), err
    assert not (folder / "run" / "weights.pt").exists()
    assert (folder / "run").exists() == ("after" in err)  # before the first step there is nothing to keep
    return err


def test_a_folder_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the run folder goes, and `runs` if it is empty then."""
    monkeypatch.chdir(tmp_path)
    for name, stays in (("mine/run", True), ("runs/s-1", False)):
        folder = Path(name)
        folder.mkdir(parents=True)
        with pytest.raises(KeyboardInterrupt), removed_if_interrupted(folder):
            raise KeyboardInterrupt
        assert not folder.exists()
        assert folder.parent.exists() == stays


@pytest.mark.parametrize("delay", [*OFTEN, *(pytest.param(delay, marks=pytest.mark.slow) for delay in BY_HAND)])
def test_ctrl_c_after_some_seconds(delay: float, tmp_path: Path) -> None:
    interrupted(tmp_path, delay)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_ctrl_c_at_random(number: int, tmp_path: Path) -> None:
    interrupted(tmp_path, random.Random(number).uniform(0.01, 15.0))


ASKED = "a checkpoint is saved after this step; a second signal ends the job at once"
ENDINGS = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted", signal.SIGHUP: "hung up"}


def asked_to_end(number: signal.Signals, folder: Path) -> int:
    """How many steps a job had trained that was asked to end while it trained."""
    process = training(folder)
    process.send_signal(number)
    err = ended(process, folder, 128 + number)
    steps = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert err == f"{number.name}: {ASKED}\n{ENDINGS[number]} after {steps:,} steps; run\n"
    (found,) = (folder / "run" / "checkpoints").iterdir()
    assert found.name == f"step-{steps:08}"
    return steps


def test_a_job_that_trains_saves_a_checkpoint(tmp_path: Path) -> None:
    asked_to_end(signal.SIGTERM, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDINGS)
def test_and_goes_on_from_it(number: signal.Signals, tmp_path: Path) -> None:
    """As the run that was not interrupted."""
    steps = asked_to_end(number, tmp_path)
    resumed = piperc(tmp_path, ENTRY, *words(steps + 2, "run"), "--resume", "run")
    whole = piperc(tmp_path, ENTRY, *words(steps + 2, "whole"))
    for process in (resumed, whole):
        assert process.communicate(timeout=60)[1] == ""
    run, whole_run = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "whole"))
    assert [json.loads(row)["loss"] for row in run] == [json.loads(row)["loss"] for row in whole_run]


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    slow = "import time\nexec(open(FILE).read())\ndef on_step(row):\n    if row['step'] > 2: time.sleep(600)\n"
    (tmp_path / "m.py").write_text(slow.replace("FILE", repr(str(MODEL))))
    process = training(tmp_path, tmp_path / "m.py")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert ended(process, tmp_path, 143) == f"SIGTERM: {ASKED}\nterminated after 4 steps; run\n"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("delay", [3.0, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.2, 1.0, 6.0))])
def test_sigterm_before_it_trains(delay: float, tmp_path: Path) -> None:
    process = job(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    assert re.fullmatch(r"(SIGTERM: [^\n]+\n)?terminated (while|after) [^\n]+\n", ended(process, tmp_path, 143))


def training(folder: Path, model: Path = MODEL) -> subprocess.Popen[str]:
    """A job that has trained some steps."""
    process = job(folder, model)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step    3 "):
        assert process.poll() is None
    return process


# ------------------------------------------------------------------------------------------- where Python would lose it

SWALLOWED = {
    "in a destructor": """
        class Late:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)
        def run():
            late = Late()
            del late
    """,
    "by an except": """
        def run():
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                pass
    """,
    "by code that raises something else": """
        def run():
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                raise ValueError("what a library makes of it") from None
    """,
    "by a callback of C": """
        import ctypes
        def run():
            ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
    """,
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_an_interrupt_that_is_swallowed(name: str, tmp_path: Path) -> None:
    """It comes again, until the command has ended."""
    code = (
        "import signal, sys, time\nfrom piperlang import interrupts\nfrom piperlang.cli import main\n"
        + textwrap.dedent(SWALLOWED[name])
        + textwrap.dedent("""
        def whole(words):
            run()
            time.sleep(50)
            print("went on")
            return 0
        main._run = whole
        sys.exit(interrupts.watched(lambda: main.main(["explain"])))
        """)
    )
    process = piperc(tmp_path, code)
    assert ended(process, tmp_path) == "interrupted while starting\n"


@pytest.mark.parametrize(("seconds", "said"), [(0.5, "imported\n"), (50, "")])
def test_an_import_ends_first(seconds: float, said: str, tmp_path: Path) -> None:
    """torch aborts the process when its import is interrupted. One that takes long is given up with the process."""
    (tmp_path / "slow_package.py").write_text(
        "import signal, sys, time\nsignal.raise_signal(signal.SIGINT)\n"
        f"time.sleep({seconds})\nprint('imported', file=sys.stderr)\n"
    )
    code = textwrap.dedent("""
        import sys, time
        from piperlang.interrupts import watched

        def run():
            import slow_package
            time.sleep(50)
            return 0

        sys.path.insert(0, "")
        sys.exit(watched(run))
    """)
    assert ended(piperc(tmp_path, code), tmp_path) == f"{said}interrupted while starting\n"


def test_cleaning_up_is_not_interrupted_again(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import signal, sys, time
        from piperlang.interrupts import watched

        def run():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
                print("cleaned up", file=sys.stderr)

        sys.exit(watched(run))
    """)
    assert ended(piperc(tmp_path, code), tmp_path) == "cleaned up\ninterrupted while starting\n"


def test_a_main_thread_that_never_comes_back(tmp_path: Path) -> None:
    """It waits in C, where no exception can be raised: the process ends all the same."""
    code = textwrap.dedent("""
        import ctypes, sys
        from piperlang import interrupts

        interrupts.BUSY = 1.0

        def wait():
            # A call that goes on after a signal, as long kernels do.
            lock = ctypes.create_string_buffer(64)
            libc = ctypes.CDLL(None)
            libc.pthread_mutex_init(lock, None)
            libc.pthread_mutex_lock(lock)
            print("up", flush=True)
            libc.pthread_mutex_lock(lock)

        sys.exit(interrupts.watched(wait))
    """)
    process = piperc(tmp_path, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert ended(process, tmp_path) == "interrupted while starting\n"


def test_a_handler_of_the_users(tmp_path: Path) -> None:
    """Who handles SIGINT in a model file decides what it means."""
    code = "import signal, sys, time\nfrom piperlang.interrupts import watched\n"
    code += "def run():\n    signal.signal(signal.SIGINT, lambda *_: print('mine'))\n"
    code += "    signal.raise_signal(signal.SIGINT)\n    time.sleep(0.5)\n    return 3\nsys.exit(watched(run))"
    process = piperc(tmp_path, code)
    assert process.communicate(timeout=60) == ("mine\n", "")
    assert process.returncode == 3


def test_a_background_job_that_ignores_interrupts(tmp_path: Path) -> None:
    code = "import signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += "from piperlang.interrupts import watched\n"
    code += "sys.exit(watched(lambda: signal.raise_signal(signal.SIGINT) or 0))"
    process = piperc(tmp_path, code)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
