"""Explains why one node runs before another: the shortest chain of dependencies, with the line of the script for
each link."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from piperlang.ir.graph import Graph, Node
from piperlang.repl.state import State


class Link(NamedTuple):
    """A node that waits, and the reason. Numbers past the graph's nodes are gates between two steps of an order."""

    node: int
    reason: str


class Waiting:
    """The dependencies between nodes, with reasons."""

    def __init__(self, state: State) -> None:
        self.state, self.graph = state, state.graph
        self.links: dict[int, list[Link]] = {}
        for node in self.graph.nodes:
            for key in (key for keys in node.reads for key in keys if key in self.graph.made):
                self._link(self.graph.made[key], node.id, f"reads {key}")
        chained = self._chained()
        for later, sooner in self.graph.after.items():
            for one in sooner:
                self._link(one, later, chained.get((one, later)) or self._kept_back(self.graph.nodes[later]))
        self._fences()

    def _link(self, before: int, after: int, reason: str) -> None:
        self.links.setdefault(before, []).append(Link(after, reason))

    def _chained(self) -> dict[tuple[int, int], str]:
        """The edges of `order A -> B`."""
        found: dict[tuple[int, int], str] = {}
        for chain in self.graph.chains:
            for i in range(1, len(chain.groups)):
                line = f"ordered by {self.state.line_of(chain.written[i])}"
                found |= {(one, later): line for one in chain.groups[i - 1] for later in chain.groups[i]}
        return found

    def _kept_back(self, node: Node) -> str:
        if node.op == "update":
            return "updates weights that it reads"
        by = node.template.by
        return f"delayed by {self.state.line_of(by)}" if by is not None else "delayed by the compiler, to bound memory"

    def _fences(self) -> None:
        gate = len(self.graph.nodes)
        for order in self.graph.orders:
            step = {node: written for group, written in zip(order.groups, order.written, strict=True) for node in group}
            for earlier, later in order.fences(lambda node: self.graph.nodes[node].stream):
                for one in earlier:
                    self._link(one, gate, "")
                for one in later:
                    self._link(gate, one, f"ordered by {self.state.line_of(step[one])}")
                gate += 1

    def path(self, start: Iterable[int], goal: set[int]) -> list[Link] | None:
        """The shortest chain from one of `start` to one of `goal`; its first link has no reason."""
        came: dict[int, Link] = {}
        first = list(dict.fromkeys(start))
        waiting, seen = deque(first), set(first)
        while waiting:
            now = waiting.popleft()
            for link in self.links.get(now, ()):
                if link.node in seen:
                    continue
                seen.add(link.node)
                came[link.node] = Link(now, link.reason)
                if link.node in goal:
                    return self._back(link.node, came)
                waiting.append(link.node)
        return None

    def _back(self, node: int, came: dict[int, Link]) -> list[Link]:
        links: list[Link] = []
        while node in came:
            before, reason = came[node]
            if node < len(self.graph.nodes):
                links.append(Link(node, reason))
            node = before
        return [Link(node, ""), *reversed(links)]


def explain(state: State, first: list[Node], second: list[Node]) -> Iterator[str]:
    """Whether `first` runs before `second`, and why."""
    graph = state.graph
    if {node.id for node in first} == {node.id for node in second}:
        yield (
            f"both are the same node: {first[0]}"
            if len(first) == 1
            else f"both are the same {len(first)} nodes; name passes or microbatches to compare two of them"
        )
        return
    waiting = Waiting(state)
    ahead = waiting.path((node.id for node in first), {node.id for node in second})
    if ahead is not None:
        yield f"{graph.nodes[ahead[-1].node]} waits for {graph.nodes[ahead[0].node]}:"
        yield from _lines(graph, ahead)
        yield from _others(first, second)
        return
    back = waiting.path((node.id for node in second), {node.id for node in first})
    if back is not None:
        yield f"no, the order is reversed: {graph.nodes[back[-1].node]} waits for {graph.nodes[back[0].node]}:"
        yield from _lines(graph, back)
        return
    yield f"they are not ordered: {first[0]} and {second[0]} may run in either order, or at the same time"
    yield "add `order A -> B` to order them"


def _lines(graph: Graph, path: list[Link]) -> Iterator[str]:
    names = [str(graph.nodes[link.node]) for link in path]
    width = max(map(len, names))
    for i, (name, link) in enumerate(zip(names, path, strict=True)):
        yield f"  {'   ' if not i else '-> '}{name:<{width}}  {link.reason}".rstrip()


def _others(first: list[Node], second: list[Node]) -> Iterator[str]:
    if len(first) > 1 or len(second) > 1:
        yield f"  the shortest chain among {len(first)} x {len(second)} pairs; name microbatches to select one"
