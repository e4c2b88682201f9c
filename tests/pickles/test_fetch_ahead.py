"""What is fetched of a file in a store before somebody reads it."""

from __future__ import annotations

import time

import pytest

from ckptools.files.remote_path import RemotePath
from ckptools.files.remote_store import RemoteError, RemoteStore
from ckptools.files.storage import Status
from ckptools.pickles import reader
from ckptools.pickles.fetch_ahead import FetchAhead, fetch
from tests.truth import FIXTURES

RANK_0 = FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / "rank0.pt"


class OneFile(RemoteStore):
    """A store with one file, which counts what is fetched of it, and fails when it is told to."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data, self.ranges, self.fails, self.seconds = data, [], False, 0.0

    def _list(self, folder):
        return {"rank0.pt": Status(len(self.data), 0.0)}

    def _look(self, key):
        return None

    def _fetch(self, key, version, start, end):
        if self.fails:
            raise RemoteError("does not answer")
        time.sleep(self.seconds)
        self.ranges.append((start, end))
        return self.data[start:end]


def in_store(data: bytes) -> RemotePath:
    path = RemotePath("s3://bucket/rank0.pt")
    path._store = OneFile(data)
    return path


def test_reading_the_structure_of_a_fetched_file_takes_no_request():
    path = in_store(RANK_0.read_bytes())
    fetch(path)
    fetched = len(path.store.ranges)
    assert repr(reader.read(path).tree) == repr(reader.read(RANK_0).tree)
    assert 0 < fetched == len(path.store.ranges) <= 4


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"no checkpoint", RANK_0.read_bytes()[:5000]])
def test_what_is_no_checkpoint_is_left_to_who_reads_it(data):
    fetch(in_store(data))


def test_a_store_that_fails_is_left_to_who_reads_it():
    path = in_store(RANK_0.read_bytes())
    path.store.fails = True
    fetch(path)
    path.store.fails = False
    assert reader.read(path).claims


def test_files_on_disk_are_not_fetched():
    ahead = FetchAhead()
    ahead.add([RANK_0])
    assert ahead._threads == 0


def test_who_waits_for_a_file_finds_it_fetched():
    path, ahead = in_store(RANK_0.read_bytes()), FetchAhead()
    path.store.seconds = 0.02
    ahead.add([path])
    ahead.wait(path)
    ahead.wait(path)
    fetched = len(path.store.ranges)
    assert reader.read(path).claims and fetched == len(path.store.ranges) > 0
