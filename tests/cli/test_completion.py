"""Completion in real shells: what a tab offers after `piperc ...`. Shells that are not installed are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from piperlang.cli.completion import WRITERS, commands
from piperlang.cli.main import COMMANDS, command_parser, main
from piperlang.diagnostics.codes import CODES

Complete = Callable[[str], set[str]]
"""What a shell offers for a command line that is not finished."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to complete, and a script for each shell."""
    found = tmp_path_factory.mktemp("files")
    for name in ("model.py", "my schedule.piper", "other.piper", "step.plan", "notes.txt"):
        (found / name).touch()
    (found / "examples").mkdir()
    (found / "examples" / "zbv.piper").touch()
    scripts = tmp_path_factory.mktemp("scripts")
    for shell, write in WRITERS.items():
        (scripts / shell).write_text(write(commands()))
    (found / ".scripts").symlink_to(scripts)
    return found


def started(folder: Path, command: str, *arguments: str) -> pexpect.spawn:
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    environment = {
        "PATH": "/usr/bin:/bin",
        "TERM": "dumb",
        "PS1": "$ ",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "LANG": "C.UTF-8",
    }
    shell = pexpect.spawn(
        command,
        list(arguments),
        cwd=str(folder),
        env=environment,
        encoding="utf-8",
        timeout=300,
        dimensions=(100, 200),
        echo=False,
    )
    shell.ptyproc.delayafterterminate = 2.0  # seconds, not 0.1: the machine may be busy
    return shell


@pytest.fixture(scope="module")
def bash(folder: Path) -> Iterator[Complete]:
    shell = started(folder, "bash", "--norc", "--noprofile", "-i")
    for setting in ("show-all-if-ambiguous on", "bell-style none", "enable-bracketed-paste off"):
        shell.sendline(f"bind 'set {setting}'")
    shell.sendline("source .scripts/bash; echo re''ady")
    shell.expect_exact("ready")

    def complete(line: str) -> set[str]:
        # M-* writes all completions into the line, which is then printed word by word in place of being run.
        shell.send(f"{line}\x1b*\x01printf '<%s>' \x05; echo '<e''nd>'\r")
        shell.expect_exact("<end>")
        words = shell.before.rpartition("<piperc>")[2]
        return {word for word in words.strip("<>").split("><") if word not in line.split()[1:]}

    yield complete
    shell.close(force=True)


@pytest.fixture(scope="module")
def fish(folder: Path) -> Complete:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")

    def complete(line: str) -> set[str]:
        command = ["fish", "--no-config", "-c", "source .scripts/fish; complete -C $argv[1]", line]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        )
        assert done.stderr == ""
        return {row.partition("\t")[0] for row in done.stdout.splitlines()}

    return complete


@pytest.fixture(scope="module")
def zsh(folder: Path) -> Iterator[Complete]:
    shell = started(folder, "zsh", "-f", "-i")
    # Every match is written into the line, and the line is printed in place of being run.
    for line in (
        "autoload -U compinit; compinit -u -D",
        "zstyle ':completion:*' completer _all_matches _complete",
        "zstyle ':completion:*' insert true",
        "zstyle ':completion:*' old-matches false",
        'show() { local -a w=(${(z)BUFFER}); print -r -- "<${(j:><:)${(@Q)w}}><end>"; BUFFER= }',
        "zle -N show; bindkey '^T' show; bindkey '^I' complete-word",
        "source .scripts/zsh; print re''ady",
    ):
        shell.sendline(line)
    shell.expect_exact("ready")

    def complete(line: str) -> set[str]:
        shell.send(f"{line}\t\x14")
        shell.expect_exact("<end>")
        words = shell.before.rpartition("<piperc>")[2]
        return {word for word in words.strip("<>").split("><") if word not in line.split()[1:]}

    yield complete
    shell.close(force=True)


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest) -> Complete:
    found: Complete = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("piperc ch", {"check"}),
        ("piperc check --num", {"--numerics"}),
        ("piperc check --format ", {"full", "concise", "json", "github", "sarif"}),
        ("piperc --format s", {"sarif"}),
        ("piperc check o", {"other.piper"}),
        ("piperc check mo", {"model.py"}),
        ("piperc orders m", {"my schedule.piper"}),
        ("piperc orders examples/", {"examples/zbv.piper"}),
        ("piperc mo", {"model.py"}),
        ("piperc model.py other.piper --exec", {"--executor"}),
        ("piperc model.py other.piper --executor ", {"ray", "inline"}),
        ("piperc run s", {"step.plan"}),
        ("piperc explain P090", {code for code in CODES if code.startswith("P090")}),
        ("piperc completion ", {"bash", "zsh", "fish"}),
        ("piperc graph model.py other.piper --sv", {"--svg"}),
        ("piperc orders --num", set()),
    ],
)
def test_what_is_offered(complete: Complete, line: str, offered: set[str]) -> None:
    assert {word.removesuffix("=") for word in complete(line)} - {line.split()[-1]} == offered


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_other_files_are_not_offered(shell: str, request: pytest.FixtureRequest) -> None:
    """zsh offers them where nothing else fits, as it does for every command."""
    assert request.getfixturevalue(shell)("piperc orders notes") <= {"notes"}


def test_all_commands_are_offered(complete: Complete) -> None:
    assert complete("piperc ") >= {*COMMANDS, "model.py"}


def test_all_options_are_offered(complete: Complete) -> None:
    for name in ("train", "orders", "doctor"):
        offered = {word.removesuffix("=") for word in complete(f"piperc {name} --")}
        assert offered == {flag for flag in command_parser(name).flags if flag.startswith("--")}


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, write in WRITERS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == write(commands())
