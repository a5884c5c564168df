"""Reports what torch and Ray detect on this machine, as JSON: `python probe.py torch`.

Runs in a process of its own, since loading either can take long or crash. It imports nothing of piperlang.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def torch() -> dict[str, Any]:
    import torch
    import torch.distributed as distributed

    cuda = torch.cuda.is_available()
    nccl = cuda and distributed.is_available() and distributed.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [_gpu(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
    }


def _gpu(number: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return {"name": torch.cuda.get_device_name(number), "free": free, "memory": total}


def other(name: str) -> dict[str, Any]:
    return {"version": importlib.import_module(name).__version__}


if __name__ == "__main__":
    json.dump(torch() if sys.argv[1] == "torch" else other(sys.argv[1]), sys.stdout)
