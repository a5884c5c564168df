"""The reference: the same habit trained eagerly on one device, as anyone would write it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as f
from torch import nn
from torch.utils import checkpoint as recompute

from piperlang.capture.trace.eager import CountedDraws
from piperlang.capture.trace.observed import total_of
from piperlang.capture.trace.random import counter_dropout, mix
from tests.habits.habit import SAMPLES, STEPS, Habit

SEED = 0


@dataclass(frozen=True)
class Reference:
    """What plain training gives."""

    batches: list[tuple[Any, Any]]
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """By the name of the parameter, for every step; those that autograd gives none for are missing."""
    state: dict[str, Any]
    """After the last step: `model.state_dict()`. An extra state may be anything."""


def batches(habit: Habit) -> list[tuple[Any, Any]]:
    found = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        found.append(habit.batch(step))
    return found


def plain(habit: Habit) -> Reference:
    """Trains three steps. The batches given back are untouched, whatever the model does to its inputs."""
    given = batches(habit)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    model = habit.model()
    optimizer = _optimizer(habit, model)
    schedule = habit.lr_schedule(optimizer) if habit.lr_schedule else None
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for step, batch in enumerate(given):
        inputs, target = copied(batch)
        model.zero_grad()  # those that the optimizer was not given, too
        with _dropout(step) if habit.dropout else contextlib.nullcontext():
            loss = total_of(_loss(habit, model, inputs, target))
            loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: _dense(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        if habit.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), habit.max_norm)
        _update(habit, model, optimizer, inputs, target)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.detach())
        elif schedule is not None:
            for one in schedule if isinstance(schedule, list) else [schedule]:
                one.step()
    state = {name: copied(value) for name, value in model.state_dict().items()}
    return Reference(given, losses, gradients, state)


def _optimizer(habit: Habit, model: nn.Module) -> Any:
    """The first argument's name says what the function wants: `model`, `named_params`, or else parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    first = next(iter(inspect.signature(habit.optimizer).parameters))
    return habit.optimizer(model if first == "model" else named if first == "named_params" else [p for _, p in named])


def copied(value: Any) -> Any:
    """What is one tensor stays one, and views stay views."""
    return copy.deepcopy(value)


def _loss(habit: Habit, model: nn.Module, inputs: Any, target: Any) -> torch.Tensor:
    args = inputs if isinstance(inputs, tuple | list) else (inputs,)
    output = model(**inputs) if isinstance(inputs, dict) else model(*args)
    loss = habit.loss(output, target)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss  # type: ignore[no-any-return]


def _update(habit: Habit, model: nn.Module, optimizer: Any, inputs: Any, target: Any) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
        return

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(habit, model, inputs, target)
        loss.backward()
        return loss

    optimizer.step(closure)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.detach().clone()


@contextlib.contextmanager
def _dropout(step: int) -> Iterator[None]:
    """Masks by seed, step and position. A checkpoint is a plain call meanwhile, since its masks must not change."""
    rng, numbers = torch.tensor([mix(SEED, step), 0]), itertools.count()

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return counter_dropout(input, rng, next(numbers), p, SAMPLES) if training and p > 0.0 else input

    def call(function: Any, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    fused = f.scaled_dot_product_attention

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """The weights are what attention gives for the columns of a unit matrix."""
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if dropout_p == 0.0:
            return fused(q, k, v, **options)
        unit = torch.eye(k.shape[-2], dtype=v.dtype).expand(*v.shape[:-2], -1, -1)
        weights = dropout(fused(q, k, unit, **options), dropout_p)
        return weights @ v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)

    def by_feature(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * (torch.rand(*x.shape[:2], *[1] * (x.dim() - 2)) >= p) / (1 - p) if training else x

    with (
        CountedDraws(SEED, step, SAMPLES),
        mock.patch.multiple(f, dropout1d=by_feature, dropout2d=by_feature, dropout3d=by_feature),
        mock.patch.object(recompute, "checkpoint", call),
        mock.patch.object(f, "dropout", dropout),
        mock.patch.object(f, "scaled_dot_product_attention", attend),
    ):
        yield
