"""Ids of values: what is printed is read back as the same object."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piperlang.core.value_id import NORM_FACTOR, RNG, SEED, Kind, ValueId, parse

NAMED = [kind for kind in Kind if kind not in (Kind.SAVED, Kind.RESIDUALS, Kind.HOST, Kind.SIGNAL, Kind.SPLITS)]
POINTS = st.lists(st.integers(0, 99), max_size=3).map(tuple)
CHANGES = ("joined", "sent", "splits", "fetched", "updated", "total")


@st.composite
def ids(draw: st.DrawFn) -> ValueId:
    """Any id that a graph could hold, with any name that a module could have."""
    if draw(st.booleans()):
        name, owner = draw(st.text(min_size=1, max_size=12)), draw(POINTS)
        found = ValueId(draw(st.sampled_from(NAMED)), name, owner, draw(st.none() | POINTS))
    else:
        kind = draw(st.sampled_from([Kind.SAVED, Kind.RESIDUALS, Kind.HOST, Kind.SIGNAL]))
        found = ValueId(kind, "", (draw(st.integers(0, 99)),), draw(st.none() | POINTS))
    for _ in range(draw(st.integers(0, 3))):
        of_a_microbatch = ["redistributed", "sliced"] if found.microbatch is not None else []
        step = draw(st.sampled_from([*CHANGES, *of_a_microbatch]))
        if step == "redistributed":
            found = found.redistributed(draw(st.integers(0, 99)))
        elif step == "sliced":
            found = found.sliced(draw(POINTS.filter(bool)))
        else:
            found = getattr(found, step)
    return found


@settings(deadline=None, max_examples=40)
@given(ids())
def test_the_same_object_again(one: ValueId) -> None:
    assert parse(str(one)) is one
    assert pickle.loads(pickle.dumps(one)) is one
    assert copy.deepcopy(one) is one
    assert one.follows(one.origin)
    assert one.origin.every_microbatch is one.every_microbatch


@settings(deadline=None, max_examples=40)
@given(ids(), ids())
def test_different_ids_print_differently(one: ValueId, other: ValueId) -> None:
    assert (one is other) == (str(one) == str(other))


def test_what_is_made_of_a_value() -> None:
    x = ValueId(Kind.ACTIVATION, "x", (), (2,))
    assert str(x.redistributed(1).sent) == "x#2@1!sent"
    assert x.redistributed(1).follows(x)
    assert not x.follows(x.redistributed(1))
    assert not ValueId(Kind.ACTIVATION, "x", (), (20,)).follows(x)
    assert x.sliced((0, 1)).microbatch == (2, 0, 1)
    assert x.joined.joins(ValueId(Kind.ACTIVATION, "x", (), (2, 1)))
    assert not x.joined.joins(ValueId(Kind.ACTIVATION, "x", (), (1, 1)))
    assert not x.joined.joins(ValueId(Kind.ACTIVATION, "y", (), (2, 1)))
    assert x.splits.kind is Kind.SPLITS
    assert {str(one) for one in (SEED, RNG, NORM_FACTOR)} == {"given:seed", "given:rng", "norm:"}


@pytest.mark.parametrize("text", ["", "nothing:x#0", "x#0?", "x#0.", "x@1..2#0", "w:a:b@0", "x#0@", "x#0!Sent"])
def test_other_texts_are_no_ids(text: str) -> None:
    found = parse(text)
    assert found is None or str(found) == text
