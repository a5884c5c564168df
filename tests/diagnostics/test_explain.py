"""The pages of `piperc explain`: one per code, with scripts that fail and are repaired as the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piperlang.cli.main import main
from piperlang.diagnostics import explain
from piperlang.diagnostics.codes import CODES
from piperlang.diagnostics.explain import MODEL, Example, Page, page
from piperlang.source import Source
from piperlang.syntax.format import format_source

PAGES = Path(explain.__file__).parent / "pages"
NO_PLACE = {"P0901", "P0902", "P0904"}
"""Mistakes on the command line: there is no file to point into."""

NO_SCRIPT = {
    "P0503",
    "P0504",
    "P0505",
    "P0506",
    "P0602",
    "P0603",
    "P0604",
    "P0605",
    "P0615",
    "P0616",
    "P0606",
    "P0607",
    "P0608",
    "P0609",
    "P0610",
    "P0611",
    "P0612",
    "P0613",
    "P0614",
    "P0905",
}
"""What no script can cause: broken plans (test_plan.py), workers that die (test_faults.py), packages that are missing
(test_package.py). Their pages say what to look at."""

every_code = pytest.mark.parametrize(
    "code", sorted(code for code in CODES if not code.startswith("P08") and code not in NO_SCRIPT)
)
"""The pages about models are run by test_capture.py."""


def of_role(code: str, role: str) -> list[Example]:
    return [example for example in page(code).examples() if example.role == role]


def run(example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """`piperc` on the example's files, in a folder that holds nothing else."""
    if MODEL in example.files:
        pytest.importorskip("torch")
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, data in example.files.items():
        (folder / name).write_bytes(data)
    return main([*example.command(), "--format", "json"])


def diagnostics(captured: Any) -> list[dict[str, Any]]:
    """What was reported as JSON, on whichever of the two streams."""
    text = captured.out if captured.out.startswith("{") else captured.err
    found: list[dict[str, Any]] = json.loads(text)["diagnostics"]
    return found


# ------------------------------------------------------------------------------------------------------------ pages


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert {path.name for path in PAGES.iterdir()} == {f"{code}.md" for code in CODES}


@pytest.mark.parametrize("code", sorted(NO_SCRIPT))
def test_form_of_pages_without_a_script(code: str) -> None:
    found = page(code)
    assert found.title == f"{code}: {CODES[code]}"
    assert 8 <= len(found.text.splitlines()) <= 35


@every_code
def test_form(code: str) -> None:
    found = page(code)
    assert found.title == f"{code}: {CODES[code]}"
    assert {example.role for example in found.examples()} == {"failing", "repaired"}
    assert 10 <= len(found.text.splitlines()) <= (45 if found.models() else 35)
    assert max(map(len, found.text.splitlines())) <= 140
    assert found.text.count("```") % 2 == 0
    assert found.text.endswith("\n")


@every_code
def test_failing_examples_give_the_code(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, example in enumerate(of_role(code, "failing")):
        status = run(example, tmp_path / str(number), monkeypatch)
        found = diagnostics(capsys.readouterr())
        assert {d["code"] for d in found} == {code}
        assert status == (2 if code.startswith("P09") else 1)
        for d in found:
            assert d["message"]
            assert (d["file"] is None) == (code in NO_PLACE)
            if d["file"] is not None:
                assert d["file"] in example.files
                assert (d["end_line"], d["end_column"]) >= (d["line"], d["column"]) >= (1, 1)


@every_code
def test_repaired_examples_are_clean(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, example in enumerate(of_role(code, "repaired")):
        status = run(example, tmp_path / str(number), monkeypatch)
        captured = capsys.readouterr()
        assert (status, captured.err) == (0, "")


@every_code
def test_repaired_examples_are_in_the_canonical_layout(code: str) -> None:
    for example in of_role(code, "repaired"):
        for name, data in example.files.items():
            text = data.decode()
            assert name == MODEL or format_source(Source(name, text)) == text


# ---------------------------------------------------------------------------------------------------------- command


@every_code
def test_command_prints_the_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    upper = capsys.readouterr()
    assert upper.out.rstrip("\n") == page(code).text.rstrip("\n")
    assert upper.err == ""
    assert main(["explain", code.lower()]) == 0
    assert capsys.readouterr() == upper


def test_command_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{code}  {title}" for code, title in CODES.items()]


def test_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "P0903x", "--format", "json"]) == 2
    (found,) = diagnostics(capsys.readouterr())
    assert found["code"] == "P0904"
    assert found["helps"] == ["did you mean `P0903`?"]


# ----------------------------------------------------------------------------------------------------------- format


def test_blocks_become_examples() -> None:
    text = (
        "# P0000: a title\n\nText.\n\n"
        "```piper failing -p ranks=2\na\n```\n\n```piper failing file=b.piper\nb\n```\n\n"
        "```piper failing\nc\n```\n\n"
        "```piper repaired file=x.piper encoding=latin-1 times=2 orders --json\nö\n```\n\n"
        "```\nno example\n```\n"
    )
    found = Page("P0000", text)
    assert found.title == "P0000: a title"
    assert found.examples() == [
        Example("failing", ("-p", "ranks=2"), {"schedule.piper": b"a\n", "b.piper": b"b\n"}),
        Example("failing", (), {"schedule.piper": b"c\n"}),
        Example("repaired", ("orders", "--json"), {"x.piper": b"\xf6\n\xf6\n"}),
    ]


def test_a_model_serves_all_scripts_of_its_page() -> None:
    text = (
        "# P0000: a title\n\n```python model\nm\n```\n\n```piper failing --numerics\na\n```\n\n```piper repaired"
        " file=x.piper\nb\n```\n"
    )
    failing, repaired = Page("P0000", text).examples()
    assert failing == Example("failing", ("--numerics",), {"schedule.piper": b"a\n", "model.py": b"m\n"})
    assert failing.command() == ["check", "model.py", "schedule.piper", "--numerics"]
    assert repaired == Example("repaired", (), {"x.piper": b"b\n", "model.py": b"m\n"})
    assert repaired.command() == ["check", "model.py", "x.piper"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ((), ["check", "a.piper"]),
        (("-p", "ranks=2"), ["check", "a.piper", "-p", "ranks=2"]),
        (("orders", "--csv"), ["orders", "a.piper", "--csv"]),
        (("check", "other.piper"), ["check", "other.piper"]),
        (("explain", "P0302"), ["explain", "P0302"]),
    ],
)
def test_command_line_of_an_example(arguments: tuple[str, ...], command: list[str]) -> None:
    assert Example("failing", arguments, {"a.piper": b"", "b.piper": b""}).command() == command
