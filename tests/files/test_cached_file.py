"""Reading ranges of a file in a store: the right bytes, by few requests."""

from __future__ import annotations

from threading import Lock

from hypothesis import given
from hypothesis import strategies as st

from ckptools.files.remote import cached_file
from ckptools.files.remote.cached_file import BLOCK, GAP, LARGE, SMALL, TAIL, BlockCache, Fetch, RemoteFile
from ckptools.files.storage import Status

DATA = bytes(range(251)) * 400


class Requests:
    """Fetches from `DATA` and keeps which ranges."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(DATA)
        self.ranges.append((start, end))
        return DATA[start:end]


def opened() -> tuple[RemoteFile, Requests]:
    requests = Requests()
    return file_of(requests), requests


def file_of(fetch: Fetch, size: int = len(DATA), cache: BlockCache | None = None, key: str = "f") -> RemoteFile:
    return RemoteFile(key, fetch, Status(size, 0.0), cache or BlockCache(), Lock())


def blocks(start: int, end: int) -> tuple[int, int]:
    """The range of the blocks that have the bytes of a range."""
    return start - start % BLOCK, min(-(-end // BLOCK) * BLOCK, len(DATA))


places = st.integers(0, len(DATA) - 1)
reads = st.tuples(places, st.integers(1, 20_000)).map(lambda r: (r[0], min(r[1], len(DATA) - r[0])))


@given(st.lists(reads, max_size=20), st.lists(st.lists(st.tuples(places, places), max_size=3), max_size=20))
def test_any_reads_after_any_hints_give_the_files_bytes(wanted, hints):
    file, _ = opened()
    for place, (offset, length) in enumerate(wanted):
        if place < len(hints):
            file.expect((min(pair), max(pair) + 1) for pair in hints[place])
        assert file.read(offset, length) == DATA[offset : offset + length]


@given(st.lists(reads, max_size=20))
def test_a_buffer_is_filled_with_the_files_bytes(wanted):
    file, _ = opened()
    for offset, length in wanted:
        buffer, done = bytearray(length), 0
        while done < length:
            done += file.read_into(offset + done, memoryview(buffer)[done:])
        assert buffer == DATA[offset : offset + length]


@given(st.lists(reads, max_size=20))
def test_no_byte_is_fetched_twice(wanted):
    file, requests = opened()
    for offset, length in wanted:
        file.read(offset, length)
    assert sum(end - start for start, end in requests.ranges) <= len(DATA)
    assert file.bytes_read == sum(end - start for start, end in requests.ranges)


def test_a_small_read_brings_the_blocks_behind_it_and_one_at_the_end_the_tail():
    file, requests = opened()
    file.read(5000, 10), file.read(4096, 10), file.read(8191, 1)
    file.read(len(DATA) - 22, 22), file.read(len(DATA) - TAIL, 50)
    assert requests.ranges == [(4096, 8192), blocks(len(DATA) - TAIL, len(DATA))]


def test_a_large_read_brings_nothing_else():
    requests = []
    file = file_of(lambda start, end: (requests.append((start, end)), bytes(end - start))[1], 4 * LARGE)
    file.read(5000, 2 * LARGE)
    assert requests == [(5000, 5000 + 2 * LARGE)]


def test_ranges_that_are_expected_come_together_where_they_are_close():
    file, requests = opened()
    file.expect([(5000, 5100), (5200, 9000), (9000 + GAP + 1, 90_000)])
    file.read(5210, 5), file.read(5000, 100), file.read(8000, 1000)
    assert requests.ranges == [blocks(5000, 9000)]


def test_what_was_read_is_not_fetched_again_by_who_opens_it_next():
    requests, cache = Requests(), BlockCache()
    for _ in range(2):
        file = file_of(requests, cache=cache)
        file.read(0, 512), file.read(len(DATA) - 22, 22)
        file.close()
    assert len(requests.ranges) == 2


def test_small_reads_one_behind_the_other_become_few_requests():
    file, requests = opened()
    for offset in range(0, len(DATA), 100):
        assert file.read(offset, min(100, len(DATA) - offset)) == DATA[offset : offset + 100]
    assert len(requests.ranges) <= 8


def test_small_reads_far_apart_do_not_bring_more_and_more():
    file, requests = opened()
    for offset in range(0, len(DATA) - TAIL, 20_480):
        file.read(offset, 10)
    assert max(end - start for start, end in requests.ranges) == SMALL < LARGE


def test_what_is_kept_of_all_files_together_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(cached_file, "MAX_KEPT", 50_000)
    cache = BlockCache()
    files = [file_of(lambda start, end: bytes(end - start), 1 << 20, cache, str(number)) for number in range(100)]
    for file in files:
        files[0].read(0, 10)
        file.read(0, SMALL)
    assert 40_000 < cache.count * BLOCK <= 50_000
    assert [cache.get(key, 0, 1) == [None] for key in ("0", "1", "99")] == [False, True, False]


def test_what_is_kept_of_one_file_is_bounded(monkeypatch):
    monkeypatch.setattr(cached_file, "MAX_KEPT", 50_000)
    cache = BlockCache()
    file = file_of(lambda start, end: bytes(end - start), 1 << 30, cache)
    for offset in range(0, 1 << 28, 1 << 20):
        file.read(offset, 10)
        assert SMALL <= cache.count * BLOCK <= 50_000 and cache.get("f", offset, offset + 10) != [None]


@given(st.lists(reads, max_size=8), st.lists(reads, max_size=8), st.sampled_from([100, 9000, 50_000]))
def test_what_was_fetched_beforehand_is_read_without_a_request(before, ranges, most):
    file, requests = opened()
    for offset, length in before:
        file.read(offset, length)
    known = len(requests.ranges)
    file.prefetch([(offset, offset + length) for offset, length in ranges], most)
    asked = len(requests.ranges)
    assert all(end - start <= most + 2 * BLOCK for start, end in requests.ranges[known:])
    for offset, length in ranges:
        assert file.read(offset, length) == DATA[offset : offset + length]
    assert len(requests.ranges) == asked or any(length > most for _, length in ranges)


def test_ranges_that_lie_close_together_are_fetched_by_one_request_as_far_as_that_is_not_too_large():
    file, requests = opened()
    file.prefetch([(5000, 5100), (5200, 9000), (9000 + GAP, 28_672), (60_000, 90_000), (32_000, 34_000)], 25_500)
    assert requests.ranges == [blocks(5000, 28_672), blocks(32_000, 34_000)]


def test_nothing_is_fetched_beforehand_that_is_here_or_lies_behind_the_end():
    file, requests = opened()
    file.read(5000, 30_000), file.read(50_000, 30_000)
    file.prefetch([(4000, 60_000), (len(DATA) - 10, len(DATA) + 10), (len(DATA) + 5, len(DATA) + 9)], 1 << 20)
    assert requests.ranges[2:] == [(3072, 49_152), blocks(len(DATA) - 10, len(DATA))]
