"""Reading the shard records of FSDP1 files in batches gives exactly what reading every opcode gives."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import ReadError
from ckptools.files.opening import File
from ckptools.files.zip_archive import Container
from ckptools.model.extents import Extents
from ckptools.model.shards import ShardList
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, tensors_in
from ckptools.pickles.archive import locator
from ckptools.pickles.batches import MAX_ATTEMPTS, Batches, Skipped
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import PickleError
from tests.pickles.forge import number, text
from tests.truth import FIXTURES

FILES = sorted([*FIXTURES.glob("*/*rank*.pt"), *FIXTURES.glob("*/ckpt/*rank*.pt")])
WITH_RECORDS = ("composer-0.13", "torch1.13", "torch2.0.1", "torch2.13.0-fsdp1")


def spelled(node, inside=frozenset()):
    """Everything about a value, as text."""
    assert not isinstance(node, Skipped)
    if id(node) in inside:
        return "itself"
    inside = inside | {id(node)}
    if isinstance(node, Tensor):
        return str([(n, spelled(getattr(node, n), inside)) for n in node.__slots__ if n != "detail"])
    if hasattr(node, "_fields"):
        return f"{type(node).__name__}({', '.join(f'{n}={spelled(v, inside)}' for n, v in node._asdict().items())})"
    if type(node) is tuple and all(type(v) is int for v in node):
        return repr(node)
    if isinstance(node, dict):
        return str([(spelled(k, inside), spelled(v, inside)) for k, v in node.items()])
    if isinstance(node, (ShardList, Extents)):
        node = tuple(node)
    if isinstance(node, (list, tuple)):
        return f"{type(node).__name__}{[spelled(v, inside) for v in node]}"
    if isinstance(node, Opaque):
        return f"{node.name}{[spelled(p, inside) for p in node.parts()]}"
    return repr(node)


def outcome(data, locate, fast):
    machine = Machine(data, locate, fast)
    try:
        tree = spelled(machine.load())
    except (PickleError, ReadError) as error:
        return str(error)
    return tree, machine.claims, list(machine.globals), machine.stopped_at


def pickled(path):
    with File(path) as file:
        return Container(file).read("data.pkl")


def both(path, data):
    with File(path) as file:
        locate = locator(Container(file))
        return outcome(data, locate, True), outcome(data, locate, False)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_fixture_reads_the_same_with_runs_and_without(path):
    fast, slow = both(path, pickled(path))
    assert fast == slow and isinstance(fast, tuple)


SHARDED = [p for p in FILES if p.parent.name.startswith(WITH_RECORDS) and "rank1" in p.name]


@pytest.mark.parametrize("path", SHARDED, ids=lambda p: p.parent.name)
def test_most_records_of_every_fixture_are_skipped(path):
    with File(path) as file:
        machine = Machine(pickled(path), locator(Container(file)))
        tree = machine.load()
    listed = sum(len(t.shards) for _, t in tensors_in(tree) if t.kind == "sharded_tensor")
    assert sum(map(len, machine.batches.batches)) > listed * 0.8


SMALL = {p: pickled(p) for p in SHARDED}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_pickle_reads_the_same_with_runs_and_without(data):
    path = data.draw(st.sampled_from(list(SMALL)))
    mutated = bytearray(SMALL[path])
    # Most of the damage goes where the shard lists are.
    first = mutated.index(b"shards_metadata")
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.one_of(st.integers(first, first + 1500), st.integers(0, len(mutated) - 1)))
        old = mutated[at]
        mutated[at] = data.draw(
            st.one_of(st.integers(0, 255), st.sampled_from([old ^ 1, old + 1 & 255, *b"KMJhjqr0(ea"]))
        )
    fast, slow = both(path, bytes(mutated))
    assert fast == slow


# -- forged, on purpose ------------------------------------------------------------------------------------------

WORDS = ("shard_offsets", "shard_sizes", "placement", "_worker_name", "_rank", "_device")
CLASSES = (("m", "ShardMetadata"), ("r", "_remote_device"), ("torch", "device"))
START = b"".join(text(w) + b"q%c0" % n for n, w in enumerate(WORDS)) + b"".join(
    f"c{m}\n{n}\n".encode() + b"q%c0" % number for number, (m, n) in enumerate(CLASSES, len(WORDS))
)
"""Gives every word of a record a memo number, as the first record of a real file does."""

FIRST = 1000


CUDA = text("cuda")


def record(i, first=None, offset=None, rank=None, device=CUDA):
    """The opcodes of shard record `i`, fetching its words from the memo; its own numbers begin at `first`."""
    numbers = count(FIRST + 10 * i if first is None else first)

    def put():
        return b"r" + next(numbers).to_bytes(4, "little")

    data = b"h\x06)\x81" + put() + b"N}" + put()
    data += b"(h\0]" + put() + b"(" + (offset or b"M" + i.to_bytes(2, "little")) + b"K\0e"
    data += b"h\1]" + put() + b"(K\1K\3e" + b"h\2h\7)\x81" + put() + b"}" + put()
    data += b"(h\3Nh\4" + (rank or b"K%c" % (i % 256)) + b"h\5h\x08" + device + put() + b"K%c\x86" % (i % 8)
    return data + put() + b"R" + put() + b"ubu\x86" + put() + b"b"


def run(n=20, **oddities):
    return b"](" + b"".join(record(i, **oddities) for i in range(n)) + b"e"


def get(i, which):
    return b"j" + (FIRST + 10 * i + which).to_bytes(4, "little")


def give(i, which):
    return b"r" + (FIRST + 10 * i + which).to_bytes(4, "little")


def fast_and_slow(data):
    """Read both ways; the machine that read with runs."""
    fast, slow = Machine(data), Machine(data, fast=False)
    results = []
    for machine in (fast, slow):
        try:
            results.append(spelled(machine.load()))
        except PickleError as error:
            results.append(str(error))
    assert results[0] == results[1]
    return fast


TAILS = {
    "nothing": b"",
    "a placement": get(3, 4),
    "all placements in a row": b"](" + b"".join(get(i, 4) for i in range(20)) + b"e",
    "all records in a row": b"](" + b"".join(get(i, 0) for i in range(20)) + b"e",
    "some placements": b"](" + b"".join(get(i, 4) for i in range(5)) + b"e",
    "placements backwards": b"](" + b"".join(get(i, 4) for i in range(19, 0, -1)) + b"e",
    "a list of offsets": get(3, 2),
    "a device": get(3, 8),
    "one number too far": get(20, 0),
    "an append to offsets": get(3, 2) + b"K\7a",
    "a new state for a record": get(3, 0) + b"}b",
    "a new state for a placement": get(3, 4) + b"}" + text("_rank") + b"K\7sb",
    "items for a placement": get(3, 4) + b"K\7a",
    "a record as a key": b"}" + get(3, 0) + b"Ns",
    "a record in a set": b"\x8f(" + get(3, 0) + b"\x90",
    "a record in a call": b"cfoo\nbar\n" + get(3, 0) + b"\x85R",
    "a record in a size": b"ctorch\nSize\n]" + get(3, 0) + b"a\x85R",
    "a number given again": b"N" + give(3, 1) + get(3, 1),
    "a number given by counting": b"N\x94h\x09",
    "a number behind the run": b"N" + give(20, 0) + get(20, 0),
    "another run behind it": b"](" + b"".join(record(i) for i in range(20, 40)) + b"e",
    "the same run again": run(),
    "a word given again, then a run": text("other") + b"q\x000](" + b"".join(record(i) for i in range(20, 40)) + b"e",
}  # fmt: skip


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_whatever_refers_to_skipped_records_is_as_if_none_was_skipped(tail):
    fast_and_slow(START + b"(" + run() + tail + b"t.")


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_nor_does_it_matter_when_the_records_themselves_are_thrown_away(tail):
    fast_and_slow(START + b"(" + run() + b"0" + tail + b"t.")


ODD = {
    "a negative offset": {"offset": b"J\xff\xff\xff\xff"},
    "an offset of 8 bytes": {"offset": b"\x8a\x08" + bytes(8)},
    "an offset of 9 bytes": {"offset": b"\x8a\x09" + bytes(9)},
    "a long that lies": {"offset": b"\x8a\x02K\0e"},
    "a text that lies": {"device": b"X\x05\0\0\0cuda"},
    "a text of no letters": {"device": text("cu da")},
    "an offset that is none": {"offset": b"N"},
    "numbers that repeat": {"first": FIRST},
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_records_that_are_not_quite_as_torchs_are_read_in_full(odd):
    fast_and_slow(START + run(3, **odd) + b".")


@pytest.mark.parametrize("gap", [1, 3, 50])
def test_records_whose_numbers_leave_gaps_are_not_matched_again_and_again(gap, monkeypatch):
    matched, match = [], Batches._match

    def counted(*args):
        matched.append(args)
        return match(*args)

    monkeypatch.setattr(Batches, "_match", counted)
    numbers = [FIRST + 10 * i + i // gap for i in range(200)]
    fast_and_slow(START + b"](" + b"".join(record(i, first) for i, first in enumerate(numbers)) + b"e.")
    assert 1 <= len(matched) <= MAX_ATTEMPTS


def sharded(rows, listing, spec=b"N"):
    """A ShardedTensor of `rows` rows that lists the records of `listing`."""
    size = b"(" + number(rows) + b"K\3t"
    inner = b"(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nctorch\nfloat32\n" + size + b"NNNNNt"
    held = b"cx\nShardedTensorMetadata\n)\x81}" + text("shards_metadata") + listing + b"sb"
    world = b"".join(text(k) + number(v) for k, v in (("global_rank", 0), ("local_world_size", rows)))
    group = b"cx\nProcessGroupState\n)\x81}(" + world + text("global_world_size") + number(rows) + b"ub"
    head = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
    return (
        head
        + b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
        + inner
        + b"(]"
        + held
        + group
        + spec
        + b"NttR"
    )


SPECS = {
    "ChunkShardingSpec": b"cx\nChunkShardingSpec\n)\x81}"
    + text("placements")
    + TAILS["all placements in a row"]
    + b"sb",
    "EnumerableShardingSpec": b"cx\nSpec\n)\x81}" + text("shards") + TAILS["all records in a row"] + b"sb",
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_sharded_tensor_keeps_its_run_when_its_spec_lists_the_records_again(spec):
    machine = fast_and_slow(START + sharded(20, run(), spec) + b".")
    assert [len(batch) for batch in machine.batches.batches] == [19]


@pytest.mark.parametrize("kinds", ["ab", "aab", "abb", "aabb", "aaab"])
def test_records_of_two_kinds_that_take_turns_are_told_apart(kinds):
    records = [record(i, device=text("cpu" if kinds[i % len(kinds)] == "a" else "cuda")) for i in range(20)]
    (tensor,) = read(sharded(20, b"](" + b"".join(records) + b"e"))
    assert places(tensor) == [(i, i) for i in range(20)]


def test_a_sharded_tensor_knows_every_box_and_rank_of_a_run():
    tensor = Machine(START + sharded(20, run()) + b".").load()
    assert [(s.box.offsets, s.box.sizes, s.rank) for s in tensor.shards] == [((i, 0), (1, 3), i) for i in range(20)]


def read(*values):
    """What a pickle of several values reads as, with runs and without."""
    data = START + b"(" + b"".join(values) + b"t."
    fast_and_slow(data)
    return Machine(data).load()


def places(tensor):
    return [(s.box.offsets[0], s.rank) for s in tensor.shards]


def test_a_number_that_was_taken_before_a_run_is_the_runs_afterwards():
    *_, last = read(text("before") + give(4, 0), sharded(20, run()), get(4, 0))
    assert isinstance(last, Opaque) and last.name.endswith("ShardMetadata")


def test_of_records_that_repeat_their_numbers_the_last_has_them():
    _, again = read(sharded(3, run(3, first=FIRST)), sharded(3, b"](" + get(0, 0) + b"e"))
    assert places(again) == [(2, 2)]


def test_a_number_given_again_to_another_record_is_that_record_in_a_list_of_all():
    _, again = read(sharded(20, run()), get(7, 0) + give(3, 0) + b"0", sharded(20, TAILS["all records in a row"]))
    assert places(again)[:5] == [(0, 0), (1, 1), (2, 2), (7, 7), (4, 4)]


def test_numbers_given_again_behind_the_fetch_of_a_record_are_no_list_of_all():
    fetched = b"](" + get(0, 0) + b"".join(give(i, 0) for i in range(1, 20)) + b"e"
    *_, again = read(sharded(20, run()), sharded(20, fetched), sharded(20, b"](" + get(7, 0) + b"e"))
    assert places(again) == [(0, 0)]


def test_a_number_that_a_record_takes_from_what_was_before_is_the_records_afterwards():
    taking = run().replace(give(3, 3), b"r" + (9).to_bytes(4, "little"))
    *_, last = read(text("before") + b"q\x09", sharded(20, taking), b"h\x09")
    assert last == [1, 3]


def test_a_state_borrowed_from_inside_a_skipped_record_is_that_state():
    placement = b"h\7)\x81" + get(3, 5) + b"b"
    borrower = b"h\6)\x81}(h\0](K\0K\0eh\1](K\1K\3eh\2" + placement + b"ub"
    _, other = read(sharded(20, run()), sharded(20, b"](" + borrower + b"e"))
    assert places(other) == [(0, 3)]


def test_a_negative_rank_of_a_skipped_record_stays_negative():
    (tensor,) = read(sharded(2, run(2, rank=b"J\xff\xff\xff\xff")))
    assert places(tensor) == [(0, -1), (1, -1)]


def test_a_record_outside_its_tensor_is_refused():
    tensor = Machine(START + sharded(19, run(), b"N") + b".").load()
    assert tensor.shards == () and tensor.contradictions[0][1].startswith("a shard at")


@pytest.mark.parametrize("rows", [(19,), (30, 19), (20, 30, 40, 50, 60, 19)], ids=str)
def test_nor_in_a_smaller_tensor_than_those_that_it_lies_in(rows):
    others = b"".join(sharded(n, TAILS["all records in a row"]) for n in rows)
    first, *_, last = Machine(START + b"(" + sharded(20, run()) + others + b"t.").load()
    assert not first.contradictions and "in a tensor of" in last.contradictions[0][1]


def test_looking_for_words_that_never_come_is_given_up():
    started = time.perf_counter()
    Machine(
        b"cm\nShardMetadata\nq\0("
        + b"".join(text(str(i)) + b"r" + i.to_bytes(4, "little") for i in range(9, 20_009))
        + b"h\0" * 20_000
        + b"t."
    ).load()
    assert time.perf_counter() - started < 2


# -- one rank's file of 256 --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_world(tmp_path_factory):
    """One rank's file of a 256-rank world, written by real FSDP1 in another process."""
    folder = tmp_path_factory.mktemp("fake") / "run"
    subprocess.run([sys.executable, "-m", "tests.fake_world", str(folder)], check=True, capture_output=True)
    (path,) = folder.glob("*.pt")
    return path


@pytest.mark.slow
def test_nearly_all_records_of_a_big_world_are_skipped(fake_world):
    with File(fake_world) as file:
        machine = Machine(pickled(fake_world), locator(Container(file)))
        tree = machine.load()
    listed = sum(len(t.shards) for _, t in tensors_in(tree))
    assert listed > 38_000 and sum(map(len, machine.batches.batches)) > listed - 300
    assert len(machine.memo) < 30_000


@pytest.mark.slow
def test_a_big_world_reads_the_same_with_runs_and_without(fake_world):
    fast, slow = both(fake_world, pickled(fake_world))
    assert fast == slow


@pytest.mark.slow
def test_a_lone_file_of_a_big_world_is_opened_in_one_pass_and_says_what_it_is(fake_world):
    ck = ckptools.open(fake_world)
    assert (ck.world_size.value, ck.cost.files, ck.cost.nbytes < fake_world.stat().st_size + 1000) == (256, 1, True)
    assert sum(p.code == "CK001" for p in ck.problems) >= 1 and not ck.whole
