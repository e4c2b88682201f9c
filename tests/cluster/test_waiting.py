"""What is said while somebody is waited for, and that nothing is said where nobody is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from ckptools.cluster import waiting
from ckptools.cluster.rendezvous import Meeting, open_store
from ckptools.cluster.waiting import Wait
from ckptools.errors import RendezvousError
from tests.training.started import PATIENCE, finish, free_port, is_free, start


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say a line after a fifth of a second."""
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)


def said_in(timeout: float) -> list[str]:
    lines: list[str] = []
    wait = Wait(timeout, lines.append)
    while not wait.is_over():
        wait.pause(lambda: "node 1")
    return lines


def test_lines_come_ever_more_seldom(impatient: None) -> None:
    # After 0.2, 0.6 and 1.8 s; of a machine that sleeps longer, fewer.
    lines = said_in(3)
    assert 1 <= len(lines) <= 3
    assert re.fullmatch(r"waiting for node 1; gives up after 3 s, \d s are over", lines[0])


def test_a_wait_that_ends_soon_is_silent() -> None:
    assert said_in(0.3) == []


def said_by(role: str, numbers: Sequence[int], count: int) -> list[list[str]]:
    """What members say who come to a meeting of more than they are, if they are no more than that."""
    said: list[list[str]] = [[] for _ in numbers]
    host = open_store("localhost", 0, True, 60.0).store
    with ThreadPoolExecutor(len(numbers)) as pool:
        for number, lines in zip(numbers, said, strict=True):
            pool.submit(attend, host.port, role, number, count, lines)
    return said


def attend(port: int, role: str, number: int, count: int, lines: list[str]) -> None:
    store = open_store("localhost", port, False, 60.0).store
    with Meeting(store, role, number, count, 3.0, at="head:7", say=lines.append) as meeting:
        meeting.gather("hello")


@pytest.mark.slow
def test_every_node_says_for_whom_it_waits(impatient: None) -> None:
    first, other = said_by("node", [0, 2], 4)
    for lines in (first, other):
        assert lines[-1].startswith("waiting for node 1, node 3 at head:7 (2 of 4 nodes came); gives up after 3 s, ")


@pytest.mark.slow
def test_of_ranks_which_share_a_terminal_the_first_speaks(impatient: None) -> None:
    first, other = said_by("rank", [1, 2], 3)
    assert first[-1].startswith("waiting for rank 0 at head:7 (2 of 3 ranks came)")
    # Where this machine let rank 1 come late, rank 2 was the first until then.
    assert all("rank 1" in line for line in other)


@pytest.mark.slow
def test_who_comes_before_the_first_is_silent_once_that_is_there(impatient: None) -> None:
    said: list[list[str]] = [[], []]
    host = open_store("localhost", 0, True, 60.0).store
    with ThreadPoolExecutor(2) as pool:
        pool.submit(attend, host.port, "rank", 2, 3, said[1])
        while not said[1]:
            time.sleep(0.02)
        pool.submit(attend, host.port, "rank", 1, 3, said[0])
    assert said[0][-1].startswith("waiting for rank 0 at head:7 (2 of 3 ranks came)")
    assert said[1] and all("rank 1" in line for line in said[1])


def test_nothing_is_said_where_all_have_come(impatient: None) -> None:
    assert said_by("node", [0], 1) == [[]]


def test_a_rendezvous_that_nobody_hosts_yet_is_waited_for_aloud(impatient: None) -> None:
    lines: list[str] = []
    port = free_port()
    with pytest.raises(RendezvousError, match="was not reachable"):
        open_store("localhost", port, False, 1.0, lines.append)
    at = f"localhost:{port} (connection refused)"
    assert lines[0].startswith(f"waiting for number 0, which is not yet at {at}; gives up after 1 s")


def test_who_hosts_the_rendezvous_says_why_nobody_reaches_it(impatient: None) -> None:
    lines: list[str] = []
    with pytest.raises(RendezvousError, match=r"cannot host the rendezvous at no-such-host\.invalid:\d+ \(.*name.*\)"):
        open_store("no-such-host.invalid", free_port(), True, 1.0, lines.append)
    assert re.match(r"waiting for an answer from no-such-host\.invalid:\d+ \(.*name.*\); gives up", lines[0])


def test_who_hosts_the_rendezvous_at_an_address_of_others_can_be_interrupted() -> None:
    begun = time.monotonic()
    Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        open_store("no-such-host.invalid", free_port(), True, 20.0)
    assert time.monotonic() - begun < 10


def reads(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_a_node_that_waits_for_another_says_so(tmp_path: Path) -> None:
    port = free_port()
    node = start(tmp_path / "run", "--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", f"localhost:{port}")
    line = reads(node)
    node.send_signal(signal.SIGINT)
    expected = rf"waiting for node 1 at localhost:{port} \(1 of 2 nodes came\); gives up after 300 s, \d+ s are over\n"
    assert re.fullmatch(expected, line)
    assert finish([node])[0][0] == 130
    assert is_free(port)
