"""What a step of CPU workers frees, the C library keeps for the next one. By itself glibc gives it back to the system,
and every page of it costs a page fault when the next step wants memory: most under schedules that hold many
activations at once (1,500 faults in a step of a small GPT under GPipe, a tenth of the step, and next to none under
1F1B)."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""
_NEVER, _LARGEST = -1, 32 << 20
"""No trimming; and the largest size that glibc takes for blocks of the heap."""
_DEFAULT = 128 << 10
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Where users say it themselves."""


def keep(keeps: bool) -> None:
    """From now on, or no more: then what is free goes back at once."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or any(name in os.environ for name in _VARIABLES):
        return
    for parameter, value in ((_TRIM_THRESHOLD, _NEVER), (_MMAP_THRESHOLD, _LARGEST)):
        library.mallopt(parameter, value if keeps else _DEFAULT)
    if not keeps:
        library.malloc_trim(0)
