"""What the analysis of samples says of a program is what dividing its batch does to loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.batch.samples import Samples, samples
from piperlang.capture.batch.walk import walk_samples
from piperlang.capture.batch.whole import edits
from piperlang.capture.trace.trace import trace
from piperlang.capture.trace.whole_sum import reason
from piperlang.diagnostics import Diagnostic
from piperlang.diagnostics.codes import CODES
from tests.support.models import CASES, Mlp, Moe, square, tokens, vectors, words
from tests.support.often import one_in

torch.set_num_threads(1)
LONG, WIDE, EXPERTS = 4, 6, 3
Function = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]


@pytest.fixture(autouse=True)
def _code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODES, "P0805", CODES.get("P0805", "the model mixes samples"))


class Part(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDE, WIDE), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(torch.tanh(self.linear(x)))


class Whole(nn.Module):
    """The function under test stands in a module of its own, with weights before it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDE, WIDE), Part(function)

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(self.first(x))


def numbers(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, LONG, WIDE), torch.randn(count, LONG, WIDE)


def analysed(
    model: Callable[[], nn.Module], loss: Loss, batch: Callable[[int], Any] = numbers, size: int = 2
) -> Samples:
    _, small, large, walk = edits(*(trace(model, loss, batch(n)) for n in (size, 2 * size)))
    return samples(small, large, walk)


def refusal(model: Callable[[], nn.Module], loss: Loss) -> tuple[Diagnostic | None, bool]:
    """Why microbatches cannot divide the batch, and whether devices can, because they add up sums."""
    _, small, large, walk = edits(*(trace(model, loss, numbers(n)) for n in (2, 4)))
    found = samples(small, large, walk)
    why = next((reason(node) for node in small.graph.nodes if node.name in found.summed), None)
    return found.mixing or why, found.mixing is None and why is not None


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def divided(
    model: nn.Module, loss: Loss, batch: tuple[torch.Tensor, torch.Tensor], parts: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sums of losses and of gradients over equal parts of the batch."""
    total, grads = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
        one = loss(model(x), y)
        total += one.detach()
        for into, grad in zip(
            grads, torch.autograd.grad(one, list(model.parameters()), allow_unused=True), strict=True
        ):
            into += 0 if grad is None else grad
    return total, grads


def combines(how: str, model: Callable[[], nn.Module], loss: Loss, batch: Callable[[int], Any] = numbers) -> bool:
    """Whether loss and gradients of 8 samples are the mean, or the sum, of those of their parts, for 2 and 4 parts."""
    torch.manual_seed(5)
    real = model().double()
    data = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch(8))
    whole, grads = divided(real, loss, data, 1)  # type: ignore[arg-type]
    for parts in (2, 4):
        scale = 1 / parts if how == "mean" else 1.0
        loss_of_parts, grads_of_parts = divided(real, loss, data, parts)  # type: ignore[arg-type]
        pairs = [(whole, loss_of_parts), *zip(grads, grads_of_parts, strict=True)]
        if not all(torch.allclose(a, b * scale, rtol=1e-9, atol=1e-11) for a, b in pairs):
            return False
    return True


# ------------------------------------------------------------------------------------------------- ready-made models


@pytest.mark.parametrize("name", CASES)
def test_models_may_be_divided(name: str) -> None:
    case = CASES[name]
    found = analysed(case.model, case.loss, case.batch, 4)
    assert found.mixing is None
    assert found.loss == ("sum" if case.loss is words else "mean")  # a cross entropy is traced as a sum over a count
    assert not found.weighted


@pytest.mark.parametrize("name", one_in(4, ["gpt2", "llama", "qwen_moe"]))
def test_transformers_may_be_divided(name: str) -> None:
    pytest.importorskip("transformers")
    from tests.support import transformers_models

    found = analysed(
        getattr(transformers_models, name),
        transformers_models.loss,
        lambda n: (torch.zeros(n, 6, dtype=torch.long),) * 2,
    )
    assert found.mixing is None
    assert found.loss == "sum"
    assert not found.weighted


@pytest.mark.slow
def test_transformers_that_compute_with_means() -> None:
    """The balancing loss that Qwen3-MoE computes itself is a product of means over the batch."""
    transformers = pytest.importorskip("transformers")
    from tests.support import transformers_models

    def model() -> nn.Module:
        made = transformers_models.qwen_moe()
        assert isinstance(made, transformers.Qwen3MoeForCausalLM)
        made.config.output_router_logits = True
        return made

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return transformers_models.loss(output, target) + output.aux_loss

    found = analysed(model, loss, lambda n: (torch.zeros(n, 6, dtype=torch.long),) * 2)
    assert found.mixing is None
    assert found.summed


# ------------------------------------------------------------------------------------------------------- what is fine


def per_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).flatten(1).mean(1)


def heads(x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return f.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def sequence_first(x: torch.Tensor) -> torch.Tensor:
    tokens = torch.relu(x.transpose(0, 1).reshape(-1, WIDE))
    return tokens.view(LONG, -1, WIDE).cumsum(0).permute(1, 0, 2)


def written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], LONG, WIDE, dtype=x.dtype)
    y[:, 1:] = x[:, :-1]
    y[:, 0] += 1
    return y.exp()


def gates(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.softmax(x[..., :EXPERTS], -1)
    return scores, f.one_hot(scores.argmax(-1), EXPERTS)


def capacity_per_sequence(x: torch.Tensor) -> torch.Tensor:
    _, chosen = gates(x)
    slot = chosen.cumsum(1) * chosen
    return x * ((slot > 0) & (slot <= 1)).any(-1, keepdim=True)


def capacity_of_all(x: torch.Tensor) -> torch.Tensor:
    _, chosen = gates(x)
    slot = chosen.flatten(0, 1).cumsum(0).view_as(chosen) * chosen
    return x * ((slot > 0) & (slot <= 2)).any(-1, keepdim=True)


def balance_per_sequence(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores, chosen = gates(output)
    share = chosen.to(scores.dtype).mean(1)
    return square(output, target) + 0.1 * EXPERTS * (share * scores.mean(1)).sum(-1).mean()


def balance_of_all(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores, chosen = gates(output)
    share = chosen.to(scores.dtype).mean((0, 1))
    return square(output, target) + 0.1 * EXPERTS * (share * scores.mean((0, 1))).sum()


def accumulated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=output.dtype)
    for i in range(LONG):
        total = total + ((output[:, i] - target[:, i]) ** 2).sum()
    return total


class Decay(Whole):
    """A loss with a term of the weights alone."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.first.weight.pow(2).sum()


def classes(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.flatten(0, 1), target.flatten(0, 1).argmax(-1)


FINE: dict[str, tuple[Function, Loss, str]] = {
    "pointwise": (lambda x: f.gelu(x) * torch.sigmoid(x) + 1, square, "mean"),
    "sum": (same, lambda o, t: f.mse_loss(o, t, reduction="sum"), "sum"),
    "manual mean": (same, lambda o, t: ((o - t) ** 2).sum() / o.shape[0], "mean"),
    "manual mean by elements": (same, lambda o, t: ((o - t) ** 2).sum() * (1 / o.numel()), "mean"),
    "mean made a sum": (same, lambda o, t: square(o, t) * len(o), "sum"),
    "divided before the sum": (same, lambda o, t: (per_sample(o, t) / o.shape[0]).sum(), "mean"),
    "losses of samples": (same, lambda o, t: per_sample(o, t).mean(), "mean"),
    "python sum of means": (same, lambda o, t: sum(square(o[:, i], t[:, i]) for i in range(LONG)), "mean"),
    "python sum of sums": (same, lambda o, t: sum(((o[:, i] - t[:, i]) ** 2).sum() for i in range(LONG)), "sum"),
    "accumulated from zero": (same, accumulated, "sum"),
    "stacked means": (same, lambda o, t: torch.stack([square(o, t), o.abs().mean()]).sum(), "mean"),
    "mean and a constant": (same, lambda o, t: 2 - square(o, t), "mean"),
    "means of columns": (same, lambda o, t: ((o - t) ** 2).mean(0).sum(), "mean"),
    "product over samples": (same, lambda o, t: torch.einsum("bij,bij->", o, t), "sum"),
    "gram of features": (same, lambda o, t: (o.flatten(0, 1).T @ t.flatten(0, 1)).diagonal().sum() / len(o), "mean"),
    "cross entropy by hand": (
        same,
        lambda o, t: f.cross_entropy(*classes(o, t), reduction="none").view(o.shape[:2]).sum(1).mean(),
        "mean",
    ),
    "cross entropy of sequences": (
        same,
        lambda o, t: f.cross_entropy(o.transpose(1, 2), t.argmax(-1), reduction="sum"),
        "sum",
    ),
    "cross entropy of shares": (
        same,
        lambda o, t: f.cross_entropy(o.flatten(0, 1), t.flatten(0, 1).softmax(-1)),
        "mean",
    ),
    "l1": (same, f.l1_loss, "mean"),
    "huber": (same, lambda o, t: f.huber_loss(o, t, reduction="sum"), "sum"),
    "smooth l1": (same, f.smooth_l1_loss, "mean"),
    "bce": (same, lambda o, t: f.binary_cross_entropy_with_logits(o, t.sigmoid()), "mean"),
    "bce of shares": (torch.sigmoid, lambda o, t: f.binary_cross_entropy(o, t.sigmoid(), reduction="sum"), "sum"),
    "kl": (lambda x: x.log_softmax(-1), lambda o, t: f.kl_div(o, t.softmax(-1), reduction="batchmean"), "mean"),
    "hinge": (same, lambda o, t: f.soft_margin_loss(o, t.sign()), "mean"),
    "cosine": (same, lambda o, t: 1 - f.cosine_similarity(o, t, dim=-1).mean(), "mean"),
    "cumsum within": (lambda x: x.cumsum(1), square, "mean"),
    "softmax within": (lambda x: x.softmax(1) + x.log_softmax(-1), square, "mean"),
    "max within": (lambda x: x - x.amax(1, keepdim=True) + x.max(-1, keepdim=True)[0], square, "mean"),
    "sort within": (lambda x: x.sort(1)[0].flip(1).roll(1, -1), square, "mean"),
    "std within": (lambda x: x / (x.std((1, 2), keepdim=True) + 1), square, "mean"),
    "sequence first": (sequence_first, square, "mean"),
    "attention": (heads, square, "mean"),
    "attention by einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x).softmax(-1) @ x, square, "mean"),
    "convolution": (lambda x: f.conv1d(x, torch.ones(LONG, LONG, 3, dtype=x.dtype), padding=1), square, "mean"),
    "pooling": (lambda x: f.max_pool1d(x, 3, 1, 1) + f.avg_pool1d(x, 3, 1, 1), square, "mean"),
    "layer norm": (lambda x: f.layer_norm(x, x.shape[1:]), square, "mean"),
    "group norm": (lambda x: f.group_norm(x, 2), square, "mean"),
    "instance norm": (lambda x: f.instance_norm(x), square, "mean"),
    "batch norm of constants": (
        lambda x: f.batch_norm(x, torch.zeros(LONG, dtype=x.dtype), torch.ones(LONG, dtype=x.dtype)),
        square,
        "mean",
    ),
    "written in place": (written, square, "mean"),
    "repeated": (lambda x: x.repeat_interleave(2, 0).relu().unflatten(0, (-1, 2)).sum(1), square, "mean"),
    "two halves": (lambda x: torch.cat([x, x.exp()]), lambda o, t: f.mse_loss(o, torch.cat([t, t])), "mean"),
    "two halves apart": (lambda x: torch.cat([x, x.exp()])[x.shape[0] :], square, "mean"),
    "parts of a sample": (
        lambda x: torch.cat([t * 2 for t in reversed(x.unbind(1))], -1).view_as(x) + torch.cat(x.chunk(2, 1)[::-1], 1),
        square,
        "mean",
    ),
    "gathered within": (lambda x: x.gather(1, x.argsort(1)), square, "mean"),
    "picked per sample": (lambda x: x + x[torch.arange(x.shape[0]), x.mean(-1).argmax(1)][:, None], square, "mean"),
    "placed by zeros": (lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1), square, "mean"),
    "triangle": (lambda x: torch.ones(LONG, LONG, dtype=x.dtype).tril() @ x, square, "mean"),
    "fourier": (lambda x: torch.fft.fft(x, dim=1).real, square, "mean"),
    "inverses": (
        lambda x: x + torch.linalg.inv(x @ x.mT + torch.eye(LONG, dtype=x.dtype)).diagonal(0, 1, 2)[..., None],
        square,
        "mean",
    ),
    "sums by kind": (
        same,
        lambda o, t: (
            torch.zeros(WIDE, dtype=o.dtype).scatter_add_(0, t.argmax(-1).flatten(), o.mean(-1).flatten()).sum()
        ),
        "sum",
    ),
    "constant as long as the batch": (
        same,
        lambda o, t: (per_sample(o, t) * torch.full((len(o),), 1 / len(o))).sum(),
        "mean",
    ),
    "where": (lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.5).clamp(max=0.9), square, "mean"),
    "capacity per sequence": (capacity_per_sequence, square, "mean"),
    "balance per sequence": (same, balance_per_sequence, "mean"),
}


@pytest.mark.parametrize("name", one_in(6, FINE))
def test_what_may_be_divided(name: str) -> None:
    function, loss, how = FINE[name]
    found = analysed(lambda: Whole(function), loss)
    assert found.mixing is None
    assert found.loss == how
    assert combines(how, lambda: Whole(function), loss)
    assert not combines("sum" if how == "mean" else "mean", lambda: Whole(function), loss)


def test_a_term_of_the_weights_fits_a_mean() -> None:
    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return f.mse_loss(output[0], target) + 0.1 * output[1]  # type: ignore[no-any-return]

    assert analysed(lambda: Decay(same), loss).mixing is None
    assert combines("mean", lambda: Decay(same), loss)


def test_what_does_not_reach_the_loss_does_not_matter() -> None:
    def noted(x: torch.Tensor) -> Any:
        seen = torch.zeros(2, WIDE)
        seen[0].copy_(x.detach().cumsum(0)[0, 0])
        return x

    model = trace(lambda: Whole(noted), square, numbers(2))
    assert any("cumsum" in node.name for node in model.graph.nodes)
    assert analysed(lambda: Whole(noted), square).mixing is None


# ----------------------------------------------------------------------------------------------------- what is refused


def gram(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(1)
    return x + (flat @ flat.T).tanh().mean(1)[:, None, None]


def minus(reduction: Function) -> Function:
    return lambda x: x - reduction(x)


def attended(x: torch.Tensor) -> torch.Tensor:
    q = x.transpose(0, 1)
    return f.scaled_dot_product_attention(q, q, q).transpose(0, 1)


def convolved(x: torch.Tensor) -> torch.Tensor:
    return f.conv1d(x.permute(1, 2, 0), torch.ones(WIDE, WIDE, 3, dtype=x.dtype), padding=1).permute(2, 0, 1)


def running_sum(x: torch.Tensor) -> torch.Tensor:
    return (torch.ones(len(x), len(x), dtype=x.dtype).tril() @ x.flatten(1)).view_as(x)


def crossing(start: Callable[[torch.Tensor], int]) -> Function:
    """As many elements as there are samples, from a dimension that holds two batches, and not one of the two."""
    return lambda x: torch.cat([x, x.exp()])[start(x) : start(x) + len(x)]


def padded(x: torch.Tensor) -> torch.Tensor:
    """Between constants that are half as long as the batch, the first sample is not where a batch begins."""
    edge = torch.zeros(len(x) * LONG // 2, WIDE, dtype=x.dtype)
    return x + torch.cat([edge, x.flatten(0, 1), edge]).view(2, -1, LONG, WIDE)[0]


MIXING: dict[str, tuple[Function, str]] = {
    "cumsum": (lambda x: x.cumsum(0), "cumsum operates along the batch dimension"),
    "cumprod": (lambda x: x.cumprod(0), "cumprod operates along the batch dimension"),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), "logcumsumexp operates along the batch dimension"),
    "cummax": (lambda x: x.cummax(0)[0], "cummax operates along the batch dimension"),
    "cummin": (lambda x: x.cummin(0)[0], "cummin operates along the batch dimension"),
    "sort": (lambda x: x.sort(0)[0], "sort operates along the batch dimension"),
    "argsort": (lambda x: x + x.argsort(0), "argsort operates along the batch dimension"),
    "topk": (lambda x: x - x.topk(1, 0)[0], "topk operates along the batch dimension"),
    "softmax": (lambda x: x.softmax(0), "softmax operates along the batch dimension"),
    "log_softmax": (lambda x: x.log_softmax(0), "log_softmax operates along the batch dimension"),
    "flip": (lambda x: x.flip(0), "flip operates along the batch dimension"),
    "roll": (lambda x: x.roll(1, 0), "roll operates along the batch dimension"),
    "cumsum of flattened": (
        lambda x: x.flatten(0, 1).cumsum(0).view_as(x),
        "cumsum operates along the batch dimension",
    ),
    "cumsum, samples last": (
        lambda x: x.movedim(0, -1).cumsum(-1).movedim(-1, 0),
        "cumsum operates along the batch dimension",
    ),
    "amax": (minus(lambda x: x.amax(0)), "amax over the samples"),
    "amin": (minus(lambda x: x.amin((0, 1))), "amin over the samples"),
    "max": (minus(lambda x: x.max()), "max over the samples"),
    "min": (minus(lambda x: x.min(0)[0]), "min over the samples"),
    "argmax": (minus(lambda x: x.argmax(0)), "argmax over the samples"),
    "prod": (minus(lambda x: x.prod(0)), "prod over the samples"),
    "std": (minus(lambda x: x.std(0)), "std over the samples"),
    "var": (minus(lambda x: x.var()), "var over the samples"),
    "norm": (minus(lambda x: x.norm(dim=0)), "norm over the samples"),
    "vector norm": (minus(torch.linalg.vector_norm), "linalg_vector_norm over the samples"),
    "logsumexp": (minus(lambda x: x.logsumexp(0)), "logsumexp over the samples"),
    "median": (minus(lambda x: x.median(0)[0]), "median over the samples"),
    "centred": (minus(lambda x: x.mean(0)), "combines a mean over the samples with individual samples"),
    "scaled by the mean": (lambda x: x * x.mean(), "multiplies a mean over the samples"),
    "divided by the sum": (lambda x: x / x.exp().sum(), "divides by a sum over the samples"),
    "batch norm": (
        lambda x: f.batch_norm(x, None, None, training=True),
        "batch_norm needs the statistics of the whole batch",
    ),
    "layer norm of all": (lambda x: f.layer_norm(x, x.shape), "layer_norm over the samples"),
    "instance norm of transposed": (
        lambda x: f.instance_norm(x.permute(1, 2, 0)).permute(2, 0, 1),
        "instance_norm over the samples",
    ),
    "group norm of transposed": (
        lambda x: f.group_norm(x.transpose(0, 1), 1).transpose(0, 1),
        "group_norm over the samples",
    ),
    "gram": (gram, "matmul combines different samples with each other"),
    "gram by einsum": (
        lambda x: x + torch.einsum("bij,cij->bc", x, x).tanh().mean(1)[:, None, None],
        "einsum combines different samples with each other",
    ),
    "distances": (
        lambda x: x + torch.cdist(x.flatten(1), x.flatten(1)).mean(1)[:, None, None],
        "cdist combines different samples with each other",
    ),
    "all pairs": (lambda x: (x[None] - x[:, None]).abs().mean(1), "sub combines different samples with each other"),
    "samples as a sequence": (attended, "scaled_dot_product_attention operates along the batch dimension"),
    "convolution over samples": (convolved, "conv1d operates along the batch dimension"),
    "triangle of samples": (running_sum, "matmul depends on the position of a sample in the batch"),
    "first sample": (minus(lambda x: x[0]), "select selects some of the samples"),
    "last sample": (minus(lambda x: x[-1:]), "slice selects some of the samples"),
    "halves of the batch": (lambda x: torch.cat(x.chunk(2)[::-1]), "chunk selects some of the samples"),
    "neighbours": (lambda x: x - torch.cat([torch.zeros_like(x[:1]), x[:-1]]), "slice selects some of the samples"),
    "ghost batches": (
        lambda x: x.view(2, -1, LONG, WIDE).cumsum(0).view_as(x),
        "view splits the batch dimension into several dimensions",
    ),
    "other order": (
        lambda x: x * x.transpose(0, 1).reshape(x.shape[0], LONG, WIDE),
        "reshape splits the batch dimension into several dimensions",
    ),
    "other samples": (
        lambda x: (x.flatten(0, 1) * x.transpose(0, 1).flatten(0, 1)).view_as(x),
        "mul combines different samples with each other",
    ),
    "chosen by data": (lambda x: x * x[x.mean((1, 2)).argsort() * 0], "operates along the batch dimension"),
    "chosen by own data": (
        lambda x: x * x[(x.mean((1, 2)) > 9).long()],
        "index indexes the batch dimension with values that depend on the data",
    ),
    "size as a factor": (lambda x: (x / x.shape[0]).exp(), "exp uses a number that depends on the batch size"),
    "size as a bound": (lambda x: x.clamp(max=0.01 * x.shape[0]), "clamp uses a number that depends on the batch size"),
    "across two batches": (crossing(lambda x: len(x) // 2), "slice selects some of the samples"),
    "from the third sample": (crossing(lambda x: 2), "slice selects some of the samples"),
    "between constants": (padded, "cat concatenates other data along the batch dimension"),
    "triangle over samples": (
        lambda x: x.movedim(0, -1).tril().movedim(-1, 0),
        "tril operates along the batch dimension",
    ),
    "windows": (lambda x: x - x.unfold(0, 2, 2).mean(), "unfold selects some of the samples"),
    "size as a term": (lambda x: x + 0.1 * len(x), "add uses a number that depends on the batch size"),
    "size in weights": (
        lambda x: x @ torch.full((WIDE, WIDE), 0.1 * len(x), dtype=x.dtype),
        "matmul uses a number that depends on the batch size",
    ),
    "size as a tensor's bound": (
        lambda x: torch.maximum(x, torch.full((), 0.01 * len(x), dtype=x.dtype)),
        "maximum uses a number that depends on the batch size",
    ),
    "size as repetitions": (
        lambda x: x + x.diff(n=len(x) // 2, dim=1).sum(1, keepdim=True),
        "diff operates along the batch dimension",
    ),
    "fourier": (lambda x: torch.fft.fft(x, dim=0).real, "fft_fft operates along the batch dimension"),
    "diagonal": (minus(lambda x: x.diagonal(0, 0, 1).sum()), "diagonal operates along the batch dimension"),
    "capacity of all": (capacity_of_all, "cumsum operates along the batch dimension"),
}


SUMMED = ("std", "var", "centred", "scaled by the mean", "divided by the sum", "batch norm")


@pytest.mark.parametrize("name", one_in(6, MIXING))
def test_models_that_mix_samples(name: str) -> None:
    function, message = MIXING[name]
    refused, summed = refusal(lambda: Whole(function), square)
    assert refused is not None
    assert summed == (name in SUMMED)
    assert refused.code == "P0805"
    assert refused.message.startswith("the batch cannot be divided: ")
    assert message in refused.message
    assert refused.notes == ("in module part",)
    assert len(refused.helps) == 1
    assert not combines("mean", lambda: Whole(function), square)
    assert not combines("sum", lambda: Whole(function), square)


PLACED: dict[str, Function] = {
    "bags of half a sample": lambda x: (
        x
        + f.embedding_bag(x.argmax(2).flatten(), torch.eye(WIDE, dtype=x.dtype), torch.arange(0, LONG * len(x), 2))[
            ::2, None
        ]
    ),
    "arange": lambda x: x + torch.arange(len(x))[:, None, None],
    "linspace": lambda x: x + torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None, None],
    "logspace": lambda x: x * torch.logspace(0, 1, len(x), dtype=x.dtype)[:, None, None],
    "window": lambda x: x * torch.hann_window(len(x), dtype=x.dtype)[:, None, None],
    "eye": lambda x: x + torch.eye(len(x), x.shape[1], dtype=x.dtype)[..., None],
    "meshgrid": lambda x: (
        x + torch.meshgrid(torch.arange(len(x)), torch.arange(x.shape[1]), indexing="ij")[0][..., None]
    ),
    "cumsum of ones": lambda x: x + torch.ones_like(x).cumsum(0),
    "cumsum of new ones": lambda x: x + torch.ones(len(x), dtype=x.dtype).cumsum(0)[:, None, None],
    "triangle of ones": lambda x: x + torch.ones(len(x), len(x), dtype=x.dtype).tril()[:, :1, None],
    "remainder of the number": lambda x: x + torch.arange(3, dtype=x.dtype)[torch.arange(len(x)) % 3][:, None, None],
    "share of the batch": lambda x: x + x.new_full((len(x), 1, 1), 1.0 / len(x)),
    "one of the batch": lambda x: (
        x + torch.cat([torch.ones(1, dtype=x.dtype), torch.zeros(len(x) - 1, dtype=x.dtype)])[:, None, None]
    ),
    "padded": lambda x: x + f.pad(torch.zeros(len(x) - 1, dtype=x.dtype), (1, 0), value=1.0)[:, None, None],
    "first row written": lambda x: x * _written(x, lambda mask: mask[0].fill_(0)),
    "all but the first written": lambda x: x * _written(x, lambda mask: mask[1:].fill_(0)),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 0.0),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.tensor(5.0, dtype=x.dtype)),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), torch.ones_like(x[:1]) * 0 + 1),
    "index_select": lambda x: x + x.index_select(0, torch.zeros(len(x), dtype=torch.long)),
    "gather": lambda x: x.gather(0, torch.zeros(len(x), dtype=torch.long)[:, None, None].expand_as(x)),
    "take": lambda x: x.take(torch.arange(x.numel()).view_as(x).flip(0)),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(len(x), 1, 1, dtype=torch.long), 0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.square()),
    "put": lambda x: x.put(torch.tensor([0]), torch.ones(1, dtype=x.dtype)),
    "select_scatter": lambda x: x.select_scatter(torch.zeros_like(x[0]), 0, 0),
    "slice_scatter": lambda x: x.slice_scatter(torch.zeros_like(x[:1]), 0, 0, 1),
    "pseudo-inverse": lambda x: x + torch.linalg.pinv(x.flatten(1)).T.view_as(x),
    "strides": lambda x: x.contiguous().as_strided(x.shape, (0, x.stride(1), x.stride(2))),
}
"""What depends on where in the batch a sample stands, by constants as long as the batch or by operators without a
rule."""


def _written(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    mask = torch.ones(len(x), 1, 1, dtype=x.dtype)
    write(mask)
    return mask


@pytest.mark.parametrize("name", one_in(3, PLACED))
def test_where_a_sample_stands(name: str) -> None:
    refused = analysed(lambda: Whole(PLACED[name]), square).mixing
    assert refused is not None
    assert refused.code == "P0805"


def test_what_can_be_neither_known_nor_tried() -> None:
    refused = analysed(
        lambda: Whole(
            lambda x: torch.segment_reduce(x, "sum", lengths=torch.full((len(x), 2), 2), axis=1).repeat(1, 2, 1)
        ),
        square,
    ).mixing
    assert refused is not None
    assert "segment_reduce has no rule, and trying it on two batches failed: RuntimeError" in refused.message


ALIKE: dict[str, Function] = {
    "its own row": lambda x: x[torch.arange(len(x))],
    "its own element": lambda x: x + x[torch.arange(len(x)), x.argmax(1)[:, 0]][:, None],
    "rows by number and position": lambda x: x[torch.arange(len(x))[:, None], torch.arange(x.shape[1])],
    "positions": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].expand(len(x), -1, 1),
    "positions by cumsum": lambda x: x + torch.ones(x.shape[:2], dtype=x.dtype).cumsum(1)[..., None],
    "differences": lambda x: (
        x + torch.diff(torch.arange(x.shape[1] + 1, dtype=x.dtype)[None].expand(len(x), -1), dim=1)[..., None]
    ),
    "mask": lambda x: x * torch.ones(len(x), x.shape[1], x.shape[1], dtype=x.dtype).tril()[:, :, :1],
    "constant column written": lambda x: x * _written(x, lambda mask: mask[:, 0].fill_(2)),
    "padding": lambda x: torch.cat([x, x.new_zeros(len(x), 1, x.shape[2])], 1)[:, :-1],
    "gather within": lambda x: x.gather(1, x.argsort(1)),
    "take_along_dim within": lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1) + x,
    "one hot": lambda x: x + f.one_hot(x.argmax(2), x.shape[2]),
    "searched": lambda x: x + torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype)),
    "windows within": lambda x: x + x.unfold(1, 2, 1).mean(-1).mean(1, keepdim=True),
    "pixels by place": lambda x: (
        x + f.grid_sample(x[:, None], torch.tanh(x)[..., None].expand(-1, -1, -1, 2), align_corners=True)[:, 0]
    ),
    "bags": lambda x: x + f.embedding_bag(x.argmax(2), torch.eye(WIDE, dtype=x.dtype))[:, None],
    "unpooled": lambda x: f.max_unpool1d(*f.max_pool1d(x, 2, return_indices=True), 2),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_for_all_samples(name: str) -> None:
    assert analysed(lambda: Whole(ALIKE[name]), square).mixing is None
    assert combines("mean", lambda: Whole(ALIKE[name]), square)


MIXING_LOSSES: dict[str, tuple[Loss, str]] = {
    "root": (lambda o, t: square(o, t).sqrt(), "sqrt is applied to a mean over the samples"),
    "exponential": (lambda o, t: ((o - t) ** 2).sum().exp(), "exp is applied to a sum over the samples"),
    "square": (lambda o, t: (o - t).mean() ** 2, "pow is applied to a mean over the samples"),
    "reciprocal": (lambda o, t: 1 / square(o, t), "reciprocal is applied to a mean over the samples"),
    "product of means": (lambda o, t: o.mean() * o.exp().mean(), "mul multiplies a mean over the samples"),
    "dot of means": (lambda o, t: o.mean((0, 1)) @ o.exp().mean((0, 1)), "matmul multiplies a mean over the samples"),
    "rounded": (lambda o, t: (o.sum() * 99).long() + square(o, t), "to is applied to a sum over the samples"),
    "counts": (
        lambda o, t: o.argmax(-1).flatten().bincount(minlength=WIDE).to(o.dtype) @ o.mean((0, 1)),
        "matmul multiplies a sum over the samples",
    ),
    "constant over a mean": (lambda o, t: torch.ones(()) / square(o, t), "div is applied to a mean over the samples"),
    "constant that follows the size": (
        lambda o, t: square(o, t) + torch.ones(()) * len(o),
        "add combines values that scale differently with the batch size",
    ),
    "scaled in a product": (
        lambda o, t: torch.addmm(t[:, 0], o[:, 0], torch.eye(WIDE, dtype=o.dtype), alpha=len(o)).mean(),
        "addmm uses a number",
    ),
    "samples as classes": (
        lambda o, t: f.cross_entropy(o.flatten(1).T, torch.zeros(LONG * WIDE).long()),
        "cross_entropy_loss operates along the batch dimension",
    ),
    "masked mean": (lambda o, t: (o * (o > 0)).sum() / (o > 0).sum(), "div divides by a sum over the samples"),
    "sum and a constant": (lambda o, t: (o - t).sum() + 1, "add adds a constant to a sum over the samples"),
    "divided twice": (lambda o, t: square(o, t) / len(o), "neither a sum nor a mean"),
    "root of the size": (
        lambda o, t: ((o - t) ** 2).sum() / math.sqrt(len(o)),
        "div uses a number that depends on the batch size",
    ),
    "worst sample": (lambda o, t: per_sample(o, t).max(), "max over the samples"),
    "contrast": (
        lambda o, t: f.cross_entropy(o.flatten(1) @ t.flatten(1).T, torch.arange(len(o))),
        "matmul combines different samples with each other",
    ),
    "table of pairs": (
        lambda o, t: (o.mean((1, 2)) - t.mean((1, 2))[:, None]).abs().sqrt().mean(),
        "sub combines different samples with each other",
    ),
    "balance of all": (balance_of_all, "mul multiplies a mean over the samples"),
}


SUMMED_LOSSES = (
    "root",
    "exponential",
    "square",
    "reciprocal",
    "product of means",
    "dot of means",
    "rounded",
    "counts",
    "constant over a mean",
    "masked mean",
    "sum and a constant",
    "balance of all",
)


@pytest.mark.parametrize("name", one_in(5, MIXING_LOSSES))
def test_losses_that_mix_samples(name: str) -> None:
    loss, message = MIXING_LOSSES[name]
    refused, summed = refusal(lambda: Whole(same), loss)
    assert refused is not None
    assert summed == (name in SUMMED_LOSSES)
    assert message in refused.message
    assert refused.notes == ("in the loss",)
    assert not combines("mean", lambda: Whole(same), loss)
    assert not combines("sum", lambda: Whole(same), loss)


@pytest.mark.parametrize(
    ("function", "loss", "repair"),
    [
        (same, balance_of_all, "compute a load-balancing loss per sequence, as DeepSeek-V3 does"),
        (MIXING["batch norm"][0], square, "LayerNorm or GroupNorm"),
        (MIXING["cumsum"][0], square, "within each sample"),
        (MIXING["amax"][0], square, "within each sample"),
        (MIXING["gram"][0], square, "pairs of samples"),
        (same, MIXING_LOSSES["sum and a constant"][0], "take the mean over the samples"),
        (same, MIXING_LOSSES["masked mean"][0], "divide by a constant"),
        (MIXING["first sample"][0], square, "every sample alike"),
    ],
)
def test_the_repair_suits_the_cause(function: Function, loss: Loss, repair: str) -> None:
    refused, _ = refusal(lambda: Whole(function), loss)
    assert refused is not None
    assert repair in refused.helps[0]


@pytest.mark.parametrize(
    ("slots", "reduction", "fits"),
    [(torch.zeros, "sum", True), (torch.zeros, "mean", True), (torch.ones, "mean", True), (torch.ones, "sum", False)],
)
def test_means_and_sums_written_into_slots(slots: Callable[..., torch.Tensor], reduction: str, fits: bool) -> None:
    """A loss collected in a tensor of constants: those that stay count once for every part."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = slots(3, dtype=output.dtype)
        kept[0] = f.mse_loss(output, target, reduction=reduction)
        kept[1] = getattr(output, reduction)()
        return kept.sum()

    found = analysed(lambda: Whole(same), loss)
    assert (found.mixing is None) == fits
    assert combines(reduction, lambda: Whole(same), loss) == fits
    assert found.loss == reduction or not fits


@pytest.mark.parametrize("value", [lambda x: x.mean(0), lambda x: x.cumsum(0)], ids=["mean", "cumsum"])
def test_mixing_that_is_written_into_a_view(value: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 0] = value(x[:, 0])
        return y + x

    refused = analysed(lambda: Whole(function), square).mixing
    assert refused is not None
    assert refused.notes == ("in module part",)
    assert not combines("mean", lambda: Whole(function), square)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], first: bool) -> None:
        super().__init__()
        self.rnn = kind(WIDE, WIDE, batch_first=first)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(kind: Callable[..., nn.Module]) -> None:
    assert analysed(lambda: Recurrent(kind, True), square).mixing is None
    assert combines("mean", lambda: Recurrent(kind, True), square)
    refused = analysed(lambda: Recurrent(kind, False), square).mixing
    assert refused is not None
    assert "operates along the batch dimension" in refused.message
    assert refused.notes == ("in module rnn",)
    assert not combines("mean", lambda: Recurrent(kind, False), square)


@pytest.mark.parametrize("first", [True, False])
def test_layers_of_torch(first: bool) -> None:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDE, 2, 8, dropout=0.0, batch_first=first)

    assert (analysed(layer, square).mixing is None) == first
    assert combines("mean", layer, square) == first


def test_the_first_cause_is_named() -> None:
    refused = analysed(lambda: Whole(lambda x: x.softmax(0)), balance_of_all).mixing
    assert refused is not None
    assert "softmax operates along the batch dimension" in refused.message


def test_a_loss_of_many_numbers() -> None:
    refused = analysed(lambda: Whole(same), per_sample).mixing
    assert refused is not None
    assert "the loss is not a scalar" in refused.message


def test_a_program_that_is_another_at_another_size() -> None:
    found = analysed(lambda: Whole(lambda x: x.exp() if x.shape[0] > 2 else x), square)
    assert found.mixing is not None
    assert found.mixing.code == "P0805"
    assert "different operators for different batch sizes" in found.mixing.message
    swapped = analysed(lambda: Whole(lambda x: x.exp() - x if x.shape[0] > 2 else x - x.exp()), square)
    assert swapped.mixing is not None


def test_masks_of_dropout_follow_the_first_dimension() -> None:
    """With as many words as samples the trace cannot tell the two apart; the samples' dimension can."""

    class Dropped(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.linear, self.dropout, self.first = nn.Linear(WIDE, WIDE), nn.Dropout(0.5), first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return self.dropout(x) if self.first else self.dropout(x.transpose(0, 1)).transpose(0, 1)

    assert analysed(lambda: Dropped(True), square).mixing is None
    refused = analysed(lambda: Dropped(False), square).mixing
    assert refused is not None
    assert "masks of dropout" in refused.message
    assert refused.notes == ("in module dropout",)


# -------------------------------------------------------------------------------------------------------- dimensions


def dims_of(function: Function, size: int = 2) -> list[tuple[int, int]]:
    """Of the nodes that the function made, in order."""
    small, large = (trace(lambda: Whole(function), square, numbers(n)) for n in (size, 2 * size))
    found = samples(small, large, walk_samples(small, large))
    assert found.mixing is None
    nodes = [node.name for node in small.graph.nodes if node.op == "call_function"]
    after = nodes[nodes.index("tanh") + 1 :]
    return [found.dims[name] for name in after if name in found.dims and "getitem" not in name]


def test_samples_are_followed_through_sequence_first_models() -> None:
    # transpose, reshape, relu, view, cumsum, permute
    assert dims_of(sequence_first) == [(1, 1), (0, 1), (0, 1), (1, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize("size", [2, 4])
def test_samples_are_followed_through_views(size: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)  # samples and words: LONG elements in a row to a sample
        x = x.unflatten(1, (2, -1))  # the same
        x = x.transpose(0, 1)  # (2, samples * words, 3)
        x = x.reshape(2, -1)  # (2, samples * words * 3)
        x = x.unsqueeze(1)  # (2, 1, samples * words * 3)
        x = x.view(2, -1, LONG * 3)  # (2, samples, words * 3)
        x = x.flatten()  # (2 * samples * words * 3): outer 2
        return x.view(2, -1, LONG, 3).permute(1, 2, 0, 3).flatten(2)

    assert dims_of(function, size) == [
        (0, LONG),
        (0, LONG),
        (1, LONG),
        (1, LONG * 3),
        (2, LONG * 3),
        (1, 1),
        (0, LONG * 3),
        (1, 1),
        (0, 1),
        (0, 1),
    ]


def test_samples_are_followed_through_joints() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.stack([x, x], 0)  # (2, samples, ...)
        y = torch.cat([y, y], 1)  # outer 2 within dim 1
        y = y.sum(0)  # (2 * samples, ...)
        y = y[: x.shape[0]]  # the first of the two batches
        y = y.expand(3, *y.shape)
        return y.select(0, 0)

    assert dims_of(function) == [(1, 1), (1, 1), (0, 1), (0, 1), (1, 1), (0, 1)]


def test_batch_and_constants_have_dimensions_too() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(LONG, x.shape[0], WIDE).transpose(0, 1)

    small, large = (trace(lambda: Whole(function), square, numbers(n)) for n in (2, 4))
    found = samples(small, large, walk_samples(small, large))
    assert [found.dims[name] for name in (*small.batch, "zeros", "transpose")] == [(0, 1), (0, 1), (1, 1), (0, 1)]
    assert not set(small.weights) & set(found.dims)


# ----------------------------------------------------------------------------------------------- what nothing is known
# of


def test_custom_operators_are_trusted() -> None:
    @torch.library.custom_op("piperlang_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    found = analysed(lambda: Whole(lambda x: twice(x.flatten(0, 1)).view_as(x)), square)
    assert found.mixing is None
    assert found.dims["twice"] == (0, LONG)


def test_operators_that_cannot_be_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piperlang.capture.batch.walk.Walk._graph", lambda walk, node, mode: None)
    assert analysed(lambda: nn.Identity(), lambda o, t: square(o, t.unfold(1, 1, 1).flatten(2))).mixing is None
    refused = analysed(lambda: nn.Identity(), lambda o, t: square(o, t.unfold(0, 1, 1).flatten(2))).mixing
    assert refused is not None
    assert "unfold operates along the batch dimension" in refused.message


def test_custom_operators_that_lose_the_samples_are_not() -> None:
    @torch.library.custom_op("piperlang_test::strange", mutates_args=())
    def strange(x: torch.Tensor) -> torch.Tensor:
        return x.amax(0)

    strange.register_fake(lambda x: x[0].clone())
    refused = analysed(lambda: Whole(lambda x: x - strange(x)), square).mixing
    assert refused is not None
    assert "strange reduces all samples to a value that is neither a sum nor a mean" in refused.message


@pytest.mark.parametrize(("model", "loss", "batch"), [(Mlp, square, vectors), (Moe, words, tokens)], ids=["mlp", "moe"])
def test_models_are_what_the_analysis_says(
    model: Callable[[], nn.Module], loss: Loss, batch: Callable[[int], Any]
) -> None:
    assert combines("mean", model, loss, batch)
