"""Work in threads, and the buffers that each of them keeps."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from ckptools.tensor_io.elements import buffer
from ckptools.tensor_io.fetch_ahead import in_threads


@pytest.mark.parametrize("threads", [0, 1, 3, 50])
def test_results_come_in_the_order_of_the_items(threads):
    assert in_threads(lambda n: n * n, range(20), threads) == [n * n for n in range(20)]


def test_no_items_have_no_results():
    assert in_threads(lambda n: n, [], 4) == []


def test_as_many_threads_work_at_a_time_as_were_asked_for():
    together = threading.Barrier(3, timeout=10)
    assert len({*in_threads(lambda _: (together.wait(), threading.get_ident())[1], range(3), 3)}) == 3


def test_the_first_failure_ends_the_work():
    begun = []

    def work(n: int) -> int:
        begun.append(n)
        if n == 2:
            raise IndexError(n)  # which is not the end of the list
        return n

    with pytest.raises(IndexError):
        in_threads(work, range(1000), 1)
    assert begun == [0, 1, 2]


def test_when_one_fails_the_others_are_told_to_give_up_and_begin_nothing_more():
    begun, given_up = [], threading.Event()

    def work(n: int) -> None:
        begun.append(n)
        if n:
            raise IndexError(n)
        assert given_up.wait(10)

    with pytest.raises(IndexError):
        in_threads(work, range(1000), 2, given_up.set)
    assert sorted(begun) == [0, 1]


def test_what_a_handler_of_a_signal_raises_ends_the_work_too():
    begun, given_up = [], threading.Event()

    def work(n: int) -> None:
        begun.append(n)
        given_up.wait(1)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        with pytest.raises(SystemExit):
            in_threads(work, range(3), 1, given_up.set)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert begun == [0]


def test_a_thread_has_its_buffer_alone_and_gets_it_again():
    own = buffer("test", 5, "f4")
    assert buffer("test", 4, "f4").base is own.base
    assert in_threads(lambda _: buffer("test", 5, "f4").base is own.base, [0], 1) == [False]
    assert len(buffer("test", 70, "f8")) == 70
