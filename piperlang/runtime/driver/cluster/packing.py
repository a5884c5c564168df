"""What workers receive."""

from __future__ import annotations

from ray import cloudpickle

from piperlang.capture.user.model_file import model_modules


def pack(value: object) -> bytes:
    """Pickles a value for another process, including functions that it cannot import."""
    for module in model_modules():
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    packed: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return packed
