"""A key of a stage program and of everything that its compiled form depends on: equal keys, equal code.

Private API, kept in this file, tried on torch 2.11 and 2.13: the settings of Inductor and AOTAutograd as
dictionaries."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piperlang.version import __version__

_OPERATORS = (
    "aten::",
    "prims::",
    *(f"piper::{name}" for name in ("batch_sums", "checked", "early", "keep", "uniform", "whole_sum")),
)
"""Operators whose meaning follows from the versions of torch and piperlang. The others of piperlang number what this
process has, and what an operator of the user does is not part of its name."""
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_FUNCTIONS = {operator.getitem: "getitem"}


class _Unknown(Exception):
    """The graph has something of which a key cannot say what it is."""


def key_of(graph: fx.Graph, looks: Sequence[tuple[Any, ...]]) -> str | None:
    """None if one cannot be told. `looks`: shapes, strides, dtypes and devices of the inputs."""
    try:
        text = "\n".join([*_lines(graph), repr(tuple(looks)), _settings(), _system()])
    except _Unknown:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(graph: fx.Graph) -> list[str]:
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        parts = [node.op, _target(node), _written(node.args, numbers), _written(node.kwargs, numbers), _value(node)]
        lines.append(" ".join(parts))
        numbers[node] = len(numbers)
    return lines


def _target(node: fx.Node) -> str:
    target = node.target
    if node.op in ("placeholder", "output"):
        return ""
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        # One that writes into its inputs is compiled for inputs that overlap as these do.
        if not target._schema.name.startswith(_OPERATORS) or target._schema.is_mutable:
            raise _Unknown
        return str(target)
    if node.op == "call_function" and target in _FUNCTIONS:
        return _FUNCTIONS[target]
    raise _Unknown


def _written(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return f"{value.real.hex()}+{value.imag.hex()}j"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _Unknown
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, slice):
        return f"slice{_written((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_written(one, numbers) for one in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_written(one, numbers)}' for name, one in value.items())}}}"
    raise _Unknown


def _value(node: fx.Node) -> str:
    """What the trace has said of the result."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return str([_look(one) if isinstance(one, torch.Tensor) else type(one).__name__ for one in values])


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _settings() -> str:
    import torch._functorch.config
    import torch._inductor.config

    configs: tuple[Any, ...] = (torch._inductor.config, torch._functorch.config)
    found = [config.save_config_portable(ignore_private_configs=False) for config in configs]
    cuda: Any = torch.backends.cuda.matmul
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        *(getattr(cuda, name, None) for name in _MATMUL),
        *sorted((name, value) for name, value in os.environ.items() if _is_setting(name)),
    )
    try:
        return json.dumps(found, sort_keys=True) + repr(flags)
    except (TypeError, ValueError):  # a function: who knows what it does
        raise _Unknown from None


def _is_setting(variable: str) -> bool:
    """Where caches are is none, and torch sets it itself."""
    return variable.startswith(("TORCHINDUCTOR_", "TRITON_")) and not variable.endswith("_DIR")


_MATMUL = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@cache
def _system() -> str:
    """The versions of everything that compiles, and the machine that it compiles for."""
    found: list[Any] = [__version__, _sources(), torch.__version__, torch.version.git_version, sys.version]
    with suppress(PackageNotFoundError):
        found.append(version("triton"))
    found += [platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()]
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found += [torch.version.cuda, torch.version.hip, about.name]
        found += [about.major, about.minor, about.multi_processor_count, getattr(about, "gcnArchName", "")]
    return repr(found)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources() -> str:
    """Of piperlang's own operators, which are compiled with what calls them."""
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in ("capture/trace", "runtime/device"):
        for path in sorted((folder / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
