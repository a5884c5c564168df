"""Custom functions, detached paths, gradients inside the forward, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint as recompute

from piperlang.capture.annotate import annotate
from tests.habits.habit import REFUSED, SAME, WIDTH, Between, Category, Layers

AUTOGRAD = Category("autograd", "Autograd")

# -------------------------------------------------------------------------------------------------- custom functions


class Cube(Function):
    """Its backward is what autograd would find."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


@AUTOGRAD.habit("function whose backward is the derivative")
class UsesCube(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(x)


class Surrogate(Function):
    """A step forward, the slope of a sigmoid backward, as in spiking networks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.sigmoid(x) * (1 - torch.sigmoid(x))


@AUTOGRAD.habit("function with a surrogate gradient")
class UsesSurrogate(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Surrogate.apply(x)


spike = Surrogate.apply


@AUTOGRAD.habit("function bound to a name: f = F.apply")
class UsesBound(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return spike(x)


class Separate(Function):
    """forward without ctx, and setup_context."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 0.5)


@AUTOGRAD.habit("function with setup_context")
class UsesSeparate(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Separate.apply(x * 3)


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, name: str) -> torch.Tensor:
        ctx.scale, ctx.name = scale, name
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None, None


@AUTOGRAD.habit("function with arguments that are no tensors")
class UsesScaled(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, 0.25, "quarter")


class Halves(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, -1)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = grads
        return torch.cat([a, 0.1 * b], -1)


@AUTOGRAD.habit("function with two outputs")
class UsesHalves(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Halves.apply(x)
        return torch.cat([b, a], -1)


class Top(Function):
    """Values and their indices, of which only the values have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, indices, 0.5 * grads[0])


@AUTOGRAD.habit("function with mark_non_differentiable")
class UsesTop(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = Top.apply(x)
        return values + 0.01 * indices


class Kept(Function):
    """Tensors as attributes of ctx, not through save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (1 - ctx.x**2)


@AUTOGRAD.habit("function that keeps tensors on ctx")
class UsesKept(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(x)


class Through(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@AUTOGRAD.habit("straight-through estimator as a function")
class UsesThrough(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Through.apply(x)


@AUTOGRAD.habit("quantized weights with a straight-through function")
class QuantizedWeights(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(f.linear(x, Through.apply(self.layers[i].weight), self.layers[i].bias))


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.strength * grads[0], None


@AUTOGRAD.habit("gradient reversal")
class UsesReversal(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Reversal.apply(x, 0.5)


class Normed(Function):
    """Its backward looks at the gradients of all samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 0.1 * grads[0] / grads[0].norm()


@AUTOGRAD.habit("function whose backward divides by the norm of the batch's gradient", REFUSED, whole=SAME)
class UsesNormed(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Normed.apply(x)


class Drifting(Function):
    """Its forward mixes samples if their mean is large, its backward does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - torch.relu(x.mean(0) - 0.05)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@AUTOGRAD.habit("function whose forward mixes samples, and whose backward does not", REFUSED, whole=SAME)
class UsesDrifting(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Drifting.apply(x)


class Clamped(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-1e-3, 1e-3)


@AUTOGRAD.habit("function that clamps the gradient of every element")
class UsesClamped(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Clamped.apply(x)


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 0.5 * grads[0] * x.cos()


@AUTOGRAD.habit("function with once_differentiable")
class UsesOnce(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Once.apply(x)


class Written(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]


@AUTOGRAD.habit("function with mark_dirty")
class UsesWritten(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Written.apply(x * 1.0)


class Unmaterialized(Function):
    """The second output is not used, and its gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, second = grads
        return 2 * first if second is None else 5 * first + second


@AUTOGRAD.habit("function without materialized gradients")
class UsesUnmaterialized(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Unmaterialized.apply(x)[0]


class OwnLinear(Function):
    """A layer written as a function, its weight an argument; the weight's gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        return grad @ weight, 0.5 * grad.t() @ x, grad.sum(0)


@AUTOGRAD.habit("layer written as a function")
class UsesOwnLinear(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(OwnLinear.apply(x, self.layers[i].weight, self.layers[i].bias))


# ---------------------------------------------------------------------------------------------------- detached paths


@AUTOGRAD.habit("straight-through estimator by detach")
class ByDetach(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.sign() - x).detach()


@AUTOGRAD.habit("gradient scaled by detach")
class GradientScale(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.3 + (x - x * 0.3).detach()


@AUTOGRAD.habit("detached side branch")
class SideBranch(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            a = self.stage(0, x)
        with annotate("stage", 1):
            b = self.stage(1, a.detach())
        with annotate("stage", 2):
            c = self.stage(2, a)
        with annotate("stage", 3):
            return self.stage(3, b + c)


@AUTOGRAD.habit("input of a stage detached: the stages before it do not train")
class Cutoff(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


@AUTOGRAD.habit("x.detach_() in place")
class CutoffInPlace(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach_()


@AUTOGRAD.habit("weight.data and weight.detach() in a second path")
class StoppedWeight(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[i]
        other = layer.weight.data if i % 2 else layer.weight.detach()
        return torch.tanh(layer(x) + f.linear(x, other))


@AUTOGRAD.habit("no_grad around the first stage")
class NoGradOne(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i > 0:
            return super().stage(i, x)
        with torch.no_grad():
            return super().stage(i, x)


@AUTOGRAD.habit("no_grad around the first three stages")
class NoGradSeveral(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for i in range(3):
                with annotate("stage", i):
                    x = self.stage(i, x)
        with annotate("stage", 3):
            return self.stage(3, x)


@AUTOGRAD.habit("no_grad around a stage in the middle")
class NoGradMiddle(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(i != 2):
            return super().stage(i, x)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


@AUTOGRAD.habit("teacher with @torch.no_grad() on its forward")
class WithTeacher(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Teacher()

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + (self.teacher(x) if i == 2 else 0)


@AUTOGRAD.habit("frozen first two stages")
class FrozenPrefix(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:2]:
            layer.requires_grad_(False)


@AUTOGRAD.habit("frozen last two stages")
class FrozenSuffix(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[2:]:
            layer.requires_grad_(False)


@AUTOGRAD.habit("only biases train")
class OnlyBiases(Layers):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.endswith("bias")


@AUTOGRAD.habit("enable_grad inside no_grad")
class EnabledInside(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            with annotate("stage", 0):
                x = self.stage(0, x)
            with annotate("stage", 1), torch.enable_grad():
                x = self.stage(1, x)
        for i in (2, 3):
            with annotate("stage", i):
                x = self.stage(i, x)
        return x


@AUTOGRAD.habit("set_grad_enabled(False) as a call, and back")
class SetAndBack(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        with annotate("stage", 0):
            x = self.stage(0, x)
        torch.set_grad_enabled(True)
        for i in (1, 2, 3):
            with annotate("stage", i):
                x = self.stage(i, x)
        return x


@AUTOGRAD.habit("inference_mode around the first stage")
class Inference(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i > 0:
            return super().stage(i, x)
        with torch.inference_mode():
            x = super().stage(i, x)
        return x.clone()


# ------------------------------------------------------------------------------------- gradients inside the forward


@AUTOGRAD.habit("torch.autograd.grad in the forward: forces of an energy")
class Forces(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = x
        for i in range(4):
            with annotate("stage", i):
                y = self.stage(i, y)
        with annotate("stage", 3):
            (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return force


def penalized(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    y, penalty = output
    return f.mse_loss(y, target) + 0.1 * penalty.mean()


@AUTOGRAD.habit("gradient penalty, one for each sample", loss=penalized)
class Penalty(Layers):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for i in range(3):
            with annotate("stage", i):
                x = self.stage(i, x)
        with annotate("stage", 3):
            y = self.stage(3, x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y, (slope.norm(dim=-1) - 1) ** 2


@AUTOGRAD.habit("saliency by torch.autograd.grad, detached")
class Saliency(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y = super().stage(i, x)
        if i != 2:
            return y
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * (1 + slope.detach().abs())


@AUTOGRAD.habit("gradient step on the activations in the forward (double backward)")
class Inner(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y = super().stage(i, x)
        if i != 1:
            return y
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y - 0.1 * first


@AUTOGRAD.habit("aux.backward() in the forward", REFUSED)
class BackwardInside(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y = super().stage(i, x)
        if i == 1 and torch.is_grad_enabled():
            (0.1 * y.square().mean()).backward(retain_graph=True)
        return y


@AUTOGRAD.habit("torch.func.grad in the forward")
class FuncGrad(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.grad(lambda t: t.cos().sum())(x)


@AUTOGRAD.habit("torch.func.vmap over the samples", REFUSED)
class FuncVmap(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.func.vmap(lambda row: self.layers[i].weight @ row + self.layers[i].bias)(x))


@AUTOGRAD.habit("torch.func.jvp in the forward")
class FuncJvp(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


@AUTOGRAD.habit("torch.func.functional_call with changed weights")
class FunctionalCall(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        changed = {name: 0.9 * value for name, value in self.layers[i].named_parameters()}
        return torch.tanh(torch.func.functional_call(self.layers[i], changed, (x,)))


# ------------------------------------------------------------------------------------------------------- checkpoints


@AUTOGRAD.habit("checkpoint with use_reentrant=False")
class Checkpointed(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return recompute.checkpoint(super().stage, i, x, use_reentrant=False)


@AUTOGRAD.habit("checkpoint with use_reentrant=True")
class Reentrant(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 0:
            return super().stage(i, x)
        return recompute.checkpoint(super().stage, i, x, use_reentrant=True)


@AUTOGRAD.habit("checkpoint with dropout inside", dropout=True)
class CheckpointedDropout(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return recompute.checkpoint(self._dropped, i, x, use_reentrant=False)

    def _dropped(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return f.dropout(torch.tanh(self.layers[i](x)), 0.25, self.training)


@AUTOGRAD.habit("checkpoint with use_reentrant=True and an input without gradient: the stage does not train")
class ReentrantFirst(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i > 0:
            return super().stage(i, x)
        return recompute.checkpoint(super().stage, i, x, use_reentrant=True)


@AUTOGRAD.habit("checkpoint_sequential")
class Sequential(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return recompute.checkpoint_sequential(self.block, 2, x, use_reentrant=False) if i == 2 else super().stage(i, x)


@AUTOGRAD.habit("saved tensors on the CPU (save_on_cpu)")
class SavedOnCpu(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().stage(i, x)


def _halve(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def _restore(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


@AUTOGRAD.habit("saved_tensors_hooks that keep activations in bfloat16")
class SavedInHalf(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(_halve, _restore):
            return super().stage(i, x)


@AUTOGRAD.habit("retain_grad on an activation that is not read")
class Retained(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.retain_grad()
        self.activation = x
        return x


@AUTOGRAD.habit("a gradient that is zero for the frozen half of a tensor (mask by detach)")
class HalfStopped(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a.detach(), b], -1)


class ScaledBack(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = ScaledBack.scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.scale * gradient


@AUTOGRAD.habit("function that reads a class attribute, set for one call", REFUSED)
class SetForACall(Between):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        ScaledBack.scale = 0.5
        try:
            return ScaledBack.apply(x)  # type: ignore[no-any-return]
        finally:
            ScaledBack.scale = 1.0
