"""The layout of the project: tests in a folder for each package, no test imports another one, and a package without
import cycles and without untyped records."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

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


# -------------------------------------------------------------------------------------------------------- the package


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def run_time_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports anywhere in a file, in functions too, except those for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from run_time_imports(child)


def test_no_import_cycles() -> None:
    """Between files of piperlang/: neither when they are loaded nor when functions run."""
    files = {module_name(file): file for file in (ROOT / "piperlang").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found: set[str] = set()
        for statement in run_time_imports(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom):
                module = statement.module or ""
                found |= {full if (full := f"{module}.{one.name}") in files else module for one in statement.names}
            else:
                found |= {one.name for one in statement.names}
        graph[name] = {other for other in found if other in files and other != name}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_plans_and_the_runtime_have_no_untyped_records() -> None:
    """Instructions, stage programs and shards are types; dicts with string keys are for JSON."""
    untyped = re.compile(r"""\b(args|kind|entry|held)\[['"]""")
    wrong = [
        f"{file.relative_to(ROOT)}:{number}"
        for package in ("plan", "runtime")
        for file in (ROOT / "piperlang" / package).rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if untyped.search(line)
    ]
    assert not wrong


SYNTAX = ("piperlang.syntax.tree", "piperlang.syntax.node")


def test_no_class_name_means_two_things() -> None:
    """Nodes of the syntax tree are always written `tree.Shard`. What a directive leads to may have its name: the
    placement of a sharded tensor, the instruction that offloads."""
    files = {module_name(file): file.read_text(encoding="utf-8") for file in (ROOT / "piperlang").rglob("*.py")}
    found: dict[str, list[str]] = {}
    for module in files.keys() - set(SYNTAX):
        for node in ast.parse(files[module]).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    assert len(found) > 200
    twice = {name: modules for name, modules in found.items() if len(modules) > 1}
    assert twice.keys() == {"Offload", "Recompute", "Replicate", "Shard"}, twice
    assert all(any(".directives." in module for module in modules) for modules in twice.values())
    taken = {name for module in files.keys() - set(SYNTAX) for name in imported(files[module])}
    assert not found.keys() & {name.rpartition(".")[2] for name in taken if name.rpartition(".")[0] in SYNTAX}
