"""The orders two published implementations really issue, as plain data to compare with.

An order is, for each rank, a list of steps; a step is a list of items which may
overlap; an item is ``{"stage": s, "pass": p, "mb": m}`` with ``p`` one of F (forward),
B (full backward), I (input-gradient half) and W (weight-gradient half).

* ``torch_order`` asks ``torch.distributed.pipelining`` itself: it builds torch's own
  schedule objects around stages that compute nothing, and reads back what they issue.
* ``deepseek_dualpipe`` states the facts of DeepSeek's bidirectional DualPipe.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, TypedDict

from torch.distributed.pipelining import schedules as torch_schedules

Item = TypedDict("Item", {"stage": int, "pass": str, "mb": int})
Step = list[Item]
Order = list[list[Step]]

# torch logs a line per schedule built; a test builds hundreds.
logging.getLogger(torch_schedules.__name__).setLevel(logging.ERROR)

SINGLE: dict[str, type[Any]] = {"gpipe": torch_schedules.ScheduleGPipe, "one_f_one_b": torch_schedules.Schedule1F1B}
LOOPED: dict[str, type[Any]] = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, type[Any]] = {
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
NAMES = (*SINGLE, *LOOPED, *V_SHAPED)
PASSES = ("F", "B", "I", "W")


def item(stage: int, pass_: str, mb: int) -> Item:
    """One unit of work, as an order writes it."""
    return {"stage": stage, "pass": pass_, "mb": mb}


class FakeStage:
    """A pipeline stage that computes and sends nothing, and notes what it is asked to do.

    It has just the attributes and methods torch's schedules touch. Every ``get_*_ops``
    answers no operations, so torch's batching and waiting run over empty lists and no
    process group is needed.
    """

    submod = None
    has_backward = True

    def __init__(self, stage: int, stages: int, rank: int, ranks: int) -> None:
        self.stage_index = stage
        self.num_stages = stages
        self.group_rank = rank
        self.group_size = ranks
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.calls: list[Item] = []

    def forward_one_chunk(self, mb: int, *_: Any, **__: Any) -> None:
        self.calls.append(item(self.stage_index, "F", mb))

    def backward_one_chunk(self, mb: int, *_: Any, **__: Any) -> None:
        self.calls.append(item(self.stage_index, "B", mb))

    def _no_ops(self, mb: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = _no_ops
    get_bwd_recv_ops = get_bwd_send_ops = _no_ops

    def perform_reduce_grad(self, scale: int) -> None:
        """Nothing to reduce."""


def _single_rank(name: str, rank: int, pp: int, micro: int) -> list[Step]:
    """What ``_step_microbatches`` calls on ``rank``'s one stage.

    GPipe and 1F1B are run, not read: torch 2.13's ``pipeline_order`` of 1F1B (which
    it only prints) numbers the last rank's forwards from 1, while the step itself
    numbers them from 0. Only ``_initialize_stage`` (shape inference) is replaced.
    """
    stage = FakeStage(rank, pp, rank, pp)
    schedule = SINGLE[name](stage, micro)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return [[call] for call in stage.calls]


def _steps(actions: list[Any]) -> list[Step]:
    """torch's lowered actions without communication, sharding and reduction.

    An OVERLAP_F_B action is one step of its sub-actions, in torch's own order.
    """
    parts = [action.sub_actions or (action,) for action in actions]
    return [
        [item(a.stage_index, a.computation_type.value, a.microbatch_index) for a in group]
        for group in parts
        if group[0].computation_type.value in PASSES
    ]


def _multi(schedule_class: type[Any], pp: int, micro: int, chunks: int) -> Order:
    """The order of a schedule with several stages on each rank.

    ``pipeline_order_with_comms`` is the list torch's runtime walks, so it is what is
    issued; torch computes all ranks' lists in every rank's constructor. The schedule
    only counts the stages it is handed, so rank 0's are handed to it.
    """
    stages = [FakeStage(rank, pp * chunks, 0, pp) for rank in range(chunks)]
    ranks = schedule_class(stages, micro).pipeline_order_with_comms
    return [_steps(ranks[rank]) for rank in range(pp)]


def _issued(name: str, pp: int, micro: int, chunks: int) -> Order:
    if name in SINGLE:
        return [_single_rank(name, rank, pp, micro) for rank in range(pp)]
    if name in V_SHAPED:
        return _multi(V_SHAPED[name], pp, micro, 2)
    return _multi(LOOPED[name], pp, micro, chunks)


def torch_refusal(name: str, pp: int, micro: int, chunks: int = 2) -> str | None:
    """Why torch refuses this size (the first line of its error), or None if it does not."""
    try:
        _issued(name, pp, micro, chunks)
    except (ValueError, AssertionError) as refusal:
        return (str(refusal) or type(refusal).__name__).splitlines()[0]
    return None


def torch_order(name: str, pp: int, micro: int, chunks: int = 2) -> Order | None:
    """The order torch issues on each of ``pp`` ranks, or None where torch refuses the size.

    ``chunks`` is the number of stages on each rank of the looped schedules (stage ``s``
    is on rank ``s % pp``); the single-stage and the V-shaped schedules fix it themselves.
    """
    try:
        return _issued(name, pp, micro, chunks)
    except (ValueError, AssertionError):
        return None


class _DualPipeRank:
    """One rank's list in DeepSeek's DualPipe, built by the moves its code has.

    Facts. The pipeline runs both ways over ``pp`` stages, ``pp`` even, and every rank
    holds two stages: rank ``r`` is stage ``r`` for the microbatches entering at rank 0
    (direction 0, the first half) and stage ``pp - 1 - r`` for those entering at the
    last rank (direction 1, the second half). A *near* move works in the direction
    whose entrance is closer, a *far* move in the other: DeepSeek's phases 0 and 1,
    flipped on the second half of the ranks. So rank ``r`` and rank ``pp - 1 - r`` run
    mirror images. Microbatches of one direction go in order. A backward with
    ``enable_zb`` leaves its weight gradients in a FIFO that both directions share, and
    a W runs the oldest entry.
    """

    def __init__(self, rank: int, pp: int, micro: int) -> None:
        ahead = (rank, 0)
        back = (pp - 1 - rank, micro // 2)
        self.near, self.far = (ahead, back) if rank < pp // 2 else (back, ahead)
        self.steps: list[Step] = []
        self.taken: dict[tuple[int, str], int] = {}
        self.pending: deque[Item] = deque()

    def next(self, side: tuple[int, int], kind: str) -> int:
        """The next microbatch of a direction: ``side`` is its stage here and its first one."""
        stage, first = side
        count = self.taken.get((stage, kind), 0)
        self.taken[stage, kind] = count + 1
        return first + count

    def forward(self, side: tuple[int, int]) -> Item:
        return item(side[0], "F", self.next(side, "F"))

    def backward(self, side: tuple[int, int]) -> Item:
        return item(side[0], "B", self.next(side, "B"))

    def add(self, *items: Item) -> None:
        self.steps.append(list(items))

    def backward_input(self, side: tuple[int, int]) -> None:
        """A backward with ``enable_zb``: the input half now, the weight half queued."""
        stage, mb = side[0], self.next(side, "B")
        self.add(item(stage, "I", mb))
        self.pending.append(item(stage, "W", mb))

    def weight(self) -> None:
        self.add(self.pending.popleft())


def _dualpipe_rank(rank: int, pp: int, micro: int) -> list[Step]:
    """The eight phases of DeepSeek's ``DualPipe.step`` on one rank."""
    out = _DualPipeRank(rank, pp, micro)
    near, far = out.near, out.far
    depth = min(rank, pp - 1 - rank)  # hops from the nearer end
    inward = pp // 2 - 1 - depth  # hops to the middle pair of ranks

    for _ in range(2 * inward):  # 1: F near
        out.add(out.forward(near))
    for _ in range(depth + 1):  # 2: F near, F far
        out.add(out.forward(near))
        out.add(out.forward(far))
    for _ in range(inward):  # 3: I far, W, F far
        out.backward_input(far)
        out.weight()
        out.add(out.forward(far))
    for i in range(micro // 2 - pp + depth + 1):  # 4: F near & B far, F far & B near
        first = [out.forward(near), out.backward(far)]
        if i == 0 and inward == 0:  # the middle ranks do not overlap their first pair
            out.add(first[0])
            out.add(first[1])
        else:
            out.add(*first)
        out.add(out.forward(far), out.backward(near))
    for _ in range(inward):  # 5: B far, F far & B near
        out.add(out.backward(far))
        out.add(out.forward(far), out.backward(near))
    for i in range(2 * (depth + 1)):  # 6: backward far, backward near; split from the middle on
        side = near if i % 2 else far
        if i < depth + 1:
            out.add(out.backward(side))
        else:
            out.backward_input(side)
    for _ in range(inward):  # 7: W, I near
        out.weight()
        out.backward_input(near)
    for _ in range(depth + 1):  # 8: W
        out.weight()
    assert not out.pending
    return out.steps


def deepseek_dualpipe_refusal(pp: int, micro: int) -> str | None:
    """Why DeepSeek's DualPipe asserts on this size, or None if it runs."""
    if pp % 2:
        return "DualPipe needs an even number of ranks"
    if micro % 2 or micro < 2 * pp:
        return "DualPipe needs an even number of microbatches, at least two per rank"
    return None


def deepseek_dualpipe(pp: int, micro: int) -> Order | None:
    """DeepSeek's bidirectional DualPipe on each of ``pp`` ranks, or None where it asserts.

    Direction 0 has microbatches ``0 .. micro/2 - 1``, direction 1 the rest.
    """
    if deepseek_dualpipe_refusal(pp, micro):
        return None
    return [_dualpipe_rank(rank, pp, micro) for rank in range(pp)]
