"""The resolved script: what a script came to, as a script that comes to the same."""

from __future__ import annotations

import pytest

from piperlang.elaborate.resolved import resolved
from piperlang.pipeline import replay, schedule
from piperlang.plan.lower import lower
from piperlang.source import Source
from tests.support.equivalence import compiled, program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.often import one_in

MORE = {
    "parameters and loops": (
        "gpt",
        (
            "param ranks = 2\nmesh gpu = pp: ranks, dp: 2\nfor r in range(ranks):\n    place [stage=2 * r:2 * r + 2] on"
            " gpu[pp=r]\nreplicate [stage={0, 1}] | [stage=2:] over gpu.dp with params=sharded, prefetch=1,"
            " bucket=1KB\nsplit batch into 2 as mb\norder on gpu[pp=0]:\n    ([stage=0, pass=F, mb=next] | [stage=1,"
            ' pass=F, mb=next]) & [stage=1, pass=B, mb=next?]\nstream [pass=W, stage!=3] on "other one" with'
            " priority=high\nrecompute [stage=1]\n"
        ),
    ),
    "tags": (
        "mlp",
        (
            'tag half="first one" at layers[0], layers[1:2]\nmesh gpu = d: 2\nplace [!half] on gpu[d=0]\nplace'
            ' [half="first one"] on gpu[d=1]\n'
        ),
    ),
}


@pytest.mark.parametrize("name", one_in(3, [*JOB_SCHEDULES, *MORE]))
def test_it_comes_to_the_same(name: str) -> None:
    model, text = (JOB_SCHEDULES | MORE)[name]
    found = schedule(program(model), Source("s.piper", text))
    assert not found.problems
    directives = found.directives
    again = resolved(directives)
    assert not {"for", "param", "from", "def"} & {line.split()[0] for line in again.splitlines()}
    graph, _ = compiled(program(model), again)
    assert resolved(graph.directives) == again
    expected = [device.instructions for device in lower(found.graph()).devices]
    assert [device.instructions for device in lower(graph).devices] == expected
    replayed = replay(program(model), directives)  # the directives themselves, without any script
    assert not replayed.problems
    assert [device.instructions for device in lower(replayed.graph()).devices] == expected
