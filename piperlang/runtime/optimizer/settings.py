"""What the user's `optimizer` and `lr_schedule` have decided in one process, as text.

Every worker calls them itself. Where they depend on something that differs between processes (an unseeded generator,
the process id, the time), replicas and stages would train with different options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import optim

from piperlang.capture.user.prints import text_of
from piperlang.capture.user.state import attributes_read_by
from piperlang.runtime.optimizer.copies import options

Settings: TypeAlias = Mapping[str, Mapping[str, str]]
"""Options and initial state by weight; by "", those of the optimizer itself."""
Changed: TypeAlias = tuple[Sequence[str], str, str]
"""An option that has changed: a weight of the group, the name of the option, its value."""


def settings_of_weights(optimizer: optim.Optimizer, names: Sequence[Sequence[str]]) -> Settings:
    """`names`: of the weights of each group."""
    groups = [{name: text_of(value) for name, value in options(group).items()} for group in optimizer.param_groups]
    return {name: group for group, its in zip(groups, names, strict=True) for name in its}


def settings_of_optimizer(optimizer: optim.Optimizer) -> Mapping[str, str]:
    """Its class, and what a step reads of it besides groups and state."""
    read = [one for one in attributes_read_by(optimizer.step) if one.name not in ("param_groups", "state", "defaults")]
    return {"the class of the optimizer": type(optimizer).__qualname__} | {
        one.label: text_of(one.scope[one.name]) for one in read
    }


def joined(settings: Sequence[Settings]) -> Settings:
    """Of several optimizers: each weight has one, and what is of an optimizer itself is numbered."""
    found = {name: values for one in settings for name, values in one.items() if name}
    own = [one.get("", {}) for one in settings]
    several = {f"{key} (optimizer {number})": value for number, one in enumerate(own) for key, value in one.items()}
    return found | ({"": own[0] if len(own) == 1 else several} if own else {})


def digest(changes: Sequence[Changed]) -> str:
    """The order of groups does not count: it may be that of a set."""
    return hashlib.blake2b(repr(sorted(changes)).encode(), digest_size=16).hexdigest()


def difference(one: Settings, other: Settings) -> tuple[str, str, str] | None:
    """The first setting that differs, in words, with both values."""
    for name in {**one, **other}:
        here, there = one.get(name, {}), other.get(name, {})
        # A process knows what its own part of the program reads.
        for key in {**here, **there} if name else here.keys() & there.keys():
            if here.get(key) != there.get(key):
                return f"{key} of weight {name}" if name else key, here.get(key, "missing"), there.get(key, "missing")
    return None
