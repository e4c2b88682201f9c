"""Reading ranges of a file in a store: the right bytes, by few requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptools.files import remote_file, remote_store
from ckptools.files.remote_file import GAP, LARGE, SMALL, TAIL, Held, Known, RemoteFile
from ckptools.files.remote_store import RemoteStore
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
    return RemoteFile(requests, Status(len(DATA), 0.0)), requests


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


def test_a_small_read_brings_what_lies_around_it():
    file, requests = opened()
    file.read(0, 10), file.read(100, 10), file.read(SMALL - 1, 1)
    file.read(len(DATA) - 22, 22), file.read(len(DATA) - TAIL, 50)
    assert requests.ranges == [(0, SMALL), (len(DATA) - TAIL, len(DATA))]


def test_a_large_read_brings_nothing_else():
    file, requests = opened()
    file.read(5000, 30_000)
    assert requests.ranges == [(5000, 35_000)]


def test_ranges_that_are_expected_come_together_where_they_are_close():
    file, requests = opened()
    file.expect([(5000, 5100), (5200, 9000), (9000 + GAP + 1, 90_000)])
    file.read(5210, 5), file.read(5000, 100), file.read(8000, 1000)
    assert requests.ranges == [(5000, 9000)]


def test_what_was_read_of_the_ends_is_not_fetched_again_by_who_opens_it_next():
    requests, known = Requests(), Known()
    for _ in range(2):
        file = RemoteFile(requests, Status(len(DATA), 0.0), known)
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
    for offset in range(0, len(DATA) - TAIL, 20_000):
        file.read(offset, 10)
    assert max(end - start for start, end in requests.ranges) == SMALL < LARGE


def test_what_is_kept_of_all_files_together_is_bounded(monkeypatch):
    monkeypatch.setattr(remote_store, "MAX_KEPT", 50_000)
    store = Zeros()
    files = [store.open(f"f/{number}") for number in range(100)]
    for file in files:
        file.read(0, 4096)
    assert sum(known.nbytes for known in store._known.values()) == store._kept <= 50_000


def test_of_what_is_kept_that_of_the_file_goes_first_that_was_fetched_from_longest_ago(monkeypatch):
    monkeypatch.setattr(remote_store, "MAX_KEPT", 50_000)
    store = Zeros()
    first = store.open("f/0")
    for number in range(1, 11):
        store.open(f"f/{number}").read(0, 4096)
        first.read(20_000 * min(number, 4), 10)
    assert store._known["f/0"].nbytes and not store._known["f/1"].nbytes


class Zeros(RemoteStore):
    """A store of a hundred files of zeros."""

    def _list(self, folder):
        return {str(number): Status(1 << 20, 0.0) for number in range(100)}

    def _look(self, key):
        return None

    def _fetch(self, key, version, start, end):
        return bytes(end - start)


def test_what_is_kept_of_one_file_is_bounded(monkeypatch):
    monkeypatch.setattr(remote_file, "MAX_KEPT", 50_000)
    known = Known()
    file = RemoteFile(lambda start, end: bytes(end - start), Status(1 << 30, 0.0), known)
    for offset in range(0, 1 << 28, 1 << 20):
        file.read(offset, 10)
    assert 40_000 < known.nbytes <= 50_000 and known.at(offset) and not known.at(0)


@given(st.lists(st.tuples(places, st.integers(1, 9000)), max_size=12), places)
def test_a_byte_is_found_where_any_piece_has_it(pieces, place):
    known, kept = Known(), []
    known.grown = kept.append
    for start, length in pieces:
        known.add(Held(start, DATA[start : start + length]))
    held, end = known.at(place), [min(start + length, len(DATA)) for start, length in pieces]
    assert (held is not None) == any(start <= place < last for (start, _), last in zip(pieces, end, strict=True))
    assert held is None or held.data[place - held.start] == DATA[place]
    assert known.nbytes == sum(kept) and known.clear() == sum(kept) and known.at(place) is None


@given(st.lists(reads, max_size=8), st.lists(reads, max_size=8), st.sampled_from([100, 9000, 50_000]))
def test_what_was_fetched_beforehand_is_read_without_a_request(before, ranges, most):
    file, requests = opened()
    for offset, length in before:
        file.read(offset, length)
    known = len(requests.ranges)
    file.prefetch([(offset, offset + length) for offset, length in ranges], most)
    asked = len(requests.ranges)
    assert all(end - start <= most for start, end in requests.ranges[known:])
    for offset, length in ranges:
        assert file.read(offset, length) == DATA[offset : offset + length]
    assert len(requests.ranges) == asked or any(length > most for _, length in ranges)


def test_ranges_that_lie_close_together_are_fetched_by_one_request_as_far_as_that_is_not_too_large():
    file, requests = opened()
    file.prefetch([(5000, 5100), (5200, 9000), (9000 + GAP, 30_000), (60_000, 90_000), (29_000, 31_000)], 25_500)
    assert requests.ranges == [(5000, 30_000), (30_000, 31_000)]


def test_nothing_is_fetched_beforehand_that_is_here_or_lies_behind_the_end():
    file, requests = opened()
    file.read(5000, 30_000), file.read(50_000, 30_000)
    file.prefetch([(4000, 60_000), (len(DATA) - 10, len(DATA) + 10), (len(DATA) + 5, len(DATA) + 9)], 1 << 20)
    assert requests.ranges[2:] == [(4000, 50_000), (len(DATA) - 10, len(DATA))]
