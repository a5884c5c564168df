"""An order in which the whole graph can run, or the cycle that prevents it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from piperlang.diagnostics import Diagnostic, Label, PiperError
from piperlang.elaborate.directive import Step
from piperlang.ir.graph import Graph
from piperlang.source import Span

Edges: TypeAlias = tuple[list[list[int]], list[int]]
"""For every node, who waits for it, and for how many it waits. Numbers past the nodes are gates."""


def edges(graph: Graph, norm: bool = False) -> Edges:
    """What waits for what. `norm`: all updates wait for the norm of all gradients.

    A fence of an order is a gate: what comes after waits for the gate, the gate for what comes before. So wide steps
    cost no product."""
    count = len(graph.nodes)
    gates = [
        fence for order in graph.orders for fence in order.fences(lambda node: graph.nodes[node].stream) if fence[0]
    ]
    if norm:
        updates = [node.id for node in graph.nodes if node.op == "update"]
        gates.append(([maker for update in updates for maker in graph.sources(graph.nodes[update])], updates))
    users: list[list[int]] = [[] for _ in range(count + len(gates))]
    waits = [0] * len(users)

    def edge(before: int, after: int) -> None:
        users[before].append(after)
        waits[after] += 1

    for node in graph.nodes:
        makers = set(graph.sources(node))
        waits[node.id] = len(makers)
        for maker in makers:
            users[maker].append(node.id)
    for node_id, sooner in graph.after.items():
        for one in sooner:
            edge(one, node_id)
    for gate, (earlier, later) in enumerate(gates, count):
        for one in earlier:
            edge(one, gate)
        for one in later:
            edge(gate, one)
    return users, waits


def topological(graph: Graph, known: Edges | None = None) -> list[int]:
    """All nodes, each after what it reads and what is ordered before it; ties in the order of their numbers. `known`:
    the edges of the graph, where the caller has them."""
    count = len(graph.nodes)
    users, waits = known or edges(graph)
    waits = waits.copy()
    ready = [i for i in range(len(users) - 1, -1, -1) if not waits[i]]
    done: list[int] = []
    while ready:
        now = ready.pop()
        done.append(now)
        for user in reversed(users[now]):
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    if len(done) < len(users):
        raise PiperError(_cycle(graph, users, {i for i, left in enumerate(waits) if left}, count))
    return [i for i in done if i < count]


def check_norm(graph: Graph) -> None:
    """All updates are to wait for the norm of all gradients: raises P0501 if an order has a gradient wait for an
    update."""
    ordered = {node for steps in (*graph.orders, *graph.chains) for group in steps.groups[:-1] for node in group}
    if all(graph.nodes[node].op != "update" for node in ordered):
        return
    try:
        topological(graph, edges(graph, norm=True))
    except PiperError as problem:
        (found,) = problem.diagnostics
        notes = (*found.notes, "updates wait for the norm of all gradients")
        help = "move the update behind them, or train with `--on-nan continue` and without `max_norm`"
        raise PiperError(replace(found, notes=notes, helps=(help,))) from None


def _cycle(graph: Graph, users: Sequence[Sequence[int]], stuck: set[int], count: int) -> Diagnostic:
    """Walk backwards among what is stuck until a node comes twice, and name the cycle node by node."""
    before: dict[int, int] = {}
    for node in stuck:
        for user in users[node]:
            if user in stuck:
                before[user] = node
    now = next(iter(before))
    path: list[int] = []
    seen: set[int] = set()
    while now not in seen:
        seen.add(now)
        path.append(now)
        now = before[now]
    cycle = [i for i in reversed(path[path.index(now) :]) if i < count]
    names = [str(graph.nodes[i]) for i in cycle]
    labels: list[tuple[Step | None, str]] = list(_labels(graph, set(cycle)))
    lines = [f"{name} before {names[(i + 1) % len(names)]}" for i, name in enumerate(names)]
    shown = lines if len(lines) <= 12 else [*lines[:11], f"... and {len(lines) - 11} more"]
    (step, text), *others = labels or [(None, "")]
    return Diagnostic(
        "P0501",
        "these nodes wait for each other",
        step.span if step else None,
        text,
        tuple(Label(s.span, t) for s, t in others[:3] if s),
        notes=tuple(shown),
        helps=("move what is waited for before the step that waits",),
        trail=step.trail if step else (),
    )


def _labels(graph: Graph, cycle: set[int]) -> Iterator[tuple[Step, str]]:
    """The steps of orders that name nodes of the cycle; those of chains first, which a user writes by hand."""
    seen: set[Span] = set()
    for order in (*graph.chains, *graph.orders):
        for group, step in zip(order.groups, order.written, strict=True):
            for node in group:
                if node in cycle and step.span not in seen:
                    seen.add(step.span)
                    yield step, f"orders {graph.nodes[node]}"
