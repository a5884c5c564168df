"""Rows that go to their experts go by one choice: what a pass reads together has gone the same way, and what comes back
comes back by it.

How many rows go where is seen only when they go, so nothing else would notice rows that have gone another way.
"""

from __future__ import annotations

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import Combine, Compute, Dispatch, ExchangeSplits, Routing
from piperlang.plan.verify.report import At, Checked

CODE = "P0503"
FOLLOWS = "rows go, and come back, by the choice that their own microbatch made"


def routes(checked: Checked) -> None:
    if not checked.of["choose"]:
        for at in checked.all("dispatch", "combine"):
            checked.wrong(CODE, f"{at.does.op} without a choice to go by", at, help=FOLLOWS)
        return
    for d, device in enumerate(checked.plan.devices):
        _Device(checked).run([At(d, i, x) for i, x in enumerate(device.instructions)])


class _Device:
    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.ways: dict[ValueId, tuple[At, ExchangeSplits]] = {}
        """Every way, and who found it."""
        self.gone: dict[ValueId, tuple[ValueId, At]] = {}
        """Every value that is where experts are: by which way, and who brought it there."""

    def run(self, every: list[At]) -> None:
        for at in every:
            if isinstance(at.does, Routing):
                self._route(at, at.does)
            elif isinstance(at.does, Compute):
                self._compute(at, at.does)
        self.checked.steps += len(every)

    def _route(self, at: At, x: Routing) -> None:
        key, members = x.source, self._members(x)
        if x.experts < 1 or x.experts % len(members):
            self.checked.wrong(CODE, f"{x.experts} experts on {len(members)} devices", at, help=FOLLOWS)
        if isinstance(x, ExchangeSplits):
            if x.splits is not x.target.splits or key in self.gone:
                self.checked.wrong(CODE, f"{key} cannot be a choice that gives {x.splits}", at, help=FOLLOWS)
            self.ways[x.splits] = at, x
            self.gone[x.target] = x.splits, at
            return
        assert isinstance(x, Dispatch | Combine)
        found, by = self.ways.get(x.splits, (at, None))
        if by is None:
            self.checked.wrong(CODE, f"{x.op} by {x.splits}, which no exchange of counts has made", at, help=FOLLOWS)
        elif self._members(by) != members or by.experts != x.experts or x.splits.microbatch != key.microbatch:
            self.checked.wrong(CODE, f"{key} does not belong to the choice by which it goes", found, at, help=FOLLOWS)
        elif isinstance(x, Dispatch):
            if key in self.gone:
                self.checked.wrong(CODE, f"{key} is where its experts are already", self.gone[key][1], at, help=FOLLOWS)
            self.gone[x.target] = x.splits, at
        elif self.gone.get(key, (None, at))[0] is not x.splits:
            self.checked.wrong(
                CODE,
                f"{key} comes back by another way than it went",
                self.gone.get(key, (None, found))[1],
                at,
                help=FOLLOWS,
            )

    def _members(self, x: Routing) -> tuple[int, ...]:
        """Counts may be exchanged on another stream than tokens, and then in a group of its own."""
        return self.checked.plan.groups[x.group].members

    def _compute(self, at: At, x: Compute) -> None:
        """What rows a pass reads, all by one way, are those that it gives."""
        went = {key: self.gone[key] for key in x.reads if key in self.gone}
        if not self.checked.plan.programs[x.program].routed:
            for key, (_, by) in went.items():
                self.checked.wrong(CODE, f"{key} is where experts are, and the pass has none", by, at, help=FOLLOWS)
            return
        ways = {way for way, _ in went.values()}
        if len(ways) != 1:
            self.checked.wrong(
                CODE,
                "rows of a pass have gone different ways" if ways else "no rows have gone to these experts",
                *[by for _, by in went.values()][:2],
                at,
                help=FOLLOWS,
            )
            return
        (way,) = ways
        self.gone.update((key, (way, at)) for key in x.writes if key.kind is not Kind.WEIGHT_GRADIENT)
