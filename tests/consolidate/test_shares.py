"""Shares of a plan: every byte in exactly one, and none much heavier than another."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.cluster.team import shares
from ckptools.consolidate.shares import ALL, GRAIN, shares_of
from ckptools.consolidate.source_records import CopiedBytes, crcs_of
from ckptools.consolidate.writers.layout import Job
from ckptools.errors import CkptoolsError
from ckptools.model.regions import Box, contiguous_strides
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.checksums import crc32
from ckptools.tensor_io.stream import Copy


def job(number: int, rows: list[int], width: int, dtype: str = "float32") -> Job:
    """A tensor whose rows lie in as many files as there are numbers, behind those of the tensors before it."""
    shards, at = [], 0
    for rank, count in enumerate(rows):
        source = Source(Path(f"rank{rank}"), number << 24, "float32", (count, width), (width, 1), "", (0, 0))
        shards.append(Shard(Box((at, 0), (count, width)), source=source, rank=rank))
        at += count
    tensor = Tensor((at, width), "float32", tuple(shards))
    assert contiguous_strides(tensor.shape) == (width, 1)
    return Job(f"t{number}", tensor, dtype, 0, number << 24)


ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
PLANS = st.lists(st.tuples(ROWS, st.sampled_from([1, 3, 512, 2048])), min_size=1, max_size=8)


def bytes_of(jobs: list[Job], count: int) -> list[list[tuple[int, int]]]:
    """Of each share: from which byte of the output to which."""
    cut = shares_of(jobs, count)
    return [[(j.offset + p.offset, j.offset + p.offset + p.nbytes) for j in jobs for p in s.parts(j)] for s in cut]


@settings(max_examples=60, deadline=None)
@given(PLANS, st.integers(1, 9), st.sampled_from(["float32", "bfloat16"]))
def test_every_byte_is_in_exactly_one_share(plan, count, dtype):
    jobs = [job(n, rows, width, dtype) for n, (rows, width) in enumerate(plan)]
    at = {j.offset: j.offset for j in jobs}
    for begin, end in sorted(part for share in bytes_of(jobs, count) for part in share):
        start = begin >> 24 << 24
        assert begin == at[start]
        at[start] = end
    assert [at[j.offset] - j.offset for j in jobs] == [j.nbytes for j in jobs]


@settings(max_examples=60, deadline=None)
@given(PLANS, st.integers(1, 9))
def test_no_share_is_heavier_than_its_part_but_for_what_is_not_cut(plan, count):
    jobs = [job(n, rows, width) for n, (rows, width) in enumerate(plan)]
    weights = [sum(end - begin for begin, end in share) for share in bytes_of(jobs, count)]
    assert max(weights) <= sum(j.nbytes for j in jobs) / count + 2 * GRAIN


def test_a_rank_reads_few_files():
    jobs = [job(n, [64] * 8, 512) for n in range(20)]
    read = [{p.source for j in jobs for p in s.parts(j) if isinstance(p, Copy)} for s in shares_of(jobs, 4)]
    assert [len(files) for files in read] == [2, 2, 2, 2]


def test_one_rank_copies_everything():
    assert shares_of([job(0, [3], 2)], 1) == [ALL]


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_items_are_cut_into_runs_of_nearly_equal_weight(weights, count):
    cut = shares(weights, count)
    assert [n for run in cut for n in run] == list(range(len(weights)))
    heaviest = max((w + 1 for w in weights), default=0)
    assert all(sum(weights[n] + 1 for n in run) <= (sum(weights) + len(weights)) / count + heaviest for run in cut)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_no_plan_has_no_parts(count):
    assert [list(share.parts(job(0, [1], 1))) for share in shares_of([], count)].count([]) >= count - 1


@pytest.mark.parametrize("regions", [[], [(0, 8)], [(0, 8), (8, 9)], [(4, 8), (0, 4), (4, 8)]], ids=str)
def test_what_was_not_written_exactly_once_is_not_taken_for_written(regions):
    with pytest.raises(CkptoolsError, match="t0: of 12 bytes these were written: "):
        crcs_of([job(0, [3], 1)], [CopiedBytes(0, begin, end - begin, 0) for begin, end in regions], True)


def test_the_crc_of_a_tensor_is_made_of_the_regions_that_several_ranks_wrote():
    parts = [CopiedBytes(0, 8, 4, crc32(b"ijkl")), CopiedBytes(0, 0, 8, crc32(b"abcdefgh"))]
    assert crcs_of([job(0, [3], 1)], parts, True) == [crc32(b"abcdefghijkl")]


def test_what_begins_where_a_share_ends_is_in_the_next_alone():
    jobs = [job(n, [16], 64, "bfloat16") for n in range(4)]
    assert [len(share) for share in bytes_of(jobs, 4)] == [1, 1, 1, 1]


def test_a_copy_is_cut_between_two_grains():
    starts = [begin % GRAIN for share in bytes_of([job(0, [40], 2048)], 7) for begin, _ in share]
    assert starts == [0] * 7
