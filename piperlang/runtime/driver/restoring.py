"""A job that starts from a checkpoint: every process reads the parts that its device keeps, whatever schedule wrote
them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from piperlang.core.value_id import ValueId
from piperlang.diagnostics import PiperError, error, listed
from piperlang.plan.plan import DevicePlan, ParameterShard, Plan
from piperlang.runtime.box import take
from piperlang.runtime.checkpoint.files import Folder, Reader, read_manifest
from piperlang.runtime.checkpoint.manifest import Manifest, TensorId
from piperlang.runtime.checkpoint.ranges import IndexRange
from piperlang.runtime.checkpoint.tree import DTYPES
from piperlang.runtime.driver.saving import shape_of

_NAMED = 3


@dataclass(frozen=True)
class Restore:
    """A checkpoint that was verified by the driver."""

    folder: Folder
    step: int
    new_options: bool = False
    """Options of the model file are used, even if they differ from those of the checkpoint."""

    @cached_property
    def reader(self) -> Reader:
        """Opened by the process that reads, not by the driver that sends this."""
        return Reader(self.folder, read_manifest(self.folder))


def kept(
    plan: DevicePlan, model: Mapping[str, torch.Tensor], reader: Reader, where: torch.device
) -> dict[ValueId, torch.Tensor]:
    """What a device keeps. `model`: its tensors, of which only types count where the checkpoint has their values."""
    return {key: _part(shard, model, reader).to(where) for key, shard in plan.weights.items()}


def _part(shard: ParameterShard, model: Mapping[str, torch.Tensor], reader: Reader) -> torch.Tensor:
    at = IndexRange.normal(shard.box, shard.interval)
    name = TensorId("weight", shard.weight)
    dtype = model[shard.weight].dtype
    master = TensorId("master", shard.weight)
    if dtype == torch.float32 and master in reader and DTYPES[reader.manifest.tensors[name].dtype] != dtype:
        name = master
    if name in reader:
        found = reader.tensor(name, at).to(dtype)
        return found if shard.interval is None else found.reshape(-1)
    # A constant of the program, or a weight without elements.
    found = take(model[shard.weight].detach(), shard.box)
    return (found if shard.interval is None else found.flatten()[slice(*shard.interval)]).clone()


class Restored(Mapping[str, torch.Tensor]):
    """The tensors of a model that no device keeps, with values of a checkpoint."""

    def __init__(self, model: Mapping[str, torch.Tensor], reader: Reader) -> None:
        self.model, self.reader = model, reader

    def __getitem__(self, name: str) -> torch.Tensor:
        rest = TensorId("rest", name)
        return self.reader.tensor(rest) if rest in self.reader else self.model[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)


def shapes_of(plan: Plan, constants: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights that devices keep, without constants of the program."""
    ranges: dict[str, list[IndexRange]] = {}
    for device in plan.devices:
        for shard in device.weights.values():
            if shard.weight not in constants:
                ranges.setdefault(shard.weight, []).append(IndexRange(shard.box))
    return {name: shape_of(its) for name, its in ranges.items()}


def check_model(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> None:
    """The checkpoint must be of the model that is trained."""
    stored = manifest.weights
    missing = [name for name, shape in shapes.items() if name not in stored and torch.Size(shape).numel()]
    if missing:
        raise _other_model(f"has no weight {_names(missing)}, which the model has")
    more = [name for name in stored if name not in shapes]
    if more:
        raise _other_model(f"has the weight {_names(more)}, which the model does not have")
    for name, one in stored.items():
        if one.shape != tuple(shapes[name]):
            raise _other_model(f"has {name} of shape {list(one.shape)}, and the model {list(shapes[name])}")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    return listed(list(names[:_NAMED]), "and") + more


def _other_model(what: str) -> PiperError:
    return error(
        "P0612",
        f"the checkpoint {what}",
        help="resume with the model that the run was started with; to start from its weights, `piperc export` them and"
        " set `initial_weights`",
    )
