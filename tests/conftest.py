"""One set of workers for all tests that want some: starting eight of them takes longer than most of what they are used
for."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # tests of the front end run without torch and Ray
    from piperlang.runtime.driver.cluster import Cluster
    from tests.support.jobs import Lent

# A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Two threads of an operator wait for each other far longer than the work takes while other tests use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOGETHER = {
    "test_matrix.py": "ray",
    **dict.fromkeys(
        (
            "test_graph.py",
            "test_known_faults.py",
            "test_plan.py",
            "test_plan_text.py",
            "test_resolved.py",
            "test_training.py",
        ),
        "models",
    ),
    "test_repl_completion.py": "repl",
    **{
        name: name
        for name in (
            "test_capture.py",
            "test_completion.py",
            "test_dropless.py",
            "test_fuzz.py",
            "test_golden.py",
            "test_habits.py",
            "test_mistake_examples.py",
            "test_mixing.py",
            "test_never_wrong.py",
            "test_optimizers.py",
            "test_package.py",
            "test_whole_sums.py",
        )
    },
}
"""Files whose tests share what takes long to make, traced models most of all, with the group of xdist that they form:
in every process of its own it would be made again."""

ONE_IN = {
    "test_bad_command_line.py": {"test_narrow_terminal_encodings": 3, "test_odd_file_names": 3},
    "test_between_steps.py": {
        "test_validation_that_moves_the_data": 2,
        "test_what_workers_change_without_a_comparison": 2,
    },
    "test_buckets.py": {"test_trains_as_one_device_would": 2},
    "test_capture.py": {"test_chunks_are_a_true_dag": 2, "test_equals_eager_autograd": 2},
    "test_causal.py": {"test_a_mask_that_is_computed_is_causal_or_stays": 2},
    "test_checkpoint_commands.py": {"test_what_would_be_another_run_is_refused": 3},
    "test_command_line.py": {"test_help_fits_the_terminal": 3},
    "test_cross_entropy.py": {"test_the_backward_reads_neither_logits_nor_targets": 2},
    "test_dropless.py": {"test_equals_the_single_device_on_workers": 2},
    "test_equivalence.py": {"test_a_pair_of_directives": 3},
    "test_editors.py": {"test_vim_agrees_with_pygments": 3},
    "test_examples.py": {"test_a_plan_trains_like_the_plain_model": 2},
    "test_gradient_sums.py": {"test_nothing_lies_in_the_memory_of_a_sum": 2},
    "test_habits.py": {"test_a_habit_is_the_same_or_refused": 3},
    "test_job.py": {"test_random_schedules_train_as_one_device_would": 4, "test_trains_as_one_device_would": 3},
    "test_loading.py": {"test_in_workers": 2, "test_rejected": 2, "test_slices": 2, "test_what_cannot_be_sliced": 2},
    "test_localize.py": {"test_attention_by_heads": 2, "test_experts": 2},
    "test_matrix.py": {"test_equals_the_single_device": 6},
    "test_keep.py": {"test_losses_and_weights_are_those_of_plain_training": 4},
    "test_memory.py": {
        "test_gradients_of_zero": 2,
        "test_master_weights_are_foreseen": 3,
        "test_weights_and_states_of_zero": 4,
    },
    "test_mistakes.py": {"test_one_diagnostic_that_says_what_and_how_to_repair_it": 3},
    "test_never_wrong.py": {
        "test_a_program_that_depends_on_the_batch_size": 2,
        "test_kinds_in_threads": 2,
        "test_kinds_on_workers": 3,
        "test_the_guard_alone_finds": 3,
        "test_the_guard_alone_finds_optimizers": 2,
        "test_workers_that_set_different_options": 3,
    },
    "test_not_finite.py": {"test_stops_with_the_last_good_state": 2},
    "test_optimizers.py": {
        "test_groups_in_a_model_file": 2,
        "test_groups_on_workers": 3,
        "test_optimizers_of_torch": 2,
    },
    "test_output.py": {"test_how_it_ended_is_told": 3},
    "test_random_schedules.py": {"test_the_same_as_the_plain_model": 2},
    "test_recompute.py": {"test_gradients_are_the_same_bitwise": 2, "test_passes_take_and_give_single_tensors": 2},
    "test_repeated.py": {"test_how_layers_are_called": 2, "test_layers_by_hand": 3, "test_what_layers_are_given": 3},
    "test_samples.py": {
        "test_models_may_be_divided": 3,
        "test_models_that_mix_samples": 2,
        "test_what_is_alike_for_all_samples": 3,
        "test_what_may_be_divided": 2,
        "test_where_a_sample_stands": 3,
    },
    "test_shapes.py": {"test_a_smaller_last_batch_on_workers": 2, "test_what_sees_that_a_batch_is_padded": 2},
    "test_sharded_guard.py": {"test_right_rules_pass": 3},
    "test_varied.py": {"test_what_the_first_batch_does_not_show": 2},
    "test_user_errors.py": {
        "test_on_workers": 2,
        "test_commands_that_only_trace": 2,
        "test_training_ends_with_a_diagnostic": 4,
    },
    "test_whole_sums.py": {"test_simulated": 2, "test_workers": 3},
    "test_whole.py": {
        "test_divided_and_whole_batches_give_the_same": 2,
        "test_stages_that_have_different_parts_of_the_batch": 3,
    },
}
"""Tests with so many long cases that only every n-th runs every time. The others are slow: `-m slow` runs them."""

_seen: Counter[tuple[str, str]] = Counter()
_shared: list[Cluster] = []


def _end() -> None:
    while _shared:
        _shared.pop().close()


def _workers(count: int) -> Cluster:
    if _shared and (_shared[0].dead(0) or len(_shared[0].workers) != count):
        _end()
    if not _shared:
        from piperlang.runtime.driver.cluster import Cluster

        _shared.append(Cluster(count))
    return _shared[0]


@pytest.fixture
def cluster() -> Cluster:
    """Eight workers. A test that breaks them leaves none to the next."""
    return _workers(8)


@pytest.fixture
def worker() -> Cluster:
    """One worker, for tests that break it: eight others take a while to start."""
    return _workers(1)


@pytest.fixture
def lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """Commands in this process train on the eight workers that are there already."""
    return _lend(cluster, monkeypatch)


@pytest.fixture
def lent_worker(worker: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """The same with one, for jobs on one device."""
    return _lend(worker, monkeypatch)


def _lend(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lent:
    from tests.support.jobs import Lent

    lent = Lent(cluster)
    monkeypatch.setattr("piperlang.runtime.driver.job.Cluster", lent.asked)
    return lent


@pytest.fixture
def alone() -> None:
    """For tests that start Ray themselves: it runs once in a process."""
    _end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    _end()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: more than there are cores, because much of what tests do is to wait for processes."""
    return (os.cpu_count() or 1) * 3 // 2


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that share eight workers run on one process: xdist keeps those of a group together, if the mark is there
    before it looks at the collected items. Those that break workers or start Ray themselves run on another: they wait
    most of the time, and more than two instances of Ray on two cores take longer than one after the other. Slow tests
    may take their time."""
    if isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
        key = item.path.name, item.originalname
        if _seen[key] % ONE_IN.get(key[0], {}).get(key[1], 1):
            item.add_marker(pytest.mark.slow)
        _seen[key] += 1
    if item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.timeout(0))
    if not item.get_closest_marker("xdist_group"):
        group = _group_of_ray(item) or TOGETHER.get(item.path.name)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def _group_of_ray(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    if "alone" in fixtures or "worker" in fixtures:
        return "own ray"
    return "ray" if "cluster" in fixtures else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """xdist hands out groups in the order of the items (pyproject.toml asks for that): the long ones of Ray first, and
    at the end single tests, so that all processes end at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, bool]:
    """Those that start Ray themselves come after those that share one worker, which they end."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return 3, False
    turn = {"ray": 0, "own ray": 1}.get(mark.args[0], 2)
    return turn, turn == 1 and "alone" in getattr(item, "fixturenames", ())
