"""piperlang: a language for distributed training schedules."""

from __future__ import annotations

from importlib import import_module

from piperlang.version import __version__

TYPE_CHECKING = False  # importing typing takes 10 ms, during which Ctrl-C is not handled
if TYPE_CHECKING:
    from typing import Any

    from piperlang.capture.annotate import annotate
    from piperlang.capture.trace.routed import routed_linear
    from piperlang.diagnostics import PiperError
    from piperlang.runtime.api import compile

_HOME = {
    "PiperError": "piperlang.diagnostics",
    "annotate": "piperlang.capture.annotate",
    "routed_linear": "piperlang.capture.trace.routed",
    "compile": "piperlang.runtime.api",
}

__all__ = ["PiperError", "__version__", "annotate", "compile", "routed_linear"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext piperlang`: the magics %piper and %%piper."""
    from piperlang.repl.notebook import load

    load(shell)


def __getattr__(name: str) -> Any:
    """These need torch, which the rest of the front end must not import."""
    if name not in _HOME:
        raise AttributeError(f"module 'piperlang' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as problem:
        if problem.name not in ("torch", "ray", "numpy", "safetensors"):
            raise
        raise ImportError(
            f"piperlang.{name} needs {problem.name}: pip install 'piperlang[run]'", name=problem.name
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
