"""Plans as files: versioned JSON that is read back exactly, field by field, so that a broken or foreign file is a
diagnostic and never a surprise."""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.elaborate.modules import Importer, Module
from piperlang.elaborate.modules import load as load_module
from piperlang.ir.model import Divide
from piperlang.plan.instruction import VERSION, DevicePlan, Instruction, Plan
from piperlang.plan.saved_form import ARGUMENTS, DEVICE, KEYS, PLAN, SHAPE, Broken, integer, text
from piperlang.syntax import tree

FORMAT = "piperlang plan"


# ------------------------------------------------------------------------------------------------------- writing


def dump(plan: Plan) -> str:
    return json.dumps(
        {"format": FORMAT, "version": VERSION, "about": plan.about, **_content(plan)},
        separators=(",", ":"),
        default=_divide,
        ensure_ascii=False,
    )


def digest(plan: Plan) -> str:
    """Equal for plans that do the same, wherever they come from."""
    canonical = json.dumps(_content(plan), separators=(",", ":"), default=_divide, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _content(plan: Plan) -> dict[str, Any]:
    return {
        "samples": plan.samples,
        "combine": plan.combine,
        "seconds": plan.seconds,
        "groups": plan.groups,
        "kinds": plan.kinds,
        "names": plan.names,
        "lines": plan.lines,
        "devices": [vars(device) for device in plan.devices],
    }


def _divide(value: Any) -> Any:
    if isinstance(value, Divide):
        return {"axis": value.axis, "size": value.size, "style": value.style}
    raise TypeError(f"a plan holds a {type(value).__name__}")


# ------------------------------------------------------------------------------------------------------- reading


def load(content: str, name: str = "the plan") -> Plan:
    """The plan in a text, or a diagnostic that says where it stops being one."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise _unreadable(name, f"it is no JSON: {problem}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _unreadable(name, f'a plan says `"format": "{FORMAT}"`')
    if data.get("version") != VERSION:
        raise _unreadable(name, f"it is of version {data.get('version')}, and this piperlang reads version {VERSION}")
    # Hundreds of thousands of tuples, none in a cycle: looking for garbage among them takes longer than making them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _plan(data)
    except Broken as problem:
        raise _unreadable(name, str(problem)) from None
    finally:
        if collecting:
            gc.enable()


def _unreadable(name: str, why: str) -> PiperError:
    return error(
        "P0505", f"{name} cannot be used", notes=[why], help="make it again with `piperc plan MODEL.py SCHEDULE.piper`"
    )


def _plan(data: dict[str, Any]) -> Plan:
    raw = data.pop("devices", None)
    if not isinstance(raw, list):
        raise Broken("it has no list of devices")
    fields = PLAN({key: value for key, value in data.items() if key not in ("format", "version")})
    devices = []
    for k, one in enumerate(raw):
        try:
            devices.append(_device(one))
        except Broken as problem:
            raise problem.of(f"entry {k} of its devices") from None
    return Plan(devices=devices, **fields)


def _device(data: Any) -> DevicePlan:
    if not isinstance(data, dict) or not isinstance(data.get("instructions"), list):
        raise Broken("there is no list of instructions")
    fields = DEVICE({key: value for key, value in data.items() if key != "instructions"})
    instructions = []
    for i, one in enumerate(data["instructions"]):
        try:
            instructions.append(_instruction(one))
        except Broken as problem:
            raise problem.of(f"instruction {i}") from None
    return DevicePlan(instructions=instructions, **fields)


def _instruction(data: Any) -> Instruction:
    if type(data) is not list or len(data) != 7 or type(data[0]) is not str:
        raise Broken("it is not [do, stream, node, reads, writes, waits, args]")
    do, stream, node, reads, writes, waits, args = data
    if do not in ARGUMENTS:
        raise Broken(f"nobody knows how to `{do}`")
    return Instruction(
        sys.intern(do), text(stream), integer(node), KEYS(reads), KEYS(writes), SHAPE(waits), ARGUMENTS[do](args)
    )


# --------------------------------------------------------------------------------------------------------- about


def about(
    model: Path, script: Path | None, parameters: Mapping[str, Any] | None = None, typed: str | None = None
) -> dict[str, Any]:
    """What a plan was made from: contents of files, parameters, versions. `typed`: a script that is no file."""
    files = {str(model): _hash(model)}
    if script is not None:
        files |= {shown: _hash(path) for shown, path in _imports(load_module(script, str(script)), Importer()).items()}
    elif typed is not None:
        files["<stdin>"] = hashlib.sha256(typed.encode()).hexdigest()
    return {
        "files": files,
        "parameters": {key: str(value) for key, value in sorted((parameters or {}).items())},
        "versions": _versions(),
    }


def _imports(module: Module, importer: Importer) -> dict[str, Path]:
    """A script and every file it imports, by the names that messages use."""
    assert module.path is not None
    found = {module.script.source.name: module.path}
    importer.loaded[module.path] = module
    for statement in module.script.statements:
        if isinstance(statement, tree.FromImport | tree.ImportModule):
            path, shown, library = importer.find(statement.module, module)
            if path not in importer.loaded:
                found |= _imports(load_module(path, shown, library=library), importer)
    return found


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as problem:
        raise unreadable(path, problem) from None


def _versions() -> dict[str, str]:
    from piperlang import __version__

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"piperlang": __version__, "plan": str(VERSION), "python": platform.python_version(), "torch": torch}


def stale(now: Mapping[str, Any], then: Mapping[str, Any]) -> Diagnostic | None:
    """Why a plan that was made from `then` cannot be run with `now`; None if it can."""
    reasons: list[str] = []
    for part, what in (("files", "changed since"), ("parameters", "was"), ("versions", "was")):
        mine, theirs = _section(now, part), _section(then, part)
        for key in dict.fromkeys((*theirs, *mine)):
            have, had = mine.get(key), theirs.get(key)
            if have == had:
                continue
            if part == "files":
                reasons.append(
                    f"{key} is not read any more"
                    if have is None
                    else (
                        f"{key} was not read then"
                        if had is None
                        else f"{key} has changed since: {str(had)[:12]} then, {str(have)[:12]} now"
                    )
                )
            else:
                reasons.append(
                    f"{'parameter ' if part == 'parameters' else ''}{key} {what} {'not given' if had is None else had},"
                    f" and is {'not given' if have is None else have} now"
                )
    if not reasons:
        return None
    return Diagnostic(
        "P0506",
        f"the plan is out of date: {reasons[0]}",
        notes=tuple(reasons[1:]),
        helps=("make it again with `piperc plan MODEL.py SCHEDULE.piper`",),
    )


def _section(data: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found = data.get(part)
    return found if isinstance(found, Mapping) else {}
