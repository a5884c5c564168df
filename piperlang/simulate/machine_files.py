"""Descriptions of machines: those that come with piperlang, by name, and the user's own TOML files."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from piperlang.diagnostics import PiperError, error, listed
from piperlang.diagnostics.files import unreadable
from piperlang.diagnostics.printable import printable
from piperlang.plan.estimate.machine import Interconnect, Machine

FOLDER = Path(__file__).with_name("machines")
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""In which large matrices are multiplied."""
LONGEST = 1e3
"""Seconds of a latency."""
SLOWEST, FASTEST = 1e-3, 1e24
"""Of rates, and of counts: steps beyond them have no length that a number can say."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Machine:
    """A machine by its name, or from a file whose name ends with `.toml`."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and name not in names():
        near = get_close_matches(name, names(), 1)
        raise error(
            "P0902",
            f"there is no machine `{name}`",
            notes=[f"machines: {listed(names(), 'and')}"],
            help=f"use `{near[0]}`" if near else "name one of them, or a file: `--machine mine.toml`",
        )
    try:
        return _machine(tomllib.loads(path.read_text(encoding="utf-8")), name)
    except OSError as problem:
        raise unreadable(path, problem) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise _invalid(name, f"it is no TOML: {problem}") from None


def _machine(data: dict[str, Any], name: str) -> Machine:
    given: dict[str, Any] = {"name": printable(Path(name).name)}
    kinds = {one.name: one for one in fields(Machine)}
    for key, value in data.items():
        if key not in kinds:
            raise _invalid(name, f"unknown field `{key}`; there are {listed(list(kinds), 'and')}")
        if key in ("node", "network"):
            given[key] = Interconnect(**_link(name, key, value))
        elif key == "flops":
            if not isinstance(value, dict) or not value:
                raise _invalid(name, "`flops` is a rate for each dtype: `flops = { bfloat16 = 6e14 }`")
            unknown = next((dtype for dtype in value if dtype not in DTYPES), None)
            if unknown is not None:
                raise _invalid(name, f"`flops` has `{unknown}`; it may have {listed(DTYPES, 'and')}")
            given[key] = {dtype: _number(name, value, "flops.", dtype) for dtype in value}
        elif isinstance(kinds[key].default, str | bool):
            if not isinstance(value, type(kinds[key].default)):
                raise _invalid(name, f"`{key}` must be {'a text' if key == 'name' else 'true or false'}")
            given[key] = printable(value) if isinstance(value, str) else value
        else:
            number = _number(name, data, "", key)
            whole = isinstance(kinds[key].default, int)
            if whole and number != int(number):
                raise _invalid(name, f"`{key}` is {number:g}, and must be a whole number")
            given[key] = int(number) if whole else number
    missing = [key for key in ("flops", "memory_bandwidth", "memory", "node", "network") if key not in given]
    if missing:
        raise _invalid(name, f"it has no `{missing[0]}`")
    return Machine(**given)


def _link(name: str, key: str, value: Any) -> dict[str, float]:
    parts = [one.name for one in fields(Interconnect)]
    if not isinstance(value, dict) or value.keys() - parts:
        raise _invalid(name, f"`{key}` must be a table with `bandwidth` and `latency`")
    return {part: _number(name, value, f"{key}.", part) for part in parts}


def _number(name: str, table: Any, where: str, key: str) -> float:
    """Rates and counts are positive; only latencies, and what an instruction takes at least, may be 0."""
    value = table.get(key) if isinstance(table, dict) else None
    least = key in ("latency", "launch", "host")
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise _invalid(name, f"`{where}{key}` must be a number")
    if value < 0 or (not least and not value):
        raise _invalid(name, f"`{where}{key}` is {value:g}, and must be {'at least' if least else 'more than'} 0")
    low, high = (0.0, LONGEST) if least else (SLOWEST, FASTEST)
    if not low <= value <= high:
        raise _invalid(name, f"`{where}{key}` is {value:g}, and must be between {low:g} and {high:g}")
    return value


def _invalid(name: str, why: str) -> PiperError:
    return error("P0902", f"{name} describes no machine", notes=[why], help=f"look at {FOLDER / 'h100.toml'}")
