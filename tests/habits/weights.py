"""Parametrizations, tied and shared weights, and other ways to have parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as f
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from piperlang.capture.annotate import annotate
from tests.habits.habit import REFUSED, WIDTH, WORDS, Category, Layers, tokens, words

WEIGHTS = Category("weights", "Parametrizations and parameters")


# ---------------------------------------------------------------------------------------------------- parametrizations


@WEIGHTS.habit("weight_norm, old style")
class OldWeightNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.layers[i] = nn.utils.weight_norm(self.layers[i])


@WEIGHTS.habit("weight_norm, new style")
class NewWeightNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.weight_norm(layer)


@WEIGHTS.habit("spectral_norm, old style")
class OldSpectralNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.layers[i] = nn.utils.spectral_norm(self.layers[i])


@WEIGHTS.habit("spectral_norm, new style")
class NewSpectralNorm(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.spectral_norm(layer)


@WEIGHTS.habit("orthogonal", limit=1e-4)
class Orthogonal(Layers):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.layers[1])


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


@WEIGHTS.habit("custom parametrization")
class Custom(Layers):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.layers[2], "weight", Symmetric())


@WEIGHTS.habit("parametrize.cached around the forward")
class Cached(Custom):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(x)


@WEIGHTS.habit("pruned weights (masks as buffers)")
class Pruned(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.random_unstructured(layer, "weight", 0.3)


@WEIGHTS.habit("pruning made permanent")
class Permanent(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.random_unstructured(layer, "weight", 0.3)
            prune.remove(layer, "weight")


# ------------------------------------------------------------------------------------------------------- tied weights


@WEIGHTS.habit("embedding tied to the head", batch=tokens, loss=words)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = self.embed(ids)
        with annotate("stage", 1):
            x = torch.tanh(self.first(x))
        with annotate("stage", 2):
            x = torch.tanh(self.second(x))
        with annotate("stage", 3):
            return self.head(x)


@WEIGHTS.habit("layers of two stages share their weight")
class TiedLayers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


@WEIGHTS.habit("a layer's weight is another's transpose, in the forward")
class Transposed(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i < 3:
            return super().stage(i, x)
        return f.linear(x, self.layers[0].weight.t(), self.layers[3].bias)


@WEIGHTS.habit("a parameter under two names")
class TwoNames(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.layers[1].weight

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + (f.linear(x, self.alias) if i == 2 else 0)


@WEIGHTS.habit("a layer used in every stage")
class OneLayer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 4)


@WEIGHTS.habit("a parameter that is a view of another's storage", REFUSED)
class SharedStorage(Layers):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(2 * WIDTH, WIDTH) / 4
        self.layers[0].weight = nn.Parameter(whole[:WIDTH])
        self.layers[1].weight = nn.Parameter(whole[WIDTH // 2 : WIDTH // 2 + WIDTH])


# -------------------------------------------------------------------------------------------------- ways to have them


@WEIGHTS.habit("ParameterList")
class InList(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(4))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scales[i]


@WEIGHTS.habit("ParameterDict")
class InDict(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({f"stage{i}": torch.ones(WIDTH) for i in range(4)})

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scales[f"stage{i}"]


@WEIGHTS.habit("lazy layers, initialized by a call in the constructor")
class Lazy(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LazyLinear(WIDTH) for _ in range(4))
        for layer in self.layers:
            layer(torch.zeros(1, WIDTH))


@WEIGHTS.habit("a parameter that nothing uses")
class Unused(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


@WEIGHTS.habit("a parameter used only to compare with")
class Compared(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(WIDTH))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        return x * (x > self.threshold) if i == 1 else x


@WEIGHTS.habit("complex parameters")
class Complex(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH) if i == 1 else x


@WEIGHTS.habit("slices of one large parameter in all stages")
class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            with annotate("stage", i):
                x = torch.tanh(x @ self.weight[i])
        return x


@WEIGHTS.habit("parameters stacked in the forward")
class Stacked(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            weight = torch.stack([layer.weight for layer in self.layers])
        for i in range(4):
            with annotate("stage", i):
                x = torch.tanh(x @ weight[i] + self.layers[i].bias)
        return x


@WEIGHTS.habit("a scalar parameter")
class Scalar(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * (self.scale if i in (1, 3) else 1)


@WEIGHTS.habit("a parameter without elements")
class Empty(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, WIDTH))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + self.none.sum()


@WEIGHTS.habit("a parameter that is not contiguous")
class Strided(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).t())


@WEIGHTS.habit("a parameter with an odd number of elements", limit=1e-4)
class Odd(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(3, 1))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.odd.square().mean() if i == 1 else super().stage(i, x)


@WEIGHTS.habit("convolutions in channels_last")
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        return x.reshape(-1, WIDTH)


@WEIGHTS.habit("a parameter in a plain list: it is no parameter of the model")
class InPlainList(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)) for _ in range(4)]

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) * self.scales[i]


@WEIGHTS.habit("a module in a plain list: its weights are not those of the model")
class ModuleInPlainList(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return super().stage(i, x) + (self.hidden[0](x) if i == 1 else 0)


@WEIGHTS.habit("weights written in the constructor")
class Written(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.weight.data.normal_(std=0.3)
            layer.bias.data = torch.full((WIDTH,), 0.1)
            with torch.no_grad():
                layer.weight[0] = 0.2


@WEIGHTS.habit("weights initialized from their own values (orthogonal_, normalized rows)", limit=1e-4)
class FromValues(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
            layer.weight.data /= layer.weight.data.norm(dim=1, keepdim=True)


@WEIGHTS.habit("weights copied from one layer to the others")
class CopiedLayers(Layers):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1:]:
            layer.load_state_dict(self.layers[0].state_dict())


@WEIGHTS.habit("mixed precision of parameters: one in float64")
class OneInDouble(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return (super().stage(i, x) * self.scale).float() if i == 2 else super().stage(i, x)


@WEIGHTS.habit("LoRA beside frozen weights")
class Lora(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(2, WIDTH) / 4 for _ in range(4))
        self.up = nn.ParameterList(torch.zeros(WIDTH, 2) + 0.01 for _ in range(4))

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[i](x) + x @ self.down[i].t() @ self.up[i].t())


@WEIGHTS.habit("a parameter replaced in the forward", REFUSED)
class Replaced(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 1:
            self.layers[1].bias = nn.Parameter(self.layers[1].bias.detach() * 0.5)
        return super().stage(i, x)


@WEIGHTS.habit("hypernetwork: weights made from other weights")
class Hyper(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, WIDTH * WIDTH)

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(f.linear(x, self.make(self.code).view(WIDTH, WIDTH))) if i == 2 else super().stage(i, x)
