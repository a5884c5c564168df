"""Rows that go to their experts go by one choice: what a pass reads together has gone the same way, and what comes back
comes back by it.

How many rows go where is seen only when they go, so nothing else would notice rows that have gone another way.
"""

from __future__ import annotations

from piperlang.ir.graph import COMPUTE, WAY, Key
from piperlang.plan.check import At, Checked
from piperlang.plan.instruction import ROUTES

CODE = "P0503"
FOLLOWS = "rows go, and come back, by the choice that their own microbatch made"


def routes(checked: Checked) -> None:
    if not checked.of["choose"]:
        for at in checked.all("dispatch", "combine"):
            checked.wrong(CODE, f"{at.does.do} without a choice to go by", at, help=FOLLOWS)
        return
    for d, device in enumerate(checked.plan.devices):
        _Device(checked).run([At(d, i, x) for i, x in enumerate(device.instructions)])


class _Device:
    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.ways: dict[Key, At] = {}
        """Every way, and who found it."""
        self.gone: dict[Key, tuple[Key, At]] = {}
        """Every value that is where experts are: by which way, and who brought it there."""

    def run(self, every: list[At]) -> None:
        for at in every:
            if at.does.do in ROUTES:
                self._route(at)
            elif at.does.do in COMPUTE:
                self._compute(at)
        self.checked.steps += len(every)

    def _route(self, at: At) -> None:
        do, args, (key, *way) = at.does.do, at.does.args, at.does.reads
        if args["experts"] < 1 or args["experts"] % len(args["members"]):
            self.checked.wrong(CODE, f"{args['experts']} experts on {len(args['members'])} devices", at, help=FOLLOWS)
        if do == "choose":
            if at.does.writes[1] != f"{at.does.writes[0]}{WAY}" or key in self.gone:
                self.checked.wrong(CODE, f"{key} cannot be a choice that gives {at.does.writes[1]}", at, help=FOLLOWS)
            self.ways[at.does.writes[1]] = at
            self.gone[at.does.writes[0]] = at.does.writes[1], at
            return
        found = self.ways.get(way[0])
        if found is None:
            self.checked.wrong(CODE, f"{do} by {way[0]}, which is no way", at, help=FOLLOWS)
        elif (
            found.does.args["members"] != args["members"]
            or found.does.args["experts"] != args["experts"]
            or _point(way[0]) != _point(key)
        ):
            self.checked.wrong(CODE, f"{key} does not belong to the choice by which it goes", found, at, help=FOLLOWS)
        elif do == "dispatch":
            if key in self.gone:
                self.checked.wrong(CODE, f"{key} is where its experts are already", self.gone[key][1], at, help=FOLLOWS)
            self.gone[at.does.writes[0]] = way[0], at
        elif self.gone.get(key, ("", at))[0] != way[0]:
            self.checked.wrong(
                CODE,
                f"{key} comes back by another way than it went",
                self.gone.get(key, ("", found))[1],
                at,
                help=FOLLOWS,
            )

    def _compute(self, at: At) -> None:
        """What rows a pass reads, all by one way, are those that it gives."""
        kind = self.checked.plan.kinds[at.does.args["kind"]]
        went = {key: self.gone[key] for key in at.does.reads if key in self.gone}
        if not kind["routed"]:
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
        self.gone.update((key, (way, at)) for key in at.does.writes if not key.startswith("dw:"))


def _point(key: Key) -> str:
    return key.partition("#")[2].partition("@")[0]
