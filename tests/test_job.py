"""Plans on real Ray workers over gloo equal the plain model.

`pytest tests/test_job.py -m slow` runs two hundred more random schedules.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch.distributed import HashStore

from piperlang.capture.program import capture
from piperlang.diagnostics import PiperError
from piperlang.fuzz.traits import Traits
from piperlang.fuzz.write import write
from piperlang.runtime.cluster import Cluster
from piperlang.runtime.comm import agree
from tests.equivalence import program
from tests.jobs import assert_trains
from tests.matrix import SAMPLES, cases
from tests.models import CASES, Case
from tests.random_models import case

PIPE = """
from std.pipeline import {name}, {place}
mesh gpu = pp: {ranks}, dp: {width}
split batch into 4 as mb
{place}(gpu, {arguments})
{data}
{name}(gpu, {ranks}, 4)
"""


def pipeline(name: str, place: str, ranks: int, width: int = 1, data: str = "", arguments: str = "") -> str:
    return PIPE.format(name=name, place=place, ranks=ranks, width=width, data=data, arguments=arguments or str(ranks))


REPLICATE = "replicate [pass=*] over gpu.dp"
DP = "mesh gpu = dp: 4\nplace [pass=*] on gpu\nsplit batch into 2 as mb\nreplicate [pass=*] over gpu.dp{}\n"
SCHEDULES = {
    "1f1b": ("gpt", pipeline("one_f_one_b", "loop", 4)),
    "1f1b x dp": ("unet", pipeline("one_f_one_b", "loop", 4, 2, REPLICATE)),
    "zbv x zero3": ("gpt", pipeline("zbv", "vee", 2, 2, f"{REPLICATE} with params=sharded")),
    "zbv x zero3, added up in parts": (
        "gpt",
        pipeline("zbv", "vee", 2, 2, f"{REPLICATE} with params=sharded, accumulate=sharded"),
    ),
    "dualpipe x zero2": ("mlp", pipeline("dualpipe", "mirror", 4, 2, f"{REPLICATE} with grads=sharded", "4, 4")),
    "dp": ("gpt", DP.format("")),
    "zero1": ("mlp", DP.format(" with states=sharded")),
    "zero3": ("unet", DP.format(" with params=sharded, prefetch=1")),
    "zero2 outside of zero3": (
        "gpt",
        (
            "mesh gpu = dp: 2, tp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with"
            " grads=sharded\nreplicate [pass=*] over gpu.tp with params=sharded\n"
        ),
    ),
    "ep": (
        "moe",
        (
            "mesh gpu = ep: 4\nplace [pass=*] on gpu\nshard [expert=*] over gpu.ep\nreplicate [!expert] over"
            " gpu.ep\nsplit batch into 2 as mb\n"
        ),
    ),
    "pp x ep": (
        "moe",
        (
            "mesh gpu = pp: 2, ep: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nshard [expert=*] over"
            " gpu.ep\nreplicate [!expert] over gpu.ep with grads=sharded\n"
        ),
    ),
    "dropless": (
        "dropless",
        (
            "mesh gpu = pp: 2, ep: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nshard [expert=*]"
            " over gpu.ep\nreplicate [!expert] over gpu.ep with states=sharded\nsplit batch into 2 as mb\n"
        ),
    ),
    "uneven": (
        "mlp",
        (
            "mesh gpu = d: 4\nplace [stage=0] on gpu[d=3]\nplace [stage=1] on gpu[d=0:2]\nplace [stage=2:4] on"
            " gpu\nreplicate [stage!=0] over gpu.d\nsplit batch into 2 as mb\n"
        ),
    ),
    "columns and rows": (
        "gpt",
        (
            'tag part="up" at blocks[*].up\ntag part="down" at blocks[*].down\nmesh gpu = tp: 2\nplace [pass=*] on'
            ' gpu\nshard [part="up"] over gpu.tp with style=columns\nshard [part="down"] over gpu.tp with'
            " style=rows\nreplicate [!part] over gpu.tp\n"
        ),
    ),
    "recompute and offload": (
        "unet",
        'recompute [stage=1]\noffload [stage=2]\nsplit batch into 2 as mb\nstream [stage=3, pass=W] on "weights"\n',
    ),
    "ranks wait for each other": (
        "mlp",
        (
            "mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nsplit batch into 2 as"
            " mb\norder [stage=3, pass=F, mb=0] -> [stage=0, pass=F, mb=1]\n"
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_trains_as_one_device_would(name: str, cluster: Cluster) -> None:
    model, script = SCHEDULES[name]
    assert_trains(cluster, CASES[model], program(model), script)


EACH = 5
"""Random schedules for one model."""


@cache
def random_model(number: int) -> tuple[Case, Traits]:
    """Random models, and every third time a GPT or a mixture of experts, whose weights can be divided in more ways."""
    found = (
        cases()[("gpt-4", "moe-4", "dropless-4", "gpt-2", "moe-2", "dropless-2")[number // 3 % 6]]
        if number % 3 == 1
        else case(number)
    )
    return found, Traits(capture(found.model, found.loss, found.batch(SAMPLES)))


def check_random(cluster: Cluster, seed: int) -> None:
    found, traits = random_model(seed // EACH)
    script = write(traits, seed, devices=8)
    try:
        assert_trains(cluster, found, traits.program, script)
    except BaseException:
        print(script)
        raise


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 10))])
def test_random_schedules_train_as_one_device_would(seed: int, cluster: Cluster) -> None:
    check_random(cluster, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 210))
def test_two_hundred_more(seed: int, cluster: Cluster) -> None:
    check_random(cluster, seed)


def test_workers_of_two_plans_do_not_join() -> None:
    store = HashStore()
    store.set("digest-1", "of another plan")
    with pytest.raises(PiperError, match="workers 0 and 1 have different plans"):
        agree(store, 0, 2, "of this plan")
    store.set("digest-1", "of this plan")
    agree(store, 0, 2, "of this plan")
