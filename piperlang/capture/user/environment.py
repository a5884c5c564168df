"""Which environment variables code reads: a traced program keeps their values.

Private API, kept in this file: the class of `os.environ` (Python 3.11 to 3.13), whose `get`, `in` and `os.getenv` all
come to `__getitem__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from piperlang.resources import PACKAGE

_MAPPING = (os.__file__, "<frozen os>", "<frozen _collections_abc>", "_collections_abc.py")
_NOT_RECORDED = (str(Path(torch.__file__).parent) + os.sep, str(PACKAGE) + os.sep)
"""torch reads settings of its own while it traces, and sets some of them later."""


@contextmanager
def recorded_reads(keys: list[str]) -> Iterator[None]:
    """Adds the names of all variables that are read meanwhile, but for torch's."""
    kind: Any = type(os.environ)
    plain = kind.__getitem__

    def read(self: Any, key: Any) -> Any:
        if isinstance(key, str | bytes) and not _reader().startswith(_NOT_RECORDED):  # `os.environb` is one, too
            keys.append(os.fsdecode(key))
        return plain(self, key)

    kind.__getitem__ = read
    try:
        yield
    finally:
        kind.__getitem__ = plain


def _reader() -> str:
    """The file of the code that asks."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_MAPPING):
        frame = frame.f_back
    return frame.f_code.co_filename
