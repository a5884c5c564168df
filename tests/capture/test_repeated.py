"""A model whose layers are copied is the same program as one whose layers are all traced, to the last operator, module
path, tag and line of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as f
import transformers
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from piperlang.capture.annotate import annotate
from piperlang.capture.trace import repeated
from piperlang.capture.trace.names import names_of
from piperlang.capture.trace.trace import Traced, trace
from piperlang.diagnostics import PiperError

aten = torch.ops.aten
library: Any = transformers  # its constructors are hardly typed
LAYERS, WIDTH = 8, 6


def described(traced: Traced) -> list[tuple[Any, ...]]:
    """Everything that later passes read. Constants by their values, because copies share them; a cast that changes
    nothing is its operand, because it returns the same tensor."""
    names: dict[fx.Node, str] = {}
    found: list[tuple[Any, ...]] = []
    for node in traced.graph.nodes:
        weight = traced.weights.get(node.name) if node.op == "placeholder" else None
        if weight is not None and not isinstance(weight.fake, FakeTensor):
            names[node] = f"constant {weight.fake.tolist()}"
        elif node.target is aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]:
            names[node] = names[node.args[0]]
        else:
            names[node] = weight.name if weight is not None else f"value {len(found)}"
            arguments = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
            looks = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
            modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            custom, lines = node.meta.get("custom") or {}, node.meta.get("stack_trace") or ""
            if node.target is aten.detach.default:  # at the end of a region without gradients, of its last operator
                lines = ""
            target = "" if node.op == "placeholder" else str(node.target)
            found.append((names[node], target, str(arguments), looks, names_of(node), modules, custom, lines))
    return found


@contextmanager
def copies_counted() -> Iterator[list[int]]:
    counts: list[int] = []

    def write(self: repeated.Layers, graph: fx.Graph, old: Any = repeated.Layers.write) -> None:
        counts.append(len(self.copies))
        old(self, graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated.Layers, "write", write)
        yield counts


def traced_both_ways(
    make: Callable[[], nn.Module], loss: Callable[[Any, Any], Any], batch: tuple[Any, Any]
) -> tuple[Traced, Traced, int]:
    """With all layers traced, with layers copied, and the number of copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated, "LEAST", 10**9)
        every = trace(make, loss, batch)
    with copies_counted() as counts:
        copied = trace(make, loss, batch)
    return every, copied, counts[-1]


# ------------------------------------------------------------------------------------------------------ layers by hand


class Block(nn.Module):
    """A layer that a habit overrides."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.i = i
        self.a, self.b, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.b(f.dropout(torch.relu(self.a(self.norm(x))), 0.1, self.training))


class OtherNumber(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.i


class TwoKinds(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) if self.i % 2 else torch.tanh(super().forward(x))


class NoGradient(Block):
    """Calls the same functions in the same order."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(self.i != 5):
            y = self.b(torch.relu(self.a(x)))
        return x + y


class Detached(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.detach() if self.i == 3 else x)


class TaggedAlike(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with annotate("part", "mlp"):
            return super().forward(x)


class TaggedByNumber(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with annotate("stage", self.i):
            return super().forward(x)


class WritesNew(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        y /= 2.0
        y[:, 0] = 0.0
        return y


class WritesInput(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x) * 2.0
        y.view(-1)[0] = 1.0
        x[:, 1] += y[:, 1].detach()
        return x


class OwnConstant(Block):
    """A tensor that is neither a parameter nor a buffer, another one in each layer."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.factor = torch.tensor(1.0 + i)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.factor


class Counting(Block):
    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class SameInput(Block):
    """Returns one of its inputs beside a new tensor, and what is no tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"new": super().forward(x), "old": x, "number": self.i}


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsObject(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Box(super().forward(x))


class Keeps(Block):
    """What leaves the layer in another way than as a result is read later."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = torch.sigmoid(x)
        return super().forward(x)


class Collects(Block):
    """Writes into a dict that it is given."""

    def forward(self, x: torch.Tensor, found: dict[int, torch.Tensor]) -> Any:
        found[self.i] = x
        return super().forward(x)


class ReadsList(Block):
    def forward(self, x: torch.Tensor, others: list[torch.Tensor]) -> Any:
        return super().forward(x) + others[0] * others[-1]


class Unseen(Block):
    """A function that is called in a way that cannot be seen."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        with torch._C.DisableTorchFunction():
            y = y * (0.5 + self.i)
        return torch.tanh(y)


class Catches(Block):
    """Its own code catches whatever is raised in it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        try:
            return y[:, numpy.array([5, 4, 3, 2, 1, 0])]
        except:  # noqa: E722
            return y


class SliceOrList(Block):
    def forward(self, x: torch.Tensor) -> Any:
        rows = self.b.weight[0:3:1] if self.i == 5 else self.b.weight[[0, 3, 1]]
        return super().forward(x) + rows.sum(0)[:WIDTH]


class Rounded(float):
    def __repr__(self) -> str:
        return f"{self:.0f}"


class RoundedNumber(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * Rounded(1.25 if self.i == 5 else 1.0)


class NotesOnTensors(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y: Any = super().forward(x)
        y.factor = getattr(y, "factor", 2.0 + (self.i == 5))
        return y * y.factor


class WritesByOperator(Block):
    """Into a tensor that is neither its own nor its input."""

    def forward(self, x: torch.Tensor, others: list[torch.Tensor]) -> Any:
        aten.add_.Tensor(others[1], x)
        f.leaky_relu(others[1], 0.1, True)
        return super().forward(x) + others[1]


class ReturnsTwice(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y


class ReturnsViews(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y.view(-1, 2, WIDTH)


class OneReturnsViews(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, (y if self.i == 5 else y * 2).view(-1, 2, WIDTH)


class Raises(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.i in (0, 5):
            raise ValueError
        return y


class Stack(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block(i) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            with annotate("layer", i):
                x = layer(x)
            if isinstance(x, dict):
                x = x["new"] * x["number"] + x["old"]
            if isinstance(x, tuple):
                y, z = x
                y.mul_(1.5)
                x = y + z.view_as(y)
            x = x.value if isinstance(x, Box) else x
        if isinstance(self.layers[0], Keeps):
            x = x + sum(layer.kept for layer in self.layers)
        return x


class Careful(Stack):
    """Goes on where a layer fails."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            try:
                x = layer.forward(x)
            except:  # noqa: E722
                x = x * 0.5
        return x


class OtherWeights(Stack):
    """One layer is called with a bias that is not its own."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            bias = {"b.bias": torch.cat([self.first.bias[:1]])} if i == 5 else {}
            x = torch.func.functional_call(layer, bias, (x,))
        return x


class Gives(Stack):
    """Gives its layers something else besides a tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        found: dict[int, torch.Tensor] = {}
        for layer in self.layers:
            x = layer(x, found if isinstance(layer, Collects) else [x, torch.sigmoid(x)])
        return x + sum(found.values())


class Apart(nn.Module):
    """Layers of a kind that are called on lines of their own, one of them twice, and share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(0), Block(1), Block(2)
        self.d, self.e, self.f = Block(3), Block(4), Block(5)
        self.e.a.weight = self.a.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.b(x)
        with torch.no_grad():
            y = self.c(x)
        x = self.d(x + y)
        x = self.e(x) + self.f(x)
        return self.f(x)


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)


@pytest.mark.parametrize(
    ("block", "copies"),
    [
        (Block, 7),
        (OtherNumber, 0),
        (TwoKinds, 6),
        (NoGradient, 6),
        (Detached, 6),
        (TaggedAlike, 7),
        (TaggedByNumber, 0),
        (WritesNew, 7),
        (WritesInput, 0),
        (OwnConstant, 7),
        (Counting, 0),
        (SameInput, 7),
        (ReturnsObject, 0),
        (Unseen, 0),
        (Catches, 0),
        (SliceOrList, 6),
        (RoundedNumber, 6),
        (NotesOnTensors, 6),
        (ReturnsTwice, 0),
        (ReturnsViews, 0),
        (OneReturnsViews, 0),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_layers_by_hand(block: type[Block], copies: int) -> None:
    every, copied, found = traced_both_ways(lambda: Stack(block), f.mse_loss, numbers())
    assert described(copied) == described(every)
    assert found == copies


@pytest.mark.parametrize(
    ("stack", "block", "copies"),
    [(Careful, Raises, 0), (Careful, OtherNumber, 0), (Careful, TwoKinds, 6), (OtherWeights, Block, 6)],
)
def test_how_layers_are_called(stack: type[Stack], block: type[Block], copies: int) -> None:
    every, copied, found = traced_both_ways(lambda: stack(block), f.mse_loss, numbers())
    assert described(copied) == described(every)
    assert found == copies


@pytest.mark.parametrize(("block", "copies"), [(Collects, 0), (ReadsList, 7), (WritesByOperator, 0)])
def test_what_layers_are_given(block: type[Block], copies: int) -> None:
    every, copied, found = traced_both_ways(lambda: Gives(block), f.mse_loss, numbers())
    assert described(copied) == described(every)
    assert found == copies


def test_calls_on_lines_of_their_own() -> None:
    every, copied, found = traced_both_ways(Apart, f.mse_loss, numbers())
    assert described(copied) == described(every)
    assert found == 4  # the first has another input, and the third no gradients


def test_what_leaves_a_layer_unseen() -> None:
    """The program would read tensors that are in no graph: all layers are traced."""
    every, copied, found = traced_both_ways(lambda: Stack(Keeps), f.mse_loss, numbers())
    assert described(copied) == described(every)
    assert found == 0


class WarmLoss:
    """Another loss in its first call."""

    warm = True

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        factor, self.warm = 2.0 if self.warm else 1.0, False
        return f.mse_loss(output, target) * factor


def test_state_that_an_attempt_leaves_behind() -> None:
    """A layer that writes is traced in a second attempt: the model is a new one then, and the loss is not."""
    with pytest.raises(PiperError) as found:
        trace(lambda: Stack(WritesInput), WarmLoss(), numbers())
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "P0808"


def test_tracing_itself_is_no_state_of_the_model() -> None:
    """The function that stands in for the forward of layers reads what has been traced. A model whose state changes is
    called twice more, and exported again."""
    exports = []

    def export(*args: Any, old: Any = torch.export.export, **options: Any) -> Any:
        exports.append(args)
        return old(*args, **options)

    with pytest.MonkeyPatch.context() as patch, copies_counted() as counts:
        patch.setattr(torch.export, "export", export)
        trace(lambda: Stack(Block), f.mse_loss, numbers())
    assert counts == [LAYERS - 1]
    assert len(exports) == 1


# ------------------------------------------------------------------------------------------------------ library models

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def words(output: Any, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.logits.flatten(0, -2), target.flatten())


@pytest.mark.parametrize(
    ("name", "copies", "options"),
    [
        ("Llama", 7, {}),
        pytest.param("Mistral", 7, {}, marks=pytest.mark.slow),
        pytest.param("GptOss", 6, EXPERTS | {"num_experts_per_tok": 2, "head_dim": 8}, marks=pytest.mark.slow),
        pytest.param(
            *("DeepseekV3", 6, EXPERTS | RANKS | {"num_experts_per_tok": 2, "first_k_dense_replace": 1}),
            marks=pytest.mark.slow,
        ),
        pytest.param("Qwen3Moe", 7, EXPERTS | {"num_experts_per_tok": 2, "head_dim": 8}, marks=pytest.mark.slow),
    ],
)
def test_library_models(name: str, copies: int, options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        made: nn.Module = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**SIZES, **options))
        return made

    ids = torch.randint(3, 32, (2, 8))
    every, copied, found = traced_both_ways(make, words, (ids, ids))
    assert described(copied) == described(every)
    assert found == copies
