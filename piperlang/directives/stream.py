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

Preconditions: the selector matches nodes of the graph so far. A selector with `pass=I` or `pass=W` divides those
backward passes into I and W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.build.match import name_halves, require_match
from piperlang.core.selector import Selector
from piperlang.diagnostics import error
from piperlang.elaborate.directive import Directive
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter


@dataclass(frozen=True)
class Stream(Directive):
    """stream SELECTOR on "NAME"
    Assign compute or communication to a logical stream."""

    nodes = (tree.StreamOn,)

    selector: Selector
    stream: str

    @classmethod
    def read(cls, script: Interpreter, node: tree.StreamOn) -> Stream:
        name = script.text(node.stream, "the name of a stream")
        if not name:
            raise error("P0204", "a stream needs a name", node.stream.span, "empty")
        return cls(script.settled(node.selector), name, **script.written(node))

    def __str__(self) -> str:
        return f'stream {self.selector} on "{self.stream}"'

    def apply_to_schedule(self, schedule: Schedule) -> None:
        name_halves(schedule, self.selector, self)
        require_match(schedule, self.selector)
        schedule.streams.append(self)
