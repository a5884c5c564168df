"""Hooks on tensors, parameters, modules, optimizers and state dicts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from tests.habits.habit import EITHER, REFUSED, Between, Category, Layers, sgd

HOOKS = Category("hooks", "Hooks")


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return 0.5 * gradient


SEEN: list[Any] = []
"""What hooks record; nobody reads it."""


def record(gradient: torch.Tensor) -> None:
    SEEN[:] = [gradient.shape]


# ---------------------------------------------------------------------------------------------------------- tensors


@HOOKS.habit("tensor hook that scales the gradient", REFUSED)
class TensorScale(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(halved)
        return x


@HOOKS.habit("tensor hook that clamps the gradient", REFUSED)
class TensorClamp(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return x


@HOOKS.habit("tensor hook that divides by the norm of the batch's gradient", REFUSED)
class TensorNorm(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.1 * gradient / gradient.norm())
        return x


@HOOKS.habit("tensor hook that only records", REFUSED)
class TensorRecord(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(record)
        return x


@HOOKS.habit("hook on grad_fn that scales", REFUSED)
class GradFnScale(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(0.5 * gradient for gradient in gradients))
        return x


@HOOKS.habit("register_multi_grad_hook that records", REFUSED)
class MultiRecord(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            torch.autograd.graph.register_multi_grad_hook((x,), lambda gradients: SEEN.clear())
        return x


# ------------------------------------------------------------------------------------------------------- parameters


@HOOKS.habit("parameter hook that scales the gradient", REFUSED)
class ParameterScale(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.register_hook(halved)


@HOOKS.habit("parameter hook that masks rows of the gradient", REFUSED)
class ParameterMask(Layers):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones_like(self.layers[2].weight)
        mask[:4] = 0
        self.layers[2].weight.register_hook(lambda gradient: gradient * mask)


@HOOKS.habit("parameter hook that clips its norm", REFUSED)
class ParameterClip(Layers):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * (0.01 / (gradient.norm() + 1e-6)).clamp(max=1.0))


@HOOKS.habit("parameter hook that only records", REFUSED)
class ParameterRecord(Layers):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(record)


def halve_in_place(parameter: torch.Tensor) -> None:
    parameter.grad = 0.5 * parameter.grad  # type: ignore[operator]


@HOOKS.habit("post-accumulate-grad hook that scales", REFUSED)
class PostAccumulate(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_post_accumulate_grad_hook(halve_in_place)


def update_at_once(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= 0.05 * parameter.grad  # type: ignore[operator]
    parameter.grad = None


@HOOKS.habit("post-accumulate-grad hook that updates the weight (optimizer in backward)", REFUSED)
class OptimizerInBackward(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_post_accumulate_grad_hook(update_at_once)


# ---------------------------------------------------------------------------------------------------------- modules


@HOOKS.habit("full backward hook that changes the input's gradient", REFUSED)
class BackwardHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_hook(
            lambda module, inputs, outputs: tuple(None if g is None else 0.5 * g for g in inputs)
        )


@HOOKS.habit("full backward pre-hook that changes the output's gradient", REFUSED)
class BackwardPreHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_full_backward_pre_hook(lambda module, outputs: tuple(0.5 * g for g in outputs))


@HOOKS.habit("full backward hook that only records", REFUSED)
class BackwardRecord(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_full_backward_hook(lambda module, inputs, outputs: SEEN.clear())


@HOOKS.habit("full backward hook of the whole model that only records", REFUSED)
class WholeBackwardRecord(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, inputs, outputs: SEEN.clear())


@HOOKS.habit("forward hook that changes the output")
class ForwardHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)


@HOOKS.habit("forward pre-hook that changes the input")
class ForwardPreHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_pre_hook(lambda module, inputs: (0.5 * inputs[0],))


@HOOKS.habit("forward hook that scales the gradient of the output", REFUSED)
class ForwardThenGradient(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(halved)


@HOOKS.habit("forward hook that keeps activations, which the forward uses")
class ForwardKept(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.Tensor] = {}
        self.layers[1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.kept[1] = output

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + (0.1 * self.kept[1] if i == 3 else 0)


@HOOKS.habit("forward hook that only records statistics")
class ForwardRecord(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda module, inputs, output: self.seen.append(output.detach().mean()))


@HOOKS.habit("forward hook with kwargs that changes the output")
class ForwardKwargs(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, inputs, kwargs, output: output - 0.1, with_kwargs=True)


@HOOKS.habit("forward hook that counts calls and acts on the count", REFUSED)
class ForwardCount(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers[1].register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 0.5 * self.calls)


class Marked(nn.Linear):
    """Only those are meant by the global hooks."""


@HOOKS.habit("global forward hook that changes outputs")
class GlobalForward(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Marked(8, 8)
        _once(
            register_module_forward_hook, lambda module, inputs, output: 2 * output if type(module) is Marked else None
        )


class MarkedToo(nn.Linear):
    pass


@HOOKS.habit("global backward hook that changes gradients", REFUSED)
class GlobalBackward(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = MarkedToo(8, 8)
        _once(
            register_module_full_backward_hook,
            lambda module, inputs, outputs: tuple(0.5 * g for g in inputs) if type(module) is MarkedToo else None,
        )


_registered: dict[Any, Any] = {}


def _once(register: Any, hook: Any) -> None:
    """However often the model is made, there is one hook."""
    if register in _registered:
        _registered[register].remove()
    _registered[register] = register(hook)


# -------------------------------------------------------------------------------------------- optimizers, state dicts


@HOOKS.optimizer("optimizer step pre-hook that scales gradients", EITHER)
def pre_hook(params: Any) -> torch.optim.Optimizer:
    found = sgd(params)
    found.register_step_pre_hook(_halve_all)
    return found


def _halve_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@HOOKS.optimizer("optimizer step pre-hook that clips the global norm", EITHER)
def clipping_hook(params: Any) -> torch.optim.Optimizer:
    found = sgd(params)
    found.register_step_pre_hook(lambda optimizer, args, kwargs: _clip(optimizer))
    return found


def _clip(optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


@HOOKS.optimizer("optimizer step post-hook that clamps weights", EITHER)
def post_hook(params: Any) -> torch.optim.Optimizer:
    found = sgd(params)
    found.register_step_post_hook(lambda optimizer, args, kwargs: _clamp(optimizer))
    return found


@torch.no_grad()
def _clamp(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.1, 0.1)


@HOOKS.optimizer("optimizer step post-hook that counts steps", EITHER)
def counting_hook(params: Any) -> torch.optim.Optimizer:
    found = sgd(params)
    found.register_step_post_hook(lambda optimizer, args, kwargs: SEEN.clear())
    return found


@HOOKS.habit("state-dict hook that adds an entry")
class StateDictAdds(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_add)


def _add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "version"] = torch.tensor(2)


@HOOKS.habit("state-dict hook that renames weights")
class StateDictRenames(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in list(state):
        state[name.replace("layers.", "blocks.")] = state.pop(name)


@HOOKS.habit("load-state-dict pre-hook")
class LoadHook(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, state, *others: state.pop("old", None))


@HOOKS.habit("extra state")
class ExtraState(Layers):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        pass


@HOOKS.habit("hook that is given up where it cannot be registered", REFUSED)
class HookIfPossible(Between):
    """Plain training registers it."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(Exception):
            x.register_hook(halved)
        return x
