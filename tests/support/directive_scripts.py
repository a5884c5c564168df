"""Scripts with one directive or two, and with what they need around them, for every kind of model."""

from __future__ import annotations

from itertools import combinations

DATA = {
    "ddp": "",
    "zero1": " with states=sharded",
    "zero2": " with grads=sharded, bucket=1KB",
    "zero3": " with params=sharded, prefetch=1",
}

DIRECTIVES = ("place", "split", *DATA, "shard", "stream", "order", "recompute", "offload")

STAGES = {"moe": 2}

SHARD = {
    "mlp": "shard [stage=0] over gpu.tp with style=columns\nreplicate [stage!=0] over gpu.tp",
    "dropout": "shard [stage=1] over gpu.tp with style=columns\nreplicate [stage!=1] over gpu.tp",
    "unet": "shard [part=*] over gpu.tp with style=columns\nreplicate [!part] over gpu.tp",
    "gpt": """shard [part="up"] over gpu.tp with style=columns
shard [part="down"] over gpu.tp with style=rows
shard [part="norm"] over gpu.tp with style=sequence
replicate [!part] over gpu.tp""",
    **dict.fromkeys(
        ("moe", "dropless"), "shard [expert=*] over gpu.tp with style=experts\nreplicate [!expert] over gpu.tp"
    ),
}
"""Which parts of each model are divided, and how; the rest divides the batch along the same axis."""

TAGS = {
    "unet": "tag part=1 at down[0], frozen",
    "gpt": 'tag part="up" at blocks[*].up\ntag part="down" at blocks[*].down\ntag part="norm" at blocks[*].second',
}


def script(model: str, *names: str) -> str:
    """A script with these directives, and with what they need around them to make sense."""
    stages = STAGES.get(model, 4)
    data = next((name for name in names if name in DATA), None)
    axes = [
        axis for axis, needed in (("pp: 2", "place" in names), ("dp: 2", data), ("tp: 2", "shard" in names)) if needed
    ]
    lines = [f"mesh gpu = {', '.join(axes)}"] if axes else []
    if "shard" in names and model in TAGS:
        lines.insert(0, TAGS[model])
    if "split" in names:
        lines.append("split batch into 2 as mb")
    if "place" in names:
        lines += [f"place [stage=0:{stages // 2}] on gpu[pp=0]", f"place [stage={stages // 2}:{stages}] on gpu[pp=1]"]
    elif axes:
        lines.append("place [pass=*] on gpu")
    if data:
        lines.append(f"replicate [pass=*] over gpu.dp{DATA[data]}")
    if "shard" in names:
        lines.append(SHARD[model])
    if "stream" in names:
        lines.append('stream [stage=1, pass=W] on "weights"')
    if "order" in names:
        lines += _order(names, stages)
    if "recompute" in names:
        lines += ["recompute [stage=0]", "recompute [stage=1] with policy=cheap"]
    if "offload" in names:
        lines.append("offload [stage=1]")
    return "\n".join(lines) + "\n"


def _order(names: tuple[str, ...], stages: int) -> list[str]:
    """Against what would otherwise come first: the last microbatch before the first, later stages before earlier ones
    where both can run."""
    if "split" not in names:
        return [f"order [stage={stages - 1}, pass=I] -> [stage={stages - 1}, pass=W] -> [update, stage=0]"]
    backwards = [f"    [stage={s}, pass=F, mb=1], [stage={s}, pass=F, mb=0]" for s in range(stages // 2)]
    where = "gpu[pp=0]" if "place" in names else None
    chain = [f"order [stage=0, pass=F, mb=1] -> [stage=0, pass=F, mb=0] -> [stage={stages - 1}, pass=B, mb=1]"]
    return [f"order on {where}:", *backwards] if where else chain


SINGLES = [(name,) for name in DIRECTIVES]

PAIRS = [pair for pair in combinations(DIRECTIVES, 2) if not (set(pair) <= set(DATA))]
