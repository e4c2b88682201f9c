"""What another rank's pickle has spelled is recognised, and read exactly as if every opcode were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container
from ckptools.pickles import reader
from ckptools.pickles.archive import locator
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError, RepeatedRecords
from tests.pickles.test_shard_runs import (
    START,
    TAILS,
    WITH_RECORDS,
    WORDS,
    pickled,
    record,
    run,
    sharded,
    spelled,
    text,
)
from tests.thorough import examples
from tests.truth import FIXTURES

FOLDERS = [
    p for p in sorted(FIXTURES.iterdir()) if p.name.startswith(WITH_RECORDS) and len(list(p.glob("*rank*.pt"))) > 1
]


def outcome(data, locate=None, **how):
    machine = Machine(data, locate, **how)
    try:
        return spelled(machine.load()), machine.claims, machine.stopped_at
    except (PickleError, ReadError) as error:
        return str(error)


def same(data, repeated, locate=None):
    """The outcome with what is repeated, after it was seen to be that of every opcode."""
    with_repeated = outcome(data, locate, repeated=repeated)
    assert with_repeated == outcome(data, locate, fast=False)
    return with_repeated


def same_file(path, repeated, data=None):
    with File(path) as file:
        return same(pickled(path) if data is None else data, repeated, locator(Container(file)))


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_every_rank_reads_the_same_after_the_others(folder, backwards):
    repeated = RepeatedRecords()
    for path in sorted(folder.glob("*rank*.pt"), reverse=backwards) * 2:
        assert isinstance(same_file(path, repeated), tuple)


RANKS = [sorted(folder.glob("*rank*.pt")) for folder in FOLDERS]


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_mutated_pickle_reads_the_same_after_the_other_ranks(data):
    ranks = data.draw(st.sampled_from(RANKS))
    repeated = RepeatedRecords()
    for path in ranks:
        reader.read(path, repeated)
    path = data.draw(st.sampled_from(ranks))
    mutated = bytearray(pickled(path))
    first = mutated.index(b"shards_metadata") if b"shards_metadata" in mutated else 0
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(first, min(first + 3000, len(mutated) - 1)))
        mutated[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([*b"KMJhjqr0(ea"])))
    same_file(path, repeated, bytes(mutated))
    same_file(path, repeated)


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_whatever_refers_to_recognised_records_is_as_if_none_was_recognised(tail):
    repeated = RepeatedRecords()
    same(START + b"(" + sharded(20, run()) + b"t.", repeated)
    same(START + b"(" + sharded(20, run()) + tail + b"t.", repeated)
    same(START + b"(" + run() + b"0" + tail + b"t.", repeated)


def rows_of(repeated):
    return {id(rows): rows for known in repeated.rows.values() for rows, _ in known.values()}.values()


def learned(repeated):
    return sum(map(len, rows_of(repeated)))


def test_a_list_that_was_met_before_is_not_learned_again():
    repeated = RepeatedRecords()
    same(START + sharded(20, run()) + b".", repeated)
    assert learned(repeated) == 19
    same(START + sharded(20, run()) + b".", repeated)
    assert learned(repeated) == 19


def test_nor_where_it_has_other_memo_numbers():
    repeated = RepeatedRecords()
    same(START + sharded(20, run()) + b".", repeated)
    moved = b"](" + b"".join(record(i, 70_000 + 10 * i) for i in range(20)) + b"e"
    same(START + sharded(20, moved) + b".", repeated)
    assert learned(repeated) == 19
    for _ in range(2):  # now the first record too, by which the others were found
        same(START + b"(" + sharded(20, run()) + sharded(20, moved) + b"t.", repeated)
        assert learned(repeated) == 19 + 20


def test_nor_where_its_memo_numbers_would_be_beyond_32_bits():
    repeated = RepeatedRecords()
    same(START + sharded(20, run()) + b".", repeated)
    last = (1 << 32) - 1
    beyond = b"](" + b"".join(record(i, 70_000 + 10 * i) for i in range(20)) + b"e"
    beyond = beyond.replace(b"r" + (70_199).to_bytes(4, "little"), b"r" + last.to_bytes(4, "little"))
    same(START + sharded(20, beyond) + b".", repeated)


def test_of_a_list_with_another_record_in_it_only_what_begins_there_is_learned():
    repeated = RepeatedRecords()
    same(START + sharded(100, run(100)) + b".", repeated)
    records = [record(i) for i in range(100)]
    records[50] = record(50, offset=b"K\x07")
    same(START + sharded(100, b"](" + b"".join(records) + b"e") + b".", repeated)
    assert learned(repeated) == 99 + 50


def test_a_rank_in_the_middle_of_a_list_learns_little_that_no_rank_before_spelled():
    """Behind a rank's own place each record has the number that in the rank before the next one had."""
    repeated = RepeatedRecords()
    for rank in range(5):
        before = b"".join(record(i, 1000 + 10 * i) for i in range(rank))
        own = record(rank, 100)
        behind = b"".join(record(i, 1000 + 10 * (i - 1)) for i in range(rank + 1, 60))
        head = START + b"(" + own
        same(head + sharded(60, b"](" + before + b"j" + (100).to_bytes(4, "little") + behind + b"e") + b"t.", repeated)
    assert learned(repeated) < 70


def test_the_same_bytes_mean_another_thing_where_the_words_have_other_numbers():
    swapped = ("shard_sizes", "shard_offsets", *WORDS[2:])
    other = b"".join(text(w) + b"q%c0" % n for n, w in enumerate(swapped)) + START[START.index(b"cm\n") :]
    repeated = RepeatedRecords()
    assert isinstance(same(START + sharded(20, run()) + b".", repeated), tuple)
    assert "offsets=(1, 3), sizes=(0, 0)" in same(other + sharded(20, run()) + b".", repeated)[0]


def test_records_whose_numbers_were_given_before_are_read_in_full():
    repeated = RepeatedRecords()
    same(START + sharded(20, run()) + b".", repeated)
    taken = text("taken") + b"r" + (1005).to_bytes(4, "little") + b"0"
    same(START + taken + b"(" + sharded(20, run()) + b"j" + (1005).to_bytes(4, "little") + b"t.", repeated)


def test_what_is_beyond_the_limit_is_not_remembered_and_reads_the_same():
    repeated = RepeatedRecords()
    repeated.room = 0
    for _ in range(2):
        same(START + sharded(20, run()) + b".", repeated)
    assert learned(repeated) == 0
