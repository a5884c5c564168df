"""Prints directives as a flat script: no parameters, loops or imports, one directive after
the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from piperlang.elaborate import directive as d
from piperlang.elaborate.selector import Selector, TagValue
from piperlang.elaborate.values import Mesh


def resolved(directives: Iterable[d.Directive]) -> str:
    return "".join(f"{line}\n" for directive in directives for line in _lines(directive))


def _lines(directive: d.Directive) -> Iterator[str]:
    match directive:
        case d.UseMesh(mesh=mesh):
            yield _mesh(mesh)
        case d.Tag(tags=tags, paths=paths):
            yield f"tag {', '.join(f'{key}={_tag(value)}' for key, value in tags)} at {', '.join(map(str, paths))}"
        case d.Place(selector=selector, where=where):
            yield f"place {selector} on {where}"
        case d.Replicate(selector=selector, axes=axes, options=options):
            yield f"replicate {selector} over {', '.join(map(str, axes))}{_with(options)}"
        case d.Shard(selector=selector, axes=axes, options=options):
            yield f"shard {selector} over {', '.join(map(str, axes))}{_with(options)}"
        case d.Split(selector=selector, count=count, name=name):
            yield f"split {'batch' if selector is None else selector} into {count} as {name}"
        case d.Stream(selector=selector, stream=stream):
            yield f'stream {selector} on "{stream}"'
        case d.Recompute(selector=selector, options=options):
            yield f"recompute {selector}{_with(options)}"
        case d.Offload(selector=selector, options=options):
            yield f"offload {selector}{_with(options)}"
        case d.Order(where=None, steps=steps):
            yield f"order {' -> '.join(map(_step, steps))}"
        case d.Order(where=where, steps=steps):
            yield f"order on {where}:"
            for step in steps:
                yield f"    {_step(step)}"


def _mesh(mesh: Mesh) -> str:
    return f"mesh {mesh.name} = {', '.join(f'{axis}: {size}' for axis, size in mesh.axes)}"


def _step(step: d.Step) -> str:
    return " & ".join(map(_one, step.items))


def _one(selector: Selector) -> str:
    """In an order, `|` between selectors needs parentheses."""
    return f"({selector})" if len(selector.alternatives) > 1 else str(selector)


def _with(options: Sequence[d.Option]) -> str:
    return f" with {', '.join(f'{option.name}={_value(option.value)}' for option in options)}" if options else ""


def _tag(value: TagValue) -> str:
    return f'"{value}"' if isinstance(value, str) else _value(value)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) and not value.isidentifier() else str(value)
