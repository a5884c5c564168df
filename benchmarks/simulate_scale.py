"""How long it takes to compile and simulate a step of a very large model on 2,048 devices, and how much memory.

The model and the schedule are those of graph_scale: a mixture of experts of 61 layers with 256 experts, pp=16, dp=2,
ep=64, 160 microbatches, shapes only. Devices that do the same are simulated once.

    python -m benchmarks.simulate_scale [--json] [--layers 61] [--microbatches 160] [--machine h100] [-o timeline.html]
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.graph_scale import DATA, LENGTH, PER, RANKS, SCRIPT, network

if TYPE_CHECKING:
    from piperlang.simulate.execute import SimulatedStep


def measure(layers: int, microbatches: int, machine: str) -> tuple[dict[str, Any], SimulatedStep]:
    import torch
    import torch.nn.functional as f

    from piperlang.capture.program import capture
    from piperlang.pipeline import representative, schedule
    from piperlang.simulate.costs import MachineCosts
    from piperlang.simulate.machine_files import load
    from piperlang.simulate.result import as_json, simulated
    from piperlang.source import Source

    times: dict[str, float] = {}
    at = time.perf_counter()

    def done(what: str) -> None:
        nonlocal at
        now = time.perf_counter()
        times[what], at = round(now - at, 1), now

    ids = torch.zeros((1, 1), dtype=torch.int64).expand(microbatches * DATA * PER, LENGTH)
    program = capture(network(layers), lambda y, t: f.cross_entropy(y.flatten(0, 1), t.flatten()), (ids, ids))
    done("capture")
    gc.disable()  # as `piperc simulate` does
    script = SCRIPT.format(ranks=RANKS, data=DATA, per=PER, microbatches=microbatches)
    scheduled = schedule(program, Source("scale.piper", script))
    assert not scheduled.problems, scheduled.problems
    graph = scheduled.graph()
    done("graph")
    plan, classes = representative(graph)
    done("plan")
    found = simulated(plan, graph, MachineCosts(plan, graph, load(machine)), classes)
    data = as_json(found, load(machine).memory)
    done("simulate")
    return {
        "devices": data["devices"],
        "simulated_devices": len(classes),
        "nodes": len(graph.nodes),
        "instructions": sum(len(device.instructions) for device in plan.devices),
        "step_seconds": round(data["seconds"], 3),
        "idle": round(data["idle"]["mean"], 4),
        "memory_gib": round(data["memory"]["peak"] / 2**30, 1),
        "seconds": times,
        "total_seconds": round(sum(times.values()), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--microbatches", type=int, default=160)
    parser.add_argument("--machine", default="h100")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page of the simulated step")
    options = parser.parse_args()
    row, step = measure(options.layers, options.microbatches, options.machine)
    if options.output is not None:
        from piperlang.view.page import page

        options.output.write_text(page([step.timeline], paths=[step.path]), encoding="utf-8")
    if options.json:
        print(json.dumps(row))
    else:
        for name, value in row.items():
            print(f"{name}: {value}")
    gc.freeze()  # else Python looks for garbage among a million objects before it ends, for two seconds


if __name__ == "__main__":
    main()
