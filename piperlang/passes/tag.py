"""tag: names parts of the model by module path, and so decides where it is cut into chunks.

Before: one chunk per run of equal annotations. After `tag stage=0 at embed, layers[0:2]`:

    F[stage=0] on device    embed, layers.0, layers.1 are one chunk
    F[stage=1] on device    ...

Preconditions: the paths name modules of the model that compute something; nothing has been placed, divided or ordered
yet, since that would speak of chunks that are now cut otherwise."""

from __future__ import annotations

from piperlang.diagnostics import Label, error
from piperlang.elaborate import directive as d
from piperlang.passes.schedule import Schedule


def tag(schedule: Schedule, directive: d.Tag) -> None:
    early = next((x for x in schedule.directives if not isinstance(x, d.Tag | d.UseMesh)), None)
    if early is not None:
        raise error(
            "P0413",
            "chunks are tagged after they have been used",
            directive.span,
            "cuts the model anew",
            also=[Label(early.span, "used here")],
            help="move the tag up",
        )
    schedule.program.check_tag(directive)
    schedule.tag_directives.append(directive)
    schedule.recut()


def use_mesh(schedule: Schedule, directive: d.UseMesh) -> None:
    """A mesh only names devices: nothing in the graph changes until something is placed there."""
    schedule.meshes.setdefault(directive.mesh, directive)
