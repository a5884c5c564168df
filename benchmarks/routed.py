"""Rows that choose experts in bf16 on a GPU: `routed_linear`, forward and backward, against one product for every
expert and against a capacity of twice the mean.

    python -m benchmarks.routed [--json] [--rows 16384] [--width 1024] [--hidden 4096] [--experts 16]

Errors are relative to float32 on the same choices; times are of the shortest of ten runs, side by side.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piperlang.capture.trace.routed import routed_linear


def one_by_one(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """As anyone would write it: every expert's rows picked, multiplied and put back."""
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert, matrix in enumerate(weight):
        mine = (chosen == expert).nonzero().squeeze(1)
        out = out.index_add(0, mine, rows[mine] @ matrix)
    return out


def padded(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """Room for twice the mean, whoever needs it: what is too much is dropped."""
    experts, room = weight.shape[0], 2 * rows.shape[0] // weight.shape[0]
    order = torch.argsort(chosen, stable=True)
    starts = torch.searchsorted(chosen[order], torch.arange(experts, device=chosen.device))
    place = torch.arange(len(chosen), device=chosen.device) - starts[chosen[order]]
    slot = torch.where(place < room, chosen[order] * room + place, experts * room)
    packed = rows.new_zeros(experts * room + 1, rows.shape[1]).index_copy(0, slot, rows[order])
    done = torch.bmm(packed[:-1].view(experts, room, -1), weight).flatten(0, 1)
    return torch.zeros(len(rows), weight.shape[2], device=rows.device, dtype=rows.dtype).index_copy(
        0, order, torch.cat([done, done.new_zeros(1, done.shape[1])])[slot]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    for name, value in (("rows", 16384), ("width", 1024), ("hidden", 4096), ("experts", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = torch.randn(options.rows, options.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (
        (torch.randn(options.experts, options.width, options.hidden, device=device) / options.width**0.5)
        .to(torch.bfloat16)
        .requires_grad_()
    )
    chosen = (
        torch.rand(options.rows, device=device) ** 1.5 * options.experts
    ).long()  # uneven: the first experts are chosen more often
    grad = torch.randn(options.rows, options.hidden, device=device, dtype=torch.bfloat16)
    exact = _results(
        one_by_one,
        rows.detach().float().requires_grad_(),
        chosen,
        weight.detach().float().requires_grad_(),
        grad.float(),
    )
    found: list[dict[str, Any]] = []
    for name, way in (("routed_linear", routed_linear), ("one by one", one_by_one), ("capacity", padded)):
        results = _results(way, rows, chosen, weight, grad)
        errors = [
            float((mine.float() - theirs).abs().max() / theirs.abs().max())
            for mine, theirs in zip(results, exact, strict=True)
        ]
        ms = _ms(lambda way=way: _results(way, rows, chosen, weight, grad), device)  # type: ignore[misc]
        found.append(
            {"way": name, "ms": round(ms, 3), "result": errors[0], "grad_rows": errors[1], "grad_weight": errors[2]}
        )
        if not options.json:
            print(found[-1], flush=True)
    if options.json:
        print(json.dumps({"rows": found, "device": device, "torch": torch.__version__}))


def _results(way: Callable[..., Tensor], rows: Tensor, chosen: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    done = way(rows, chosen, weight)
    return [done.detach(), *torch.autograd.grad(done, (rows, weight), grad)]


def _ms(run: Callable[[], object], device: str) -> float:
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1000 * best


if __name__ == "__main__":
    main()
