"""Several output files: as few as the limit allows, and nearly equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptools.consolidate.writers.layout import files_of

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=40)


def filled(sizes: list[int], limit: int) -> int:
    """How many files there are when each is filled before the next is begun."""
    count, room = 0, -1
    for size in sizes:
        if size > room:
            count, room = count + 1, limit
        room -= size
    return count


@given(SIZES, st.integers(1, 60))
def test_everything_is_in_one_file_and_none_is_larger_than_the_limit(sizes, limit):
    files = files_of(sizes, limit)
    assert [n for file in files for n in file] == list(range(len(sizes)))
    assert all(len(file) == 1 or sum(sizes[n] for n in file) <= limit for file in files)
    assert len(files) <= filled(sizes, limit)


@given(st.integers(1, 60), st.integers(1, 20))
def test_files_of_things_of_one_size_differ_by_one_of_them_at_most(count, per_file):
    files = [len(file) for file in files_of([7] * count, 7 * per_file)]
    assert len(files) == -(-count // per_file) and max(files) - min(files) <= 1


def test_the_last_file_is_not_what_the_others_have_left():
    assert [len(file) for file in files_of([1] * 11, 10)] == [6, 5]


def test_without_a_limit_there_is_one_file():
    assert files_of([3, 4], None) == [range(2)] and files_of([], 5) == [range(0)]
