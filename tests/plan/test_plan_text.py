"""Golden texts: the plans of a handful of schedules, instruction by instruction.

`PIPER_GOLDEN=write pytest tests/plan/test_plan_text.py` writes them; read the difference before you commit it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piperlang.plan.instructions import INSTRUCTIONS
from piperlang.plan.rewrite.clip import with_norm
from piperlang.plan.text import line, text
from tests.support.plan_runs import SUBJECTS, planned

GOLDEN = Path(__file__).parent / "golden"
SCHEDULES = {
    "data_parallel": ("mlp", "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\n"),
    "zero3": ("mlp", "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n"),
    "pipeline": (
        "mlp",
        "mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nsplit batch into 2 as mb\n",
    ),
    "tensor": SUBJECTS["columns and rows"],
    "offload": ("mlp", "split batch into 2 as mb\noffload [stage=0]\nrecompute [stage=1]\n"),
    "experts": SUBJECTS["ep"],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden(name: str) -> None:
    plan = planned(*SCHEDULES[name])[2]
    found = text(with_norm(plan, 1.0) if name == "data_parallel" else plan)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PIPER_GOLDEN") == "write":
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_every_value_is_shown() -> None:
    """What an instruction reads and writes is in its line, and what its other fields say."""
    seen = set()
    for name in SCHEDULES:
        for device in planned(*SCHEDULES[name])[2].devices:
            for x in device.instructions:
                shown = line(x)
                assert shown.startswith(f"{x.op} on {x.stream}: ")
                assert all(str(key) in shown for key in (*x.reads, *x.writes))
                assert not x.waits or shown.endswith(f" after {', '.join(map(str, x.waits))}")
                seen.add(x.op)
    assert len(seen) > len(INSTRUCTIONS) / 2
