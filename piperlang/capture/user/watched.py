"""What a model has besides the weights that its optimizer trains: attributes, buffers, frozen parameters.

A traced program reads them as they were when it was traced, but for buffers that the forward itself changes. Code that
changes them between two calls of the model (a step of the optimizer, a hook, `on_step`) would have no effect on
training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from weakref import ref

import torch
from torch import nn

from piperlang.capture.user.held import refuses_use
from piperlang.capture.user.prints import Prints, tensor_print
from piperlang.capture.user.state import HELP, STANDARD, module_name
from piperlang.diagnostics import error
from piperlang.source import Span


class WatchedModel:
    """Modules as they are now. References are weak: a module that nobody else has cannot be changed."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], trained: Collection[int] = ()) -> None:
        """`modules`: with their paths. `trained`: ids of the parameters that are updated."""
        self.modules = [
            (
                path,
                ref(module),
                tuple(
                    name for name, value in module._parameters.items() if value is not None and id(value) not in trained
                ),
            )
            for path, module in modules
        ]
        self.prints = dict(self._prints())

    def _prints(self) -> Iterator[tuple[str, object]]:
        prints = Prints(contents=True)
        for path, reference, frozen in self.modules:
            module = reference()
            if module is None:
                continue
            for name, value in vars(module).items():
                if name not in STANDARD:
                    yield f"attribute `{name}` of {module_name(path)}", prints.of(value)
            tensors = [("buffer", name, value) for name, value in module._buffers.items()]
            tensors += [("parameter", name, module._parameters.get(name)) for name in frozen]
            for kind, name, tensor in tensors:
                if isinstance(tensor, torch.Tensor) and not refuses_use(tensor):
                    yield f"{kind} {path}.{name}".replace(" .", " "), tensor_print(tensor)

    def changed(self) -> str | None:
        """The first that is another now."""
        if not self.modules:
            return None
        now = dict(self._prints())
        self.modules = [entry for entry in self.modules if entry[1]() is not None]
        return next((name for name, print in now.items() if self.prints.get(name, print) != print), None)

    def check(self, when: str, line: Span | None) -> None:
        """Raises P0808. `when`: what has run since."""
        name = self.changed()
        if name is not None:
            raise error(
                "P0808",
                f"{name} changes {when}",
                line,
                notes=["the traced program keeps the value that it had when the model was traced"],
                help=HELP,
            )
