"""`--resume RUN|auto`: the checkpoint that a run continues from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from piperlang.cli.model import doing
from piperlang.cli.run_folder import check_free
from piperlang.diagnostics import PiperError, error
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.runtime.checkpoint.files import Folder
    from piperlang.runtime.checkpoint.manifest import Manifest
    from piperlang.runtime.driver.restoring import Restore

AUTO = "auto"


@dataclass(frozen=True)
class Resumed:
    run: Folder
    """The run folder; or the place of its checkpoints, where that is all there is."""
    checkpoint: Folder
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def restore(self, new_options: bool) -> Restore:
        from piperlang.runtime.driver.restoring import Restore

        return Restore(self.checkpoint.absolute(), self.step, new_options)


def resumed(options: argparse.Namespace) -> Resumed | None:
    """The newest checkpoint that is whole. None if the run starts at its beginning."""
    if options.resume is None:
        return None
    with doing("verifying the checkpoint"):
        found = _newest(options)
    if found is None:
        emit(Notice("there is no checkpoint yet: training starts at the first step"))
        return None
    if options.seed not in (None, found.manifest.seed):
        raise error(
            "P0612",
            f"cannot resume with `--seed {options.seed}`: the run has seed {found.manifest.seed}",
            help="leave out --seed: weights, data and dropout continue with the seed of the run",
        )
    later = _later(found) if str(found.checkpoint) == str(location(options.resume)) and not options.out else None
    if later is not None:
        raise error(
            "P0612",
            f"cannot continue {found.run} after step {found.step}: it has a later checkpoint, {later.name}",
            help=f"train the other branch in its own folder with `--out`, or continue with `--resume {found.run}`",
        )
    emit(Notice(f"resuming after {counted(found.step, 'step')}: {found.checkpoint}"))
    return found


def _later(found: Resumed) -> Folder | None:
    """The newest checkpoint of the run, if it is whole and of a later step: a new start would go on from it."""
    newest = newest_whole(found.run)
    return newest.checkpoint if newest is not None and newest.step > found.step else None


def location(text: str) -> Folder:
    """A folder of this machine, or a URL."""
    from piperlang.runtime.checkpoint.remote import Remote

    return Remote(text) if "://" in text else Path(text)


def _newest(options: argparse.Namespace) -> Resumed | None:
    from piperlang.runtime.checkpoint.store import store_of

    if options.resume != AUTO:
        path = location(options.resume)
        if isinstance(path, Path) and not options.out:
            check_free(path)
        return newest_of(path)
    runs = [Path(options.out)] if options.out else list(_runs(options.script))
    run = next((run for run in runs if store_of(run).names()), None)
    if run is None:
        return None
    check_free(run)
    return _of_run(run)


def _runs(script: str) -> Iterator[Path]:
    """The run folders of a script, the newest first."""
    stem = Path(script).stem if script != "-" else "stdin"
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    folders = Path("runs").iterdir() if Path("runs").is_dir() else iter(())
    found = [(int(match[1]), folder) for folder in folders if (match := pattern.fullmatch(folder.name))]
    return (folder for _, folder in sorted(found, reverse=True))


def newest_of(path: Folder) -> Resumed:
    """Of a run folder, or the checkpoint that is named."""
    from piperlang.runtime.checkpoint.files import verify
    from piperlang.runtime.checkpoint.manifest import MANIFEST, Damaged
    from piperlang.runtime.checkpoint.store import store_of

    if (path / MANIFEST).exists() and not store_of(path).names():
        try:
            return Resumed(path.absolute().parent.parent, path, verify(path))
        except Damaged as problem:
            raise damaged(path, problem) from None
    if not store_of(path).names():
        raise no_checkpoint(path)
    return _of_run(path)


def no_checkpoint(path: Folder) -> PiperError:
    return error(
        "P0611",
        f"{path} has no checkpoint" if path.exists() else f"{path} does not exist",
        help=(
            "name a run folder; checkpoints are saved with --save-every, --save-minutes, and when a job is interrupted"
        ),
    )


def _of_run(run: Folder) -> Resumed:
    from piperlang.runtime.checkpoint.manifest import Damaged
    from piperlang.runtime.checkpoint.store import store_of

    problems: list[PiperError] = []
    for folder, manifest in store_of(run).all():
        if not isinstance(manifest, Damaged):
            for problem in problems:
                emit(Notice(problem.diagnostics[0].message, warning=True))
            return Resumed(run, folder, manifest)
        problems.append(damaged(folder, manifest))
    raise PiperError(*(one for problem in problems for one in problem.diagnostics))


def newest_whole(run: Folder) -> Resumed | None:
    """The newest checkpoint of a run that is whole, if there is one."""
    from piperlang.runtime.checkpoint.manifest import Damaged
    from piperlang.runtime.checkpoint.store import store_of

    for folder, manifest in store_of(run).all():
        if not isinstance(manifest, Damaged):
            return Resumed(run, folder, manifest)
    return None


def damaged(checkpoint: Folder, problem: Exception) -> PiperError:
    return error(
        "P0611",
        f"the checkpoint {checkpoint} cannot be used: {problem}",
        help="use an older one, or copy it again from where it was saved; `piperc ckpt verify` checks all of a run",
    )
