"""Python's garbage collector, which slows down making many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Makes or reads hundreds of thousands of objects, none of them in a cycle: looking for garbage among them would
    take as long as the work itself."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
