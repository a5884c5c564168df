from typing import Any


def dump(plan: Any) -> str:
    return ""
