"""Schedules of every kind with the model that each is for, by name: scripts that train on workers."""

from __future__ import annotations

PIPE = """
from std.pipeline import {name}, {place}
mesh gpu = pp: {ranks}, dp: {width}
split batch into 4 as mb
{place}(gpu, {arguments})
{data}
{name}(gpu, {ranks}, 4)
"""


def pipeline_script(name: str, place: str, ranks: int, width: int = 1, data: str = "", arguments: str = "") -> str:
    return PIPE.format(name=name, place=place, ranks=ranks, width=width, data=data, arguments=arguments or str(ranks))


REPLICATE = "replicate [pass=*] over gpu.dp"

DP = "mesh gpu = dp: 4\nplace [pass=*] on gpu\nsplit batch into 2 as mb\nreplicate [pass=*] over gpu.dp{}\n"

JOB_SCHEDULES = {
    "1f1b": ("gpt", pipeline_script("one_f_one_b", "loop", 4)),
    "1f1b x dp": ("unet", pipeline_script("one_f_one_b", "loop", 4, 2, REPLICATE)),
    "zbv x zero3": ("gpt", pipeline_script("zbv", "vee", 2, 2, f"{REPLICATE} with params=sharded")),
    "zbv x zero3, added up in parts": (
        "gpt",
        pipeline_script("zbv", "vee", 2, 2, f"{REPLICATE} with params=sharded, accumulate=sharded"),
    ),
    "looped bfs x zero3": (
        "gpt",
        pipeline_script("looped_bfs", "loop", 2, 2, f"{REPLICATE} with params=sharded", "2, 2"),
    ),
    "1f1b x zero3, kept through the turn": (
        "unet",
        pipeline_script(
            "one_f_one_b", "loop", 4, 2, f"{REPLICATE} with params=sharded, keep=turn\nrecompute [stage=1]"
        ),
    ),
    "dualpipe x zero2": ("mlp", pipeline_script("dualpipe", "mirror", 4, 2, f"{REPLICATE} with grads=sharded", "4, 4")),
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
        (
            "recompute [stage=1]\noffload [stage=2]\nrecompute [stage=2:4] with policy=cheap\n"
            "split batch into 2 as mb\n"
            'stream [stage=3, pass=W] on "weights" with priority=high\n'
        ),
    ),
    "ranks wait for each other": (
        "mlp",
        (
            "mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\nsplit batch into 2 as"
            ' mb\nstream [comm=p2p] on "pp" with priority=high, ctas=8\n'
            "order [stage=3, pass=F, mb=0] -> [stage=0, pass=F, mb=1]\n"
        ),
    ),
}
