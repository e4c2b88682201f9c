"""Ranks that wait for each other: a line says so, an interrupt ends it, and a missing rank is an error in time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import pytest

from ckptools.cluster import ranks
from ckptools.cluster.environment import derive
from ckptools.errors import RendezvousError, UsageError
from tests.training.forked import ckptools_forked
from tests.training.started import free_port


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Be rank 0 of two, the other of which never comes; yields the port."""
    port = free_port()
    where = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks, "PATIENCE", 0.1)
    yield port


@contextmanager
def waiting(seconds: float, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranks, "MEETING_SECONDS", seconds)
    with ranks.joined(derive(os.environ), "verify x.pt", said.append):
        yield


def test_a_rank_that_does_not_come_is_waited_for_aloud(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with pytest.raises(RendezvousError) as raised, waiting(1, said, monkeypatch):
        pass
    assert said == [f"waiting for the other ranks at 127.0.0.1:{alone}; gives up after 1 s"]
    assert str(raised.value).startswith(f"the 2 ranks did not meet at 127.0.0.1:{alone}: Timed out after ")
    assert "1/2 clients joined" in str(raised.value) and "env -u RANK -u WORLD_SIZE" in str(raised.value)


def test_an_interrupt_ends_the_wait(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), waiting(20, [], monkeypatch):
        pass
    assert time.monotonic() - begun < 10


def test_a_port_that_something_else_has_is_said(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.create_server(("127.0.0.1", alone))
    with taken, pytest.raises(RendezvousError, match="address already in use"), waiting(1, [], monkeypatch):
        pass


@pytest.mark.parametrize("silence", ["soon", "1", "nan"])
def test_a_silence_that_makes_no_sense_is_refused(silence: str, alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTOOLS_RANK_TIMEOUT", silence)
    with pytest.raises(UsageError, match="CKPTOOLS_RANK_TIMEOUT is"), waiting(1, [], monkeypatch):
        pass


def add_a_word_to_rank_1() -> None:
    if os.environ["RANK"] == "1":
        sys.argv.append("--deep")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_that_run_different_commands_are_told_so_once() -> None:
    done = ckptools_forked(2, "verify", "x.pt", before=add_a_word_to_rank_1)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "has another command than rank 0: 'verify x.pt --deep', not 'verify x.pt'; start the same" in done.stderr


@pytest.mark.timeout(120)
def test_an_error_that_all_ranks_find_is_what_one_process_says() -> None:
    done = ckptools_forked(2, "verify", "no-such-file.pt")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "error: no-such-file.pt: no such file or folder\n")
