"""Modules: one parsed file with the names it binds, found in the standard library or relative to the importing file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from piperlang.diagnostics import Label, PiperError, did_you_mean, error, listed
from piperlang.elaborate.library import modules
from piperlang.elaborate.names import Names
from piperlang.elaborate.values import Value
from piperlang.source import Source, Span
from piperlang.syntax import parse, tree
from piperlang.syntax.parse import is_file


@dataclass(eq=False)
class Module:
    name: str
    script: tree.Script
    path: Path | None = None
    """None for text that is not a file: it can import the library only."""
    names: dict[str, Value] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """Names that a failed statement would have bound: using one is not reported again."""

    def __str__(self) -> str:
        return f"module {self.name}"


def load(path: Path, shown: str, *, library: bool = False) -> Module:
    """Read, parse and check one file; every problem in it is raised at once."""
    if library:
        return _module(_library(path, shown), path.resolve())
    return from_source(parse.read(path, shown), path.resolve())


@cache
def _library(path: Path, shown: str) -> tree.Script:
    """Parsed once: a session evaluates its imports with every statement."""
    return _checked(parse.read(path, shown, library=True))


def from_source(source: Source, path: Path | None = None) -> Module:
    return _module(_checked(source), path)


def _module(script: tree.Script, path: Path | None) -> Module:
    stem = Path(script.source.name).stem
    return Module(f"std.{stem}" if script.source.library else stem, script, path)


def _checked(source: Source) -> tree.Script:
    script, problems = parse.parse(source)
    try:
        problems = problems + Names(script.broken).check(script.statements)
    except RecursionError:
        raise error(
            "P0107",
            "this script is nested too deeply",
            source.span(0, 0),
            help="name the inner parts with `let`, and move inner blocks to functions",
        ) from None
    if problems:
        raise PiperError(*sorted(problems, key=lambda d: d.span.start if d.span else 0))
    return script


IMPORT_PATH = "PIPER_IMPORT_PATH"
"""The environment variable with further folders that scripts may import from, separated as in PATH."""


def import_path() -> list[Path]:
    return [Path(one).resolve() for one in os.environ.get(IMPORT_PATH, "").split(os.pathsep) if one]


@dataclass
class Importer:
    """Finds and caches modules, and tracks which are being evaluated: a cycle is an error that shows the path."""

    texts: Mapping[Path, str] = field(default_factory=dict)
    """Unsaved text of files that are open in an editor; it replaces the files' contents."""
    loaded: dict[Path, Module] = field(default_factory=dict)
    open: list[tuple[Path, Span]] = field(default_factory=list)
    failed: set[Path] = field(default_factory=set)
    home: Path | None = None
    """The folder of the script, from which it may import; that of the first module that imports one."""

    def find(self, module: tree.Library | tree.File, importing: Module) -> tuple[Path, str, bool]:
        """The file, the name it is shown by, and whether it is the library's."""
        if isinstance(module, tree.Library):
            name = ".".join(module.parts)
            if name not in modules():
                raise error(
                    "P0209",
                    f"unknown module `{name}`",
                    module.span,
                    f"the library has {listed(modules(), 'and')}",
                    help=did_you_mean(name, modules()),
                )
            return modules()[name].resolve(), f"std/{modules()[name].name}", True
        return self._beside(module, importing)

    def load(self, path: Path, shown: str, library: bool) -> Module:
        text = self.texts.get(path)
        return load(path, shown, library=library) if text is None else from_source(Source(shown, text), path)

    def _beside(self, module: tree.File, importing: Module) -> tuple[Path, str, bool]:
        if not module.path.endswith(".piper") or os.path.isabs(module.path) or "\0" in module.path:
            raise error(
                "P0209",
                "an import must name a .piper file relative to this one",
                module.span,
                help='import "./common.piper" as c',
            )
        if importing.path is None:
            raise error("P0209", "cannot import a file: this script was not read from a file", module.span)
        path = importing.path.parent / module.path
        if not is_file(path) and Path(os.path.realpath(path)) not in self.texts:
            near = (
                did_you_mean(path.name, [p.name for p in path.parent.glob("*.piper")])
                if is_file(path.parent, folder=True)
                else None
            )
            raise error(
                "P0209", f"file {module.path} not found", module.span, "the path is relative to this script", help=near
            )
        self.home = self.home or importing.path.parent
        real = Path(os.path.realpath(path))  # of links in a circle, too, where `resolve` raises
        if not any(real.is_relative_to(folder) for folder in (self.home.resolve(), *import_path())):
            link = os.path.normpath(path.absolute()) != str(real)
            raise error(
                "P0209",
                f"{module.path} is {f'a link to {real}, ' if link else ''}outside of the folder of the script",
                module.span,
                f"a script imports from {self.home} and the folders below it",
                help=f"to allow it: `--import-path {real.parent}`",
            )
        shown = os.path.normpath(os.path.join(os.path.dirname(importing.script.source.name), module.path))
        return real, shown, False

    def check_cycle(self, path: Path, span: Span) -> None:
        opened = [p for p, _ in self.open]
        if path not in opened:
            return
        at = opened.index(path)
        also = [Label(where, "which imports") for _, where in self.open[at + 1 :]]
        names = " -> ".join(p.name for p in [*opened[at:], path])
        raise error("P0210", "import cycle", span, names, also=also, help="move the shared code into a third file")
