"""piperlang: a language for distributed training schedules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piperlang.capture.annotate import annotate
    from piperlang.capture.routed import routed_linear
    from piperlang.runtime.api import compile

__version__ = "0.1.0"
__all__ = ["__version__", "annotate", "compile", "routed_linear"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext piperlang`: the magics %piper and %%piper."""
    from piperlang.repl.notebook import load

    load(shell)


def __getattr__(name: str) -> Any:
    """These need torch, which the rest of the front end must not import."""
    if name == "annotate":
        from piperlang.capture.annotate import annotate

        return annotate
    if name == "routed_linear":
        from piperlang.capture.routed import routed_linear

        return routed_linear
    if name == "compile":
        from piperlang.runtime.api import compile

        return compile
    raise AttributeError(f"module 'piperlang' has no attribute {name!r}")
