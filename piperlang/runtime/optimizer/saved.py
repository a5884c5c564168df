"""The state of optimizers in a checkpoint: by weight and index range, whatever copies a schedule needs.

What an optimizer keeps for a weight, with the shape of what it updates, is sharded as the weight is. Small tensors of
another shape, such as a count of steps, are the same for all parts of a weight. Learning rate schedules are not saved:
they are stepped again, and the options that they give are compared with those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.runtime.checkpoint import tree
from piperlang.runtime.checkpoint.files import Reader
from piperlang.runtime.checkpoint.manifest import TensorId
from piperlang.runtime.checkpoint.ranges import IndexRange
from piperlang.runtime.optimizer.copies import WeightPart, options, set_option
from piperlang.runtime.optimizer.distributed import DistributedOptimizer
from piperlang.runtime.optimizer.optimize import Optimizers
from piperlang.runtime.optimizer.options_only import attributes_of, fingerprints
from piperlang.runtime.optimizer.user import ELEMENTWISE, PER_PARAMETER

INLINE = 64
"""The most elements of a tensor that is written into the manifest."""
Wanted: TypeAlias = Callable[[str, IndexRange], bool]
"""Whether a part of a weight is saved here."""


class SavedTensor(NamedTuple):
    """A tensor, or a part of one, to be stored."""

    name: TensorId
    tensor: torch.Tensor
    range: IndexRange
    like: bool = True
    """It has the shape of the weight, of which this is a range."""


def range_of(part: WeightPart) -> IndexRange:
    return IndexRange.normal(part.box, part.flat)


def saved(optimizers: Optimizers, wanted: Wanted, trees: dict[str, Any]) -> Iterator[SavedTensor]:
    """Master weights, averages and state of the parts that are saved here; containers of them go to `trees`."""
    averages = optimizers.averages.averages if optimizers.averages is not None else []
    weights = [pair for one in optimizers.each for pair in one.weights]
    done: set[tuple[str, IndexRange]] = set()
    for place, (part, parameter) in enumerate(weights):
        at = range_of(part)
        if (part.weight, at) in done or not wanted(part.weight, at):
            continue
        done.add((part.weight, at))
        if parameter.dtype != part.now.dtype:
            yield SavedTensor(TensorId("master", part.weight), parameter.detach(), at)
        if averages:
            yield SavedTensor(TensorId("average", part.weight), averages[place], at)
    for number, one in enumerate(optimizers.each):
        trees.update(_own_trees(number, one))
        left = {(part.weight, range_of(part)) for part, _ in one.weights} & done
        for copy, pairs in one.copies:
            for part, parameter in pairs:
                at = range_of(part)
                if (part.weight, at) in left and parameter in copy.state:
                    left.discard((part.weight, at))
                    yield from _state(one, copy, part, parameter, trees)


def _state(
    one: DistributedOptimizer, copy: optim.Optimizer, part: WeightPart, parameter: nn.Parameter, trees: dict[str, Any]
) -> Iterator[SavedTensor]:
    found: list[SavedTensor] = []
    whole_weight = not part.partial
    if vars(parameter) and type(copy) not in ELEMENTWISE | PER_PARAMETER:
        raise _not_saved(
            one,
            f"attribute `{next(iter(vars(parameter)))}` of the parameter of weight {part.weight}",
            "keep it in `self.state[p]`",
        )
    places = {parameter.untyped_storage().data_ptr(): "the weight itself"}

    def leaf(path: tree.Path, value: torch.Tensor) -> Any:
        shared = places.setdefault(value.untyped_storage().data_ptr(), f"state `{'.'.join(path)}`")
        if value.numel() and shared != f"state `{'.'.join(path)}`":
            raise _not_saved(
                one,
                f"state `{'.'.join(path)}` of weight {part.weight} has the memory of {shared}",
                "keep a tensor of its own: `.clone()`",
            )
        name = TensorId("state", part.weight, path)
        if value.shape == parameter.shape and not _of_weight(one, part, path, value):
            found.append(SavedTensor(name, value, range_of(part)))
            return {"like": list(path)}
        if value.numel() <= INLINE:
            return _inline(value, parameter)
        if not whole_weight:
            raise _not_saved(
                one,
                f"state `{'.'.join(path)}` of weight {part.weight} has shape {list(value.shape)}, and the weight is"
                " sharded",
                "keep state with the shape of the parameter, or of at most 64 elements",
            )
        found.append(SavedTensor(name, value, IndexRange.whole(value.shape), like=False))
        return {"whole": list(path)}

    trees[f"state {part.weight}"] = _written(one, copy.state[parameter], leaf, f"the state of weight {part.weight}")
    yield from found


def _of_weight(one: DistributedOptimizer, part: WeightPart, path: tree.Path, value: torch.Tensor) -> bool:
    """Whether a state of shape [1], where one element of a sharded weight is updated, belongs to the weight as a whole,
    as it does for larger parts."""
    if not part.partial or value.numel() != 1 or type(one.user) in ELEMENTWISE:
        return False
    for copy, pairs in one.copies:
        for _, parameter in pairs:
            found = copy.state.get(parameter) if parameter.numel() > 1 else None
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            if isinstance(found, torch.Tensor):
                return found.shape != parameter.shape
    return False


def _inline(value: torch.Tensor, parameter: nn.Parameter) -> Any:
    """`host`: it is in host memory, and the parameter is not."""
    return {**tree.inline(value), "host": value.device.type == "cpu" != parameter.device.type}


def _written(one: DistributedOptimizer, value: Any, leaf: Callable[[tree.Path, torch.Tensor], Any], what: str) -> Any:
    try:
        return tree.written(value, leaf)
    except tree.NotPlain as problem:
        raise _not_saved(one, f"{what}: {problem}", "keep tensors, numbers, text, and containers of these") from None


def _not_saved(one: DistributedOptimizer, why: str, help: str) -> PiperError:
    return error(
        "P0610",
        f"{type(one.user).__name__} keeps something that a checkpoint cannot have",
        line_of_function(one.make),
        notes=[why],
        help=help,
    )


# ------------------------------------------------------------------------------------------------- of whole optimizers


def _own_trees(number: int, one: DistributedOptimizer) -> Iterator[tuple[str, Any]]:
    """Options, and what copies have changed of their own: the same for all copies of an optimizer."""
    for group, names, copies in zip(one.user.param_groups, one.names, one.groups, strict=True):
        if not names:
            continue
        yield f"options {names[0]}", _plain_options(options(group))
        for its in copies:
            changed = {key: value for key, value in options(its).items() if not _same(value, group.get(key))}
            if changed:
                yield f"changed {names[0]}", _written(one, changed, _small(one), f"the group of weight {names[0]}")
    if type(one.user) in ELEMENTWISE | PER_PARAMETER and not one.shared.hooks:
        return
    name = one.shared.changed()
    if name is not None:
        raise _not_saved(one, f"{name} changes when it steps", "keep it in `self.state[p]` or in the groups")
    for copy, _ in one.copies:
        kept = {key: value for key, value in copy.state.items() if not isinstance(key, torch.Tensor)}
        if kept:
            yield f"shared {number}", _written(one, kept, _small(one), "its state besides that of weights")
        yield f"attributes {number}", _attributes(one, copy)


def _small(one: DistributedOptimizer) -> Callable[[tree.Path, torch.Tensor], Any]:
    def leaf(path: tree.Path, value: torch.Tensor) -> Any:
        if value.numel() > INLINE:
            raise _not_saved(
                one, f"`{'.'.join(path)}` has {value.numel():,} elements", "keep large tensors in `self.state[p]`"
            )
        return tree.inline(value)

    return leaf


def _attributes(one: DistributedOptimizer, copy: optim.Optimizer) -> Any:
    """Attributes that steps have changed."""
    now = attributes_of(copy)
    changed = {
        name: now[name] for name, one_print in fingerprints(now).items() if one_print != one.attributes.get(name)
    }
    states = {
        its.untyped_storage().data_ptr() for its in pytree.tree_leaves(list(copy.state.values())) if _has_memory(its)
    }
    small = _small(one)

    def leaf(path: tree.Path, value: torch.Tensor) -> Any:
        if _has_memory(value) and value.untyped_storage().data_ptr() in states:
            raise _not_saved(
                one, f"its attribute `{'.'.join(path)}` has the memory of a state of a weight", "read `self.state[p]`"
            )
        return small(path, value)

    return _written(one, changed, leaf, "an attribute that changes when it steps")


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0


def _plain_options(found: Mapping[str, Any]) -> Any:
    """Options as they are compared when a run is resumed; those that JSON cannot have do not count."""
    plain = {}
    for name, value in found.items():
        with suppress(tree.NotPlain):
            tree.written(value, _inline_leaf)
            plain[name] = value
    return tree.written(plain, _inline_leaf)


def _inline_leaf(_: tree.Path, value: torch.Tensor) -> Any:
    return tree.inline(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


# ----------------------------------------------------------------------------------------------------------- restoring


def restore(optimizers: Optimizers, reader: Reader, new_options: bool) -> None:
    """Optimizers as they were. `new_options`: the options of the model file are used, even if they differ from those of
    the checkpoint."""
    optimizers.replay(reader.manifest.step - reader.manifest.data.skipped)
    for number, one in enumerate(optimizers.each):
        if not new_options:
            _compare_options(one, reader)
        for part, parameter in one.weights:
            name = TensorId("master", part.weight)
            if parameter.dtype != part.now.dtype and name in reader:
                parameter.data.copy_(reader.tensor(name, range_of(part)).view(parameter.shape))
        for copy, pairs in one.copies:
            _restore_copy(number, one, copy, pairs, reader)
    if optimizers.averages is not None:
        optimizers.averages.restore(_averages(optimizers.averages.weights, reader))


def _averages(weights: Sequence[tuple[WeightPart, nn.Parameter]], reader: Reader) -> list[torch.Tensor]:
    if not all(TensorId("average", part.weight) in reader for part, _ in weights):
        return []
    return [
        reader.tensor(TensorId("average", part.weight), range_of(part)).view(parameter.shape).to(parameter)
        for part, parameter in weights
    ]


def _restore_copy(
    number: int,
    one: DistributedOptimizer,
    copy: optim.Optimizer,
    pairs: Sequence[tuple[WeightPart, nn.Parameter]],
    reader: Reader,
) -> None:
    trees = reader.manifest.trees
    for group in copy.param_groups:
        names = next(its for its, copies in zip(one.names, one.groups, strict=True) if any(group is g for g in copies))
        for name, value in tree.read(trees.get(f"changed {names[0]}", {"dict": []}), tree.from_inline).items():
            set_option(group, name, value)
    for key, value in tree.read(trees.get(f"shared {number}", {"dict": []}), tree.from_inline).items():
        copy.state[key] = value
    for name, value in tree.read(trees.get(f"attributes {number}", {"dict": []}), tree.from_inline).items():
        if not callable(getattr(copy, name, None)):
            setattr(copy, name, value)
    for part, parameter in pairs:
        found = reader.manifest.state(part.weight)
        if found is not None:
            on_device = _counts_on_device(copy, parameter)
            copy.state[parameter] = tree.read(found, _leaf_reader(part, parameter, reader, on_device))
        else:
            copy.state.pop(parameter, None)


def _leaf_reader(
    part: WeightPart, parameter: nn.Parameter, reader: Reader, on_device: bool
) -> Callable[[Any], torch.Tensor]:
    updated = TensorId("master", part.weight)
    trained = reader.manifest.tensors.get(updated) or reader.manifest.tensors.get(TensorId("weight", part.weight))

    def leaf(found: Any) -> torch.Tensor:
        if "hex" in found:
            value = tree.from_inline(found)
            return value if found["host"] or not on_device else value.to(parameter.device)
        like = "like" in found
        name = TensorId("state", part.weight, tuple(found["like" if like else "whole"]))
        value = reader.tensor(name, range_of(part) if like else None).to(parameter.device)
        if like:
            value = value.view(parameter.shape)
            if trained is not None and value.dtype == tree.DTYPES[trained.dtype]:
                value = value.to(parameter.dtype)
        return value

    return leaf


def _counts_on_device(copy: optim.Optimizer, parameter: nn.Parameter) -> bool:
    """torch's optimizers keep their count of steps on the host, unless these options are set."""
    for group in copy.param_groups:
        if any(parameter is its for its in group["params"]):
            return bool(group.get("capturable") or group.get("fused")) or type(copy) not in ELEMENTWISE
    return True


def _compare_options(one: DistributedOptimizer, reader: Reader) -> None:
    for group, names in zip(one.user.param_groups, one.names, strict=True):
        was = reader.manifest.trees.get(f"options {names[0]}") if names else None
        if was is None:
            continue
        before = tree.read(was, tree.from_inline)
        after = tree.read(_plain_options(options(group)), tree.from_inline)
        other = next((name for name in after if name in before and not _same(after[name], before[name])), None)
        if other is not None:
            raise error(
                "P0612",
                f"option `{other}` of the group of weight {names[0]} is {after[other]}, and was {before[other]} in the"
                " run",
                line_of_function(one.make),
                notes=["`optimizer` and `lr_schedule` give it, stepped as often as the run was"],
                help="make them give what they gave, or continue with other options: `--new-options`",
            )
