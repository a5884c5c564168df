"""What every batch of a job must look like, and the values of the whole batch. It can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from piperlang.diagnostics import PiperError, error
from piperlang.source import Span


@dataclass(frozen=True)
class WholeValues:
    """Computes the values of the whole batch, from its tensors: such as the number of targets that are not masked."""

    module: fx.GraphModule
    divisors: tuple[int, ...]
    """Values that the loss divides by."""
    loss: Span | None
    """The line of the loss."""

    @property
    def reads(self) -> list[int]:
        """The tensors of the batch that they are computed from."""
        given = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        return [i for i, node in enumerate(given) if node.users]

    def of(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            found = list(self.module.to(batch[0].device).forward(*batch))
        for i in self.divisors:
            if found[i].numel() == 1 and not found[i].item():
                raise error(
                    "P0807",
                    "the count of the loss is 0 for a batch, and the loss would divide by 0",
                    self.loss,
                    help="skip batches in which every target is masked",
                )
        return found


@dataclass(frozen=True)
class BatchLayout:
    """A plan is for batches of one shape: additional samples would be ignored, and fewer would not be enough."""

    structure: pytree.TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]
    """Of the tensors of the batch and of the values of the whole batch, in the program."""
    whole: WholeValues | None
    rows: tuple[int, ...] = ()
    """The samples that the program is given, where some are repeated so that the batch can be divided."""

    @property
    def samples(self) -> int:
        return next((shape[0] for shape in self.shapes if shape), 1)

    @property
    def written_shapes(self) -> str:
        return ", ".join(str(list(shape)) for shape in self.shapes)

    def fits(self, batch: tuple[Any, Any], samples: int | None = None) -> bool:
        """Whether a batch has these shapes; `samples`: if the batch were so many samples. A batch of another structure
        or dtype is refused."""
        shapes = [shape_of(leaf, samples) for leaf in self.leaves(batch)]
        return shapes == list(self.shapes)

    def flatten(self, batch: tuple[Any, Any]) -> list[torch.Tensor]:
        """The tensors of a batch in the order of the program's inputs, independent of the order of dict keys, and
        values of the whole batch."""
        flat = self.leaves(batch)
        for i, (tensor, shape) in enumerate(zip(flat, self.shapes, strict=True)):
            if tuple(tensor.shape) != shape:
                raise _other_shape(
                    f"tensor {i} of a batch has shape {list(tensor.shape)}, but the model was traced with {list(shape)}"
                )
        given = [tensor.detach() if tensor.requires_grad else tensor for tensor in flat]
        whole = [] if self.whole is None else self.whole.of(given)
        return [*(repeated(given, self.rows) if self.rows else given), *whole]

    def leaves(self, batch: tuple[Any, Any]) -> list[torch.Tensor]:
        """The tensors of a batch. One of another structure or dtype is refused."""
        try:
            flat: list[torch.Tensor] = self.structure.flatten_up_to(tuple(batch))
        except ValueError:
            raise _other_shape(
                f"a batch has the structure {_written(pytree.tree_structure(batch))}, but the model was traced with"
                f" {_written(self.structure)}"
            ) from None
        for i, (tensor, dtype) in enumerate(zip(flat, self.dtypes, strict=True)):
            if tensor.dtype != dtype:
                raise _other_shape(
                    f"tensor {i} of a batch has dtype {tensor.dtype}, but the model was traced with {dtype}",
                    "give all batches the same dtype, with `.to(dtype)`",
                )
        return flat

    def named(self, batch: tuple[Any, Any]) -> Mapping[str, torch.Tensor]:
        return dict(zip(self.names, self.flatten(batch), strict=True))


def size_of(flat: Sequence[torch.Tensor]) -> int:
    """The number of samples of a batch."""
    return next((tensor.shape[0] for tensor in flat if tensor.dim()), 1)


def repeated(flat: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a batch with these samples of it."""
    samples, index = size_of(flat), torch.tensor(rows)
    return [
        tensor[index.to(tensor.device)] if tensor.dim() and tensor.shape[0] == samples else tensor for tensor in flat
    ]


def shape_of(leaf: torch.Tensor, samples: int | None) -> tuple[int, ...]:
    """The shape of a tensor of a batch; `samples`: if the batch were so many samples."""
    return tuple(leaf.shape) if samples is None else (samples, *leaf.shape[1:])


def shapes_of(batch: tuple[Any, Any], samples: int | None = None) -> str:
    """`[4, 128], [4]`."""
    return ", ".join(str(list(shape_of(leaf, samples))) for leaf in pytree.tree_leaves(batch))


def _written(layout: pytree.TreeSpec) -> str:
    """`([tensor, tensor], tensor)`."""
    return str(pytree.tree_unflatten(["tensor"] * layout.num_leaves, layout)).replace("'tensor'", "tensor")


def _other_shape(message: str, help: str = "give all batches the same shape: drop or pad the last one") -> PiperError:
    return error("P0801", message, help=help)
