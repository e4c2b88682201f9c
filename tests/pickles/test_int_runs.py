"""Ints read in runs are the ints of the opcodes, and one tuple is held for all files that spell it alike."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.pickles import machine_state
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import MAX_RUN, MIN_RUN, RUN, PickleError, RepeatedRecords, ints_of_run
from tests.pickles.test_shard_runs import spelled

WIDE = st.one_of(
    st.integers(0, 2**32 - 1),
    st.integers(-(2**39), 2**39 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 70_000),
)
FRAGMENTS = st.one_of(
    st.lists(WIDE, max_size=40).map(tuple),
    st.lists(WIDE, max_size=40),
    st.lists(st.integers(2**31, 2**32 - 1), min_size=MIN_RUN - 2, max_size=MIN_RUN + 2).map(tuple),
    st.integers(-(2**80), 2**80),
    st.text(max_size=3),
)


def outcome(data, repeated=None, fast=True):
    try:
        return spelled(Machine(data, None, fast, repeated=repeated).load())
    except PickleError as error:
        return str(error)


def states(*seeds):
    """Python's random states as a rank file holds those of all ranks: each a tuple of its own."""
    return [random.Random(seed).getstate() for seed in seeds]


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS, max_size=5), st.data())
def test_a_pickle_of_ints_reads_the_same_in_runs_and_by_opcodes_also_when_damaged(tree, data):
    spelling = bytearray(pickle.dumps(tree, 2))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(spelling) - 1))
        spelling[place] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b"(tJKM\x8a\x05\x08.l")))
    whole = bytes(spelling[: data.draw(st.one_of(st.just(len(spelling)), st.integers(0, len(spelling))))])
    repeated = RepeatedRecords()
    assert outcome(whole, repeated) == outcome(whole, repeated) == outcome(whole, fast=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1)), min_size=MIN_RUN, max_size=99))
def test_a_run_is_decoded_as_python_does(ints):
    run = pickle.dumps(ints, 2)
    found = RUN.match(run, run.index(b"(") + 1)
    assert found is not None and ints_of_run(found.group()) == tuple(ints)


@pytest.mark.parametrize("count", [MIN_RUN - 1, MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 3 * MAX_RUN + 5])
@pytest.mark.parametrize("kind", [tuple, list])
def test_as_many_ints_come_out_as_went_in(count, kind):
    ints = kind(range(2**31 - 500, 2**31 - 500 + count))
    assert Machine(pickle.dumps((ints, [7]), 2)).load() == (ints, [7])


@pytest.mark.parametrize("bits", [0, 7, 8, 15, 16, 31, 32, 33, 38, 39, 40, 55, 62, 63, 64, 71])
def test_ints_of_every_width_and_sign_come_out_as_they_are(bits):
    around = [sign * 2**bits + more for sign in (1, -1) for more in range(-2, 3)]
    tree = [tuple(around * 2), (2**31, *around), [2**31] * MIN_RUN + around]
    assert Machine(pickle.dumps(tree, 2)).load() == tree


def test_a_state_is_one_object_for_all_files_and_never_for_two_places_of_one():
    repeated = RepeatedRecords()
    first, again = (Machine(pickle.dumps(states(1, 1, 2), 2), repeated=repeated).load() for _ in range(2))
    assert first == states(1, 1, 2)
    assert [a[1] is b[1] for a, b in zip(first, again, strict=True)] == [True, True, True]
    assert first[0][1] is not first[1][1]


@pytest.mark.parametrize("tail", [(), (1,), (2**31 + 1, 5), (2**31 + 2,) * 30])
def test_a_tuple_that_begins_like_a_known_one_is_itself(tail):
    repeated, known = RepeatedRecords(), (2**31,) * 20
    assert Machine(pickle.dumps([known], 2), repeated=repeated).load() == [known]
    for tree in ([(*known, *tail)], [[*known, *tail]], [known, (*known[:12], *tail), (7, *known, *tail)]):
        assert Machine(pickle.dumps(tree, 2), repeated=repeated).load() == tree


@pytest.mark.parametrize("limit", [0, 4000])
def test_beyond_the_limit_states_are_made_anew(limit):
    repeated = RepeatedRecords(limit)
    first, again = (Machine(pickle.dumps(states(1, 2), 2), repeated=repeated).load() for _ in range(2))
    assert first == again == states(1, 2)
    assert [a[1] is b[1] for a, b in zip(first, again, strict=True)] == [limit > 0, False]


def test_the_bytes_of_an_array_are_one_object_for_all_files():
    repeated, array = RepeatedRecords(), np.random.RandomState(3).get_state()[1]
    first, again = (Machine(pickle.dumps(array, 2), repeated=repeated).load() for _ in range(2))
    assert first.data is again.data and first.data == array.tobytes()


def test_every_int_of_a_run_counts_as_an_opcode(monkeypatch):
    monkeypatch.setattr(machine_state, "MAX_OPCODES", 60_000)
    data = pickle.dumps(states(*range(200)), 2)
    for fast in (True, False):
        with pytest.raises(PickleError, match="more than 60000 opcodes"):
            Machine(data, None, fast).load()
