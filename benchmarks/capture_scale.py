"""Capture of models that fit no machine, from shapes alone: time and memory until every layer is a chunk with its
passes.

python -m benchmarks.capture_scale [--only NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
import transformers
from torch import nn

from piperlang.capture.program import capture
from piperlang.directives.tag import ModulePath, Tag
from piperlang.source import Source

library: Any = transformers  # its constructors are hardly typed
LENGTH = 64
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8}
SMALL: dict[str, Any] = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LARGE: dict[str, Any] = {**LLAMA, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"Llama-3 70B, {n} layers": ("Llama", SMALL | {"num_hidden_layers": n}) for n in (20, 40, 80)},
    "Llama-3 405B, 126 layers": ("Llama", LARGE | {"num_hidden_layers": 126}),
    "DeepSeek-V3, 61 layers": ("DeepseekV3", {}),
}


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def measure(name: str) -> dict[str, Any]:
    prefix, options = MODELS[name]
    config = getattr(library, f"{prefix}Config")(**options)
    ids = torch.randint(config.vocab_size, (2, LENGTH))
    started = time.perf_counter()
    program = capture(lambda: getattr(library, f"{prefix}ForCausalLM")(config), loss, (ids, ids))
    traced = time.perf_counter() - started
    span = Source("s.piper", "tag").span(0, 3)
    layers = config.num_hidden_layers
    tags = [Tag((("stage", i),), (ModulePath(("model", "layers", i), span),), span=span) for i in range(layers)]
    cut = program.cut(tags)
    return {
        "model": name,
        "parameters": sum(weight.bytes for weight in cut.model.weights.values()) // 4,
        "chunks": len(cut.chunks),
        "distinct": len(set(cut.keys)),
        "trace_s": round(traced, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for name in MODELS:
        if options.only in name:  # in a process of its own, for its peak of memory
            command = [sys.executable, "-m", "benchmarks.capture_scale", "--one", name]
            rows.append(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
            if not options.json:
                print(rows[-1], flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
