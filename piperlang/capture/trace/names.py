"""The paths of the modules that operators belong to. A module that is registered in several places answers to all of
its paths: an embedding that encoder and decoder share is `shared`, `encoder.embed` and `decoder.embed`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from piperlang.capture.annotate import CALLER

_NAMES = "piper_modules"
_Path = tuple[str, ...]


@dataclass(frozen=True)
class ModuleName:
    parts: _Path
    least: int = 0
    """How long a prefix of it has to be to mean this module: where the decoder calls `encoder.embed_tokens`, its
    operators are not part of `encoder`."""


def names_of(node: fx.Node) -> list[ModuleName]:
    """All names of the innermost module of an operator. The first is the one that it is called by."""
    return node.meta.get(_NAMES) or [ModuleName(_innermost(node))]


def name_modules(graph: fx.Graph, model: nn.Module) -> None:
    """Notes all names of modules that have several."""
    paths: dict[int, list[_Path]] = {}
    for path, module in _registered(model, (), ()):
        paths.setdefault(id(module), []).append(path)
    several = {path: every for every in paths.values() if len(every) > 1 for path in every}
    if not several:
        return
    known: dict[tuple[_Path, ...], list[ModuleName]] = {}
    for node in graph.nodes:
        stack = tuple(_stack(node))
        if any(path in several for path in stack):
            if stack not in known:
                known[stack] = _names(stack, several)
            node.meta[_NAMES] = known[stack]


def _names(stack: tuple[_Path, ...], several: dict[_Path, list[_Path]]) -> list[ModuleName]:
    called: _Path = ()
    others: list[ModuleName] = []
    for path in stack:
        every = several.get(path, [path])
        called = next((one for one in every if one[: len(called)] == called), path)
        others = [one for old in others if (one := _inside(old, path, stack)) is not None]
        others += [ModuleName(one, len(one)) for one in every if one != called]
    return [ModuleName(called), *others]


def _inside(outer: ModuleName, path: _Path, stack: tuple[_Path, ...]) -> ModuleName | None:
    """The name of a module inside one with another name."""
    above = stack[stack.index(path) - 1] if stack.index(path) else ()
    return ModuleName(outer.parts + path[len(above) :], outer.least) if path[: len(above)] == above else outer


def _registered(module: nn.Module, path: _Path, above: tuple[nn.Module, ...]) -> Iterator[tuple[_Path, nn.Module]]:
    """All modules by all their paths; a module inside itself once."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None and child not in (*above, module):
            yield from _registered(child, (*path, name), (*above, module))


def _stack(node: fx.Node) -> Iterator[_Path]:
    """The modules that an operator is called in, from the model inwards."""
    called = list((node.meta.get("nn_module_stack") or {}).values())
    for path, _ in called[:-1] if CALLER in (node.meta.get("custom") or {}) else called:
        yield tuple(part for part in path.removeprefix("model").strip(".").split(".") if part)


def _innermost(node: fx.Node) -> _Path:
    *_, last = ((), *_stack(node))
    return last
