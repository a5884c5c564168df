"""How the command line is read: suggestions, the order of arguments, folders, formats, colours, help."""

from __future__ import annotations

import argparse
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from piperlang.cli import needs
from piperlang.cli.main import COMMANDS, command_parser, main
from piperlang.diagnostics.render import FORMATS
from tests.support import ROOT
from tests.support.often import one_in

MLP = ROOT / "examples" / "01_mlp"
BOTH = str(MLP / "both.piper")
WRONG = "let a = [1, 2]\nprint b\n"


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("words", "message", "help"),
    [
        ("orders S.piper --after 3", "`piperc orders` has no option `--after`", "it is an option of `piperc graph`"),
        (
            "check S.piper --steps 3",
            "`piperc check` has no option `--steps`",
            "it is an option of `piperc train`, `piperc run` and `piperc profile`",
        ),
        ("M.py S.piper --step 3", "abbreviated option `--step`", "did you mean `--steps`?"),
        (
            "M.py S.piper --s=3",
            "abbreviated option `--s`",
            "did you mean `--steps`, `--seed`, `--save-every`, `--save-minutes` or `--shapes`?",
        ),
        ("M.py S.piper --stesp 3", "unknown option `--stesp`", "did you mean `--steps`?"),
        ("graph --aftr 3", "unknown option `--aftr`", "did you mean `--after`?"),
        ("orders S.piper --jsn", "unknown option `--jsn`", "did you mean `--json`?"),
        ("orders S.piper -x", "unknown option `-x`", "`piperc orders --help` lists the options"),
        ("check S.piper --numrics=1", "unknown option `--numrics`", "did you mean `--numerics`?"),
        (
            "--json check S.piper",
            "option `--json` is before the command",
            "put options after the command: piperc check --json ...",
        ),
        (
            "--steps 3 M.py S.piper",
            "option `--steps` is before the command",
            "put options after the command: piperc train --steps ...",
        ),
        ("--formt json check S.piper", "unknown option `--formt`", "did you mean `--format`?"),
        ("--verison", "unknown option `--verison`", "did you mean `--version`?"),
        ("version", "unknown command `version`", "did you mean `--version`?"),
        ("help chek", "unknown command `chek`", "did you mean `check`?"),
        ("ordres S.piper", "unknown command `ordres`", "did you mean `orders`?"),
        (
            "check S.piper --format jsno",
            "`jsno` is not one of full, concise, json, github, sarif",
            "did you mean `json`?",
        ),
        ("check S.piper --format", "`--format` needs a value", "`piperc check --help` lists the options"),
        (
            "M.py S.piper --steps ten",
            "`--steps` must be an integer, not `ten`",
            "`piperc train --help` lists the options",
        ),
        (
            "M.py S.piper --timeout ten",
            "`--timeout` must be a number, not `ten`",
            "`piperc train --help` lists the options",
        ),
        ("orders S.piper --json --csv", "`--csv` and `--json` cannot be combined", "use only one of them"),
        ("orders S.piper T.piper", "unexpected argument `T.piper`", "piperc orders [options] FILE.piper"),
        ("orders M.py S.piper", "`piperc orders` takes no model", "remove M.py: piperc orders [options] FILE.piper"),
        ("run M.py S.piper", "`piperc run` takes no model", "remove M.py: piperc run [options] FILE.plan"),
        ("fmt M.py", "`piperc fmt` takes no model", "remove M.py: piperc fmt [options] FILE.piper ..."),
        ("-- check S.piper", "unknown option `--`", "`piperc --help` lists the commands and options"),
        ("M.py", "SCHEDULE.piper is missing", "piperc train [options] MODEL.py SCHEDULE.piper"),
        ("graph", "MODEL.py and SCHEDULE.piper are missing", "piperc graph [options] MODEL.py SCHEDULE.piper"),
        ("check", "FILE.piper is missing", "piperc check [options] [MODEL.py] FILE.piper ..."),
        (
            "--format json",
            "`--format json` without a command",
            "piperc COMMAND [options] ...; `piperc --help` lists the commands",
        ),
        (
            "S.piper",
            "missing command",
            "`piperc check S.piper` checks the script, `piperc MODEL.py S.piper` trains a model with it",
        ),
        ("S.piper M.py", "the model must come before the schedule", "piperc M.py S.piper"),
        ("S.piper --steps 3 M.py", "the model must come before the schedule", "piperc M.py S.piper"),
        ("train S.piper M.py", "the model must come before the schedule", "piperc M.py S.piper"),
        ("check S.piper M.py", "the model must come before the schedule", "piperc check M.py S.piper"),
        ("check S.piper --numerics M.py", "the model must come before the schedule", "piperc check M.py S.piper"),
        ("graph S.piper M.py --json", "the model must come before the schedule", "piperc graph M.py S.piper"),
        ("plan S.piper M.py", "the model must come before the schedule", "piperc plan M.py S.piper"),
    ],
)
def test_what_is_said_of_wrong_command_lines(
    words: str, message: str, help: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.split()
    code, out, err = ran(capsys, *arguments, *([] if "--format" in words else ["--format", "json"]))
    assert (code, out) == (2, "")
    if err.startswith("{"):
        (found,) = json.loads(err)["diagnostics"]
        assert (found["code"], found["message"], found["helps"]) == ("P0902", message, [help])
    else:
        assert f"error[P0902]: {message}\n" in err
        assert f"= help: {help}\n" in err


NUMBERS = [
    (command, action)
    for command in COMMANDS
    for action in command_parser(command).described()
    if getattr(action.type, "__name__", "") in ("int", "float")
]
"""Every option of every command that is a number."""


@pytest.mark.parametrize(
    ("command", "action"), NUMBERS, ids=[f"{command} {action.option_strings[-1]}" for command, action in NUMBERS]
)
def test_numbers_that_no_command_can_use(
    command: str, action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused where they stand, before the files, which do not exist, are looked at."""
    flag = action.option_strings[-1]
    files = {"check": ["M.py", "S.piper"], "run": ["P.plan"], "fuzz": ["M.py"], "repl": ["M.py"]}
    for value in ("9" * 23, "-" + "9" * 23, "9" * 5000, "nan", "inf", "-inf", "1e400", "", "ten"):
        code, out, err = ran(capsys, command, *files.get(command, ["M.py", "S.piper"]), f"{flag}={value}")
        assert (code, out) == (2, ""), value
        assert re.match(rf"error\[P0902\]: (`{flag}[ `]|{flag} must be )", err), (value, err)
        assert "= help: " in err
        assert len(err) < 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "M.py S.piper --seed 9223372036854775808",
            "--seed must be at most 9223372036854775807, not 92233720368547758",
        ),
        ("M.py S.piper --timeout nan", "--timeout must be a number from 0.001 to 100000000, not nan"),
        ("M.py S.piper --timeout inf", "--timeout must be at most 100000000, not inf"),
        ("M.py S.piper --timeout 0", "--timeout must be at least 0.001, not 0"),
        ("M.py S.piper --steps 0", "--steps must be at least 1, not 0"),
        ("M.py S.piper --devices 0", "--devices must be at least 1, not 0"),
        ("M.py S.piper --validate-every 0", "--validate-every must be at least 1, not 0"),
        ("graph M.py S.piper --after -1", "--after must be at least 0, not -1"),
        ("fuzz M.py --count 0", "--count must be at least 1, not 0"),
        ("fuzz M.py --devices 99999", "--devices must be at most 65536, not 99999"),
        ("fuzz M.py --mesh pp=1000,dp=1000", "`--mesh pp=1000,dp=1000` has more than 65,536 devices"),
        ("M.py S.piper -p =", "invalid parameter `-p =`"),
        ("plan M.py S.piper -p a", "invalid parameter `-p a`"),
        ("graph M.py S.piper -p a=1 -p a=2", "parameter `a` is given twice"),
        ("check M.py S.piper -p 1=1", "invalid parameter `-p 1=1`"),
        ("M.py S.piper --out FILE", "cannot make the run folder FILE"),
        ("M.py S.piper --out FILE/run", "cannot make the run folder FILE/run"),
        (
            "M.py S.piper --executor inline --backend nccl",
            "cannot use `--backend nccl`: `--executor inline` runs on the CPU",
        ),
        ("plan M.py S.piper -o FOLDER", "`-o FOLDER` cannot be written"),
        ("plan M.py S.piper -o none/x.plan", "`-o none/x.plan` cannot be written"),
        ("graph M.py S.piper --svg FOLDER", "`--svg FOLDER` cannot be written"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(find_spec(name) is None for name in ("torch", "ray", "numpy", "safetensors")):
        pytest.skip("the front end alone refuses these commands because it cannot run them")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "M.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "S.piper").write_text("")
    code, out, err = ran(capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error[P0902]: {message}")
    assert "= help: " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "FOLDER", "M.py", "S.piper"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (f"{command} {flag} {name}", f"`{flag} {name}` cannot be written")
            for command, flag in (
                ("plan M.py S.piper", "-o"),
                ("profile M.py S.piper", "-o"),
                ("graph M.py S.piper", "--svg"),
            )
            for name in ("M.py", "S.piper", "../w/S.piper", "link.svg", "imported.piper", "imported.py")
        ),
        ("view M.py S.piper -o link.svg", "`-o link.svg` cannot be written"),
        ("view M.py S.piper --profile times.json -o times.json", "`-o times.json` cannot be written"),
        ("compare T.piper S.piper --model M.py -o link.svg", "`-o link.svg` cannot be written"),
        ("orders S.piper --svg link.svg", "`--svg link.svg` cannot be written"),
        ("orders S.piper --svg=", "the name of `--svg` is empty"),
        ("plan M.py S.piper -o=", "the name of `-o` is empty"),
        ("profile M.py S.piper --output=", "the name of `-o` is empty"),
        ("view M.py S.piper --output=", "the name of `-o` is empty"),
    ],
)
def test_no_output_overwrites_what_was_read(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that the command reads, under whatever name, and any that these may import."""
    if any(find_spec(name) is None for name in ("torch", "ray", "numpy", "safetensors")):
        pytest.skip("the front end alone refuses these commands because it cannot run them")
    monkeypatch.chdir(tmp_path)
    names = ("M.py", "S.piper", "T.piper", "imported.py", "imported.piper", "times.json")
    for name in names:
        (tmp_path / name).write_text(f"of {name}")
    (tmp_path / "link.svg").symlink_to("S.piper")
    code, out, err = ran(capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error[P0902]: {message}")
    assert [(tmp_path / name).read_text() for name in names] == [f"of {name}" for name in names]


def test_a_folder_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"`piperc check {MLP}` checks all scripts in it" in ran(capsys, str(MLP))[2]


@pytest.mark.parametrize("command", one_in(3, COMMANDS))
def test_no_flag_is_suggested_that_the_command_does_not_have(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag of every command, misspelt: what is suggested is one of this command, and never what was written."""
    own = command_parser(command).flags
    for flag in sorted({flag for name in COMMANDS for flag in command_parser(name).flags if flag.startswith("--")}):
        # One way of each, another for every command.
        written = (flag[:-1], flag + "x", flag[:3] + flag[4:])[(len(flag) + len(command)) % 3]
        if written in own or len(written) < 4:
            continue
        code, _, err = ran(capsys, command, written)
        assert code == 2
        for suggested in re.findall(r"`(-[^`]*)`", (re.search(r"did you mean (.*)\?", err) or [""])[0]):
            assert suggested in own
            assert suggested != written


def test_general_options_may_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "s.piper"
    script.write_text(WRONG)
    for words in (["--format", "json", "check"], ["--format=json", "check"], ["check", "--format", "json"]):
        code, out, _ = ran(capsys, *words, str(script))
        assert code == 1
        assert json.loads(out)["diagnostics"][0]["code"] == "P0201"


def test_options_may_stand_between_operands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.piper").write_text("param n = 2\n")
    assert ran(capsys, "check", str(tmp_path / "a.piper"), "-p", "n=3", str(tmp_path / "b.piper"))[0] == 0
    assert ran(capsys, "check", "-pn=3", "--", str(tmp_path / "a.piper"))[0] == 0
    assert "unexpected argument `x`" in ran(capsys, "orders", "a.piper", "-p", "n=3", "x")[2]


def test_alone_it_prints_help_and_does_not_look_like_success(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys)
    assert (code, err) == (2, "")
    assert out.startswith("usage: piperc MODEL.py SCHEDULE.piper [options]")
    assert all(f"    {name} " in out for name in COMMANDS)
    assert ran(capsys, "--help") == (0, out, "")
    assert ran(capsys, "help") == (0, out, "")
    assert ran(capsys, "help", "orders") == ran(capsys, "orders", "-h")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from piperlang import __version__

    assert ran(capsys, "--version") == ran(capsys, "-V") == (0, f"piperc {__version__}\n", "")


# --------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("columns", [20, 40, 50, 80, 120, 200, 400])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = ran(capsys, *([command] if command else []), "--help")
    assert code == 0
    longest = max(map(len, out.splitlines()))
    assert longest <= min(max(columns, 40), 200)
    if columns >= 80:
        assert longest > 60  # and uses it
    flags = command_parser(command).flags if command else ["--version"]
    assert all(flag in out for flag in flags)


# ------------------------------------------------------------------------------------------------------------ folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two scripts, one of them wrong and badly laid out, and what must not be looked at."""
    monkeypatch.chdir(tmp_path)
    for path, text in {
        "a.piper": "let x = 1\n",
        "deep/er/b.piper": "print  y\n",
        ".hidden/c.piper": "print z\n",
        "deep/.d.piper": "print z\n",
        "deep/notes.txt": "print z\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "venv" / "theirs.piper").write_text("print z\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_check_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "check", ".", "--format", "concise")
    assert (code, out) == (1, "")
    assert re.findall(r"^(\S+?):", err, re.MULTILINE) == ["deep/er/b.piper"]
    code, out, err = ran(capsys, "check", "deep", "a.piper", "a.piper")
    assert (code, out) == (1, "a.piper: ok (no directives)\n")
    assert "--> deep/er/b.piper:1:8" in err


def test_fmt_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "fmt", "--check", ".") == (1, "deep/er/b.piper would change\n", "")
    assert ran(capsys, "fmt", ".") == (0, "deep/er/b.piper formatted\n", "")
    assert (folder / "deep/er/b.piper").read_text() == "print y\n"
    assert ran(capsys, "fmt", "--check", ".") == (0, "", "")


@pytest.mark.parametrize("command", ["check", "fmt"])
def test_folders_that_give_nothing(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, command, "empty")
    assert code == 2
    assert "error[P0901]: no .piper files in empty" in err
    code, _, err = ran(capsys, command, "nowhere")
    assert code == 2
    assert "cannot read nowhere" in err
    code, _, err = ran(capsys, command, "empty", "a.piper", "--format", "concise")
    assert (code, err) == (
        2,
        "P0901 no .piper files in empty help: folders are searched for *.piper; hidden folders are skipped\n",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="this user reads and writes everything")
def test_folders_without_rights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "deep/er").chmod(0)
    assert "cannot read" in ran(capsys, "check", ".")[2]
    (folder / "deep/er").chmod(0o500)
    code, _, err = ran(capsys, "fmt", "deep")
    assert code == 2
    assert "error[P0901]: cannot write b.piper" in err


def test_one_broken_script_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.piper").write_text("let\n" * 60)
    (tmp_path / "b.piper").write_text("let\n" * 60)
    found = json.loads(ran(capsys, "check", ".", "--format", "json")[1])["diagnostics"]
    assert [d["file"] for d in found] == ["a.piper"] * 20 + ["b.piper"] * 20


# ------------------------------------------------------------------------------------------------------------ formats


def test_github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b:c%.piper").write_text('require False, "50%\\nmore: \u00e9"\n')
    (tmp_path / "d.piper").write_text("let x = (\n  1 +\n")
    code, out, err = ran(capsys, "check", str(tmp_path), "--format", "github")
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    # Colons and commas are escaped in properties, which they separate; percent signs and line ends everywhere.
    assert first.startswith(
        "::error file=a%2Cb%3Ac%25.piper,line=1,endLine=1,col=9,endColumn=13,title=P0207%3A requirement not met::"
    )
    assert first.endswith("::50%25%0Amore: \u00e9: this condition is false")
    assert "%0Ahelp: " in second
    assert second.startswith("::error file=d.piper,line=1,")
    assert ran(capsys, "check", BOTH, "--format", "github") == (0, "", "")


def test_sarif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fields that SARIF 2.1.0 requires, and what code scanning shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.piper").write_text("let a = 1\nlet a = 2\n")
    (tmp_path / "c.piper").write_text('print "\U0001f600", x\nprint y\n')
    code, out, err = ran(capsys, "check", str(tmp_path), "--format", "sarif")
    assert (code, err) == (1, "")
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    assert run["columnKind"] == "unicodeCodePoints"
    driver = run["tool"]["driver"]
    assert driver["name"] == "piperc"
    rules = [rule["id"] for rule in driver["rules"]]
    assert rules == ["P0201", "P0202"]
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["markdown"].startswith(f"# {rule['id']}")
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["message"]["text"]
    places = [
        (
            result["ruleId"],
            place["artifactLocation"]["uri"],
            *(place["region"][key] for key in ("startLine", "startColumn", "endLine", "endColumn")),
        )
        for result in run["results"]
        for place in [result["locations"][0]["physicalLocation"]]
    ]
    assert places == [
        ("P0202", "a%20b.piper", 2, 5, 2, 6),
        ("P0201", "c.piper", 1, 12, 1, 13),
        ("P0201", "c.piper", 2, 7, 2, 8),
    ]
    assert run["results"][0]["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 1
    empty = json.loads(ran(capsys, "check", BOTH, "--format", "sarif")[1])
    assert empty["runs"][0]["results"] == []


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_of_a_usage_error(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "explain", "P9999", "--format", format)
    assert (code, out) == (2, "")
    assert "P0904" in err


# ------------------------------------------------------------------------------------------------------------ colours


@pytest.mark.parametrize(
    ("environment", "colored"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, True),  # force-color.org: whatever the value
        ({"FORCE_COLOR": ""}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colors(
    environment: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in ran(capsys, "explain", "P9999")[2]) == colored


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_colors_on_a_terminal(environment: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from piperlang.cli.report import colored as decided

    for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    try:
        with open(slave, "w") as terminal:
            assert decided(terminal) == colored
    finally:
        os.close(master)


# ------------------------------------------------------------------------------------------------ without torch and Ray


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("M.py S.piper", "`torch`, `numpy`, `safetensors` and `ray`"),
        ("M.py S.piper --executor inline", "`torch`, `numpy` and `safetensors`"),
        ("check M.py S.piper", "`torch`, `numpy` and `safetensors`"),
        ("graph M.py S.piper", "`torch`, `numpy` and `safetensors`"),
        ("plan M.py S.piper", "`torch`, `numpy` and `safetensors`"),
        ("run step.plan", "`torch`, `numpy`, `safetensors` and `ray`"),
        ("fuzz M.py", "`torch`, `numpy` and `safetensors`"),
        ("fuzz M.py --executor ray", "`torch`, `numpy`, `safetensors` and `ray`"),
    ],
)
def test_what_to_install_for_models(
    words: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "installed", lambda name: False)
    code, out, err = ran(capsys, *words.split())
    assert (code, out) == (2, "")
    assert f"error[P0905]: {missing} are not installed\n" in err
    assert "help: pip install 'piperlang[run]'" in err


def test_the_front_end_needs_no_more_than_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "installed", lambda name: False)
    for words in (
        ["check", BOTH],
        ["orders", BOTH],
        ["fmt", "--check", BOTH],
        ["explain", "P0905"],
        ["completion", "bash"],
    ):
        assert ran(capsys, *words)[0] == 0


def test_oldest_versions_are_those_of_the_package() -> None:
    import tomllib

    run = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["run"]
    assert set(run) == {f"{name}>={'.'.join(map(str, version))}" for name, version in needs.OLDEST.items()}
