"""Which of some measured steps count."""

from __future__ import annotations

import pytest

from piperlang.simulate.profile import undelayed


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([1.0], [0]), ([2.0, 1.0, 9.0], [1]), ([1.2, 1.0, 1.4, 1.1, 7.0, 1.3, 1.5, 1.6], [1, 3, 0, 5])],
)
def test_the_shorter_half(lengths: list[float], expected: list[int]) -> None:
    assert undelayed(lengths) == expected
