"""The user's optimizer after copies of it were made: it has options, which a schedule may read and change, but neither
weights nor state.

A schedule that reads or changes weights, state or groups would act on tensors that are not trained. All of that is
refused at the line that does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import unwrap
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn, optim

from piperlang.capture.user.prints import Prints
from piperlang.capture.user.state import Frozen, Global, globals_of, labelled
from piperlang.capture.user.where import here, line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.runtime.optimizer.copies import options, same_option
from piperlang.runtime.optimizer.user import step_hooks

_REPAIR = (
    "change only options of the groups in the schedule (lr, weight_decay, momentum); move code that depends on weights"
    " or their state to the `step` of an Optimizer"
)

IN_OPTIONS = (
    "make it an option of the groups, which `lr_schedule` may change, or keep it in the optimizer's state:"
    " `self.state[p]`"
)


class _StandIn(nn.Parameter):
    """Replaces a parameter: it can be counted and compared by identity, and nothing else."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _touched("the weights")


class _Nothing:
    """Replaces an attribute that the optimizer does not have any more."""

    def __init__(self, refuse: Callable[[], PiperError]) -> None:
        self.__dict__["refuse"] = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # accessed by Python itself
            raise AttributeError(name)
        raise self.refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.refuse()

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse


def options_only(optimizer: optim.Optimizer) -> list[list[nn.Parameter]]:
    """Removes weights and state; returns the replacements of the parameters, group by group."""
    found = []
    for group in optimizer.param_groups:
        group["params"] = [_StandIn(torch.empty(0)) for _ in group["params"]]
        found.append(list(group["params"]))
    optimizer.state = _Nothing(lambda: _touched("the state of the optimizer"))  # type: ignore[assignment]
    return found


def refuse_use(optimizer: optim.Optimizer) -> None:
    """Makes using an optimizer that was created for a comparison, and that user code may keep, an error: it does not
    train the model."""
    optimizer.param_groups = _Nothing(_not_trained)  # type: ignore[assignment]
    optimizer.state = _Nothing(_not_trained)  # type: ignore[assignment]


def _not_trained() -> PiperError:
    return error(
        "P0601",
        "this code uses an optimizer object that does not train the model",
        here(),
        notes=["devices train with copies of what `optimizer` returns"],
        help="change the options of its groups (lr, weight_decay, momentum) from step to step in `lr_schedule`",
    )


def check_options(optimizer: optim.Optimizer, last: list[dict[str, Any]], make: Callable[..., Any]) -> None:
    """Between steps only the schedule may change options: changes by other code would not reach the copies, or not
    those on workers."""
    for group, was in zip(optimizer.param_groups, last, strict=False):
        name = next(
            (name for name, value in options(group).items() if name not in was or not same_option(was[name], value)),
            None,
        )
        if name is not None:
            raise error(
                "P0601",
                f"option `{name}` of the optimizer has changed between steps",
                line_of_function(make),
                notes=[
                    "only the schedule of `lr_schedule` may change options: devices train with copies of the optimizer"
                ],
                help="return an object with a method `step` from `lr_schedule(optimizer)` that changes it",
            )


def check_groups(
    optimizer: optim.Optimizer, stand_ins: list[list[nn.Parameter]], make_schedule: Callable[..., Any]
) -> None:
    """The schedule must not change the groups."""
    now = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if now != [[id(parameter) for parameter in group] for group in stand_ins]:
        raise error(
            "P0601",
            "the schedule of `lr_schedule` changes which parameters the groups of the optimizer have",
            line_of_function(make_schedule),
            notes=["groups are distributed over devices before the first step"],
            help="create all groups in `optimizer`, and change only their options in the schedule",
        )


def _touched(what: str) -> PiperError:
    return error(
        "P0601",
        f"`lr_schedule` uses {what}",
        here(),
        notes=["weights and state are distributed over devices, and copies of the optimizer train them"],
        help=_REPAIR,
    )


def what_steps_read(optimizer: optim.Optimizer, make: Callable[..., Any]) -> Frozen:
    """What the steps of an optimizer read besides the optimizer itself: data and `on_step` must leave it as it is, as
    they run in another process, or at another time, than in plain training."""
    return Frozen(
        "a step of the optimizer",
        step_hooks(optimizer),
        [type(optimizer)],
        line_of_function(make),
        tensors_read_by(make),
        help=IN_OPTIONS,
    )


def what_steps_read_elsewhere(known: Collection[str], make: Callable[..., Any]) -> Frozen:
    """The same in a process that has no optimizer. `known`: globals that its steps read."""
    reached = [(name, scope) for name, scope in globals_of([unwrap(make)]) if name in known]
    names = [*reached, *tensors_read_by(make)]
    return Frozen("a step of the optimizer", [], [], line_of_function(make), names, help=IN_OPTIONS)


def tensors_read_by(make: Callable[..., Any]) -> list[Global]:
    """Tensors and arrays that the function which makes the optimizer names: the optimizer may hold them, and its copies
    hold copies of them."""
    return [
        (name, scope)
        for name, scope in globals_of([unwrap(make)])
        if isinstance(scope.get(name), torch.Tensor | np.ndarray)
    ]


class SharedState:
    """Python state that the steps of an optimizer change outside of it: in globals, class attributes, closures of
    hooks.

    In plain training it changes once per step. Several copies of an optimizer in one process, one for each update of a
    device, would all change it."""

    def __init__(self, optimizer: optim.Optimizer, make: Callable[..., Any], copies: int) -> None:
        self.line = line_of_function(make)
        self.hooks = {
            f"step hook `{getattr(hook, '__name__', type(hook).__name__)}`": hook for hook in step_hooks(optimizer)
        }
        functions = [*(item for kind in type(optimizer).__mro__ for item in vars(kind).values()), *self.hooks.values()]
        self.globals = labelled(globals_of(functions))
        self.kind, self.copies = type(optimizer), copies
        self.before = self._prints()

    def _prints(self) -> dict[str, object]:
        prints = Prints(contents=True)
        found = {name: prints.of(hook) for name, hook in self.hooks.items()}
        found |= {f"class `{self.kind.__qualname__}`": prints.of(self.kind)}
        return found | {one.label: one.print(prints) for one in self.globals}

    def check(self) -> None:
        """One copy may change it, as in plain training."""
        name = self.changed() if self.copies > 1 else None
        if name is not None:
            raise error(
                "P0601",
                f"{name} changes in every step of the optimizer",
                self.line,
                notes=["copies of the optimizer share it, so it changes several times per training step"],
                help="keep it in `optimizer.state` or in the groups, of which every copy has its own",
            )

    def changed(self) -> str | None:
        """What is not as it was before the first step."""
        return next((name for name, now in self._prints().items() if now != self.before[name]), None)


def attributes_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """What an optimizer has besides groups, state, hooks and methods."""
    others = ("param_groups", "state", "defaults", "_opt_called", "_step_count")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in others
        and not name.startswith("_optimizer_")
        and not callable(getattr(type(optimizer), name, None))  # a method, replaced on the instance
    }


def fingerprints(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: Prints(contents=True).of(value) for name, value in values.items()}
