"""A drawing of the graph: a row per submesh and stream, time from left to right, an arrow for every
value that crosses rows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from piperlang.diagnostics import error
from piperlang.ir.graph import Graph, Node
from piperlang.ir.sort import topological

MAX_NODES = 3_000
WIDTH, HEIGHT, GAP_X, GAP_Y, LEFT, TOP = 86, 26, 22, 10, 150, 34
COLOURS = {"F": "#b7d3f2", "B": "#f2c6b7", "I": "#f2d9b7", "W": "#d9e8b0", "R": "#dfeafa", "update": "#e3d3f0"}
COMMUNICATION = "#dddddd"


def draw(graph: Graph) -> str:
    if len(graph.nodes) > MAX_NODES:
        raise error(
            "P0904",
            f"{len(graph.nodes):,} nodes are too many to draw",
            help=f"the limit is {MAX_NODES:,}: use fewer microbatches with `-p`, or draw `--after` fewer directives",
        )
    order = topological(graph)
    rows = _rows(graph, order)
    at = _positions(graph, order, rows)
    width = LEFT + (1 + max((x for x, _ in at.values()), default=0)) * (WIDTH + GAP_X)
    height = TOP + len(rows) * (HEIGHT + GAP_Y) + GAP_Y
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            ' font-family="system-ui, sans-serif" font-size="11">'
        ),
        (
            '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6"'
            ' orient="auto"><path d="M0 0L6 3L0 6z" fill="#777"/></marker></defs>'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for y, row in enumerate(rows):
        top = TOP + y * (HEIGHT + GAP_Y)
        parts.append(f'<text x="8" y="{top + HEIGHT / 2 + 4}" fill="#333">{escape(row[0])} · {escape(row[1])}</text>')
        parts.append(
            f'<line x1="{LEFT - 8}" x2="{width}" y1="{top + HEIGHT + GAP_Y / 2}" y2="{top + HEIGHT + GAP_Y / 2}"'
            ' stroke="#eee"/>'
        )
    parts += _arrows(graph, at)
    parts += [_box(graph.nodes[i], at[i]) for i in order]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(graph: Graph, order: Sequence[int]) -> dict[tuple[str, str], int]:
    """The compute stream of a submesh first, then its other streams; submeshes in order of their first node."""
    wheres = list(dict.fromkeys(str(graph.nodes[i].template.where) for i in order))
    found = {(str(node.template.where), node.stream) for node in graph.nodes}
    ordered = sorted(found, key=lambda row: (wheres.index(row[0]), row[1] != "compute", row[1]))
    return {row: y for y, row in enumerate(ordered)}


def _positions(graph: Graph, order: Sequence[int], rows: dict[tuple[str, str], int]) -> dict[int, tuple[int, int]]:
    """Each node as early as its dependencies allow, one node per cell of a row."""
    at: dict[int, tuple[int, int]] = {}
    free = [0] * len(rows)
    before: dict[int, set[int]] = {}
    for steps in graph.orders:
        for earlier, later in steps.fences(lambda number: graph.nodes[number].stream):
            for number in later:
                before.setdefault(number, set()).update(earlier)
    for i in order:
        node = graph.nodes[i]
        y = rows[str(node.template.where), node.stream]
        waits = [at[j][0] + 1 for j in {*graph.sources(node), *graph.after.get(i, ()), *before.get(i, ())}]
        x = max([free[y], *waits])
        at[i] = (x, y)
        free[y] = x + 1
    return at


def _box(node: Node, at: tuple[int, int]) -> str:
    x, y = LEFT + at[0] * (WIDTH + GAP_X), TOP + at[1] * (HEIGHT + GAP_Y)
    family = node.template
    short = "_".join(map(str, node.point))
    tags = "".join(
        f" {value}" if key == "stage" else f" {key}"
        for key, value in sorted(family.shared.items(), key=lambda t: t[0] != "stage")
    )
    label = f"{family.op}{tags}{'·' + short if short else ''}"
    colour = COLOURS.get(family.op, COMMUNICATION)
    return (
        f'<g><title>{escape(str(node))}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="3"'
        f' fill="{colour}" stroke="#999"/><text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 4}"'
        f' text-anchor="middle">{escape(label if len(label) <= 15 else label[:14] + "…")}</text></g>'
    )


def _arrows(graph: Graph, at: dict[int, tuple[int, int]]) -> list[str]:
    found = []
    for node in graph.nodes:
        for maker in sorted(set(graph.sources(node))):
            (x1, y1), (x2, y2) = at[maker], at[node.id]
            if y1 != y2:
                a, b = LEFT + x1 * (WIDTH + GAP_X) + WIDTH, TOP + y1 * (HEIGHT + GAP_Y) + HEIGHT / 2
                c, d = LEFT + x2 * (WIDTH + GAP_X), TOP + y2 * (HEIGHT + GAP_Y) + HEIGHT / 2
                found.append(
                    f'<path d="M{a} {b}C{a + GAP_X} {b} {c - GAP_X} {d} {c} {d}" fill="none" stroke="#777"'
                    ' stroke-opacity="0.5" marker-end="url(#tip)"/>'
                )
    return found
