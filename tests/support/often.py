"""Which cases of a long list run every time. The others are marked slow, and run by hand with `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Every `count`-th of them, from the first on."""
    return [pytest.param(case, marks=pytest.mark.slow if i % count else ()) for i, case in enumerate(cases)]
