"""The user's `optimizer` and `lr_schedule`: how they are called, and how much of the model a step of the optimizer
reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from piperlang.capture.trace.hooks import refuse_hooks
from piperlang.capture.user.prints import tensor_print
from piperlang.capture.user.tensors import named_tensors
from piperlang.capture.user.user_code import said
from piperlang.capture.user.where import line_of, line_of_function
from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.elaborate.directive import Written
from piperlang.source import Span

NAMED = ("named_params", "named_parameters")
"""Names of the first argument that request (name, parameter) pairs."""


class UpdateScope(Enum):
    """What the update of one element of a weight depends on, besides the options of its group."""

    ELEMENT = "its own gradient and state"
    WEIGHT = "the whole weight"
    MODEL = "all weights"


ELEMENTWISE: frozenset[type] = frozenset(
    (
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    )
)
PER_PARAMETER: frozenset[type] = frozenset((optim.Adafactor, optim.Muon))


@dataclass(frozen=True)
class UserOptimizers:
    """What `optimizer` returns: an optimizer, or a list of several that train different weights."""

    returned: Any
    each: tuple[optim.Optimizer, ...]

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()


@dataclass(frozen=True)
class UserSchedules:
    """What `lr_schedule` returns: a learning rate schedule, or a list of several."""

    each: tuple[Any, ...]

    def step(self) -> None:
        for schedule in self.each:
            schedule.step()


def call_optimizer(make: Callable[[Any], Any], model: nn.Module) -> UserOptimizers:
    """The user's optimizers on the parameters of `model` that require gradients.

    The name of its first argument decides what is passed: the model, pairs of names and parameters, or a list of
    parameters."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = next((argument.name for argument in _arguments(make)), "")
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = {name: (tensor, tensor_print(tensor)) for name, tensor in named_tensors(model).items()}
    made = make(model if first == "model" else named if first in NAMED else [parameter for _, parameter in named])
    each = tuple(made) if isinstance(made, list | tuple) else (made,)
    others = [one for one in each or (made,) if not isinstance(one, optim.Optimizer)]
    if others:
        what = (
            type(others[0]).__name__
            if others[0] is made
            else f"a {type(made).__name__} with a {type(others[0]).__name__}"
        )
        raise _mistake(
            make,
            f"`optimizer` returns {what}, not a torch.optim.Optimizer",
            "return a torch.optim.Optimizer, or a list of them",
        )
    refuse_hooks(model)
    changed = next(
        (name for name, parameter in model.named_parameters() if parameter.requires_grad != flags.get(name)), None
    )
    if changed is not None:
        raise _mistake(
            make,
            f"`optimizer` changes requires_grad of {changed}",
            "set requires_grad in `model`: the program is traced with the model that it returns",
        )
    after = named_tensors(model)
    written = next(
        (name for name, (was, seen) in before.items() if after.get(name) is not was or tensor_print(was) != seen), None
    )
    if written is not None:
        raise _mistake(
            make,
            f"`optimizer` changes {written}",
            "change weights in `model`: devices train the weights that it returns",
        )
    _check_parameters(make, model, each)
    return UserOptimizers(made, each)


def _check_parameters(make: Callable[..., Any], model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
    """Optimizers have parameters of the model, each in one of them."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    first: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in own:
                    message = "the optimizer holds a tensor that is not a parameter of the model"
                    note = f"it has shape {list(parameter.shape)} and is in parameter group {number}"
                    raise _mistake(make, message, "pass it only parameters of the model", note)
                if first.setdefault(id(parameter), place) != place:
                    raise _mistake(
                        make,
                        f"two optimizers train {own[id(parameter)]}",
                        "give each parameter to one of the optimizers",
                    )


def call_schedule(make: Callable[[Any], Any], optimizers: UserOptimizers) -> UserSchedules:
    """The user's learning rate schedules: anything with a `step()`, which is called after every training step."""
    made = make(optimizers.returned)
    each = tuple(made) if isinstance(made, list | tuple) else (made,)
    for schedule in each:
        step = getattr(schedule, "step", None)
        if not callable(step):
            message = f"`lr_schedule` returns {type(schedule).__name__}, which has no method `step`"
            raise _mistake(make, message, "return a torch.optim.lr_scheduler.LRScheduler, or a list of them")
        needed = _required(step)
        if needed:
            message = (
                f"{type(schedule).__name__}.step needs `{needed[0]}`, but the schedule is stepped without arguments"
            )
            raise _mistake(
                make,
                message,
                "use a schedule that depends only on the step number, such as CosineAnnealingLR or LambdaLR",
            )
    return UserSchedules(each)


def step_schedule(schedule: UserSchedules, optimizers: UserOptimizers, make: Callable[..., Any]) -> None:
    before = [(optimizer, _replaced(optimizer), _attributes(optimizer)) for optimizer in optimizers.each]
    try:
        schedule.step()
    except (PiperError, KeyboardInterrupt):
        raise
    except BaseException as problem:
        help = "fix this line, or make the schedule cover all training steps"
        raise error(
            "P0801",
            "the schedule of `lr_schedule` raised an exception in `step`",
            line_of(problem) or _line(make),
            notes=[said(problem)],
            help=help,
        ) from problem
    for optimizer, methods, attributes in before:
        _check_unchanged(optimizer, methods, attributes, make)


def _check_unchanged(
    optimizer: optim.Optimizer,
    methods: Mapping[str, Any],
    attributes: Mapping[str, list[tuple[Any, object]]],
    make: Callable[..., Any],
) -> None:
    """The schedule changes options of the groups, and nothing else."""
    if _replaced(optimizer) != methods:
        raise _unsupported(
            make,
            f"the schedule replaces a method of {type(optimizer).__name__}, but copies of the optimizer train",
            "change only options of the groups: a learning rate of 0 stops training",
        )
    now = _attributes(optimizer)
    changed = next((name for name in {**attributes, **now} if not _same(attributes.get(name), now.get(name))), None)
    if changed is not None:
        raise _unsupported(
            make,
            f"the schedule changes the attribute `{changed}` of {type(optimizer).__name__}, and copies of the optimizer"
            " train",
            f'keep it in the groups, as `group["{changed}"]` for all of `optimizer.param_groups`: their options change'
            " in all copies",
        )


def _replaced(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Methods that are replaced on the instance, as LRScheduler wraps `step`."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if callable(value) and callable(getattr(type(optimizer), name, None))
    }


def _attributes(optimizer: optim.Optimizer) -> dict[str, list[tuple[Any, object]]]:
    """What the instance has besides groups, state and methods. Of a tensor also how often it was written to."""
    others = ("param_groups", "state", "defaults", "_opt_called", "_step_count")
    return {
        name: [(leaf, leaf._version if isinstance(leaf, torch.Tensor) else None) for leaf in pytree.tree_leaves(value)]
        for name, value in vars(optimizer).items()
        if name not in others and not callable(value)
    }


def _same(before: list[tuple[Any, object]] | None, after: list[tuple[Any, object]] | None) -> bool:
    if before is None or after is None or len(before) != len(after):
        return False
    plain = (int, float, complex, str, bytes)
    return all(
        version == later and (one is other or (isinstance(one, plain) and type(one) is type(other) and one == other))
        for (one, version), (other, later) in zip(before, after, strict=True)
    )


def scope_of(optimizer: optim.Optimizer, make: Callable[..., Any]) -> UpdateScope:
    """Determined by exact class or by declaration; other classes are assumed to read all weights. Raises P0601 for
    optimizers that no schedule can run."""
    name = type(optimizer).__name__
    if type(optimizer) is optim.SparseAdam:
        raise _unsupported(make, f"{name} needs sparse gradients, which are not supported", "use Adam")
    if _required(type(optimizer).step, skip=1):
        message = f"{name}.step needs a closure that evaluates the model again"
        raise _unsupported(make, message, "use an optimizer whose step needs no argument, such as AdamW")
    if not getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", "step" not in vars(optimizer)):
        raise _unsupported(make, f"`step` of this {name} is replaced on the instance", "override `step` in a subclass")
    if type(optimizer).zero_grad is not optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        raise _unsupported(
            make,
            f"{name} overrides `zero_grad`, which is never called: gradients are new tensors in every step",
            "keep values that persist between steps in the optimizer's state, in `step`",
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise _unsupported(
            make, f"{name} has differentiable=True, but updates are not differentiated", "remove `differentiable`"
        )
    if _has_step_hooks(optimizer):
        return UpdateScope.MODEL
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False) is True:
        return UpdateScope.ELEMENT
    if type(optimizer) in PER_PARAMETER or getattr(optimizer, "per_parameter", False) is True:
        return UpdateScope.WEIGHT
    return UpdateScope.MODEL


def refused(
    optimizer: optim.Optimizer, make: Callable[..., Any], scope: UpdateScope, why: str, by: Written | None, line: str
) -> PiperError:
    """The error for an optimizer that needs more of the weights than a device has.

    `by`: the directive that shards the weight; `line`: its location, if only that is known."""
    name = type(optimizer).__name__
    if scope is UpdateScope.WEIGHT:
        message = f"{name} needs unsharded weights"
        helps: tuple[str, ...] = (
            "if `replicate` shards it, add `partition=weights`: every weight then belongs to one device",
            "otherwise use an elementwise optimizer, such as AdamW, or remove `shard`",
        )
    elif _has_step_hooks(optimizer):
        message = f"step hooks of {name} may read all weights"
        helps = ("remove the hooks, or keep all weights unsharded on every device",)
    else:
        message = f"{name} may read all weights in one update"
        helps = (
            (
                f"set `elementwise = True` on {name} if the update of an element depends only on its own gradient and"
                " state"
            ),
            f"set `per_parameter = True` on {name} if the update of a weight depends only on that whole weight",
            "otherwise keep all weights unsharded on every device",
        )
    notes = (why, f"sharded by {line}") if line and by is None else (why,)
    span, label = (by.span, "sharded here") if by else (_line(make), "")
    return PiperError(Diagnostic("P0601", message, span, label, notes=notes, helps=helps, trail=by.trail if by else ()))


def never_stepped(optimizer: optim.Optimizer) -> None:
    """Keep LRScheduler from warning that this optimizer was never stepped: copies of it are. A private name, in torch
    2.11 and 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _has_step_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether user code runs before or after each step of this optimizer, or of all optimizers. torch's profiler has a
    hook of its own.

    Private names of torch.optim, in torch 2.11 and 2.13."""
    return bool(step_hooks(optimizer))


def step_hooks(optimizer: optim.Optimizer) -> list[Callable[..., Any]]:
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = [
        hook for some in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks) for hook in some.values()
    ]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def _arguments(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return []


def _required(function: Callable[..., Any], skip: int = 0) -> list[str]:
    """Names of the arguments without a default, except the first `skip`."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        one.name for one in _arguments(function)[skip:] if one.kind in named and one.default is inspect.Parameter.empty
    ]


def _mistake(make: Callable[..., Any], message: str, help: str, *notes: str) -> PiperError:
    return error("P0801", message, _line(make), notes=notes, help=help)


def _unsupported(make: Callable[..., Any], message: str, help: str) -> PiperError:
    return error("P0601", message, _line(make), help=help)


def _line(make: Callable[..., Any]) -> Span | None:
    """The line where the user's function is defined."""
    return line_of_function(make.func if isinstance(make, partial) else make)
