"""Regions of autocast become explicit casts, which compute what autocast computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as f
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from piperlang import annotate
from piperlang.capture.program import capture
from piperlang.capture.trace.autocast import Autocast
from tests.support.equivalence import compiled, differences
from tests.support.models import Case
from tests.support.often import one_in

WIDE = 8
PIPELINE = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nsplit batch into 2 as mb\n"


class Region(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last, self.teacher = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.conv, self.again = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with annotate("stage", 0):
                h = torch.tanh(self.first(x))
                if self.kind == "convolutions":
                    h = self.again(self.conv(h[:, None]))[:, 0]
                if self.kind == "without gradients":
                    with torch.no_grad():
                        h = h + self.teacher(x)
            with annotate("stage", 1):
                if self.kind == "float32 inside":
                    with torch.autocast("cpu", enabled=False):
                        return self.last(h.float())
                if self.kind == "operators in float32":
                    h = h.softmax(-1) + f.layer_norm(h, [WIDE]) + h.cumsum(-1) + h.sum(-1, keepdim=True)
                if self.kind == "einsum":
                    return torch.einsum("ni,oi->no", h, self.last.weight)
                return self.last(h)  # type: ignore[no-any-return]


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, WIDE), torch.randint(WIDE, (samples,))


def outside(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.float(), target)


def inside(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return f.cross_entropy(output, target)


KINDS = ["plain", "convolutions", "without gradients", "float32 inside", "operators in float32", "einsum"]


@pytest.mark.parametrize("kind", one_in(2, KINDS))
def test_one_device_computes_what_autocast_does(kind: str) -> None:
    """To the last bit, except that gradients of a weight are not added up in bfloat16."""
    case = Case(kind, lambda: Region(kind), outside, batch, 2)
    traced = capture(case.model, case.loss, batch(8))
    graph, captured = compiled(traced, "")
    assert max(differences(case, traced, graph, captured)) < 1e-4


@pytest.mark.parametrize("kind", one_in(2, KINDS[1:]))
def test_stages_inside_of_a_region(kind: str) -> None:
    case = Case(kind, lambda: Region(kind), inside, batch, 2)
    traced = capture(case.model, case.loss, batch(8))
    graph, captured = compiled(traced, PIPELINE)
    assert len(captured.chunks) == 2
    assert max(differences(case, traced, graph, captured)) < 3e-2


def test_operators_stay_whole() -> None:
    nodes = capture(lambda: Region("convolutions"), inside, batch(8)).sizes.small.graph.nodes
    found = {str(node.target).removeprefix("aten.").split(".")[0] for node in nodes if node.op == "call_function"}
    assert {"linear", "conv1d", "cross_entropy_loss", "to"} <= found
    assert not found & {"addmm", "convolution", "_to_copy", "nll_loss_forward"}


def test_cross_entropy_in_autocast_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it takes the logarithm in half precision, and is no longer one operator; on fake tensors, without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    mode = FakeTensorMode()
    with mode:
        values = [
            torch.empty(4, WIDE, device="cuda", dtype=torch.bfloat16),
            torch.zeros(4, device="cuda", dtype=torch.long),
        ]
    graph = fx.Graph()
    places = [graph.placeholder(name) for name in ("scores", "target")]
    for place, value in zip(places, values, strict=True):
        place.meta = {"val": value}
    loss = graph.call_function(torch.ops.aten.cross_entropy_loss.default, tuple(places))
    result = Autocast("cuda", torch.bfloat16, mode).explicit(loss)
    graph.output(result)
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert result.target is torch.ops.aten.nll_loss.default
    assert torch.ops.aten._log_softmax.default in called
    assert result.meta["val"].dtype == torch.float32
