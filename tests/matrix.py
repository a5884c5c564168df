"""Pipeline schedules x data strategies x expert and tensor strategies, as scripts from parts.

    python -m tests.matrix [--only TEXT] [--write]

trains every combination on Ray workers over gloo beside the plain model on one device, and says how far apart they are;
`--write` puts that into docs/composition.md. tests/runtime/test_matrix.py runs some of them in every run of the
tests, all of them with `-m slow`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from piperlang import __version__
from piperlang.capture.program import Program, capture
from piperlang.diagnostics import PiperError
from piperlang.runtime.driver.cluster import Cluster
from tests.support import ROOT
from tests.support.equivalence import LIMIT, compiled
from tests.support.jobs import Errors, trained
from tests.support.models import Case, Dropless, Gpt, Mixture, Mlp, Unet, balanced, square, tokens, vectors, words

PAGE = ROOT / "docs" / "composition.md"
SAMPLES, MICROBATCHES = 16, 4

# ------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class Pipeline:
    title: str
    name: str
    place: str
    stages: int = 1
    """Stages on each rank."""

    def lines(self, ranks: int) -> tuple[str, str]:
        """Placement, and order."""
        more = (
            f", {self.stages}"
            if self.place == "loop" and self.stages > 1
            else f", {MICROBATCHES}"
            if self.place == "mirror"
            else ""
        )
        return f"{self.place}(gpu, {ranks}{more})", f"{self.name}(gpu, {ranks}, {MICROBATCHES})"


PIPELINES = {
    "gpipe": Pipeline("GPipe", "gpipe", "loop"),
    "1f1b": Pipeline("1F1B", "one_f_one_b", "loop"),
    "zb-h1": Pipeline("ZB-H1", "zero_bubble", "loop"),
    "interleaved": Pipeline("Interleaved", "interleaved", "loop", 2),
    "interleaved-zb": Pipeline("Interleaved zero bubble", "interleaved_zero_bubble", "loop", 2),
    "zbv": Pipeline("ZBV", "zbv", "vee", 2),
    "dualpipe": Pipeline("DualPipe", "dualpipe", "mirror"),
    "dualpipev": Pipeline("DualPipeV", "dualpipev", "vee", 2),
}
DATA = {"none": "none", "dp": "DP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "hybrid": "hybrid"}
FUNCTIONS = {"dp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "hybrid": "hybrid"}
INSIDE = {
    "none": "none",
    "ep": "EP, own axis",
    "ep-data": "EP, data axis",
    "dropless": "EP without a limit, own axis",
    "dropless-data": "EP without a limit, data axis",
    "tp": "TP columns, rows",
    "sp": "TP and sequence",
}
"""What is divided inside a stage: nothing, experts or features."""

TAGS = {
    "tp": ['tag part="up" at blocks[*].up', 'tag part="down" at blocks[*].down'],
    "sp": ['tag part="up" at blocks[*].up', 'tag part="down" at blocks[*].down', 'tag part="norm" at blocks[*].second'],
}
PARTS = {
    "ep": ["overlapped({axis})"],
    "ep-data": ["ep({axis})"],
    "dropless": ["overlapped({axis})"],
    "dropless-data": ["ep({axis})"],
    "tp": ['pair({axis}, [part="up"], [part="down"])'],
    "sp": ['pair({axis}, [part="up"], [part="down"])', 'sequence({axis}, [part="norm"])'],
}
IMPORTS = {
    **dict.fromkeys(("ep", "dropless"), "from std.expert import overlapped"),
    **dict.fromkeys(("ep-data", "dropless-data"), "from std.expert import ep"),
    "tp": "from std.tensor import pair",
    "sp": "from std.tensor import pair, sequence",
}

EXPERTS = ("ep", "ep-data", "dropless", "dropless-data")
REFUSED = {("none", "ep-data"): "P0404", ("none", "dropless-data"): "P0404"}
"""Data and inside strategies that make no sense together, and what a user is told: without data parallelism there is no
data axis that experts could share."""


@dataclass(frozen=True)
class Combination:
    pipeline: str
    data: str
    inside: str
    also: str = ""
    model: str = ""
    script: str = ""
    refused: str | None = None
    """The diagnostic that says why it cannot be."""

    @property
    def name(self) -> str:
        return " x ".join(
            part for part in (self.pipeline, self.data, self.inside, self.also) if part and part != "none"
        )


# ------------------------------------------------------------------------------------------------------------- models


def cases() -> dict[str, Case]:
    """GPT with tied embeddings, mixtures of experts with and without a limit, and an MLP, each in four stages and in
    two; a U-Net in four."""
    found = [Case("unet-4", Unet, square, vectors, 4)]
    for stages in (2, 4):
        found.append(Case(f"gpt-{stages}", partial(Gpt, stages), words, tokens, stages))
        found.append(Case(f"moe-{stages}", partial(Mixture, stages), words, tokens, stages))
        found.append(Case(f"dropless-{stages}", partial(Dropless, stages), balanced, tokens, stages))
        found.append(Case(f"mlp-{stages}", partial(Mlp, 0.0, stages), square, vectors, stages))
    return {case.name: case for case in found}


@cache
def program(model: str) -> Program:
    case = cases()[model]
    return capture(case.model, case.loss, case.batch(SAMPLES))


# ------------------------------------------------------------------------------------------------------- the whole
# matrix


def combination(pipeline: str, data: str, inside: str) -> Combination:
    """With at most eight devices: four ranks where one stage on each and one further axis leave room for them, two
    elsewhere."""
    part = PIPELINES[pipeline]
    shared = inside.endswith("-data") or (data == "hybrid" and inside != "none")
    axes = {"none": [], "hybrid": ["node", "dp"]}.get(data, ["dp"])
    axes = [
        *axes,
        *(
            []
            if inside == "none" or (shared and axes)
            else ["dp" if inside.endswith("-data") else "ep" if inside in EXPERTS else "tp"]
        ),
    ]
    ranks = 4 if part.stages == 1 and len(axes) < 2 else 2
    stages = ranks * part.stages
    kind = (
        "dropless"
        if inside.startswith("dropless")
        else (
            "moe"
            if inside in EXPERTS
            else "gpt"
            if inside != "none" or data in ("none", "zero1", "zero3", "hybrid")
            else "mlp"
        )
    )
    along = "dp" if shared else axes[-1] if axes else ""
    place, order = part.lines(ranks)
    lines = [
        f"from std.pipeline import {part.place}, {part.name}",
        *(
            [
                "from std.data import"
                f" {', '.join(sorted({FUNCTIONS[data]} | ({'ddp'} if _plain_rest(data, inside, shared) else set())))}"
            ]
            if data != "none"
            else []
        ),
        *(["from std.data import ddp"] if data == "none" and _plain_rest(data, inside, shared) else []),
        *([IMPORTS[inside]] if inside in IMPORTS and (data, inside) not in REFUSED else []),
        *TAGS.get(inside, []),
        f"mesh gpu = {', '.join([f'pp: {ranks}', *(f'{axis}: 2' for axis in axes)])}",
        f"split batch into {MICROBATCHES} as mb",
        place,
        *_data(data, inside, along, shared),
        *(
            line.format(axis=f"gpu.{along}")
            for line in (PARTS.get(inside, []) if (data, inside) not in REFUSED else ["shard [expert=*] over {axis}"])
        ),
        order,
    ]
    return Combination(
        pipeline, data, inside, "", f"{kind}-{stages}", "\n".join(lines) + "\n", REFUSED.get((data, inside))
    )


def _plain_rest(data: str, inside: str, shared: bool) -> bool:
    return inside != "none" and (not shared or data == "hybrid")


def _data(data: str, inside: str, along: str, shared: bool) -> list[str]:
    """Who is copied, and who is divided how, along the axes of data parallelism; what is not divided along an axis of
    its own divides the batch there."""
    rest = "[!expert]" if inside in EXPERTS else "[!part]"
    divided = "[expert=*]" if inside in EXPERTS else "[part=*]"
    if inside == "none":
        return {"none": [], "hybrid": ["hybrid(gpu.dp, gpu.node)"]}.get(data, [f"{FUNCTIONS.get(data)}(gpu.dp)"])
    if shared and data == "hybrid":
        return [f"hybrid(gpu.dp, gpu.node, {rest})", f"ddp(gpu.node, {divided})"]
    if shared:
        return [] if data == "none" else [f"{FUNCTIONS[data]}(gpu.dp, {rest})"]
    return [*([] if data == "none" else [f"{FUNCTIONS[data]}(gpu.dp)"]), f"ddp(gpu.{along}, {rest})"]


def _with(
    name: str, pipeline: str, data: str, inside: str, changes: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> Combination:
    """A combination of the matrix, its script changed, with further lines before the order."""
    base = combination(pipeline, data, inside)
    script = base.script
    for old, new in (changes or {}).items():
        assert old in script, (old, script)
        script = script.replace(old, new)
    *lines, order = script.splitlines()
    return Combination(pipeline, data, inside, name, base.model, "\n".join([*lines, *more, order]) + "\n")


UNEVEN = """from std.pipeline import B, F
mesh gpu = pp: 2, dp: 4
split batch into 4 as mb
place [stage=0] on gpu[pp=0, dp=0:2]
place [stage=1] on gpu[pp=1]
replicate [stage=0] over gpu.dp{zero}
replicate [stage=1] over gpu.dp{other}
order on gpu[pp=0, dp=0:2]:
    F(0)
    repeat 3: F(0), B(0)
    B(0)
order on gpu[pp=1]:
    repeat 4: F(1), B(1)
"""
NARROW = """mesh gpu = d: 8
split batch into 4 as mb
place [stage=0] on gpu[d=7]
place [stage=1] on gpu[d=0:2]
place [stage=2] on gpu[d=2:6]
place [stage=3] on gpu[d=0:4]
replicate [stage=1] over gpu.d with states=sharded
replicate [stage=2] over gpu.d with grads=sharded
replicate [stage=3] over gpu.d with params=sharded
"""

MESHES = """mesh first = pp: 2, dp: 4
mesh last = d: 8
split batch into 2 as mb
place [stage=0] on first[pp=0]
place [stage=1] on first[pp=1]
place [stage=2:4] on last
replicate [stage=0:2] over first.dp with states=sharded
replicate [stage=2:4] over last.d with params=sharded
"""
EXPERTS_MESH = """mesh rest = dp: 4
mesh experts = ep: 2, dp: 2
split batch into 2 as mb
place [!expert] on rest
place [expert=*] on experts
replicate [!expert] over rest.dp with grads=sharded
replicate [expert=*] over experts.dp
shard [expert=*] over experts.ep
"""
FEATURES_MESH = """mesh first = dp: 4
mesh last = dp: 2, tp: 2
place [stage=0:2] on first
place [stage=2:4] on last
replicate [stage=0:2] over first.dp
replicate [stage=2:4] over last.dp
shard [stage=2] over last.tp with style=columns
replicate [stage=3] over last.tp
"""


def further() -> Iterator[Combination]:
    """What the matrix leaves at its defaults: recompute, offload, buckets, prefetch, keep, streams, stages on unequal
    numbers of devices, several meshes."""
    yield _with("recompute", "1f1b", "zero2", "none", more=["recompute [stage=0:3]"])
    yield _with("recompute", "zbv", "zero3", "none", more=["recompute [pass=*]"])
    yield _with("recompute", "dualpipev", "zero1", "ep-data", more=["recompute [expert=*]"])
    yield _with("recompute", "zbv", "zero1", "dropless-data", more=["recompute [expert=*]"])
    yield _with("recompute cheap", "zbv", "zero3", "none", more=["recompute [pass=*] with policy=cheap"])
    yield _with("recompute cheap", "zbv", "zero1", "dropless-data", more=["recompute [pass=*] with policy=cheap"])
    yield _with("recompute cheap", "interleaved-zb", "dp", "tp", more=["recompute [pass=*] with policy=cheap"])
    yield _with("offload", "1f1b", "zero3", "dropless", more=["offload [expert=*]"])
    yield _with("recompute", "interleaved-zb", "dp", "tp", more=["recompute [part=*]"])
    yield _with("offload", "1f1b", "zero3", "none", more=["offload [stage=1:3]"])
    yield _with("offload", "dualpipe", "zero2", "none", more=["offload [stage=0] with prefetch=2"])
    yield _with(
        "offload and recompute", "interleaved", "zero2", "ep", more=["offload [!expert]", "recompute [expert=*]"]
    )
    yield _with("buckets of 500 bytes", "dualpipev", "zero2", "none", {"zero2(gpu.dp)": "zero2(gpu.dp, bucket=500B)"})
    yield _with("buckets of 500 bytes", "zb-h1", "dp", "none", {"ddp(gpu.dp)": "ddp(gpu.dp, bucket=500B)"})
    yield _with("prefetch 0", "interleaved-zb", "zero3", "none", {"zero3(gpu.dp)": "zero3(gpu.dp, prefetch=0)"})
    yield _with(
        "prefetch 3, buckets", "dualpipev", "zero3", "none", {"zero3(gpu.dp)": "zero3(gpu.dp, prefetch=3, bucket=1KB)"}
    )
    yield _with("prefetch 0", "gpipe", "hybrid", "none", {"gpu.node)": "gpu.node, prefetch=0)"})
    yield _with("keep pass", "gpipe", "zero3", "none", {"zero3(gpu.dp)": 'zero3(gpu.dp, keep="pass")'})
    yield _with("keep turn", "1f1b", "zero3", "none", {"zero3(gpu.dp)": 'zero3(gpu.dp, keep="turn")'})
    yield _with("keep turn", "zbv", "hybrid", "none", {"gpu.node)": 'gpu.node, keep="turn")'})
    yield _with(
        "keep turn, recompute",
        "dualpipev",
        "zero3",
        "none",
        {"zero3(gpu.dp)": 'zero3(gpu.dp, keep="turn", prefetch=0)'},
        ["recompute [pass=*]"],
    )
    yield _with(
        "streams",
        "dualpipe",
        "zero3",
        "ep-data",
        more=[
            'stream [comm=p2p] on "pp" with priority=high',
            'stream [comm=all_gather] on "gather" with ctas=4',
            'stream [pass=W] on "weights" with priority=normal',
        ],
    )
    yield Combination(
        "1f1b", "zero3", "none", "skips across stages", "unet-4", combination("1f1b", "zero3", "none").script
    )
    yield Combination(
        "zbv", "zero2", "none", "skips across stages", "unet-4", combination("zbv", "zero2", "none").script
    )
    yield Combination("1f1b", "dp", "none", "data degrees 2 and 4", "mlp-2", UNEVEN.format(zero="", other=""))
    yield Combination(
        "1f1b",
        "zero3",
        "none",
        "data degrees 2 and 4",
        "mlp-2",
        UNEVEN.format(zero=" with params=sharded", other=" with params=sharded"),
    )
    yield Combination(
        "1f1b",
        "zero2",
        "none",
        "data degrees 2 and 4, ZeRO-2 beside ZeRO-3",
        "mlp-2",
        UNEVEN.format(zero=" with grads=sharded", other=" with params=sharded"),
    )
    yield Combination("none", "zero3", "none", "stages on 1, 2, 4 and 4 devices, ZeRO-1 to ZeRO-3", "mlp-4", NARROW)
    yield Combination("none", "zero3", "none", "stages on 1, 2, 4 and 4 devices, skips", "unet-4", NARROW)
    yield Combination("none", "zero3", "none", "two meshes, skips", "unet-4", MESHES)
    for inside, model in (("ep", "moe-4"), ("dropless", "dropless-4")):
        yield Combination("none", "zero2", inside, "experts on a mesh of their own", model, EXPERTS_MESH)
    exchanged = f'{EXPERTS_MESH}stream [comm=all_to_all] on "exchange"\n'
    yield Combination(
        "none", "zero2", "ep", "experts on a mesh of their own, exchanged on a stream", "moe-4", exchanged
    )
    yield Combination("none", "dp", "tp", "features on a mesh of their own", "mlp-4", FEATURES_MESH)


MATRIX = [combination(pipeline, data, inside) for pipeline in PIPELINES for data in DATA for inside in INSIDE]
FURTHER = list(further())
ALL = {each.name: each for each in [*MATRIX, *FURTHER]}


def run(cluster: Cluster, each: Combination) -> Errors:
    return trained(cluster, cases()[each.model], program(each.model), each.script)


def refused(each: Combination) -> str | None:
    """The first diagnostic that a combination is refused with."""
    try:
        compiled(program(each.model), each.script)
    except PiperError as problem:
        return problem.diagnostics[0].code
    return None


# ------------------------------------------------------------------------------------------------------------ the page

HEAD = """# What composes

All pipeline schedules of the library, with all data strategies, with all kinds of expert and tensor parallelism: {total} combinations, each a script of a few lines that `tests/matrix.py` generates.
Each is trained for three steps on Ray workers over gloo, with {fewest} to {most} processes, and compared with the plain model on one device: the loss of every step, every gradient (each device's replica or shard), and
the final weights, in float32. The numbers below are the largest relative differences; the limit is 1e-5. `refused` is not a failure: the script is rejected with that diagnostic code.

This file is written by `python -m tests.matrix --write`, from a run with piperlang {piperlang}, torch {torch}, ray {ray} and Python {python}. {ran} combinations ran, the largest difference is {worst}; {refused}
are refused. A test checks that the tables match the matrix.

- *Data strategies*: `none`; DP (`ddp`), ZeRO-1 to ZeRO-3 (`zero1`, `zero2`, `zero3`) over an axis `dp` of two; hybrid (`hybrid`): ZeRO-3 inside a node of two, replicas across two nodes.
- *Models*: a GPT with tied embeddings (a weight that the first and the last stage share) and an MLP; for experts an MoE in every layer: either capacity-limited with top-1 routing and dropped
  tokens, or dropless with top-2 routing, a shared expert and a load-balancing loss; a U-Net for skip connections. Two to four stages, four microbatches.
- *Expert and tensor parallelism on an own axis*: the rest of the model divides the batch along that axis. With hybrid, they use the axis inside the node, which limits the job to eight
  processes. *On the data axis*: the axis that divides the batch for the rest of the model shards the experts, as in DeepSeek's models. Without data parallelism, the rest of the model does not
  use that axis, and the script is refused.

One complete script:

```piper
{example}```
"""  # noqa: E501
EXAMPLE = "dualpipev x zero2 x ep-data"


def page(results: Mapping[str, Errors | str]) -> str:
    """docs/composition.md from what every combination came to: errors, or the code it was refused with."""
    ran = [found for found in results.values() if isinstance(found, Errors)]
    import ray

    lines = [
        HEAD.format(
            total=len(results),
            fewest=min(found.devices for found in ran),
            most=max(found.devices for found in ran),
            piperlang=__version__,
            torch=torch.__version__.partition("+")[0],
            ray=ray.__version__,
            python=platform.python_version(),
            ran=len(ran),
            worst=f"{max(max(found[:3]) for found in ran):.1e}",
            refused=len(results) - len(ran),
            example=ALL[EXAMPLE].script,
        )
    ]
    for inside, title in INSIDE.items():
        lines += [
            f"## {'Pipelines and data' if inside == 'none' else title}",
            "",
            f"| | {' | '.join(DATA.values())} |",
            f"|---{'|---' * len(DATA)}|",
        ]
        for pipeline, part in PIPELINES.items():
            lines.append(
                f"| {part.title} |"
                f" {' | '.join(_cell(results[combination(pipeline, data, inside).name]) for data in DATA)} |"
            )
        lines.append("")
    lines += [
        "## And also",
        "",
        (
            "Combinations with further directives, with stages on unequal numbers of devices, and with several meshes"
            " over the same devices."
        ),
        "",
        "| combination | model | difference |",
        "|---|---|---|",
    ]
    lines += [f"| {each.name} | {each.model.partition('-')[0]} | {_cell(results[each.name])} |" for each in FURTHER]
    return "\n".join(lines) + "\n"


def _cell(found: Errors | str) -> str:
    return f"{max(found[:3]):.0e}" if isinstance(found, Errors) else f"refused {found}"


def listed(text: str) -> dict[str, str]:
    """What the page says of each combination, by name."""
    titles = {part.title: name for name, part in PIPELINES.items()} | {"": ""}
    found: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("|") and not line.startswith("|---")
        ]
        if heading == "And also":
            found |= {name: cell for name, _, cell in rows[1:]}
            continue
        inside = next((name for name, title in INSIDE.items() if title == heading), "none")
        for title, *cells in rows[1:]:
            for data, cell in zip(rows[0][1:], cells, strict=True):
                found[combination(titles[title], next(k for k, v in DATA.items() if v == data), inside).name] = cell
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="combinations whose name has it")
    parser.add_argument("--write", action="store_true", help="write docs/composition.md")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each combination")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("the page lists all combinations: --write goes without --only")
    results: dict[str, Errors | str] = {}
    failed = 0
    cluster = Cluster(8)
    try:
        for name in [name for name in ALL if options.only in name]:
            started = time.perf_counter()
            try:
                found: Errors | str = refused(ALL[name]) or "nothing" if ALL[name].refused else run(cluster, ALL[name])
            except PiperError as problem:
                found = problem.diagnostics[0].code
                if found.startswith("P06"):
                    cluster.close()
                    cluster = Cluster(8)
            results[name] = found
            right = max(found[:3]) <= LIMIT if isinstance(found, Errors) else found == ALL[name].refused
            failed += not right
            if options.json:
                print(
                    json.dumps(
                        {
                            "name": name,
                            "ok": right,
                            **(found._asdict() if isinstance(found, Errors) else {"refused": found}),
                        }
                    ),
                    flush=True,
                )
            else:
                print(
                    f"{'  ' if right else '! '}{name:60} {_cell(found):>14}  {time.perf_counter() - started:5.1f} s",
                    flush=True,
                )
    finally:
        cluster.close()
    print(f"{len(results)} combinations, {failed} wrong", file=sys.stderr)
    if options.write and not failed:
        PAGE.write_text(page(results), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
