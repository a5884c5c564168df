"""The tensors of a model by the names that a traced program uses."""

from __future__ import annotations

import torch
from torch import nn


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names, and tensors that are plain attributes of a module."""
    attributes = {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return (
        attributes
        | dict(model.named_parameters(remove_duplicate=False))
        | dict(model.named_buffers(remove_duplicate=False))
    )
