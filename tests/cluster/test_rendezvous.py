"""Members who meet at a real store of torch's, each in a thread of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
from torch.distributed import TCPStore

from ckptools.cluster.rendezvous import Meeting, name_rank, open_store
from ckptools.errors import CkptoolsError, RendezvousError, UsageError
from tests.training.forked import forkserver

LONG = 60.0
SHORT = 1.0


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def attend(
    port: int, number: int | None, count: int, say: Callable[[Meeting], object] | None = None, timeout: float = LONG
) -> object:
    """Be one member: returns what it got, or the ckptools error that it ended with."""
    try:
        place = open_store("localhost", port, None if number is None else number == 0, timeout)
        with Meeting(place.store, "node", number, count, timeout, hosts=place.hosted) as meeting:
            return say(meeting) if say else meeting.gather("hello", f"from {meeting.number}")
    except CkptoolsError as error:
        return error


def together(*members: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [each.result() for each in [pool.submit(member) for member in members]]


@contextmanager
def somebody_else() -> Iterator[int]:
    """A program that listens and never answers; yields its port."""
    with socket.create_server(("localhost", 0)) as server:
        yield server.getsockname()[1]


def test_all_get_what_each_says_by_number() -> None:
    port = free_port()
    got = together(*(lambda number=number: attend(port, number, 3) for number in (2, 0, 1)))  # type: ignore[misc]
    assert got == [["from 0", "from 1", "from 2"]] * 3


def test_members_without_numbers_take_the_next_that_is_free() -> None:
    port = free_port()
    got = together(*(lambda: attend(port, None, 3) for _ in range(3)))
    assert got == [["from 0", "from 1", "from 2"]] * 3


def test_those_who_did_not_come_are_named_to_all() -> None:
    port = free_port()
    got = together(lambda: attend(port, 0, 4, timeout=SHORT), lambda: attend(port, 2, 4, timeout=SHORT))
    assert [type(error) for error in got] == [RendezvousError] * 2
    says = [str(error) for error in got]
    assert "2 of 4 nodes came; node 1, node 3 did not within 1 s" in says


def test_nobody_at_the_address_is_said_in_time() -> None:
    error = attend(free_port(), 1, 2, timeout=SHORT)
    assert "was not reachable within 1 s (connection refused)" in str(error)


def test_a_host_that_does_not_exist_is_said_in_time() -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid:7 was not reachable within 1 s"):
        open_store("no-such-host.invalid", 7, hosts=False, timeout=SHORT)


def test_a_port_that_something_else_has_is_refused_to_who_would_host() -> None:
    with somebody_else() as port:
        assert f"port {port} of localhost is taken by something else" in str(attend(port, 0, 2, timeout=SHORT))


def test_what_answers_otherwise_is_no_rendezvous() -> None:
    with somebody_else() as port:
        error = attend(port, 1, 2, timeout=SHORT)
    assert "answers, but not as torch's rendezvous does" in str(error)


@pytest.mark.parametrize("number", [0, 1])
def test_a_number_that_is_used_twice_is_named_to_all(number: int) -> None:
    port = free_port()
    got = together(*(lambda own=own: attend(port, own, 3) for own in (0, 1, number)))  # type: ignore[misc]
    assert all(isinstance(error, RendezvousError) for error in got)
    assert {str(error).partition(",")[0] for error in got} == {f"node rank {number} is used twice"}


def test_one_too_many_is_refused() -> None:
    port = free_port()
    got = together(*(lambda: attend(port, None, 2) for _ in range(3)))
    assert "3 nodes came, but there are to be 2" in {str(error) for error in got}


def test_somebody_who_was_not_meant_to_come_stops_nobody_later() -> None:
    port = free_port()

    def late(meeting: Meeting) -> object:
        meeting.gather("hello")
        refused = attend(port, 1, 2)
        return refused, meeting.gather("end", "well")

    refused, ended = late_and_other(port, late)
    assert "used twice" in str(refused)
    assert ended == ["well", "well"]


def late_and_other(port: int, late: Callable[[Meeting], object]) -> tuple[object, object]:
    def other(meeting: Meeting) -> object:
        meeting.gather("hello")
        return meeting.gather("end", "well")

    (refused, ended), _ = together(lambda: attend(port, 0, 2, late), lambda: attend(port, 1, 2, other))  # type: ignore[misc]
    return refused, ended


def test_the_error_of_one_ends_all_with_its_class_and_words() -> None:
    port = free_port()

    def fail(meeting: Meeting) -> object:
        raise UsageError(None, "wrong")

    got = together(lambda: attend(port, 0, 2), lambda: attend(port, 1, 2, fail))
    assert [(type(error), str(error)) for error in got] == [(UsageError, "wrong")] * 2


def test_of_two_errors_at_the_same_time_one_is_everybodys() -> None:
    port = free_port()

    def fail(meeting: Meeting) -> object:
        meeting.gather("begin")
        error = meeting.report(UsageError(None, f"wrong on {meeting.number}"))
        return str(error), meeting.reported

    got = together(lambda: attend(port, 0, 2, fail), lambda: attend(port, 1, 2, fail))
    (text, told), (other_text, other_told) = got  # type: ignore[misc]
    assert text == other_text
    assert {told, other_told} == {True, False}


def host(whose: str, port: int, heard: Connection) -> None:
    """Host a store until this process is killed."""
    if whose == "ours":
        store = open_store("localhost", port, True, LONG).store
    else:
        store = TCPStore("localhost", port, None, True, wait_for_workers=False)
    heard.send(store.port)
    heard.recv()


@contextmanager
def hosted_elsewhere(whose: str) -> Iterator[int]:
    """Another process that hosts a store; yields its port."""
    port = free_port()
    here, there = forkserver().Pipe()
    process = forkserver().Process(target=host, args=(whose, port, there), daemon=True)
    process.start()
    try:
        assert here.poll(60) and here.recv() == port
        yield port
    finally:
        process.kill()
        process.join()


def test_a_port_that_another_node_of_a_run_hosts_is_joined_so_that_the_numbers_tell() -> None:
    with hosted_elsewhere("ours") as port:
        assert open_store("localhost", port, True, LONG).hosted is False


def test_a_port_that_hosts_the_store_of_another_program_is_refused() -> None:
    with hosted_elsewhere("another") as port, pytest.raises(RendezvousError, match="is taken by something else"):
        open_store("localhost", port, True, LONG)


def test_who_lost_the_others_says_what_they_said() -> None:
    port = free_port()

    def fail(meeting: Meeting) -> object:
        meeting.gather("begin")
        raise UsageError(None, "the cause")

    def lose(meeting: Meeting) -> object:
        meeting.gather("begin")
        return meeting.cause(RuntimeError("connection closed"))

    got = together(lambda: attend(port, 0, 2, lose), lambda: attend(port, 1, 2, fail))
    assert str(got[0]) == "the cause"


def test_who_lost_the_host_without_a_word_says_that_it_has_left() -> None:
    with hosted_elsewhere("ours") as port:
        store = open_store("localhost", port, False, LONG).store
        meeting = Meeting(store, "rank", 1, 2, LONG)
    found = meeting.cause(RuntimeError("gloo: connection closed by peer"))
    assert isinstance(found, RendezvousError) and "rank 0 has left" in str(found)


def test_a_rank_is_called_by_its_node_too_where_that_is_known() -> None:
    assert [name_rank(rank, (2, 1)) for rank in (1, 2)] == ["rank 1 (node 0)", "rank 2 (node 1)"]
    assert name_rank(1, (4,)) == name_rank(1, ()) == "rank 1"
