"""The layout of the tests: a folder for each package, what they share in tests/support, no test imports another one."""

from __future__ import annotations

import ast

from tests.support import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))


def imported(text: str) -> set[str]:
    """Dotted names that a file imports, each also with the name that is taken from it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def test_no_test_imports_another_test() -> None:
    modules = {file.stem for file in FILES if file.name.startswith("test_")}
    assert modules
    wrong = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for name in imported(file.read_text(encoding="utf-8"))
        if modules & set(name.split("."))
    }
    assert not wrong
