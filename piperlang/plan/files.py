"""Plans as files: versioned JSON that is read back exactly, field by field, so that a broken or foreign file is a
diagnostic and never a surprise."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from piperlang.core.collector import uncollected
from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.elaborate.modules import Importer, Module
from piperlang.elaborate.modules import load as load_module
from piperlang.plan.codec import InvalidRecord, encode, reader
from piperlang.plan.instructions import INSTRUCTIONS, Instruction
from piperlang.plan.plan import VERSION, Plan
from piperlang.syntax import tree

FORMAT = "piperlang plan"


# ------------------------------------------------------------------------------------------------------- writing


def dump(plan: Plan) -> str:
    header = {"format": FORMAT, "version": VERSION, "about": plan.about}
    return json.dumps(header | _content(plan), separators=(",", ":"), default=_encode, ensure_ascii=False)


def digest(plan: Plan) -> str:
    """Equal for plans that do the same, wherever they come from."""
    canonical = json.dumps(_content(plan), separators=(",", ":"), default=_encode, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _content(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in vars(plan).items() if name != "about"}


def _encode(value: Any) -> Any:
    return {"op": value.op, **encode(value)} if isinstance(value, Instruction) else encode(value)


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
    try:
        with uncollected():
            return _plan(data)
    except InvalidRecord as problem:
        raise _unreadable(name, str(problem)) from None


def _unreadable(name: str, why: str) -> PiperError:
    return error(
        "P0505", f"{name} cannot be used", notes=[why], help="make it again with `piperc plan MODEL.py SCHEDULE.piper`"
    )


def _plan(data: dict[str, Any]) -> Plan:
    content = {key: value for key, value in data.items() if key not in ("format", "version")}
    raw = content.get("devices")
    if not isinstance(raw, list):
        raise InvalidRecord("it has no list of devices")
    instructions = []
    for k, one in enumerate(raw):
        if not isinstance(one, dict) or not isinstance(one.get("instructions"), list):
            raise InvalidRecord(f"entry {k} of its devices: there is no list of instructions")
        where = f"entry {k} of its devices: instruction"
        instructions.append([_instruction(x, f"{where} {i}") for i, x in enumerate(one["instructions"])])
        one["instructions"] = []
    plan: Plan = reader(Plan)(content)
    for part in ("files", "parameters", "versions"):
        if part in plan.about:
            try:
                plan.about[part] = reader(dict[str, str])(plan.about[part])
            except InvalidRecord as problem:
                raise problem.of(f"`about`: `{part}`") from None
    for device, its in zip(plan.devices, instructions, strict=True):
        device.instructions = its
    return plan


def _instruction(data: Any, where: str) -> Instruction:
    try:
        if type(data) is not dict or type(data.get("op")) is not str:
            raise InvalidRecord("it has no `op`")
        op = data.pop("op")
        if op not in INSTRUCTIONS:
            raise InvalidRecord(f"unknown instruction `{op}`")
        kind: Any = INSTRUCTIONS[op]
        return reader(kind)(data)  # type: ignore[no-any-return]
    except InvalidRecord as problem:
        raise problem.of(where) from None


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
    from piperlang.version import __version__

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
