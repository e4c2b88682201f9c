"""Bytes written at offsets by threads, and taken in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptools.files.opening import InOrder, StoppedError

SECONDS = 20
"""After which something waits for ever."""


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), threads=st.integers(1, 6), window=st.integers(0, 60)
)
def test_bytes_come_out_in_order_with_any_number_of_threads_and_any_window(sizes, threads, window):
    whole = InOrder(window)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    data = bytes(at % 251 for at in range(sum(sizes)))
    waiting, lock = iter(starts), Lock()

    def write() -> None:
        while True:
            with lock:
                start = next(waiting, None)
            if start is None:
                return
            end = min((s for s in starts if s > start), default=len(data))
            for at in range(start, end, 7):  # a tensor is written in several pieces
                whole.write(at, memoryview(data)[at : min(at + 7, end)])

    with ThreadPoolExecutor(threads + 1) as pool:
        taken = pool.submit(lambda: b"".join(whole.take(0, len(data))))
        for writer in [pool.submit(write) for _ in range(threads)]:
            writer.result(SECONDS)
        assert taken.result(SECONDS) == data


def test_one_that_is_too_far_ahead_waits_until_the_reader_is_near():
    whole = InOrder(window=8)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(whole.write, 8, b"89")
        whole.write(0, b"01234567")
        assert not ahead.done()
        assert b"".join(whole.take(0, 10)) == b"0123456789"
        assert ahead.result(SECONDS) is None


def test_bytes_that_a_buffer_had_are_kept_when_it_is_used_again():
    whole, buffer = InOrder(), bytearray(b"one")
    whole.write(0, memoryview(buffer))
    buffer[:] = b"two"
    assert b"".join(whole.take(0, 3)) == b"one"


def test_whoever_waits_is_stopped():
    whole = InOrder(window=0)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(whole.write, 5, b"x"),
            pool.submit(list, whole.take(0, 3)),
            pool.submit(whole.wait_for, 3),
        ]
        whole.stop()
        for one in waiting:
            with pytest.raises(StoppedError):
                one.result(SECONDS)
