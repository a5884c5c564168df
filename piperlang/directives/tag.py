"""tag: tags parts of the model by module path, which decides where the model is cut into chunks.

    tag half=0 at layers[0]

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    ...

After:

    F[half=0, stage=0]  device  2 weights -> [8, 16]
    F[stage=0]  device  2 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    ...

A chunk is a maximal run of operators with equal tags; tags of the model's own annotations stay.

Preconditions: every path is that of a module with operators; no earlier directive uses the chunks that the tag would
cut again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.core.selector import TagValue
from piperlang.diagnostics import Label, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import written
from piperlang.elaborate.values import kind
from piperlang.source import Span
from piperlang.syntax import tree
from piperlang.syntax.words import RESERVED_KEYS

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class ModulePath:
    """`layers[0:6].attn`: names, and per index a number, a half-open range, or None for all."""

    parts: tuple[str | int | tuple[int | None, int | None] | None, ...]
    span: Span

    def __str__(self) -> str:
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += f".{part}" if text else part
            elif isinstance(part, tuple):
                text += f"[{'' if part[0] is None else part[0]}:{'' if part[1] is None else part[1]}]"
            else:
                text += "[*]" if part is None else f"[{part}]"
        return text


@dataclass(frozen=True)
class Tag(Directive):
    """tag NAME=VALUE at PATH, ...
    Tag parts of the model by module path: `tag stage=0 at embed, blocks[0:2]`.
    Must come before directives that use the chunks."""

    nodes = (tree.TagAt,)
    uses_chunks = False
    others_rely_on_it = True

    tags: tuple[tuple[str, TagValue], ...]
    paths: tuple[ModulePath, ...]

    @classmethod
    def read(cls, script: Interpreter, node: tree.TagAt) -> Tag:
        tags = tuple(_tag(script, setting) for setting in node.tags)
        return cls(tags, tuple(_path(script, path) for path in node.paths), **script.written(node))

    def __str__(self) -> str:
        tags = (f'{key}="{value}"' if isinstance(value, str) else f"{key}={written(value)}" for key, value in self.tags)
        return f"tag {', '.join(tags)} at {', '.join(map(str, self.paths))}"

    def apply_to_outline(self, outline: Outline) -> None:
        outline.tagged.setdefault(frozenset(self.tags), self)

    def apply_to_schedule(self, schedule: Schedule) -> None:
        early = next((x for x in schedule.directives if x.uses_chunks), None)
        if early is not None:
            raise error(
                "P0413",
                "`tag` after a directive that uses chunks",
                self.span,
                "cuts the model into other chunks",
                also=[Label(early.span, "uses chunks here")],
                help="move the tag before this directive",
            )
        schedule.program.check_tag(self)
        schedule.tag_directives.append(self)
        schedule.recut()


def _tag(script: Interpreter, setting: tree.Setting) -> tuple[str, TagValue]:
    value = script.evaluate(setting.value)
    if setting.name.text in RESERVED_KEYS:
        raise error(
            "P0301",
            f"`{setting.name.text}` is a built-in key and cannot be a tag",
            setting.name.span,
            help="choose another name for the tag",
        )
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise error(
            "P0204", f"a tag must be an integer or a string, not {kind(value)}", setting.value.span, kind(value)
        )
    return setting.name.text, value


def _path(script: Interpreter, node: tree.Path) -> ModulePath:
    parts: list[str | int | tuple[int | None, int | None] | None] = []
    for part in node.parts:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, tree.Everything):
            parts.append(None)
        elif isinstance(part, tree.Range):
            low, high = (script.integer(end) if end is not None else None for end in (part.low, part.high))
            parts.append((low, high))
        else:
            parts.append(script.integer(part))
    return ModulePath(tuple(parts), node.span)
