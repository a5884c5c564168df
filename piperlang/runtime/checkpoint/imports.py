"""State dicts of others as safetensors. A pickle is read with torch's restricted unpickler, which makes tensors and
plain containers only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from piperlang.runtime.checkpoint.files import flush

_WRAPPED = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which training scripts put the state dict of the model beside others."""


class NotWeights(Exception):
    """A file that has no state dict."""


def imported(path: Path, folder: Path) -> tuple[int, int]:
    """Writes the tensors of a file, or of a folder of safetensors, into another folder. How many, and how many
    numbers."""
    tensors = _tensors(path)
    # Tied weights have one storage, which a file of safetensors cannot say.
    plain = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    target = folder / "model.safetensors"
    save_file(plain, target, metadata={"format": "pt"})
    target.chmod(folder.stat().st_mode & 0o666)
    flush(target)
    return len(plain), sum(tensor.numel() for tensor in plain.values())


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise NotWeights("the folder has no .safetensors files")
    if all(file.suffix == ".safetensors" for file in files):
        return _safetensors(files)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # bytes that are no pickle raise anything
        raise NotWeights(f"{type(problem).__name__}: {str(problem).partition('.')[0]}") from None
    return _state_dict(found)


def _safetensors(files: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                here = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as problem:
            raise NotWeights(f"{file.name}: {problem}") from None
        twice = next((name for name in here if name in found), None)
        if twice is not None:
            raise NotWeights(f"{twice} is in two of the files")
        found |= here
    return found


def _state_dict(found: object) -> dict[str, torch.Tensor]:
    for key in _WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise NotWeights(f"it is of type {type(found).__name__}, not a dict of tensors")
    other = next((name for name, value in found.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise NotWeights(f"its entry {other!r} is of type {type(found[other]).__name__}, not a tensor")
    return {str(name): value for name, value in found.items()}
