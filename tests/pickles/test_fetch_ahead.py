"""What is fetched of a file in a store before somebody reads it."""

from __future__ import annotations

import time
from io import BytesIO
from zipfile import ZipFile

import pytest

from ckptools.files.remote.path import RemotePath
from ckptools.files.remote.store import Place, Store
from ckptools.files.storage import RemoteError, Status
from ckptools.pickles import archive, reader
from ckptools.pickles.archive import FetchAhead, fetch
from tests.truth import FIXTURES

RANK_0 = FIXTURES / "torch2.13.0-fsdp1-sharded-w4" / "rank0.pt"


class OneFile(Store):
    """A store with one file, which counts what is fetched of it, and fails when it is told to."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Place(None, str, "fixed"))
        self.data, self.ranges, self.fails, self.seconds = data, [], False, 0.0

    def _list(self, folder):
        return {name: Status(len(self.data), 0.0) for name in ("rank0.pt", *map(str, range(20)))}

    def _look(self, key):
        return None

    def _fetch(self, key, version, start, end):
        if self.fails:
            raise RemoteError("does not answer")
        time.sleep(self.seconds)
        self.ranges.append((start, end))
        return self.data[start:end]


def in_store(data: bytes, name: str = "rank0.pt") -> RemotePath:
    path = RemotePath(f"s3://bucket/{name}")
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


def far_byteorder() -> bytes:
    """A rank's file in which a megabyte lies before `byteorder`, which is last."""
    out = BytesIO()
    with ZipFile(RANK_0) as old, ZipFile(out, "w") as new:
        for name in [n for n in old.namelist() if n != "rank0/byteorder"]:
            new.writestr(name, old.read(name))
        new.writestr("rank0/data/999", bytes(1 << 20))
        new.writestr("rank0/byteorder", old.read("rank0/byteorder"))
    return out.getvalue()


def test_what_lies_between_the_records_that_are_fetched_is_not():
    path = in_store(far_byteorder())
    fetch(path)
    fetched = len(path.store.ranges)
    assert sum(end - start for start, end in path.store.ranges) < 70_000
    assert repr(reader.read(path).tree) == repr(reader.read(RANK_0).tree)
    assert min(start for start, _ in path.store.ranges[fetched:]) > 51_000  # headers of tensors alone


def test_a_large_pickle_is_left_to_who_reads_it(monkeypatch):
    monkeypatch.setattr(archive, "LARGEST", 10_000)
    path = in_store(RANK_0.read_bytes())
    fetch(path)
    assert sum(end - start for start, end in path.store.ranges) < 24_000
    assert reader.read(path).claims


def test_files_of_this_machine_are_left_alone():
    ahead = FetchAhead()
    ahead.add([RANK_0])
    assert not ahead._coming


def test_a_file_is_fetched_once_and_with_it_those_that_come_next(monkeypatch):
    monkeypatch.setattr(archive, "TOGETHER", 3)
    paths, ahead = [in_store(RANK_0.read_bytes(), str(number)) for number in range(7)], FetchAhead()
    ahead.add(paths)
    for path in (paths[1], paths[1], paths[0]):
        ahead.reach(path)
    ahead.reach(paths[2])
    fetched = [len(path.store.ranges) for path in paths]
    assert all(fetched[:3]) and not any(fetched[6:])
    assert reader.read(paths[0]).claims and fetched[0] == len(paths[0].store.ranges)


def test_nothing_more_is_fetched_once_it_is_closed(monkeypatch):
    monkeypatch.setattr(archive, "TOGETHER", 1)
    paths, ahead = [in_store(RANK_0.read_bytes(), str(number)) for number in range(20)], FetchAhead()
    ahead.add(paths)
    ahead.reach(paths[0])
    ahead.close()
    for path in paths:
        ahead.reach(path)
    assert not any(path.store.ranges for path in paths[3:])


def test_what_comes_next_is_fetched_before_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(archive, "TOGETHER", 2)
    paths, ahead = [in_store(RANK_0.read_bytes(), str(number)) for number in range(4)], FetchAhead()
    ahead.add(paths)
    time.sleep(0.3)
    assert [bool(path.store.ranges) for path in paths] == [True, True, False, False]
