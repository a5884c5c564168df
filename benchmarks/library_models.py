"""Models of transformers with their default settings on CUDA over NCCL, four ranks sharing what GPUs there are, against
plain training on one: LoRA of peft on a Llama in bfloat16, and the experts of a Qwen3-MoE divided over the ranks.

python -m benchmarks.library_models [--json]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
from typing import Any

import peft
import torch
import torch.nn.functional as f
import transformers
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.nccl import RANKS, compare
from piperlang.capture.trace.observed import called
from piperlang.runtime.comm import nccl
from piperlang.runtime.driver.cluster import Cluster
from tests.support.equivalence import SAMPLES, relative
from tests.support.models import Case

WORDS, LENGTH = 8192, 128
library: Any = transformers  # its constructors are hardly typed
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
PREFIX = "base_model.model."
STAGES = """
tag stage=0 at {0}model.embed_tokens, {0}model.layers[0:4]
tag stage=1 at {0}model.layers[4:8], {0}model.norm, {0}lm_head
"""
ONE = ""
ZERO = "from std.data import zero3\nmesh gpu = dp: 4\nplace [pass=*] on gpu\nzero3(gpu.dp)\n"
PIPELINE = """
from std.data import zero3
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: 2, dp: 2
loop(gpu, 2)
split batch into 2 as mb
zero3(gpu.dp)
one_f_one_b(gpu, 2, 2)
"""
EXPERTS = """
from std.data import zero2
from std.expert import ep
mesh gpu = dp: 4
tag stage=0 at model, lm_head
tag expert="all" at model.layers[*].mlp.experts
place [stage=*] on gpu
zero2(gpu.dp, [!expert])
ep(gpu.dp)
"""


def lora() -> nn.Module:
    base = library.LlamaForCausalLM(library.LlamaConfig(**SIZES)).to(torch.bfloat16)
    made: nn.Module = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return made


def mixture(dtype: torch.dtype) -> nn.Module:
    config = library.Qwen3MoeConfig(
        **SIZES, head_dim=64, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4
    )
    made: nn.Module = library.Qwen3MoeForCausalLM(config).to(dtype)
    return made


def text(samples: int) -> tuple[Any, Any]:
    ids = torch.randint(WORDS, (samples, LENGTH + 1))
    return {"input_ids": ids[:, :-1]}, ids[:, 1:]


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


def rounding(case: Case) -> float:
    """The largest relative difference between gradients of the plain model and of the same weights in float32: what its
    precision costs plain PyTorch."""
    torch.manual_seed(0)
    model = case.model().cuda()
    exact = copy.deepcopy(model).float()
    torch.manual_seed(100)
    inputs, target = pytree.tree_map(lambda t: t.cuda(), case.batch(SAMPLES))
    for one in (model, exact):
        case.loss(called(one, inputs), target).backward()  # type: ignore[no-untyped-call]
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max(relative(a.grad.float(), b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def cases() -> dict[str, tuple[Case, str]]:
    llama = Case("Llama, LoRA, bfloat16", lora, loss, text, 2)
    found = {
        "LoRA, bfloat16, one device": (llama, ONE),
        "LoRA, bfloat16, ZeRO-3": (llama, ZERO),
        "LoRA, bfloat16, 1F1B x ZeRO-3": (llama, STAGES.format(PREFIX) + PIPELINE),
    }
    for dtype in (torch.float32, torch.bfloat16):
        name = f"Qwen3-MoE, {str(dtype).removeprefix('torch.')}"
        case = Case(name, lambda dtype=dtype: mixture(dtype), loss, text, 2)  # type: ignore[misc]
        found |= {f"{name}, one device": (case, ONE), f"{name}, experts over four ranks": (case, EXPERTS)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    rows = []
    cluster = Cluster(RANKS, backend=nccl.BACKEND)
    try:
        for name, (case, script) in cases().items():
            started = time.perf_counter()
            try:
                row: dict[str, Any] = compare(cluster, case, script, options.compile)
                row["rounding"] = rounding(case)
            except Exception as problem:
                traceback.print_exc()
                row = {"error": f"{type(problem).__name__}: {problem}"[:300]}
            rows.append({"case": name, **row, "seconds": round(time.perf_counter() - started, 1)})
            if not options.json:
                print(rows[-1], flush=True)
    finally:
        cluster.close()
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
