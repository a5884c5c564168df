"""One library model under one schedule, beside plain training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.habits.plain import plain
from tests.habits.run import Outcome, Runner
from tests.models.model import LibraryModel

DATA = "from std.data import {name}\nmesh gpu = dp: 2\nplace [pass=*] on gpu\n{name}(gpu.dp)\n"
PIPELINE = """
from std.pipeline import one_f_one_b, loop
mesh gpu = pp: 2
loop(gpu, 2)
split batch into 2 as mb
one_f_one_b(gpu, 2, 2)
"""
EXPERTS = """
from std.data import ddp
from std.expert import ep
mesh gpu = dp: 2
place [stage=*] on gpu
ddp(gpu.dp, [!expert])
ep(gpu.dp)
"""
SCHEDULES = {"ddp": DATA.format(name="ddp"), "zero3": DATA.format(name="zero3"), "pp": PIPELINE, "ep": EXPERTS}
TITLES = {"ddp": "DDP", "zero3": "ZeRO-3", "pp": "1F1B", "ep": "experts divided"}


class ModelRunner(Runner):
    """Every model has scripts of its own: the same schedules, with its module paths as stages."""

    stages = ("", "")
    experts = ""

    def script(self, schedule: str) -> Path:
        path = Path(self.folder.name) / f"{schedule}.piper"
        tags = [f"tag stage={i} at {path}\n" for i, paths in enumerate(self.stages) for path in paths.split(", ")]
        tags += [f'tag expert="all" at {path}\n' for path in self.experts.split(", ") if schedule == "ep"]
        path.write_text("".join(tags) + SCHEDULES.get(schedule, ""), encoding="utf-8")
        return path

    def outcomes(self, model: LibraryModel, schedules: Iterable[str] = SCHEDULES) -> dict[str, Outcome]:
        self.stages, self.experts = model.stages, model.experts
        reference = plain(model.habit)
        return {name: self.run(model.habit, name, reference) for name in schedules if name != "ep" or model.experts}
