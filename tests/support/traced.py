"""Model files that are traced once for all tests of a module: tracing takes most of the time of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from piperlang.capture import program
from piperlang.runtime.reference import numerics


@contextmanager
def traced_once() -> Iterator[None]:
    """Commands that run in this process trace each model file once, and once more in float64."""
    capture = program.capture
    known: dict[object, program.Program] = {}

    def remembered(make: Callable[[], Any], *others: Any) -> program.Program:
        if make not in known:
            known[make] = capture(make, *others)
        return known[make]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "capture_doubled", cache(numerics.capture_doubled))
        patch.setattr(program, "capture", remembered)
        yield
