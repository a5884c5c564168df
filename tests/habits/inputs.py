"""Inputs and outputs: dicts, tuples, dataclasses, masks, batches of other shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as f
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from piperlang.capture.annotate import annotate
from tests.habits.habit import (
    EITHER,
    LENGTH,
    REFUSED,
    SAME,
    SAMPLES,
    WIDTH,
    WORDS,
    Between,
    Category,
    Layers,
    square,
    vectors,
    words,
)

INPUTS = Category("inputs", "Inputs and outputs")
T = torch.Tensor


def _two(step: int = 0) -> tuple[T, T]:
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)


def _target() -> T:
    return torch.randn(SAMPLES, WIDTH)


# ------------------------------------------------------------------------------------------------------------ inputs


class TwoInputs(Layers):
    def forward(self, first: T, second: T) -> T:  # type: ignore[override]
        with annotate("stage", 0):
            x = self.stage(0, first)
        with annotate("stage", 1):
            x = self.stage(1, x)
        with annotate("stage", 2):
            x = self.stage(2, x + second)
        with annotate("stage", 3):
            return self.stage(3, x)


INPUTS.add("a tuple of inputs", TwoInputs, batch=lambda step: (_two(), _target()))
INPUTS.add("a list of inputs", TwoInputs, batch=lambda step: (list(_two()), _target()))
INPUTS.add(
    "a dict of inputs", TwoInputs, batch=lambda step: (dict(zip(("second", "first"), _two(), strict=True)), _target())
)


@INPUTS.habit("keyword-only arguments and defaults", batch=lambda step: ({"x": vectors()[0]}, _target()))
class Keywords(Layers):
    def forward(self, x: T, *, scale: float = 0.5, mask: T | None = None) -> T:  # type: ignore[override]
        return super().forward(x * scale if mask is None else x)


@INPUTS.habit("*args and **kwargs", batch=lambda step: ({"first": vectors()[0], "second": vectors()[0]}, _target()))
class Wild(Layers):
    def forward(self, *args: Any, **kwargs: Any) -> T:  # type: ignore[override]
        return super().forward(kwargs["first"] + kwargs["second"])


@INPUTS.habit("an input that is not used", batch=lambda step: (_two(), _target()))
class UnusedInput(Layers):
    def forward(self, x: T, other: T) -> T:  # type: ignore[override]
        return super().forward(x)


@INPUTS.habit(
    "integer and bool inputs",
    batch=lambda step: ((torch.randint(WORDS, (SAMPLES,)), torch.rand(SAMPLES, WIDTH) < 0.5), _target()),
)
class Integers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: T, kept: T) -> T:  # type: ignore[override]
        with annotate("stage", 0):
            x = self.stage(0, self.embed(ids))
        with annotate("stage", 1):
            x = self.stage(1, x)
        with annotate("stage", 2):
            x = self.stage(2, x.masked_fill(~kept, 0.0))
        with annotate("stage", 3):
            return self.stage(3, x)


@INPUTS.habit(
    "an input nested in a dict of lists", batch=lambda step: ({"views": [vectors()[0], vectors()[0]]}, _target())
)
class Nested(Layers):
    def forward(self, views: list[T]) -> T:  # type: ignore[override]
        return super().forward(views[0] - views[1])


@INPUTS.habit("the input requires a gradient inside the model")
class RequiresGrad(Layers):
    def forward(self, x: T) -> T:
        x.requires_grad_(True)
        return super().forward(x)


@INPUTS.habit(
    "a mask without a batch dimension among the inputs",
    REFUSED,
    batch=lambda step: ((vectors()[0], torch.linspace(0.5, 1.5, 6)), _target()),
)
class SharedMask(Layers):
    def forward(self, x: T, mask: T) -> T:  # type: ignore[override]
        return super().forward(x * mask.mean())


@INPUTS.habit(
    "a mask without a batch dimension whose first size is the batch's",
    REFUSED,
    batch=lambda step: ((vectors()[0], torch.linspace(0.5, 1.5, WIDTH)), _target()),
)
class MistakenMask(Layers):
    def forward(self, x: T, mask: T) -> T:  # type: ignore[override]
        return super().forward(x * mask)


@INPUTS.habit(
    "an attention mask [length, length] without a batch dimension",
    REFUSED,
    batch=lambda step: (
        (torch.randn(SAMPLES, LENGTH, WIDTH), torch.ones(LENGTH, LENGTH).tril()),
        torch.randn(SAMPLES, LENGTH, WIDTH),
    ),
)
class SquareMask(Layers):
    def forward(self, x: T, mask: T) -> T:  # type: ignore[override]
        return super().forward(torch.softmax(x @ x.mT + mask.log(), -1) @ x)


@INPUTS.habit(
    "a tensor without dimensions among the inputs",
    batch=lambda step: ((vectors()[0], torch.tensor(0.5 + step)), _target()),
)
class ScalarInput(Layers):
    def forward(self, x: T, temperature: T) -> T:  # type: ignore[override]
        return super().forward(x / temperature)


@INPUTS.habit(
    "a number of Python among the inputs", REFUSED, batch=lambda step: ((vectors()[0], 0.5 + step), _target())
)
class NumberInput(Layers):
    def forward(self, x: T, temperature: float) -> T:  # type: ignore[override]
        return super().forward(x / temperature)


@INPUTS.habit("the same number of Python in every batch", REFUSED, batch=lambda step: ((vectors()[0], 0.5), _target()))
class FixedNumberInput(NumberInput):
    pass


@INPUTS.habit("None among the inputs", REFUSED, batch=lambda step: ({"x": vectors()[0], "mask": None}, _target()))
class NoneInput(Layers):
    def forward(self, x: T, mask: T | None) -> T:  # type: ignore[override]
        return super().forward(x if mask is None else x * mask)


@INPUTS.habit("a string among the inputs", REFUSED, batch=lambda step: ((vectors()[0], "train"), _target()))
class StringInput(Layers):
    def forward(self, x: T, mode: str) -> T:  # type: ignore[override]
        return super().forward(x * (2 if mode == "train" else 1))


@INPUTS.habit(
    "the batch in the second dimension",
    REFUSED,
    batch=lambda step: (torch.randn(LENGTH, SAMPLES, WIDTH), torch.randn(LENGTH, SAMPLES, WIDTH)),
)
class BatchSecond(Layers):
    """A GRU over the first dimension: dividing that one is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def stage(self, i: int, x: T) -> T:
        return self.gru(x)[0] if i == 1 else super().stage(i, x)


@INPUTS.habit(
    "two crops of every sample: twice as many inputs as targets",
    REFUSED,
    batch=lambda step: (torch.randn(2 * SAMPLES, WIDTH), _target()),
    loss=lambda output, target: f.mse_loss(output.view(-1, 2, WIDTH).mean(1), target),
)
class Crops(Layers):
    pass


@INPUTS.habit(
    "a batch that is not contiguous",
    batch=lambda step: (torch.randn(WIDTH, SAMPLES).t(), torch.randn(WIDTH, SAMPLES).t()),
)
class StridedBatch(Layers):
    pass


@INPUTS.habit("a batch that is expanded", batch=lambda step: (torch.randn(1, WIDTH).expand(SAMPLES, WIDTH), _target()))
class ExpandedBatch(Layers):
    pass


@INPUTS.habit(
    "the last batch is smaller", REFUSED, batch=lambda step: tuple(t[: 6 if step == 2 else SAMPLES] for t in vectors())
)
class LastBatch(Layers):
    pass


@INPUTS.habit(
    "sequences of another length in a later batch",
    REFUSED,
    batch=lambda step: (torch.randn(SAMPLES, LENGTH + step, WIDTH), torch.randn(SAMPLES, LENGTH + step, WIDTH)),
)
class OtherLength(Layers):
    pass


@INPUTS.habit(
    "another dtype in a later batch",
    EITHER,
    batch=lambda step: (torch.randint(5, (SAMPLES, WIDTH), dtype=torch.int64 if step else torch.int32), _target()),
)
class OtherType(Layers):
    def forward(self, x: T) -> T:
        return super().forward(x.float() / 3)


@INPUTS.habit(
    "an input that is missing from a later batch",
    REFUSED,
    batch=lambda step: ({"x": vectors()[0], **({} if step else {"more": vectors()[0]})}, _target()),
)
class MissingLater(Layers):
    def forward(self, x: T, more: T | None = None) -> T:  # type: ignore[override]
        return super().forward(x if more is None else x + more)


@INPUTS.habit(
    "None in the first batch, a tensor in later ones",
    REFUSED,
    batch=lambda step: ({"x": vectors()[0], "more": vectors()[0] if step else None}, _target()),
)
class NoneFirst(MissingLater):
    pass


@INPUTS.habit(
    "keys of the dict in another order in a later batch",
    batch=lambda step: (
        dict((("first", torch.randn(SAMPLES, WIDTH)), ("second", torch.randn(SAMPLES, WIDTH)))[:: -1 if step else 1]),
        _target(),
    ),
)
class OtherOrder(TwoInputs):
    pass


@INPUTS.habit(
    "an input whose first size is 1", REFUSED, batch=lambda step: ((vectors()[0], torch.randn(1, WIDTH)), _target())
)
class OneRow(Layers):
    def forward(self, x: T, other: T) -> T:  # type: ignore[override]
        return super().forward(x + other)


@INPUTS.habit(
    "lengths as integers, compared with positions",
    batch=lambda step: (
        (torch.randn(SAMPLES, LENGTH, WIDTH), torch.randint(1, LENGTH + 1, (SAMPLES,))),
        torch.randn(SAMPLES, WIDTH),
    ),
)
class Lengths(Layers):
    def forward(self, x: T, lengths: T) -> T:  # type: ignore[override]
        y = super().forward(x)
        with annotate("stage", 3):
            kept = (torch.arange(LENGTH) < lengths.unsqueeze(-1)).to(y.dtype).unsqueeze(-1)
            return (y * kept).sum(1) / kept.sum(1)


@INPUTS.habit(
    "packed sequences",
    REFUSED,
    batch=lambda step: (
        (torch.randn(SAMPLES, LENGTH, WIDTH), torch.randint(1, LENGTH + 1, (SAMPLES,))),
        torch.randn(SAMPLES, WIDTH),
    ),
)
class Packed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: T, lengths: T) -> T:  # type: ignore[override]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(self.gru(packed)[1][0])


@INPUTS.habit("samples repeated in the model and averaged again")
class Repeated(Between):
    def between(self, x: T) -> T:
        return (
            torch.tanh(x.repeat_interleave(3, 0) * torch.linspace(0.5, 1.5, 3).repeat(x.shape[0]).unsqueeze(-1))
            .view(-1, 3, WIDTH)
            .mean(1)
        )


@INPUTS.habit("samples tiled in the model: x.repeat(3, 1)", whole=SAME)
class Tiled(Between):
    def between(self, x: T) -> T:
        return torch.tanh(x.repeat(3, 1)).view(3, -1, WIDTH).mean(0)


@INPUTS.habit("mixup: samples mixed with the batch reversed", REFUSED, whole=SAME)
class Mixup(Layers):
    def forward(self, x: T) -> T:
        return super().forward(0.7 * x + 0.3 * x.flip(0))


# ----------------------------------------------------------------------------------------------------------- outputs


class Pair(Layers):
    def forward(self, x: T) -> Any:
        with annotate("stage", 0):
            x = self.stage(0, x)
        with annotate("stage", 1):
            x = self.stage(1, x)
        with annotate("stage", 2):
            middle = x = self.stage(2, x)
        with annotate("stage", 3):
            return self.packed(self.stage(3, x), middle)

    def packed(self, last: T, middle: T) -> Any:
        return last, middle


INPUTS.add(
    "a tuple of outputs", Pair, loss=lambda output, target: f.mse_loss(output[0], target) + f.l1_loss(output[1], target)
)
INPUTS.add("an output that the loss does not use", Pair, loss=lambda output, target: f.mse_loss(output[0], target))
INPUTS.add(
    "only an early output is used: the last stage does not train",
    Pair,
    loss=lambda output, target: f.mse_loss(output[1], target),
)


@INPUTS.habit("a dict of outputs", loss=lambda output, target: f.mse_loss(output["last"], target))
class DictOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return {"last": last, "middle": middle}


@dataclass
class Found:
    last: T
    middle: T


@INPUTS.habit("a dataclass of outputs", loss=lambda output, target: f.mse_loss(output.last, target))
class DataclassOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return Found(last, middle)


class Named(NamedTuple):
    last: T
    middle: T


@INPUTS.habit("a named tuple of outputs", loss=lambda output, target: f.mse_loss(output.last, target))
class NamedOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return Named(last, middle)


@INPUTS.habit("a ModelOutput of transformers", loss=lambda output, target: f.mse_loss(output.last_hidden_state, target))
class ModelOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return BaseModelOutput(last_hidden_state=last, hidden_states=(middle,))


@INPUTS.habit(
    "nested lists of outputs", loss=lambda output, target: sum(f.mse_loss(y, target) for pair in output for y in pair)
)
class NestedOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return [[last], [middle, last + middle]]


@INPUTS.habit(
    "a number of Python beside the output", loss=lambda output, target: f.mse_loss(output[0], target) * output[1]
)
class NumberOutput(Pair):
    def packed(self, last: T, middle: T) -> Any:
        return last, 0.5


@INPUTS.habit("an output that is a view of another")
class ViewOutput(Layers):
    def forward(self, x: T) -> T:
        y = super().forward(x)
        with annotate("stage", 3):
            return y.view(-1, 2, WIDTH // 2).flatten(1)


@INPUTS.habit("the input itself among the outputs (an autoencoder)", loss=lambda output, target: f.mse_loss(*output))
class Autoencoder(Layers):
    def forward(self, x: T) -> Any:
        return super().forward(x), x


class OwnLoss(Layers):
    """Labels are inputs, and the loss an output, as in transformers."""

    def forward(self, x: T, labels: T) -> Any:  # type: ignore[override]
        y = super().forward(x)
        with annotate("stage", 3):
            return {"loss": square(y, labels), "logits": y}


INPUTS.add(
    "the model returns its loss",
    OwnLoss,
    batch=lambda step: (dict(zip(("x", "labels"), vectors(), strict=True)), torch.zeros(SAMPLES)),
    loss=lambda output, target: output["loss"],
)
INPUTS.add(
    "a dict of targets",
    batch=lambda step: (vectors()[0], {"first": _target(), "second": _target()}),
    loss=lambda output, target: f.mse_loss(output, target["first"]) + f.l1_loss(output, target["second"]),
)
INPUTS.add(
    "the target is None",
    expected=REFUSED,
    batch=lambda step: (vectors()[0], None),
    loss=lambda output, target: output.square().mean(),
)
INPUTS.add(
    "targets of another dtype",
    batch=lambda step: (vectors()[0], _target().double()),
    loss=lambda output, target: f.mse_loss(output.double(), target),
)


@INPUTS.habit(
    "logits over tokens, flattened in the loss",
    batch=lambda step: (torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randint(WORDS, (SAMPLES, LENGTH))),
    loss=words,
)
class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: T) -> T:
        with annotate("stage", 0):
            x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x.flatten(0, 1))).view_as(x)
        with annotate("stage", 3):
            return self.head(x)


def shifted(output: T, target: T) -> T:
    return f.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


INPUTS.add(
    "labels shifted by one in the loss",
    Language,
    batch=lambda step: (lambda ids: (ids, ids))(torch.randint(WORDS, (SAMPLES, LENGTH))),
    loss=shifted,
)
INPUTS.add("one tensor as input and target", Layers, batch=lambda step: (lambda x: (x, x))(torch.randn(SAMPLES, WIDTH)))


@INPUTS.habit("complex inputs", batch=lambda step: (torch.randn(SAMPLES, WIDTH, dtype=torch.complex64), _target()))
class ComplexInput(Layers):
    def forward(self, x: T) -> T:
        return super().forward(x.abs() + x.real)
