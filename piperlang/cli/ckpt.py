"""Look at the checkpoints of a run: `ls` lists them, `verify` compares every file with its SHA-256, `show` prints what
one has."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from piperlang.cli.model import doing
from piperlang.cli.resume import damaged, location, newest_of, no_checkpoint
from piperlang.diagnostics import PiperError
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.runtime.checkpoint.files import Folder
    from piperlang.runtime.checkpoint.manifest import Manifest

ACTIONS = ("ls", "verify", "show")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ls|verify|show", choices=ACTIONS)
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    action = {"ls": _list, "verify": _verify, "show": _show}[options.action]
    return action(location(options.run_folder), options.json)


def _folders(path: Folder) -> list[Folder]:
    from piperlang.runtime.checkpoint.manifest import MANIFEST
    from piperlang.runtime.checkpoint.store import store_of

    found = store_of(path).names() or ([path] if (path / MANIFEST).exists() else [])
    if not found:
        raise no_checkpoint(path)
    return found


def _list(path: Folder, as_json: bool) -> int:
    """Manifests only: the files are not read."""
    from piperlang.runtime.checkpoint.files import read_manifest
    from piperlang.runtime.checkpoint.manifest import Damaged

    rows: list[dict[str, Any]] = []
    for folder in _folders(path):
        try:
            manifest = read_manifest(folder)
        except Damaged as problem:
            rows.append({"checkpoint": str(folder), "damaged": str(problem)})
        else:
            rows.append({"checkpoint": str(folder), **_summary(manifest)})
    if as_json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        if "damaged" in row:
            print(f"{row['checkpoint']}  damaged: {row['damaged']}")
        else:
            size = f"{row['bytes'] / 2**20:,.1f} MiB in {counted(row['files'], 'file')}"
            print(f"{row['checkpoint']}  step {row['step']:,}, {row['samples']:,} samples, {size}, {row['saved']}")
    return 0


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "samples": manifest.data.samples,
        "files": len(manifest.files),
        "bytes": sum(one.bytes for one in manifest.files.values()),
        "saved": manifest.about.get("saved", ""),
        "script": manifest.about.get("script", ""),
        "devices": manifest.about.get("devices", 0),
    }


def _verify(path: Folder, as_json: bool) -> int:
    from piperlang.runtime.checkpoint.files import verify
    from piperlang.runtime.checkpoint.manifest import Damaged

    problems: list[PiperError] = []
    for folder in _folders(path):
        with doing(f"verifying {folder}"):
            try:
                manifest = verify(folder)
            except Damaged as problem:
                problems.append(damaged(folder, problem))
                continue
        row = {"checkpoint": str(folder), **_summary(manifest)}
        print(json.dumps(row) if as_json else f"{folder}  whole, step {manifest.step:,}")
    if problems:
        raise PiperError(*(one for problem in problems for one in problem.diagnostics))
    return 0


def _show(path: Folder, as_json: bool) -> int:
    found = newest_of(path)
    manifest = found.manifest
    tensors = [
        {
            "name": str(name),
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "parts": [str(piece.range) for piece in stored.pieces],
        }
        for name, stored in manifest.tensors.items()
    ]
    if as_json:
        about = {**_summary(manifest), "about": manifest.about, "seed": manifest.seed, "tensors": tensors}
        print(json.dumps({"checkpoint": str(found.checkpoint), **about}))
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in manifest.about.get("versions", {}).items())
    print(f"{found.checkpoint}: step {manifest.step:,}, {manifest.data.samples:,} samples, seed {manifest.seed}")
    print(f"saved {manifest.about.get('saved', '')} by {manifest.about.get('script', '')}; {versions}")
    for tensor in tensors:
        parts = f" in {len(tensor['parts'])} parts" if len(tensor["parts"]) > 1 else ""
        print(f"  {tensor['name']}: {tensor['dtype']}{tensor['shape']}{parts}")
    return 0
