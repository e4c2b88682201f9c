"""Shards by column are the shards that they list."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.model.regions import Box
from ckptools.model.shards import (
    HoldingFile,
    Item,
    ItemLayout,
    ItemShards,
    Shard,
    Source,
    all_here,
    boxes_with_bytes,
    in_rank_order,
    read_files,
    record_sizes,
    shard_boxes,
    shard_ranks,
    shard_sizes,
    with_bytes,
)

FILES = [HoldingFile(Path(f"__{n}_0.distcp"), n) for n in (2, 0, 1)] + [
    HoldingFile(Path("other"), None), HoldingFile(None, 3), HoldingFile(Path("__4_0.distcp"), 4, zstd=True),
]  # fmt: skip
HOW = ("not read", "read", "like another")
ROW = st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(FILES), st.integers(0, 99), st.sampled_from(HOW))
AT = 8
"""Byte offset of the values in an item."""


def both(rows: list[tuple[int, int, HoldingFile, int, str]]) -> tuple[ItemShards, tuple[Shard, ...]]:
    """Shards by column, of which some are read, and one by one."""
    listed, single = ItemShards("float32"), list[Shard]()
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
        listed.expect_layouts()
    for n, (_, _, _, start, how) in enumerate(rows):
        source = single[n].source
        if source is not None and how == "read":
            listed.located[n] = single[n]
        elif source is not None:
            listed.layouts[n], listed.crcs[n] = ItemLayout.of(source, start), source.crc
    return listed, tuple(single)


@given(st.lists(ROW, max_size=8))
def test_columns_hold_the_same_shards(rows):
    listed, single = both(rows)
    assert listed == single and tuple(listed) == single and hash(listed) == hash(single) and len(listed) == len(single)
    assert [listed[n] for n in range(-len(single), len(single))] == [*single, *single]
    assert listed[1:4] == single[1:4] and repr(listed) == repr(single)


@given(st.lists(ROW, max_size=8))
def test_questions_about_columns_have_the_same_answers(rows):
    listed, single = both(rows)
    assert shard_boxes(listed) == shard_boxes(single) and shard_ranks(listed) == shard_ranks(single)
    assert with_bytes(listed) == with_bytes(single) and all_here(listed) == all_here(single)
    assert shard_sizes(listed) == shard_sizes(single) and read_files([listed]) == read_files([single])
    assert boxes_with_bytes(listed) == boxes_with_bytes(single) and record_sizes(listed) == record_sizes(single)


@given(st.lists(ROW, max_size=8))
def test_columns_are_sorted_by_rank_and_offsets(rows):
    listed, single = both(rows)
    assert tuple(listed.in_rank_order()) == in_rank_order(single)


def test_a_place_behind_the_last_shard_is_an_index_error():
    with pytest.raises(IndexError):
        both([])[0][0]
