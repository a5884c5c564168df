"""The diagnostic for a file that cannot be read, with a suggestion."""

from __future__ import annotations

from pathlib import Path

from piperlang.diagnostics.diagnostic import PiperError, error
from piperlang.diagnostics.suggest import did_you_mean


def unreadable(path: Path, problem: Exception, shown: str | None = None) -> PiperError:
    reason = getattr(problem, "strerror", None) or (
        "it is not text" if isinstance(problem, UnicodeDecodeError) else str(problem)
    )
    near = did_you_mean(path.name, _beside(path)) if isinstance(problem, FileNotFoundError) else None
    return error(
        "P0901", f"cannot read {shown or path}", notes=[reason[:1].lower() + reason[1:]], help=near or "check the path"
    )


def _beside(path: Path) -> list[str]:
    """Files of the same kind in the same folder, if there is one."""
    try:
        return sorted(other.name for other in path.parent.iterdir() if other.suffix == path.suffix)
    except OSError:
        return []
