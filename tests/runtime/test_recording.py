"""Steps that are recorded in parts."""

from __future__ import annotations

from collections import Counter

import pytest

from piperlang.plan.instructions import Collective, Receive, Send
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.runtime.driver.recording import parts
from tests.support.equivalence import compiled, program

SCRIPT = """
mesh gpu = pp: 2, dp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:] on gpu[pp=1]
replicate [stage=*] over gpu.dp with params=sharded
split batch into 4 as mb
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph, _ = compiled(program("mlp"), SCRIPT)
    return lower(graph)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_parts(plan: Plan, count: int) -> None:
    """Every instruction is recorded in one of them, together with all that it communicates with."""
    found = parts(plan, count)
    assert len(found) == count
    part_of = {(row, i): k for k, part in enumerate(found) for row, its in enumerate(part) for i in its}
    assert len(part_of) == sum(len(device.instructions) for device in plan.devices)
    assert sum(map(len, (its for part in found for its in part))) == len(part_of)
    messages: dict[tuple[int, int, int], set[int]] = {}
    meetings: dict[tuple[int, int], set[int]] = {}
    for row, device in enumerate(plan.devices):
        count_of: Counter[int] = Counter()
        for i, x in enumerate(device.instructions):
            if isinstance(x, Send | Receive):
                for one in x.messages:
                    ends = (device.device, one.peer) if isinstance(x, Send) else (one.peer, device.device)
                    messages.setdefault((*ends, one.tag), set()).add(part_of[row, i])
            elif isinstance(x, Collective):
                meetings.setdefault((x.group, count_of[x.group]), set()).add(part_of[row, i])
                count_of[x.group] += 1
    assert messages
    assert meetings
    assert all(len(parts_of) == 1 for parts_of in (*messages.values(), *meetings.values()))
    if count > 1:
        assert len({part_of[0, i] for i in range(len(plan.devices[0].instructions))}) > 1
