"""Extents are the shards that they list, and answer as these do, one by one."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptools.consolidate.writers.layout import identity
from ckptools.model.extents import ExtentFile, ExtentLayout, Extents, extent_file, read_paths
from ckptools.model.regions import Box
from ckptools.model.shards import Encoded, Item, Shard, ShardList, Source, in_rank_order
from ckptools.model.tensor import Tensor

FILES = [extent_file(Path(f"__{n}_0.distcp"), n) for n in (2, 0, 1)] + [
    extent_file(Path("other"), None), extent_file(None, 3), extent_file(Path("__4_0.distcp"), 4, zstd=True),
]  # fmt: skip
HOW = ("not read", "read", "like another")
ROW = st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(FILES), st.integers(0, 99), st.sampled_from(HOW))
AT = 8
"""Byte offset of the values in an item."""


def both(rows: list[tuple[int, int, ExtentFile, int, str]]) -> tuple[Extents, tuple[Shard, ...]]:
    """Shards by column, of which some are read, and one by one."""
    listed, single = Extents("float32"), list[Shard]()
    for n, (offset, size, file, start, how) in enumerate(rows):
        source = None
        if how != "not read" and file.path is not None:
            source = Source(file.path, start + AT, "float32", (size,), (1,), "data/0", (start + AT, 4 * size), n << 29)
        item = Item(file.path, start, 4 * size, "float32", (size,), file.zstd) if file.path else None
        single.append(Shard(Box((offset,), (size,)), file.rank, source, item))
        listed.offsets.append((offset,))
        listed.sizes.append((size,))
        listed.files.append(file)
        listed.starts.append(start)
        listed.lengths.append(4 * size)
    if any(one.source is not None and row[-1] != "read" for one, row in zip(single, rows, strict=True)):
        listed.layouts, listed.crcs = [None] * len(single), array("I", bytes(4 * len(single)))
    for n, (_, _, _, start, how) in enumerate(rows):
        source = single[n].source
        if source is not None and how == "read":
            listed.located[n] = single[n]
        elif source is not None:
            listed.layouts[n], listed.crcs[n] = ExtentLayout.of(source, start), source.crc
    return listed, tuple(single)


@given(st.lists(ROW, max_size=8))
def test_columns_hold_the_same_shards(rows):
    listed, single = both(rows)
    assert listed == single and tuple(listed) == single and hash(listed) == hash(single) and len(listed) == len(single)
    assert [listed[n] for n in range(-len(single), len(single))] == [*single, *single]
    assert listed[1:4] == single[1:4] and repr(listed) == repr(single)


@given(st.lists(ROW, max_size=8))
@example([(0, 2, FILES[0], 0, HOW[2]), (2, 2, FILES[1], 0, HOW[2]), (4, 1, FILES[2], 0, HOW[2])])
def test_questions_about_columns_have_the_answers_of_the_shards(rows):
    listed, single = both(rows)
    for extents in (listed, Extents.of(single, "float32")):
        assert (extents.boxes, extents.box_sizes) == ({s.box for s in single}, {s.box.sizes for s in single})
        assert extents.ranks == {s.rank for s in single} and extents.is_here == all(s.is_here for s in single)
        read = [s for s in single if s.was_read]
        boxes = [s.box for s in read]
        assert [s for s in extents.seen if s.was_read] == read and extents.all_read == (len(read) == len(single))
        assert (extents.boxes_read, extents.has_copies) == (set(boxes), len(set(boxes)) < len(boxes))
        assert tuple(extents.read) == tuple(read)
        assert read_paths([extents]) == {s.source.path for s in read}
        assert extents.record_sizes == {(s.box.numel, s.source.record_span[1]) for s in read}
        kinds = extents.kinds()
        if kinds is not None:
            every = Counter((s.box.sizes, s.source.strides, s.source.record) for s in single if s.source)
            assert Counter({(sizes, of.strides, of.record): count for (sizes, of), count in kinds.items()}) == every
        assert extents.states_any_crc >= any(s.source.crc for s in read)
        tensor = Tensor((9,), "float32", single)
        assert tensor.found == tuple(read) and tensor.first_source == next((s.source for s in read), None)


def test_other_views_of_the_same_records_are_no_ties():
    source = Source(Path("r0.pt"), 64, "float32", (2,), (1,), "data/0", (64, 16), 7)
    first, second = ([Shard(Box((0,), (2,)), 0, one)] for one in (source, source._replace(offset=72)))
    assert identity(Tensor((2,), "float32", first)) == identity(Tensor((2,), "float32", list(first)))
    assert identity(Tensor((2,), "float32", first)) != identity(Tensor((2,), "float32", second))
    assert identity(Tensor((2,), "float32", first)) != identity(Tensor((2,), "int32", first))


def test_of_the_list_of_all_ranks_the_extents_are_those_of_the_rank_itself():
    listed = tuple(Shard(Box((2 * rank,), (2,)), rank, None) for rank in range(4))
    own = listed[1]._replace(source=Source(Path("r1.pt"), 0, "float32", (2,), (1,), "data/0", (0, 8)))
    tensor = Tensor((8,), "float32", ShardList(listed, 1, 2, (own,)))
    assert [*tensor.shards] == [listed[0], own, *listed[2:]] and [*tensor.extents] == [own] == [*tensor.found]
    assert tensor.every_shard.ranks == {0, 1, 2, 3} and not tensor.every_shard.is_here and not tensor.lies_in_a_row


@given(st.lists(ROW, max_size=8))
def test_shards_are_taken_into_columns_and_come_out_as_they_were(rows):
    single = [*both(rows)[1]]
    parts = (("codes", Source(Path("r0.pt"), 0, "uint8", (2,), (1,), "data/0", (0, 2))),)
    single.append(Shard(Box((0,), (2,)), 0, None, None, Encoded("of.a.Class", parts, None, (2,), Box((0,), (2,)))))
    single.append(Shard(Box((2,), (2,)), None, parts[0][1]))
    extents = Extents.of(single, "float32")
    assert [*extents] == single and Extents.of(extents, "float32") is extents
    assert Tensor((9,), "float32", single).encoded_as == (single[-2].encoded,)


@given(st.lists(ROW, max_size=8))
def test_columns_are_sorted_by_rank_and_offsets(rows):
    listed, single = both(rows)
    assert tuple(listed.in_rank_order()) == in_rank_order(single)


def test_a_place_behind_the_last_shard_is_an_index_error():
    with pytest.raises(IndexError):
        both([])[0][0]


class InAStore(type(Path())):
    """A path with a state of its own, as that of a file in a store."""


def test_a_file_is_one_object_for_all_its_rows_but_not_for_two_openings_in_a_store():
    assert extent_file(Path("a"), 0) is extent_file(Path("a"), 0) is not extent_file(Path("a"), 1)
    first, again = InAStore("a"), InAStore("a")
    kept = extent_file(first, 0)
    assert extent_file(first, 0) is kept and extent_file(again, 0).path is again
