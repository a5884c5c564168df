"""stream: assigns nodes to a logical stream. Nodes on different streams may run at the same time.

    mesh gpu = pp: 2
    place [stage=0] on gpu[pp=0]
    place [stage=1] on gpu[pp=1]
    stream [comm=p2p, pass=F] on "pp"

Before:

    F[stage=0]  gpu[pp=0]  4 weights -> [8, 16]
    send.F[stage=0]  gpu[pp=0]  [8, 16]
    recv.F[stage=1]  gpu[pp=1]  [8, 16]
    F[stage=1]  gpu[pp=1]  4 weights -> []
    B[stage=1]  gpu[pp=1]  2 weights -> [8, 16], 4 gradients
    send.B[stage=1]  gpu[pp=1]  [8, 16]
    recv.B[stage=0]  gpu[pp=0]  [8, 16]
    B[stage=0]  gpu[pp=0]  1 weight -> 4 gradients
    ...

After:

    F[stage=0]  gpu[pp=0]  4 weights -> [8, 16]
    send.F[stage=0]  gpu[pp=0]  [8, 16]  stream pp
    recv.F[stage=1]  gpu[pp=1]  [8, 16]  stream pp
    F[stage=1]  gpu[pp=1]  4 weights -> []
    B[stage=1]  gpu[pp=1]  2 weights -> [8, 16], 4 gradients
    send.B[stage=1]  gpu[pp=1]  [8, 16]
    recv.B[stage=0]  gpu[pp=0]  [8, 16]
    B[stage=0]  gpu[pp=0]  1 weight -> 4 gradients
    ...

`with priority=high` and `ctas=8` give the stream itself resources of a GPU, whoever is on it. `priority` is that of the
CUDA stream, and of NCCL's own streams for its communication; `ctas` is how many thread blocks NCCL takes there at most.
They change no result, and nothing at all on a CPU.

Preconditions: the selector matches nodes of the graph so far. A selector with `pass=I` or `pass=W` divides those
backward passes into I and W. A stream has one value of each resource. At the end of the script, a stream with `ctas`
has communication, and both ends of a transfer are on streams with the same resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piperlang.build.match import name_halves, require_match
from piperlang.core.selector import Selector
from piperlang.core.streams import MAX_CTAS
from piperlang.diagnostics import Label, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.options import Count, Kind, Words
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class Stream(Directive):
    """stream SELECTOR on "NAME" [with priority=high|normal, ctas=8]
    Assign compute or communication to a logical stream. `priority` and `ctas` (thread blocks of its communication)
    are those of the whole stream, on GPUs."""

    nodes = (tree.StreamOn,)
    legal: ClassVar[Mapping[str, Kind]] = {
        "ctas": Count(1, MAX_CTAS, usual=8),
        "priority": Words(("high", "normal"), note="CUDA has no priority below normal"),
    }

    selector: Selector
    stream: str

    @classmethod
    def read(cls, script: Interpreter, node: tree.StreamOn) -> Stream:
        name = script.text(node.stream, "the name of a stream")
        if not name:
            raise error("P0204", "a stream needs a name", node.stream.span, "empty")
        if not name.isprintable():
            raise error(
                "P0204",
                "the name of a stream has characters that cannot be shown",
                node.stream.span,
                help="write it with letters and digits, such as `pp`",
            )
        return cls(script.settled(node.selector), name, **script.written(node))

    def __str__(self) -> str:
        return f'stream {self.selector} on "{self.stream}"{self.with_options}'

    def apply_to_outline(self, outline: Outline) -> None:
        for option in self.options:
            first, known = outline.streams.setdefault(self.stream, {}).setdefault(option.name, (self, option))
            if known.value != option.value:
                earlier = first.apart_from(self, known.span)
                raise error(
                    "P0405",
                    f'stream "{self.stream}" has `{known}`, and `{option}` here',
                    option.span,
                    "resources belong to a stream, not to what a line puts on it",
                    also=[Label(earlier, "first given here")] if earlier != option.span else [],
                    help="give one of them, or put this on a stream of another name",
                )

    def apply_to_schedule(self, schedule: Schedule) -> None:
        name_halves(schedule, self.selector, self)
        require_match(schedule, self.selector)
        self.apply_to_outline(schedule.outline)
        schedule.streams.append(self)
